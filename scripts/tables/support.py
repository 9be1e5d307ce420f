"""Tries each feature under each strategy on gloo ranks, and prints a table.

    python scripts/tables/support.py [--only NAME...] [--page docs/evidence.md]

Four ranks, which count as two nodes, train a small model for three steps under each strategy with
each feature. A cell is *yes* if the weights equal the weights of the unwrapped model trained on all
rows. Otherwise it is *raises* with the error, *wrong*, *crashes* or *hangs*.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lib.command_line import Parser
from lib.rank_processes import Ranks, Said
from table_cells import Cell, Notes, failure, folded, page_file, write_table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy, checkpoint
from flatshard.wrap import ModuleWrapPolicy

STRATEGIES = [one.name for one in ShardingStrategy]
WORLD, PER_NODE, STEPS = 4, 2, 3
EXACT, ROUNDED = 1e-5, 2e-2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return x + recompute(self._compute, x, use_reentrant=False)
        return x + self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.drops = drops
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if not self.drops or number != dist.get_rank() % 3:
                x = block(x)
        return self.head(x)


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = rows(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


Loop = Callable[[nn.Module, Any, list[int]], None]
"""Trains a model on the rows of some ranks: of this one, or of all for the unwrapped model."""


def plain_loop(model: nn.Module, optimizer: Any, ranks: list[int], clip: float = 0.0) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, rank, step) / len(ranks)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Any, ranks: list[int], **options: Any) -> None:
    optimizer.zero_grad()
    for step in range(STEPS):
        is_sharded, is_last = isinstance(model, ShardedWrapper), step == STEPS - 1
        waits = is_sharded and not is_last
        with model.no_sync(**options) if waits else contextlib.nullcontext():
            for rank in ranks:
                (loss_of(model, rank, step) / len(ranks)).backward()
    optimizer.step()


def scaled(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            scaler.scale(loss_of(model, rank, step) / len(ranks)).backward()
        scaler.step(optimizer)
        scaler.update()


def uneven(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    """Rank 3 has a batch less."""
    is_sharded = isinstance(model, ShardedWrapper)
    with model.join() if is_sharded else contextlib.nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            if ranks == [3] and step == STEPS - 1:
                break
            for rank in ranks:
                if step < STEPS - 1 or rank != 3:
                    (loss_of(model, rank, step) / len(ranks)).backward()
            optimizer.step()


def with_lbfgs(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            for rank in ranks:
                loss = loss_of(model, rank, step) / len(ranks)
                loss.backward()
            total = torch.tensor(sum(loss_of(model, rank, step).item() for rank in ranks))
            if isinstance(model, ShardedWrapper):
                dist.all_reduce(total)
            return total / WORLD

        optimizer.step(closure)


def with_muon(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    plain_loop(model, torch.optim.Muon(matrices, lr=0.01), ranks)


def in_backward(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    if isinstance(model, ShardedWrapper):
        model.step_in_backward(optimizer)
    plain_loop(model, optimizer, ranks)


def compressed(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    if isinstance(model, ShardedWrapper):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model.register_comm_hook(None, bf16_compress_hook)
    plain_loop(model, optimizer, ranks)


def own_hook(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    if isinstance(model, ShardedWrapper):
        model.register_comm_hook(None, _reduce)
    plain_loop(model, optimizer, ranks)


def _reduce(state: Any, full: Tensor, out: Tensor | None = None) -> None:
    """What users write: an average, in whole or of this rank's part."""
    dist.all_reduce(full)
    full /= WORLD
    if out is not None:
        out.copy_(full.chunk(WORLD)[dist.get_rank()])


def saved(model: nn.Module, optimizer: Any, ranks: list[int], form: str = "") -> None:
    """Trains, saves, changes the weights, loads: they are back."""
    plain_loop(model, optimizer, ranks)
    if not isinstance(model, ShardedWrapper):
        return
    if form == "checkpoint":
        checkpoint.save("saved", model, optimizer)
    elif form == "safetensors":
        checkpoint.save_safetensors(model, "saved.safetensors")
    elif form == "sharded":
        dcp.save({"model": model.sharded_state_dict()}, checkpoint_id="dcp")
    else:
        state = [checkpoint.full_state_dict(model) if form == "full" else model.state_dict()]
        if form == "full":
            dist.broadcast_object_list(state)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    if form == "checkpoint":
        checkpoint.load("saved", model, optimizer)
    elif form == "safetensors":
        checkpoint.load_safetensors(model, "saved.safetensors")
    elif form == "sharded":
        sharded = model.sharded_state_dict()
        dcp.load({"model": sharded}, checkpoint_id="dcp")
        model.load_state_dict(sharded)
    else:
        model.load_state_dict(state[0])


def on_meta(**options: Any) -> Model:
    with torch.device("meta"):
        return build(**options)


def prepared(how: str) -> Model:
    model = build()
    for block in model.blocks:
        if how == "compile":
            block.compile(backend="aot_eager", fullgraph=True)
        else:
            block.recomputes = True
    return model


def tensor_parallel() -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model: Any = parallelize_module(build(), mesh["tp"], plan)
    model.mesh = mesh["dp"]
    return model


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT8 = MixedPrecision(gather_dtype=torch.float8_e4m3fn)

# What is tried: how the model is made, the wrapper's keywords, the loop, the tolerance.
FEATURES: dict[str, tuple[Callable[[], Model], dict[str, Any], Loop, float]] = {
    "training": (build, {}, plain_loop, EXACT),
    "built on the meta device": (on_meta, {}, plain_loop, EXACT),
    "bf16": (build, {"mixed_precision": BF16}, plain_loop, ROUNDED),
    "float8 all-gathers": (build, {"mixed_precision": FLOAT8}, plain_loop, 5 * ROUNDED),
    "`wire_dtype=torch.bfloat16`": (build, {"wire_dtype": torch.bfloat16}, plain_loop, ROUNDED),
    "offload to files": (build, {"cpu_offload": CPUOffload(path=".")}, plain_loop, EXACT),
    "`step_in_backward`": (build, {}, in_backward, EXACT),
    '`boundary="row"`': (build, {"boundary": "row"}, plain_loop, EXACT),
    "`reshard_after_forward=2`": (build, {"reshard_after_forward": 2}, plain_loop, EXACT),
    "`no_sync()`": (build, {}, accumulating, EXACT),
    "`no_sync(max_bytes=...)`": (build, {}, partial(accumulating, max_bytes=4096), EXACT),
    "`no_sync(replicas_only=True)`": (build, {}, partial(accumulating, replicas_only=True), EXACT),
    "`clip_grad_norm_`": (build, {}, partial(plain_loop, clip=0.01), EXACT),
    "`GradScaler`": (build, {}, scaled, EXACT),
    "`join()`": (build, {}, uneven, EXACT),
    "`allow_divergence`": (partial(build, drops=True), {"allow_divergence": True}, plain_loop, -1),
    "bf16 compression hook": (build, {}, compressed, ROUNDED),
    "communication hook of yours": (build, {}, own_hook, EXACT),
    "activation checkpointing": (partial(prepared, "recompute"), {}, plain_loop, EXACT),
    "`torch.compile` of blocks": (partial(prepared, "compile"), {}, plain_loop, EXACT),
    "Muon (a parameter on its owner)": (build, {}, with_muon, EXACT),
    "LBFGS (the full model)": (build, {}, with_lbfgs, 10 * EXACT),
    "tensor parallelism": (tensor_parallel, {}, plain_loop, EXACT),
    "`checkpoint.save`, `load`": (build, {}, partial(saved, form="checkpoint"), EXACT),
    "`save_safetensors`, `load_safetensors`": (
        build,
        {},
        partial(saved, form="safetensors"),
        EXACT,
    ),
    "`sharded_state_dict`, DCP": (build, {}, partial(saved, form="sharded"), EXACT),
    "`full_state_dict`": (build, {}, partial(saved, form="full"), EXACT),
    "`state_dict`": (build, {}, partial(saved, form="plain"), EXACT),
}


# Where the tests show more of it, in `tests/`.
TESTS = {
    "training": "parity/test_parity.py",
    "built on the meta device": "extras/meta_init/test_meta_init.py",
    "bf16": "precision/test_precision.py",
    "float8 all-gathers": "extras/reduction/test_float8.py",
    "`wire_dtype=torch.bfloat16`": "comm/test_collectives.py",
    "offload to files": "extras/disk/test_offload.py",
    "`step_in_backward`": "extras/step_in_backward/test_step_in_backward.py",
    '`boundary="row"`': "extras/boundary/test_boundaries_in_training.py",
    "`reshard_after_forward=2`": "parity/test_strategies.py",
    "`no_sync()`": "parity/test_strategies.py",
    "`no_sync(max_bytes=...)`": "parity/test_strategies.py",
    "`no_sync(replicas_only=True)`": "parity/test_strategies.py",
    "`clip_grad_norm_`": "optimizer/test_clipping.py",
    "`GradScaler`": "idioms/test_idioms.py",
    "`join()`": "extras/join/test_join.py",
    "`allow_divergence`": "extras/divergence/test_divergence.py",
    "bf16 compression hook": "extras/reduction/test_comm_hooks.py",
    "communication hook of yours": "extras/reduction/test_comm_hooks.py",
    "activation checkpointing": "engine/test_recompute.py",
    "`torch.compile` of blocks": "engine/test_compile.py",
    "Muon (a parameter on its owner)": "extras/whole_tensors/test_whole_step.py",
    "LBFGS (the full model)": "extras/whole_tensors/test_whole_step.py",
    "tensor parallelism": "extras/tensor_parallel/test_tensor_parallel.py",
    "`checkpoint.save`, `load`": "checkpoint/test_checkpoint.py",
    "`save_safetensors`, `load_safetensors`": "checkpoint/test_safetensors.py",
    "`sharded_state_dict`, DCP": "state/test_sharded_state_dict.py",
    "`full_state_dict`": "state/test_state_dict.py",
    "`state_dict`": "state/test_state_dict.py",
}


def trial(feature: str, strategy: str, folder: str) -> float:
    """The largest difference of a weight from the unwrapped model's, over its tolerance."""
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    make, keywords, loop, tolerance = FEATURES[feature]
    rank, ranks = dist.get_rank(), list(range(WORLD))
    with contextlib.chdir(folder):
        model: Any = make()
        if mesh := getattr(model, "mesh", None):
            keywords, rank, ranks = {"device_mesh": mesh}, mesh.get_local_rank(), [0, 1]
        torch.manual_seed(0)
        sharded = ShardedWrapper(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            coalesce_bytes=0,
            **keywords,
        )
        loop(sharded, sgd(sharded.parameters()), [rank])
        found = sharded.state_dict()
    if tolerance < 0:  # no unwrapped model drops other blocks for each rank: under DDP
        other: nn.Module = build(drops=True)
        replicated = nn.parallel.DistributedDataParallel(other, find_unused_parameters=True)
        loop(replicated, sgd(replicated.parameters()), [rank])
        tolerance = EXACT
    else:
        other = build()
        loop(other, sgd(other.parameters()), ranks)
    expected = other.state_dict()
    assert list(found) == list(expected)
    differ = max((found[name].float() - expected[name]).abs().max().item() for name in expected)
    return differ / tolerance


def judge(said: list[Said]) -> Cell:
    if failed := failure(said):
        return failed
    worst = max(one.what for one in said)
    return Cell("yes") if worst <= 1 else Cell("wrong", f"{worst:.3g} times the tolerance")


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="features whose names contain NAME"
    )
    parser.add_timeout(60.0, "each training")
    parser.add_argument(
        "--page", type=page_file, help="write the table into this page instead of printing it"
    )
    args = parser.parse_args()
    names = [name for name in FEATURES if not args.only or any(one in name for one in args.only)]
    if not names:
        parser.error(f"--only: expected some of {', '.join(FEATURES)}")
    text = markdown(table(names, args.timeout))
    write_table(args.page, "features", text)


Cells = dict[str, dict[str, Cell]]
"""By feature and strategy."""


def table(names: list[str], seconds: float) -> Cells:
    cells: Cells = {}
    with Ranks(WORLD, preload=("support",)) as ranks:
        for name in names:
            cells[name] = {}
            for strategy in STRATEGIES:
                with tempfile.TemporaryDirectory() as folder:
                    said = ranks.run(trial, WORLD, name, strategy, folder, seconds=seconds)
                cells[name][strategy] = judge(said)
                print(f"{name}, {strategy}: {' '.join(cells[name][strategy])}", file=sys.stderr)
    return cells


def markdown(cells: Cells) -> str:
    """Rows of the features that some strategy lacks, a list of the other features, and reasons."""
    lines = ["| feature | yes | otherwise | test |", "|---|---|---|---|"]
    everywhere = []
    reasons = Notes("features", longest=400)
    for name, row in cells.items():
        good = any(verdict == "yes" for verdict, _ in row.values())
        others: dict[str, list[str]] = {}
        for strategy, (verdict, why) in row.items():
            if verdict != "yes":
                # Alike but for the strategy and for numbers of ranks.
                why = re.sub(r"over \d replicas", "over replicas", why)
                why = why.replace(f"{strategy} never reshards", "the strategy never reshards")
                others.setdefault(reasons.of(Cell(verdict, why)), []).append(strategy)
        if not others:
            everywhere.append(f"{name} (`{TESTS[name]}`)")
            continue
        shown = "the other strategies" if good else "none"
        notes = "; ".join(f"{', '.join(some)}: {note}" for note, some in others.items())
        lines.append(f"| {name} | {shown} | {notes} | `{TESTS[name]}` |")
    lines += ["", f"*Yes* with all strategies: {'; '.join(everywhere)}."] if everywhere else []
    version = torch.__version__.partition("+")[0]
    about = (
        f"`python scripts/tables/support.py`, {WORLD} gloo ranks as {WORLD // PER_NODE} nodes of "
        f"{PER_NODE}, torch {version}. The strategies are {', '.join(STRATEGIES)}. A file in "
        "`tests/` is named for each feature."
    )
    table = folded(f"{len(cells)} features by {len(STRATEGIES)} strategies", lines)
    return "\n".join([about, "", *table, *reasons.lines()])


if __name__ == "__main__":
    main()
