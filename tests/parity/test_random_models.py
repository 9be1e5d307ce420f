"""Random models under random settings train as the unwrapped model does, or raise on all ranks.

    CASES=5000 python -m pytest tests/parity/test_random_models.py --hypothesis-seed 7

Each case is a tree of modules (nested, shared, tied, frozen, 0-d, empty and uneven parameters, two
dtypes, unused outputs, both kinds of checkpointing, batch norm, recurrent layers), a policy, a
strategy and settings of the training, on 1 to 4 gloo ranks. All losses and the final state must be
those of the unwrapped model on all ranks' rows, or all ranks must raise flatshard's own error
(``--hypothesis-show-statistics`` counts them). Hypothesis shrinks a case that fails, and runs it
first the next time. By default the cases are few, and always the same.
"""

import contextlib
import functools
import json
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, event, given, settings, strategies as st
from torch import Tensor, nn

from flatshard import CPUOffload, ShardedWrapper, ShardingStrategy, wrap as policies
from flatshard.options.extras import default_extra
from tests.combinations import THOROUGH
from tests.harness import RankError, allow_warnings, run_ranks
from tests.oracle import set_buffers, snapshot
from tests.outcomes import PATIENCE, Cell
from tests.parity import random_models
from tests.parity.random_models import BOXES, BUFFERED, LEAVES, WIDTH, Box, Json, Leaf, kinds_in

CASES = int(os.environ.get("CASES", 100 if THOROUGH else 8))
ROWS, STEPS = 3, 3
AUTO = ["auto"] if default_extra("auto_wrap") else []  # a policy that can be deleted

# ---------------------------------------------------------------- random cases


def _trees() -> st.SearchStrategy[list[Json]]:
    common = {"of": st.integers(0, 5), "every": st.integers(2, 3), "unit": st.booleans()}
    leaf = st.fixed_dictionaries({"kind": st.sampled_from([*LEAVES, "shared", "tied"]), **common})

    def boxed(children: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
        body = st.lists(children, min_size=1, max_size=3)
        return st.fixed_dictionaries({"kind": st.sampled_from([*BOXES]), "body": body, **common})

    return st.lists(st.recursive(leaf, boxed, max_leaves=8), min_size=1, max_size=5)


CHOICES: dict[str, list[Any]] = {
    "world": [1, 2, 3, 4],
    "policy": ["none", *AUTO, "marked", "leaves", "layers", "boxes", "size", "all"],
    "sharding_strategy": [one.name for one in ShardingStrategy],
    "per_node": [1, 2, 3, 4],
    "reshard_after_forward": [None, None, True, False, 2],
    "coalesce_bytes": [0, None, 300],
    "boundary": ["element", "element", "row", "tensor", 3, 8],
    "backward_prefetch": ["AUTO", "BACKWARD_PRE", "BACKWARD_POST", None],
    "forward_prefetch": [None, False],
    "collectives": ["auto", "sockets", "native"],
    "accumulate": [1, 2, 3],
    "optimizer": ["sgd", "adamw"],
    **{name: [False, False, True] for name in ("allow_divergence", "in_backward", "offload")},
    **{name: [False, True] for name in ("clip", "eval", "input_grad")},
    "uneven": [False, False, True],
}
KEYWORDS = (
    *("sharding_strategy", "reshard_after_forward", "coalesce_bytes", "boundary", "collectives"),
    *("backward_prefetch", "forward_prefetch", "allow_divergence"),
)
"""Choices that are keywords of the wrapper."""


def _sound(case: Json) -> Json:
    """Remove combinations that raise, or differ from DDP, as documented."""
    case = dict(case)
    case["per_node"] = min(case["per_node"], case["world"])
    while case["world"] % case["per_node"]:
        case["per_node"] -= 1
    if "by_rank" in kinds_in(case["tree"]):
        case["allow_divergence"] = True
        if "reader" in kinds_in(case["tree"]):
            case["collectives"] = "auto"  # finds a collective on only some ranks at once
    may_regather = case["reshard_after_forward"] != 2 or case["world"] in (2, 4)
    if case["sharding_strategy"] != "FULL_SHARD" or not may_regather:
        case["reshard_after_forward"] = None
    # Under join(), buffers may come from another rank than in the unwrapped model, and join()
    # refuses the other kinds.
    case["uneven"] &= not (BUFFERED | {"by_rank", "reader"}) & kinds_in(case["tree"])
    if case["uneven"]:
        case["eval"], case["in_backward"], case["allow_divergence"] = False, False, False
        case["accumulate"], case["reshard_after_forward"] = 1, None
        if case["sharding_strategy"] == "HYBRID_SHARD_OP":
            case["sharding_strategy"] = "HYBRID_SHARD"
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


def steps_of(case: Json, rank: int) -> int:
    """Number of batches of a rank."""
    return STEPS - rank % 2 if case["uneven"] else STEPS


def set_step(model: nn.Module, step: int, rank: int) -> None:
    for module in model.modules():
        if type(module) is Box:
            module.step, module.rank = step, rank


def expected(case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """Train the unwrapped model in one process, rank by rank; returns losses and state dict."""
    model = random_models.build(case)
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
                set_buffers(model, buffers[rank])
                x, y = batches(case, rank, step * 3 + part)
                set_step(model, step, rank)
                loss = (model(x) - y).square().mean() / case["world"]
                loss.backward()
                total += loss.item()
                buffers[rank] = _buffers(model)
        set_buffers(model, buffers[0])
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
        if case["eval"]:
            evaluated.append(_evaluate(model, case))
    return [*losses, *evaluated], snapshot(model)


def _buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _evaluate(model: nn.Module, case: Json) -> float:
    model.eval()
    set_step(model, 0, 0)
    with torch.no_grad():
        x, y = batches(case, 0, 999)
        loss = (model(x) - y).square().mean().item()
    model.train()
    return loss


def wrap(case: Json, model: nn.Module) -> nn.Module:
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
    keywords = {name: case[name] for name in KEYWORDS}
    if case["offload"]:
        keywords["cpu_offload"] = CPUOffload(offload_params=True)
    return ShardedWrapper(model, auto_wrap_policy=policy, **keywords)


@allow_warnings()
def train(rank: int, _: int, case: Json) -> tuple[list[float], dict[str, Tensor]]:
    """Train the sharded model on this rank; returns losses and state dict."""
    model = wrap(case, random_models.build(case))
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
    return [*totals.tolist(), *evaluated], snapshot(model)


# ---------------------------------------------------------------- verdicts


def judge(case: Json, found: list[tuple[list[float], dict[str, Tensor]]]) -> Cell:
    with allow_warnings():
        losses, state = expected(case)
    tolerance = 2e-4 if "narrow" in kinds_in(case["tree"]) else 1e-9
    for rank, (ours, _) in enumerate(found):
        for index, (loss, oracle) in enumerate(zip(ours, losses, strict=True)):
            if not abs(loss - oracle) <= tolerance * max(1.0, abs(oracle)):
                why = f"rank {rank}: loss {index} is {loss!r}, expected {oracle!r}"
                return Cell("wrong", why)
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(found[0][1], state, rtol=tolerance, atol=tolerance)
        return Cell("right")
    return Cell("wrong", f"state dict is {found[0][1]}, expected {state}")


def verdict(case: Json) -> Cell:
    try:
        return judge(case, run_ranks(train, case["world"], case, patience=PATIENCE))
    except RankError as error:
        if error.verdict == "raises" and not all(error.raised):
            return Cell("wrong", f"not all ranks raise: {error}")
        if error.verdict == "raises":
            with contextlib.suppress(Exception), allow_warnings():
                expected(case)
                return Cell("raises", error.why)
            return Cell("right")  # the unwrapped model raises too
        return Cell(error.verdict, str(error))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * CASES)
@settings(
    max_examples=CASES,
    derandomize=not THOROUGH and "CASES" not in os.environ,
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
@given(
    st.fixed_dictionaries(
        {"seed": st.integers(0, 1000), "tree": _trees()}
        | {name: st.sampled_from(values) for name, values in CHOICES.items()}
    ).map(_sound)
)
def test_random_models(case: Json) -> None:
    word, why = verdict(case)
    event(word if word == "right" else re.sub(r"'[^']*'|\d+", "_", f"{word}: {why}")[:150])
    assert word in ("right", "raises"), f"{why}\ncase: {json.dumps(case)}"


def test_verdicts() -> None:
    usual = {name: values[0] for name, values in CHOICES.items()}
    case = {**usual, "seed": 3, "tree": [{"kind": "linear", "of": 0, "unit": False}]}
    losses, state = expected(case)
    assert judge(case, [(losses, state)]) == Cell("right")
    wrong = judge(case, [(losses, state), ([losses[0] + 1e-6, *losses[1:]], state)])
    assert wrong.verdict == "wrong"
    assert "rank 1: loss 0" in wrong.why
    for other in ({n: v + 1e-6 for n, v in state.items()}, {f"x{n}": v for n, v in state.items()}):
        assert judge(case, [(losses, other)]).verdict == "wrong"
