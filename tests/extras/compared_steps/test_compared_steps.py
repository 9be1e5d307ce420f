"""Ranks that step with other options, or another number of times, raise at the next backward."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import ShardedWrapper
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import step_and_zero

pytestmark = pytest.mark.by_turns


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


Params = list[nn.Parameter]
Make = Callable[[Params, int], torch.optim.Optimizer]

# The optimizer of a rank, which ranks may not step together, and a part of the error.
DIFFERENT: dict[str, tuple[Make, str]] = {
    "lr": (
        lambda params, rank: torch.optim.SGD(params, lr=0.1 / (rank + 1)),
        r"'lr' of SGD's group with '0.bias' is 0.1 on rank 0, 0.05 on rank 1\.",
    ),
    "one group": (
        lambda params, rank: torch.optim.AdamW(
            [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1 * rank}]
        ),
        r"'weight_decay' of AdamW's group with '2.bias' is 0 on rank 0, 0.1 on rank 1\.",
    ),
    "betas": (
        lambda params, rank: torch.optim.AdamW(params, betas=[0.9, 0.99 + 0.009 * rank]),
        r"'betas' of AdamW's group with '0.bias' is \(0.9, 0.99\) on rank 0, \(0.9, 0.999\) on",
    ),
    "tensor": (
        lambda params, rank: torch.optim.Adam(params, lr=torch.tensor(0.1 / (rank + 1))),
        r"'lr' of Adam's group .* is 0.1 on rank 0, 0.05 on rank 1\.",
    ),
    "class": (
        lambda params, rank: (torch.optim.NAdam if rank else torch.optim.RAdam)(params),
        r"'lr' of NAdam's group with '0.bias' is no step on rank 0, 0.002 on rank 1\.",
    ),
    "groups": (
        lambda params, rank: torch.optim.SGD(
            [{"params": params}] if rank else [{"params": [one]} for one in params], lr=0.1
        ),
        r"of SGD's group .*no step on rank 1",
    ),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_differences_are_named(rank: int, world_size: int, strategy: str) -> None:
    for kind, (make, expected) in DIFFERENT.items():
        with naming(kind):
            model = ShardedWrapper(_model(), sharding_strategy=strategy)
            optimizer = make(list(model.parameters()), rank)
            _backward(model)
            optimizer.step()
            assert_raises(RuntimeError, expected, _backward, model)

    def wrapped() -> tuple[ShardedWrapper, torch.optim.Optimizer]:
        model = ShardedWrapper(_model(), sharding_strategy=strategy)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    # A scheduler that gets this rank's metric.
    model, optimizer = wrapped()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        with pytest.raises(RuntimeError, match="FS-STEPS") if step == 3 else nullcontext():
            _backward(model)
        optimizer.step()
        plateau.step(1.0 + step * (rank - 0.5))
    # A step on one rank only; then all continue.
    model, optimizer = wrapped()
    for _ in range(1 + rank):
        optimizer.step()
    assert_raises(RuntimeError, r"is 0.1 on rank 0, 0.1, then 0.1 on rank 1\.", _backward, model)
    _backward(model)
    # Each rank has dropped another gradient.
    model[2 * rank].weight.grad = None
    optimizer.step()
    expected = r"without \.grad is 0\.weight on rank 0, 2\.weight on rank 1"
    assert_raises(RuntimeError, expected, _backward, model)
    # Steps in backward.
    model, optimizer = wrapped()
    model.step_in_backward(optimizer)
    for _ in range(2):
        _backward(model)
    optimizer.param_groups[0]["lr"] += rank
    expected = r"SGD's group with '0.bias' is 0.1 on rank 0, 1.1"
    assert_raises(RuntimeError, expected, _backward, model)


def _scheduled(params: Params, rank: int) -> Iterator[None]:
    """Rank 0 steps its scheduler before the next backward, rank 1 inside of it."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    while True:
        optimizer.step()
        if rank == 0:
            schedule.step()
        yield
        if rank == 1:
            schedule.step()


def _in_a_set(params: Params, rank: int) -> Iterator[None]:
    """Ranks collect the same parameters in another order, and with other kernels."""
    ordered = params if rank else params[::-1]
    return _steps(torch.optim.AdamW([{"params": ordered}], foreach=bool(rank)))


def _rounded(params: Params, rank: int) -> Iterator[None]:
    """Processors round the same schedule differently."""
    return _steps(torch.optim.SGD(params, lr=0.1 + 1e-16 * rank))


def _steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        yield optimizer.step()


def _alternating(params: Params, rank: int) -> Iterator[None]:
    """Two optimizers, stepped in another order on each rank; one steps every other time."""
    both = [torch.optim.SGD(params[:2], lr=0.1), torch.optim.Adam(params[2:], lr=0.2)]
    for step in range(100):
        for one in both if rank else both[::-1]:
            if step % 2 == 0 or one is both[0]:
                one.step()
        yield


def _unrelated(params: Params, rank: int) -> Iterator[None]:
    """Each rank steps a model of its own as well, as often as it likes."""
    own: Any = nn.Linear(2, 2)
    mine = torch.optim.SGD(own.parameters(), lr=0.1 + rank)
    optimizer = torch.optim.SGD(params, lr=0.1)
    while True:
        for _ in range(rank + 1):
            own(torch.ones(2)).sum().backward()
            mine.step()
        optimizer.step()
        yield


ALIKE = (_scheduled, _in_a_set, _rounded, _alternating, _unrelated)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_no_false_alarm(rank: int, world_size: int, strategy: str) -> None:
    for program in ALIKE:
        with naming(program.__name__), allow_warnings():
            model = ShardedWrapper(_model(), sharding_strategy=strategy)
            steps = program(list(model.parameters()), rank)
            for _step in range(4):
                _backward(model)
                next(steps)


@on_ranks(2)
def test_experts(rank: int, world_size: int) -> None:
    """Each rank trains an expert of its own, with its own options."""
    groups = [dist.new_group([one]) for one in range(2)]
    model = _model()
    model[2] = ShardedWrapper(model[2], process_group=groups[rank])
    model = ShardedWrapper(model)
    dense, expert = list(model[0].parameters()), list(model[2].parameters())
    optimizer = torch.optim.SGD(
        [{"params": [*dense, *expert][: 3 + rank]}, {"params": expert[1 + rank :]}]
        if rank == 0
        else [{"params": dense}, {"params": expert, "lr": 0.5}],
        lr=0.1,
    )
    for _step in range(3):
        _backward(model)
        step_and_zero(optimizer)
    optimizer.param_groups[0]["lr"] += rank
    optimizer.step()
    assert_raises(RuntimeError, r"'lr' of SGD's group with '0.bias'", _backward, model)
