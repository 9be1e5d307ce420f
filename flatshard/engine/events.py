"""``StepObserver``: hears what a run does; the engine knows nobody who listens.

Reports, checks and optimizers that step in backward attach themselves to ``Observers``. An event
that nobody overrides costs the loop over an empty list.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit

_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


class Kind(enum.Enum):
    """What a range of time was spent on. Values name tracks of a trace."""

    FORWARD_PASS = "forward pass"
    """From the beginning of the outermost forward to its end."""
    BACKWARD_PASS = "backward pass"
    """From the first gradient of an output to the end of backward."""
    FORWARD = "compute forward"
    """The thread is in a unit's forward, and in no nested unit's."""
    BACKWARD = "compute backward"
    """A unit's backward has begun last of those that are not over; recomputation included."""
    STARTING = "starting collectives"
    """The thread prepares and starts a unit's all-gather or reduction."""
    GATHER_WAIT = "waiting for all-gathers"
    """The thread waits for a unit's parameters, or reads them from other ranks' memory."""
    REDUCE_WAIT = "waiting for reductions"
    """It waits for a unit's gradients, or reads and adds other ranks'."""
    RANKS_WAIT = "waiting for all ranks"
    """It waits for what concerns no single unit: see ``StepReport.ranks_wait_seconds``."""
    GATHER = "all-gather under way"
    """From the start of a unit's all-gather until the thread has the result."""
    REDUCE = "reduction under way"
    """From the start of a unit's reduction until the thread has the result."""


class StepObserver:
    """Hears what a run does. Subclasses override the events that they want to hear."""

    def recover(self) -> None:
        """A forward, or something between steps, begins; the last step may have failed."""

    def begin_forward(self) -> None:
        """The outermost forward begins. May raise, on all ranks."""

    def end_forward(self) -> None:
        """The outermost forward is over."""

    def enter_forward(self, unit: Unit, recomputes: bool) -> None:
        """A unit's forward begins; ``recomputes``: a checkpoint runs it again in backward."""

    def unsharded(self, unit: Unit) -> None:
        """A unit's modules hold its unsharded parameters, and its forward begins."""

    def check_forward(self, unit: Unit, module: nn.Module) -> None:
        """A module's forward is over, and its parameters are still unsharded. May raise."""

    def leave_forward(self, unit: Unit) -> None:
        """A unit's forward is over, or failed."""

    def begin_backward(self) -> None:
        """The model's backward begins. May raise."""

    def begin_inner_backward(self) -> None:
        """Autograd runs another graph inside the backward that runs."""

    def enter_backward(self, unit: Unit) -> None:
        """A unit's backward begins."""

    def leave_backward(self, unit: Unit) -> None:
        """A unit's backward is over, and its parameters are sharded."""

    def on_grad(self, unit: Unit, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """The gradient of an original parameter has come, and is unreduced."""

    def reduced(self, unit: Unit) -> None:
        """All of a unit's gradients are reduced."""

    def between_units(self) -> None:
        """Backward has started all that it can: a moment for an observer's own work."""

    def votes(self) -> list[int]:
        """Numbers below 256 to compare with other ranks' at the end of backward; as many on all."""
        return []

    def tally(self, maxima: list[int]) -> None:
        """For each of ``votes``, the largest of any rank. Must not raise: see ``reduced_late``."""

    def reduced_late(self, units: Sequence[Unit]) -> None:
        """These got gradients after their reduction; nothing is under way. May raise, on all."""

    def published(self, has_gradients: bool) -> None:
        """``.grad`` is complete; ``has_gradients``: this backward brought some, on any rank."""

    def end_backward(self) -> None:
        """The model's backward is over, and so is all its communication."""

    def drop_backward(self) -> None:
        """A backward failed; what is left of it is dropped."""

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """Around a stretch of time; see ``Observers.starting`` and ``Observers.waiting``."""
        return _NOTHING


# Methods that a subclass does not override are called by nobody; see `Observers._sort`.
_EVENTS = [name for name in vars(StepObserver) if not name.startswith("_")]
O = TypeVar("O", bound=StepObserver)  # noqa: E741


class Observers:
    """The observers of one run: for each event, the methods of those that override it."""

    recover: list[Callable[[], None]]
    begin_forward: list[Callable[[], None]]
    end_forward: list[Callable[[], None]]
    enter_forward: list[Callable[[Unit, bool], None]]
    unsharded: list[Callable[[Unit], None]]
    check_forward: list[Callable[[Unit, nn.Module], None]]
    leave_forward: list[Callable[[Unit], None]]
    begin_backward: list[Callable[[], None]]
    begin_inner_backward: list[Callable[[], None]]
    enter_backward: list[Callable[[Unit], None]]
    leave_backward: list[Callable[[Unit], None]]
    on_grad: list[Callable[[Unit, FlatParamHandle, int, Tensor], None]]
    reduced: list[Callable[[Unit], None]]
    between_units: list[Callable[[], None]]
    votes: list[Callable[[], list[int]]]
    tally: list[Callable[[list[int]], None]]
    reduced_late: list[Callable[[Sequence[Unit]], None]]
    published: list[Callable[[bool], None]]
    end_backward: list[Callable[[], None]]
    drop_backward: list[Callable[[], None]]
    span: list[Callable[[Kind, Unit | None, str, bool], AbstractContextManager[object]]]

    def __init__(self) -> None:
        self._all: list[StepObserver] = []
        self._sort()

    def _sort(self) -> None:
        # New lists: a loop over the present ones may be what removes an observer.
        for event in _EVENTS:
            base = getattr(StepObserver, event)
            listeners = [one for one in self._all if getattr(type(one), event) is not base]
            setattr(self, event, [getattr(one, event) for one in listeners])

    def add(self, observer: StepObserver) -> None:
        """Tell ``observer``, too, from now on; after those that were added before."""
        self._all.append(observer)
        self._sort()

    def remove(self, observer: StepObserver) -> None:
        """Tell it no more; does nothing where it is not there."""
        self._all = [one for one in self._all if one is not observer]
        self._sort()

    def find(self, kind: type[O]) -> O | None:
        """The observer of this class, if there is one."""
        return next((one for one in self._all if isinstance(one, kind)), None)

    def starting(self, purpose: str, unit: Unit | None) -> AbstractContextManager[object]:
        """Around the start of collectives: for "forward" or "backward", or a "reduce"."""
        return self._spans(Kind.STARTING, unit, purpose, True) if self.span else _NOTHING

    def waiting(
        self, kind: Kind, unit: Unit | None = None, *, ends: bool = True
    ) -> AbstractContextManager[object]:
        """Around a wait; ``ends``: what was under way for it is over then."""
        if not self.span:
            return _NOTHING
        # Second stages of reductions start in waits for the first.
        return self._spans(kind, unit, "other" if unit is None else "reduce", ends)

    def _spans(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        # Entered already: the caller enters what this returns at once, which does nothing more.
        stack = contextlib.ExitStack()
        for make in self.span:
            stack.enter_context(make(kind, unit, purpose, ends))
        return stack


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """A range ``flatshard::label (unit)`` in the profile under way, if there is one."""
    # Asked first: a range costs microseconds per unit also where nobody profiles.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")
