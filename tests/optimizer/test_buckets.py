"""What optimizers get: neighbours as one parameter; by which kernel; what closures do."""

import copy
import io
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatshard import FlatShardTensor, ShardedWrapper
from tests.harness import naming, on_ranks
from tests.models import CASES
from tests.oracle import local_loss, own_parts, snapshot, step_and_zero, train_steps, trainable
from tests.side import Run, assert_same_model, pair

pytestmark = pytest.mark.by_turns

KINDS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}


# ---------------------------------------------------------------- by which kernel


@on_ranks(2)
def test_fused_where_it_is_left_open(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    called = 0
    fused_adamw = torch._fused_adamw_

    def counted(*args: Any, **keywords: Any) -> None:
        nonlocal called
        called += 1
        fused_adamw(*args, **keywords)

    ends = {}
    for name, is_fused, dtype, keywords in (
        ("open", True, torch.float32, {}),
        ("fused", True, torch.float32, {"fused": True}),
        ("not fused", False, torch.float32, {"fused": False}),
        ("foreach", False, torch.float32, {"foreach": True}),
        ("no foreach", False, torch.float32, {"foreach": False}),
        ("tensor", False, torch.float32, {"lr": torch.tensor(0.01)}),
        ("narrow", False, torch.bfloat16, {}),
        ("wide", True, torch.float64, {}),
    ):
        with naming(name), mock.patch.object(torch, "_fused_adamw_", counted):
            model = case.wrap(case.model().to(dtype))
            optimizer = torch.optim.AdamW(trainable(model), **{"lr": 0.01, **keywords})
            before = dict(optimizer.param_groups[0])
            called = 0
            for step in range(3):
                x = case.batch(rank + 2 * step, 8)[0].to(dtype)
                model(x).pow(2).mean().backward()
                step_and_zero(optimizer)
            assert (called > 0) is is_fused
            assert optimizer.param_groups[0] == before, "the user's options are as they were"
            ends[name] = snapshot(model)
    torch.testing.assert_close(ends["open"], ends["fused"], rtol=0, atol=0)
    for name in ("not fused", "foreach", "no foreach", "tensor"):
        torch.testing.assert_close(ends["open"], ends[name], rtol=1e-6, atol=1e-8)


@on_ranks(3)
def test_norms_and_means_of_state(rank: int, world_size: int) -> None:
    """Norms, sums and means of optimizer state are those of whole state."""
    case = CASES["mlp"]
    for kind, make in KINDS.items():
        with naming(kind):
            plain, model = case.model(), case.wrap(case.model())
            expected, optimizer = make(trainable(plain)), make(trainable(model))
            train_steps(model, optimizer, case, rank, world_size, steps=2)
            for step in range(2):
                for one in range(world_size):
                    (local_loss(plain, case, step, one, world_size) / world_size).backward()
                step_and_zero(expected)
            _compare_state(model, optimizer, plain, expected)
            loaded = make(trainable(model))
            train_steps(model, loaded, case, rank, world_size, steps=1)
            loaded.load_state_dict(own_parts(optimizer))
            for other in (optimizer, loaded):
                _compare_state(model, other, plain, expected)
            torch.save(own_parts(loaded), io.BytesIO())  # plain tensors again


def _compare_state(model: Any, optimizer: Any, plain: Any, expected: Any) -> None:
    for param, other in zip(trainable(model), trainable(plain), strict=True):
        state, wanted = optimizer.state[param], expected.state[other]
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            found = state[key]
            assert found.shape == value.shape, key
            for read in (Tensor.norm, Tensor.sum, Tensor.mean, Tensor.max, torch.linalg.norm):
                torch.testing.assert_close(read(found), read(value), check_dtype=False)
            if isinstance(found, FlatShardTensor):
                torch.testing.assert_close(found.full_tensor(), value)


SURPRISES = (
    *("nothing", "nothing", "no gradient", "another gradient", "data", "nothing", "state"),
    *("no state", "frozen"),
)
"""What happens to a parameter in the middle of a run before a step."""


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_runs_that_users_break_up(rank: int, world_size: int) -> None:
    """What was stepped as one the last time may not be one this time."""
    case = CASES["transformer"]
    plain = case.model()
    model = case.wrap(case.model())
    for stepped, ranks in ((plain, (0, 1)), (model, (rank, world_size))):
        optimizer = KINDS["adamw"](trainable(stepped))
        for surprise in (*SURPRISES, "nothing"):
            loss = (
                sum(local_loss(plain, case, 0, one, world_size) for one in range(world_size))
                if stepped is plain
                else local_loss(model, case, 0, *ranks)
            )
            (loss / world_size if stepped is plain else loss).backward()
            parameters = dict(stepped.named_parameters())
            names = [name for name in parameters if name.endswith("norm2.weight")]
            assert names, list(parameters)
            for name in names:
                _surprise(surprise, parameters[name], optimizer)
            step_and_zero(optimizer)
    torch.testing.assert_close(snapshot(model), snapshot(plain), rtol=0, atol=1e-9)


def _surprise(kind: str, param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    if kind == "no gradient":
        param.grad = None
    elif kind == "another gradient":
        assert param.grad is not None
        param.grad = param.grad * 2
    elif kind == "data":
        param.data = param.data * 0.5
    elif kind == "state":
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"] * 3
    elif kind == "no state":
        del optimizer.state[param]
    elif kind == "frozen":
        param.requires_grad_(False)


@on_ranks(2)
def test_groups_that_take_turns(rank: int, world_size: int) -> None:
    """Each group steps only its own parameters, also those between which another group's lie."""
    plain = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))).double()
    model = ShardedWrapper(copy.deepcopy(plain))

    def made(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        listed = list(params)
        groups = [{"params": listed[first::3], "lr": lr} for first, lr in enumerate((0.1, 0.0, 1))]
        return torch.optim.SGD(groups, momentum=0.9)

    ours, theirs = made(model.parameters()), made(plain.parameters())
    for _ in range(3):
        for one, optimizer in ((model, ours), (plain, theirs)):
            one(torch.ones(2, 12, dtype=torch.float64)).square().mean().backward()
            step_and_zero(optimizer)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().detach(), expected.detach())


# ---------------------------------------------------------------- closures


class _Outside(torch.optim.SGD):
    """An optimizer that is not known to be element-wise: it sees true-shape parameters."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        return super().step(closure)


@on_ranks(2)
def test_a_closure_reduces_what_was_accumulated(rank: int, world_size: int) -> None:
    """The gradients that the step uses are those after the closure, not those before it."""
    for kind in (torch.optim.SGD, _Outside):
        losses = []
        runs = pair(rank, world_size, "full")
        for run in runs:
            run.optimizer = kind(run.model.parameters(), lr=0.1, momentum=0.9)
            losses.append([_step(run, number) for number in range(0, 6, 2)])
        assert_same_model(*runs)
        totals = torch.tensor(losses[0])
        torch.distributed.all_reduce(totals)
        torch.testing.assert_close(totals / world_size, torch.tensor(losses[1]))
        _refused(runs[0])


def _step(run: Run, number: int) -> float:
    def closure() -> Tensor:
        loss = run.loss(number)
        loss.backward()
        return loss

    with run.no_sync():
        run.loss(number + 1).backward()
    loss = run.optimizer.step(closure).item()
    run.optimizer.zero_grad()
    return loss


def _refused(run: Run) -> None:
    """The closure's own backward only accumulates."""

    def closure() -> None:
        with run.no_sync():
            run.loss(0).backward()

    with pytest.raises(RuntimeError, match="accumulated under no_sync and not reduced"):
        run.optimizer.step(closure)
