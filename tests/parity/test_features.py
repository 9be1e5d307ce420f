"""Each feature with each strategy: the numbers of plain DDP, or the documented error.

Four ranks, which count as two nodes, train a small model for three steps. By default a feature runs
with one strategy, by turns; THOROUGH=1 runs all, and `scripts/evidence.py features` writes a table.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper, ShardingStrategy, checkpoint
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import THOROUGH, every
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.models import Residual
from tests.oracle import change_all, sgd
from tests.outcomes import Cell
from tests.ways import Way

STRATEGIES = [one.name for one in ShardingStrategy]
WORLD, STEPS = 4, 3
EXACT, ROUNDED = 1e-5, 2e-2


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(16, 32)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        return recompute(run, x, use_reentrant=False) if self.recomputes else run(x)


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


# ---------------------------------------------------------------- how the model is made


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def on_meta() -> Model:
    with torch.device("meta"):
        return build()


def recomputed() -> Model:
    model = build()
    for block in model.blocks:
        block.recomputes = True
    return model


def compiled() -> Model:
    model = build()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def tensor_parallel() -> Model:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model: Any = parallelize_module(build(), mesh["tp"], plan)
    model.mesh = mesh["dp"]
    return model


# ---------------------------------------------------------------- how it trains

Loop = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""Trains a sharded model, or one under DistributedDataParallel, on a rank's rows."""


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = (torch.randn(4, size, generator=generator) for size in (8, 4))
    # torch 2.11 has no backward of `mse_loss` for a bf16 output and float32 targets.
    return nn.functional.mse_loss(model(inputs).float(), targets)


def plain(model: nn.Module, optimizer: Any, rank: int, clip: float = 0.0) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Any, rank: int, **options: Any) -> None:
    for step in range(STEPS):
        waits = isinstance(model, ShardedWrapper) and step < STEPS - 1
        with model.no_sync(**options) if waits else contextlib.nullcontext():
            loss_of(model, rank, step).backward()
    optimizer.step()


def scaled(model: nn.Module, optimizer: Any, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()


def uneven(model: Any, optimizer: Any, rank: int) -> None:
    """Rank 3 has a batch less."""
    with model.join():
        for step in range(STEPS - (rank == 3)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()


def with_lbfgs(model: nn.Module, optimizer: Any, rank: int) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            total = loss.detach()
            dist.all_reduce(total)
            return total / WORLD

        optimizer.step(closure)


def with_muon(model: nn.Module, optimizer: Any, rank: int) -> None:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    plain(model, torch.optim.Muon(matrices, lr=0.01), rank)


def prepared(prepare: Callable[..., Any], model: nn.Module, optimizer: Any, rank: int) -> None:
    if isinstance(model, ShardedWrapper):
        prepare(model, optimizer)
    plain(model, optimizer, rank)


def reduce(state: Any, full: Tensor, out: Tensor | None = None) -> None:
    """What users write: an average, of all or of this rank's part."""
    dist.all_reduce(full)
    full /= WORLD
    if out is not None:
        out.copy_(full.chunk(WORLD)[dist.get_rank()])


# How weights are saved, and how they come back.


def checkpointed(model: Any, optimizer: Any) -> Callable[[], object]:
    checkpoint.save("saved", model, optimizer)
    return lambda: checkpoint.load("saved", model, optimizer)


def safetensors(model: Any, optimizer: Any) -> Callable[[], object]:
    checkpoint.save_safetensors(model, "saved.safetensors")
    return lambda: checkpoint.load_safetensors(model, "saved.safetensors")


def sharded_dict(model: Any, optimizer: Any) -> Callable[[], object]:
    dcp.save({"model": model.sharded_state_dict()}, checkpoint_id="dcp")

    def load() -> None:
        sharded = model.sharded_state_dict()
        dcp.load({"model": sharded}, checkpoint_id="dcp")
        model.load_state_dict(sharded)

    return load


def full_dict(model: Any, optimizer: Any) -> Callable[[], object]:
    state = [checkpoint.full_state_dict(model)]
    dist.broadcast_object_list(state)
    return lambda: model.load_state_dict(state[0])


def plain_dict(model: Any, optimizer: Any) -> Callable[[], object]:
    state = model.state_dict()
    return lambda: model.load_state_dict(state)


def saved(how: Callable[..., Any], model: nn.Module, optimizer: Any, rank: int) -> None:
    """Trains, saves, changes the weights, loads: they are back."""
    plain(model, optimizer, rank)
    if isinstance(model, ShardedWrapper):
        load = how(model, optimizer)
        change_all(model, Tensor.zero_)
        load()


# ---------------------------------------------------------------- the features


@dataclass(frozen=True)
class Feature:
    """How to use a feature.

    Attributes:
        loop: trains the model.
        make: makes the model.
        keywords: the wrapper's.
        tolerance: for the weights.
        refused: strategies that raise, and words of their error.
    """

    loop: Loop = plain
    make: Callable[[], Model] = build
    keywords: dict[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT
    refused: dict[str, str] = field(default_factory=dict)


KEEPS = ("NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
REPLICAS = ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT8 = MixedPrecision(gather_dtype=torch.float8_e4m3fn)
F = Feature
FEATURES = {
    "training": F(),
    "built on the meta device": F(make=on_meta),
    "bf16": F(keywords={"mixed_precision": BF16}, tolerance=ROUNDED),
    "float8 all-gathers": F(
        keywords={"mixed_precision": FLOAT8},
        tolerance=5 * ROUNDED,
        refused={"HYBRID_SHARD_OP": "secondary shards are not sent in float8"},
    ),
    "`wire_dtype=torch.bfloat16`": F(
        keywords={"wire_dtype": torch.bfloat16},
        tolerance=ROUNDED,
        refused=dict.fromkeys(REPLICAS, "averaged over .*replicas by the backend"),
    ),
    "offload to files": F(keywords={"cpu_offload": CPUOffload(path=".")}),
    "`step_in_backward`": F(partial(prepared, lambda model, opt: model.step_in_backward(opt))),
    '`boundary="row"`': F(keywords={"boundary": "row"}),
    "`reshard_after_forward=2`": F(
        keywords={"reshard_after_forward": 2},
        refused={
            **dict.fromkeys(KEEPS, "never reshards"),
            "HYBRID_SHARD_OP": "always shards parameters over the ranks of a node",
        },
    ),
    "`no_sync()`": F(accumulating),
    "`no_sync(max_bytes=...)`": F(partial(accumulating, max_bytes=4096)),
    "`no_sync(replicas_only=True)`": F(partial(accumulating, replicas_only=True)),
    "`clip_grad_norm_`": F(partial(plain, clip=0.01)),
    "`GradScaler`": F(scaled),
    "`join()`": F(uneven, refused={"HYBRID_SHARD_OP": "keeps secondary shards"}),
    "`allow_divergence`": F(make=partial(build, drops=True), keywords={"allow_divergence": True}),
    "bf16 compression hook": F(
        partial(prepared, lambda model, _: model.register_comm_hook(None, bf16_compress_hook)),
        tolerance=ROUNDED,
    ),
    "communication hook of yours": F(
        partial(prepared, lambda model, _: model.register_comm_hook(None, reduce)),
        refused=dict.fromkeys((s for s in STRATEGIES if "HYBRID" in s), "HYBRID strategy"),
    ),
    "activation checkpointing": F(make=recomputed),
    "`torch.compile` of blocks": F(make=compiled),
    "Muon (a parameter on its owner)": F(with_muon),
    "LBFGS (the full model)": F(with_lbfgs, tolerance=10 * EXACT),
    "tensor parallelism": F(
        make=tensor_parallel, refused=dict.fromkeys(REPLICAS, "a shard group of one rank")
    ),
    "`checkpoint.save`, `load`": F(partial(saved, checkpointed)),
    "`save_safetensors`, `load_safetensors`": F(partial(saved, safetensors)),
    "`sharded_state_dict`, DCP": F(partial(saved, sharded_dict)),
    "`full_state_dict`": F(partial(saved, full_dict)),
    "`state_dict`": F(partial(saved, plain_dict)),
}


def trial(rank: int, world_size: int, name: str, strategy: str, folder: str) -> float:
    """The largest difference of a weight from DDP's, over its tolerance."""
    feature = FEATURES[name]
    keywords = feature.keywords
    Way({}, WORLD, ranks_per_node=2).set_nodes()
    with contextlib.chdir(folder), allow_warnings():
        model: Any = feature.make()
        drops = model.drops
        if mesh := getattr(model, "mesh", None):
            keywords, rank = {"device_mesh": mesh}, mesh.get_local_rank()
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({Block})
        keywords = {**keywords, "sharding_strategy": strategy, "auto_wrap_policy": policy}
        sharded = ShardedWrapper(model, coalesce_bytes=0, **keywords)
        feature.loop(sharded, sgd(sharded), rank)
        found = sharded.state_dict()
        plain = build(drops=drops)
        other = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=drops)
        feature.loop(other, sgd(other), rank)
    expected = other.module.state_dict()
    assert list(found) == list(expected)
    differ = max((found[key].float() - expected[key]).abs().max().item() for key in expected)
    return differ / feature.tolerance


def judge(found: list[float]) -> Cell:
    worst = max(found)
    return Cell("right") if worst <= 1 else Cell("wrong", f"{worst:.3g} times the tolerance")


BY_TURNS = [
    (name, strategy)
    for number, name in enumerate(FEATURES)
    for strategy in every(len(STRATEGIES), STRATEGIES, number)
    if strategy not in FEATURES[name].refused
    if THOROUGH or "compile" not in name  # the compiler's own tests have its seconds of imports
]


@pytest.mark.parametrize(("name", "strategy"), BY_TURNS)
def test_feature(name: str, strategy: str, tmp_path: Path) -> None:
    assert judge(run_ranks(trial, WORLD, name, strategy, str(tmp_path))) == Cell("right")


@on_ranks(WORLD)
def test_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    for name, feature in FEATURES.items():
        for strategy, words in feature.refused.items():
            refused = pytest.raises((ValueError, NotImplementedError), match=words)
            with naming((name, strategy)), refused:
                trial(rank, world_size, name, strategy, str(tmp_path))
