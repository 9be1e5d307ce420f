"""``Observers`` tell only those who listen; a unit's phase moves as its table says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatshard.engine import backward, forward, handle, unit
from flatshard.engine.events import Kind, Observers, StepObserver
from flatshard.engine.unit import Phase, Unit
from tests.harness import run_ranks
from tests.models import CASES


class _Listener(StepObserver):
    """Hears two events, and votes."""

    def __init__(self, vote: int) -> None:
        self.heard: list[str] = []
        self.vote, self.maxima = vote, [-1]

    def begin_forward(self) -> None:
        self.heard.append("begin_forward")

    def end_backward(self) -> None:
        self.heard.append("end_backward")

    def votes(self) -> bytes:
        return bytes([self.vote, 7])

    def tally(self, maxima: bytes) -> None:
        self.maxima = list(maxima)


def test_only_what_is_overridden() -> None:
    observers, listener = Observers(), _Listener(0)
    observers.add(StepObserver())
    observers.add(listener)
    assert observers.begin_forward == listener.begin_forward
    assert observers.voters == [listener]
    assert "on_grad" not in vars(observers)
    with observers.waiting(Kind.RANKS_WAIT):
        pass
    assert observers.find(_Listener) is listener
    observers.remove(listener)
    assert "begin_forward" not in vars(observers)
    assert observers.find(_Listener) is None


def test_votes_of_all_ranks() -> None:
    run_ranks(_votes, 2)


def _votes(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    model = case.wrap(case.model())
    first, second = _Listener(rank), _Listener(3 * (1 - rank))
    model._sharding.context.observers.add(first)
    model._sharding.context.observers.add(second)
    model(case.batch(rank, 2)[0]).sum().backward()
    assert (first.maxima, second.maxima) == ([1, 7], [3, 7])
    assert first.heard == ["begin_forward", "end_backward"]


def test_core_names_no_observer() -> None:
    for module in (forward, backward, unit, handle):
        words = " ".join(vars(module))
        assert "Recorder" not in words
        assert "NonFinite" not in words
        assert "Edits" not in words


def test_phase_moves() -> None:
    one = Unit({}, ["a"], placement=_none(), topology=_none())
    for phase in (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.BACKWARD):
        one.enter(phase)
    with pytest.raises(AssertionError, match="BACKWARD to FORWARD"):
        one.enter(Phase.FORWARD)


def _none() -> Any:
    return SimpleNamespace()


def test_a_failed_inner_backward_lets_the_forward_go_on() -> None:
    """Its unit is in BACKWARD then, and is called again."""
    run_ranks(_inner_backward_fails, 2)


class _Energy(nn.Module):
    """Computes forces of a term by an inner backward, which fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x)
        inner.register_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.grad(inner.sum(), x)
        return self.inner(x)


def _fail(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def _inner_backward_fails(rank: int, world_size: int) -> None:
    from flatshard import ShardedWrapper
    from flatshard.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy([nn.Linear])
    model = ShardedWrapper(_Energy(), auto_wrap_policy=policy, coalesce_bytes=0)
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
