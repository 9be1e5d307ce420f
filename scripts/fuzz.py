"""Trains random models under random settings, and compares with the unwrapped model.

    python scripts/fuzz.py                          # 100 cases
    python scripts/fuzz.py --cases 5000 --seed 7
    python scripts/fuzz.py --case '{"world": 2, ...}'   # a case that the script has printed

Each case is a tree of modules (nested, shared, tied, frozen, 0-d, empty and uneven parameters, two
dtypes, unused outputs, both kinds of checkpointing, batch norm, recurrent layers), a policy, a
strategy and settings of the training, on 1 to 4 gloo ranks. A run is *right* if every loss and the
final state dict equal those of the unwrapped model on all ranks' rows. A run *raises* if all ranks
raise flatshard's own error. Otherwise it is *wrong*, or *hangs*. If a case is wrong or hangs, or
raises under ``--no-raises``, Hypothesis shrinks the case, the script prints it, and the exit status
is 1.

Needs the extra "dev".
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import re
import sys
import time
import warnings
from typing import Any

import lib.prerequisites  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from lib.command_line import Parser, at_least, directory
from lib.fuzz_models import BOXES, BUFFERED, LEAVES, WIDTH, Box, Json, Leaf, build, kinds_in
from lib.rank_processes import Ranks, Said
from torch import Tensor, nn

ROWS = 3
HANG_SECONDS = 60.0


# ---------------------------------------------------------------- random cases


def trees(without: set[str]) -> st.SearchStrategy[list[Json]]:
    leaf_kinds = [kind for kind in (*LEAVES, "shared", "tied") if kind not in without]
    box_kinds = [kind for kind in BOXES if kind not in without]
    leaves = st.builds(
        lambda kind, of, unit: {"kind": kind, "of": of, "unit": unit},
        st.sampled_from(leaf_kinds),
        st.integers(0, 5),
        st.booleans(),
    )

    def boxed(children: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
        return st.builds(
            lambda kind, body, every, unit: {
                "kind": kind,
                "body": body,
                "every": every,
                "unit": unit,
            },
            st.sampled_from(box_kinds),
            st.lists(children, min_size=1, max_size=3),
            st.integers(2, 3),
            st.booleans(),
        )

    return st.lists(st.recursive(leaves, boxed, max_leaves=8), min_size=1, max_size=5)


def cases(worlds: list[int], without: set[str]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 1000),
            "world": st.sampled_from(worlds),
            "tree": trees(without),
            "policy": st.sampled_from(
                ["none", "auto", "marked", "leaves", "layers", "boxes", "size", "all"]
            ),
            "strategy": st.sampled_from(
                [
                    *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "SHARD_OP"),
                    *("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OP"),
                ]
            ),
            "per_node": st.integers(1, 4),
            "regather": st.sampled_from([None, None, True, False, 2]),
            "coalesce": st.sampled_from([0, None, 300]),
            "boundary": st.sampled_from(["element", "element", "row", "tensor", 3, 8]),
            "backward_prefetch": st.sampled_from(["AUTO", "BACKWARD_PRE", "BACKWARD_POST", None]),
            "forward_prefetch": st.sampled_from([None, False]),
            "collectives": st.sampled_from(["auto", "sockets", "native"]),
            "accumulate": st.integers(1, 3),
            "optimizer": st.sampled_from(["sgd", "adamw"]),
            "in_backward": st.sampled_from([False, False, True]),
            "clip": st.booleans(),
            "eval": st.booleans(),
            "input_grad": st.booleans(),
            "offload": st.sampled_from([False, False, True]),
            "divergence": st.sampled_from([False, False, True]),
            "uneven": st.sampled_from([False, False, True]),
        }
    ).map(_sound)


def _sound(case: Json) -> Json:
    """Remove combinations that raise, or differ from DDP, as documented."""
    case = dict(case)
    case["per_node"] = min(case["per_node"], case["world"])
    while case["world"] % case["per_node"]:
        case["per_node"] -= 1
    if "by_rank" in kinds_in(case["tree"]):
        case["divergence"] = True
        if "reader" in kinds_in(case["tree"]):
            case["collectives"] = "auto"  # finds a collective on only some ranks at once
    if case["regather"] == 2 and case["world"] not in (2, 4):
        case["regather"] = None
    if case["strategy"] != "FULL_SHARD":
        case["regather"] = None
    # Under join(), buffers may come from another rank than in the unwrapped model, and join()
    # refuses the other kinds.
    case["uneven"] &= not (BUFFERED | {"by_rank", "reader"}) & kinds_in(case["tree"])
    if case["uneven"]:
        case["eval"], case["in_backward"], case["divergence"] = False, False, False
        case["accumulate"], case["regather"] = 1, None
        if case["strategy"] == "HYBRID_SHARD_OP":
            case["strategy"] = "HYBRID_SHARD"
    if case["in_backward"]:
        case["clip"], case["accumulate"] = False, 1
    return case


# ---------------------------------------------------------------- training


def batches(case: Json, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank, each of shape ``(ROWS, WIDTH)``."""
    generator = torch.Generator().manual_seed(case["seed"] * 1000 + step * 10 + rank)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(case["input_grad"]), y


def optimizer_of(case: Json, params: Any) -> torch.optim.Optimizer:
    params = [param for param in params if param.requires_grad]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
    # With a small eps, AdamW would turn gradients of 1e-17, which should be zero, into whole steps.
    return torch.optim.AdamW(params, lr=0.01, eps=1e-2)


STEPS = 3


def steps_of(case: Json, rank: int) -> int:
    """Number of batches of a rank."""
    return STEPS - rank % 2 if case["uneven"] else STEPS


def set_step(model: nn.Module, step: int, rank: int) -> None:
    for module in model.modules():
        if type(module) is Box:
            module.step, module.rank = step, rank


def expected(case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """Train the unwrapped model in one process, rank by rank; returns losses and state dict."""
    model = build(case)
    optimizer = optimizer_of(case, model.parameters())
    buffers = [_buffers(model) for _ in range(case["world"])]
    losses, evaluated = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(case["accumulate"]):
            if part == 0:  # buffers are not broadcast if the forward before was in no_sync
                buffers = [buffers[0] for _ in buffers]
            for rank in range(case["world"]):
                if step >= steps_of(case, rank):
                    continue
                _set_buffers(model, buffers[rank])
                x, y = batches(case, rank, step * 3 + part)
                set_step(model, step, rank)
                loss = (model(x) - y).square().mean() / case["world"]
                loss.backward()
                total += loss.item()
                buffers[rank] = _buffers(model)
        _set_buffers(model, buffers[0])
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
        if case["eval"]:
            evaluated.append(_evaluate(model, case))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [*losses, *evaluated], state


def _buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def _evaluate(model: nn.Module, case: Json) -> float:
    model.eval()
    set_step(model, 0, 0)
    with torch.no_grad():
        x, y = batches(case, 0, 999)
        loss = (model(x) - y).square().mean().item()
    model.train()
    return loss


def wrap(case: Json, model: nn.Module) -> nn.Module:
    from flatshard import CPUOffload, ShardedWrapper
    from flatshard import wrap as policies

    layers = {nn.Embedding, nn.GRU, nn.LayerNorm, nn.BatchNorm1d, nn.MultiheadAttention}
    classes = {"leaves": {Leaf}, "boxes": {Box}, "all": {Leaf, Box}, "layers": layers}
    policy: Any = {"none": None, "auto": "auto"}.get(case["policy"])
    if case["policy"] in classes:
        policy = policies.ModuleWrapPolicy(classes[case["policy"]])
    elif case["policy"] == "size":
        policy = functools.partial(policies.size_based_auto_wrap_policy, min_num_params=60)
    elif case["policy"] == "marked":
        policy = policies.CustomPolicy(lambda module: getattr(module, "is_unit", False))
    os.environ["LOCAL_WORLD_SIZE"] = str(case["per_node"])
    return ShardedWrapper(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=case["strategy"],
        reshard_after_forward=case["regather"],
        coalesce_bytes=case["coalesce"],
        boundary=case["boundary"],
        backward_prefetch=case["backward_prefetch"],
        forward_prefetch=case["forward_prefetch"],
        collectives=case["collectives"],
        allow_divergence=case["divergence"],
        cpu_offload=CPUOffload(offload_params=True) if case["offload"] else None,
    )


def train(case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """Train the sharded model on this rank; returns losses and state dict."""
    rank = dist.get_rank()
    model = wrap(case, build(case))
    optimizer = optimizer_of(case, model.parameters())
    if case["in_backward"]:
        model.step_in_backward(optimizer)
    totals, evaluated = torch.zeros(STEPS, dtype=torch.float64), []
    with model.join() if case["uneven"] else contextlib.nullcontext():
        for step in range(steps_of(case, rank)):
            set_step(model, step, rank)
            optimizer.zero_grad()
            for part in range(case["accumulate"]):
                is_last = part + 1 == case["accumulate"]
                x, y = batches(case, rank, step * 3 + part)
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                totals[step] += loss.detach() / case["world"]
            if case["clip"]:
                model.clip_grad_norm_(0.5)
            optimizer.step()
            if case["eval"]:
                evaluated.append(_evaluate(model, case))
    dist.all_reduce(totals)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [*totals.tolist(), *evaluated], state


# ---------------------------------------------------------------- verdicts


def judge(case: Json, said: list[Said]) -> tuple[str, str]:
    """Verdict ("right", "raises", "wrong" or "hangs"), and the reason."""
    verdicts = {one.outcome for one in said}
    if verdicts & {"hangs", "died"}:
        return "hangs", "; ".join(f"rank {r}: {v} {w}" for r, (v, w) in enumerate(said))
    if "raised" in verdicts:
        kind, message, trace = next(one.what for one in said if one.outcome == "raised")
        if verdicts != {"raised"}:
            return "wrong", f"not all ranks raise: {kind}: {message}\n{trace}"
        with contextlib.suppress(Exception):
            expected(case)
            return "raises", f"{kind}: {message}\n{trace}"
        return "right", ""  # the unwrapped model raises too
    losses, state = expected(case)
    tolerance = 2e-4 if "narrow" in kinds_in(case["tree"]) else 1e-9
    for rank, (_, (found, _)) in enumerate(said):
        for index, (ours, oracle) in enumerate(zip(found, losses, strict=True)):
            if not abs(ours - oracle) <= tolerance * max(1.0, abs(oracle)):
                return "wrong", f"rank {rank}: loss {index} is {ours!r}, expected {oracle!r}"
    return _compare_states(said[0][1][1], state, tolerance)


def _compare_states(
    ours: dict[str, Tensor], oracle: dict[str, Tensor], tolerance: float
) -> tuple[str, str]:
    if list(ours) != list(oracle):
        return "wrong", f"state dict has {list(ours)}, expected {list(oracle)}"
    for name, value in oracle.items():
        if ours[name].shape != value.shape or ours[name].dtype != value.dtype:
            return "wrong", f"{name}: {tuple(ours[name].shape)} {ours[name].dtype}"
        if not torch.allclose(ours[name], value, rtol=tolerance, atol=tolerance):
            return "wrong", f"{name} differs by {(ours[name] - value).abs().max().item():g}"
    return "right", ""


def run(ranks: Ranks, case: Json) -> list[Said]:
    return ranks.run(train, case["world"], case, seconds=HANG_SECONDS)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--cases", type=at_least(1), default=100, help="number of random cases (default: 100)")
    add("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    add(
        "--worlds",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 3, 4],
        help="numbers of ranks to choose from (default: 1 2 3 4)",
    )
    add(
        "--without",
        nargs="+",
        default=[],
        choices=(*LEAVES, *BOXES),
        help="kinds of modules that no case may have",
    )
    add("--no-raises", action="store_true", help="also fail if flatshard raises its own error")
    add("--database", type=directory, help="folder that keeps failing cases for the next run")
    add("--case", type=json.loads, help="run only this case, in JSON")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    options = parser.parse_args()
    with warnings.catch_warnings(), Ranks(max(options.worlds), preload=["fuzz"]) as ranks:
        warnings.simplefilter("ignore")
        if options.case is None:
            return search(ranks, options)
        case = options.case
        verdict, why = judge(case, run(ranks, case))
    print(verdict, why)
    return int(verdict != "right")


def search(ranks: Ranks, options: argparse.Namespace) -> int:
    """Run random cases; shrink and print the first case that fails."""
    counts: collections.Counter[str] = collections.Counter()
    raised: collections.Counter[str] = collections.Counter()
    first: dict[str, str] = {}
    bad = {"wrong", "hangs", *(["raises"] if options.no_raises else [])}

    @seed(options.seed)
    @settings(
        max_examples=options.cases,
        deadline=None,
        database=options.database and DirectoryBasedExampleDatabase(options.database),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(cases(options.worlds, set(options.without)))
    def check(case: Json) -> None:
        begin = time.monotonic()
        verdict, why = judge(case, run(ranks, case))
        counts[verdict] += 1
        if options.verbose:
            print(f"{time.monotonic() - begin:.1f} s, {verdict}: {json.dumps(case)}", flush=True)
        if verdict == "raises":
            kind = re.sub(r"'[^']*'|\d+", "_", why.split("\n")[0])[:150]
            raised[kind] += 1
            first.setdefault(kind, json.dumps(case))
        assert verdict not in bad, f"{verdict}: {why}\ncase: {json.dumps(case)}"

    failed = False
    try:
        check()
    except AssertionError as error:
        failed = True
        print(error)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for kind, count in raised.most_common():
        print(f"  {count} x {kind}\n      {first[kind]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
