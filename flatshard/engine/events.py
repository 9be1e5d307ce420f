"""``StepObserver``: hears what a run does; the engine knows nobody who listens.

Reports, checks and optimizers that step in backward attach themselves to ``Observers``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
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
    GATHER = "all-gather in flight"
    """From the start of a unit's all-gather until the thread has the result."""
    REDUCE = "reduction in flight"
    """From the start of a unit's reduction until the thread has the result."""


class StepObserver:
    """Hears what a run does. Subclasses override the events that they want to hear."""

    # A forward, or something between steps, begins; the last step may have failed.
    def recover(self) -> None: ...
    # The outermost forward begins. May raise, on all ranks.
    def begin_forward(self) -> None: ...
    # It has computed, or failed; no rank waits yet for what it all-gathered.
    def end_computing(self, failed: bool) -> None: ...
    # It is over.
    def end_forward(self) -> None: ...
    # A unit's forward begins; `recomputes`: a checkpoint runs it again in backward.
    def enter_forward(self, unit: Unit, recomputes: bool) -> None: ...
    # A unit's modules hold its unsharded parameters, and its forward begins.
    def unsharded(self, unit: Unit) -> None: ...
    # A module's forward is over, and its parameters are still unsharded. May raise.
    def check_forward(self, unit: Unit, module: nn.Module) -> None: ...
    # A unit's forward is over, or failed.
    def leave_forward(self, unit: Unit) -> None: ...
    # The model's backward begins. May raise.
    def begin_backward(self) -> None: ...
    # Autograd runs another graph inside the backward that runs.
    def begin_inner_backward(self) -> None: ...
    # A unit's backward begins.
    def enter_backward(self, unit: Unit) -> None: ...
    # It is over, and the unit's parameters are sharded.
    def leave_backward(self, unit: Unit) -> None: ...
    # The gradient of an original parameter has come, and is unreduced.
    def on_grad(self, unit: Unit, handle: FlatParamHandle, index: int, grad: Tensor) -> None: ...
    # All of a unit's gradients are reduced.
    def reduced(self, unit: Unit) -> None: ...
    # Backward has started all that it can: a moment for an observer's own work.
    def between_units(self) -> None: ...
    # Of each of this observer's `votes`, the largest of any rank. Must not raise: `reduced_late`
    # may.
    def tally(self, maxima: bytes) -> None: ...
    # These got gradients after their reduction; nothing is under way. May raise, on all ranks.
    def reduced_late(self, units: Sequence[Unit]) -> None: ...
    # `.grad` is complete; `has_gradients`: this backward brought some, on any rank.
    def published(self, has_gradients: bool) -> None: ...
    # The model's backward is over, and so is all its communication.
    def end_backward(self) -> None: ...
    # A backward failed; what is left of it is dropped.
    def drop_backward(self) -> None: ...

    def votes(self) -> bytes:
        """Bytes to compare with other ranks' at the end of backward; as many on all ranks."""
        return b""

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """Around a stretch of time; see ``Observers.starting`` and ``Observers.waiting``."""
        return _NOTHING


O = TypeVar("O", bound=StepObserver)  # noqa: E741

_PER_OBSERVER = {"votes", "tally", "span"}
_EVENTS = {name for name in vars(StepObserver) if not name.startswith("_")} - _PER_OBSERVER


class Observers(StepObserver):
    """The observers of one run: whoever calls an event of this, calls it of all of them."""

    def __init__(self) -> None:
        self._all: list[StepObserver] = []
        self._sort()

    def _sort(self) -> None:
        # An event that nobody overrides stays the method of the base class, which does nothing.
        for event in _EVENTS:
            self.__dict__.pop(event, None)
            if calls := [getattr(one, event) for one in self._overriding(event)]:
                # One observer's method needs no loop: some come for every gradient.
                setattr(self, event, partial(_call_all, calls) if calls[1:] else calls[0])
        self.voters, self._spanning = self._overriding("votes"), self._overriding("span")

    def _overriding(self, event: str) -> list[StepObserver]:
        base = getattr(StepObserver, event)
        return [one for one in self._all if getattr(type(one), event) is not base]

    def add(self, observer: StepObserver, *, first: bool = False) -> None:
        """Tell it from now on: before the others, or after those that were added before."""
        self._all.insert(0 if first else len(self._all), observer)
        self._sort()

    def remove(self, observer: StepObserver) -> None:
        """Tell it no more, if it is there; may be called in an event."""
        self._all = [one for one in self._all if one is not observer]
        self._sort()

    def find(self, kind: type[O]) -> O | None:
        return next((one for one in self._all if isinstance(one, kind)), None)

    def starting(self, purpose: str, unit: Unit | None) -> AbstractContextManager[object]:
        """Around the start of collectives: for "forward" or "backward", or a "reduce"."""
        label = "reduce" if purpose == "reduce" else "unshard"
        return self._around(Kind.STARTING, unit, purpose, True, label)

    def waiting(
        self, kind: Kind, unit: Unit | None = None, *, ends: bool = True
    ) -> AbstractContextManager[object]:
        """Around a wait; ``ends``: what was under way for it is over then."""
        # Second stages of reductions start in waits for the first.
        purpose = "other" if unit is None else "reduce"
        label = "wait_unshard" if kind is Kind.GATHER_WAIT else None
        return self._around(kind, unit, purpose, ends, label)

    def _around(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool, label: str | None
    ) -> AbstractContextManager[object]:
        profiles = torch._C._autograd._profiler_enabled()
        if not (self._spanning or profiles):
            return _NOTHING
        # Entered already: the caller enters what this returns at once, which does nothing more.
        stack = contextlib.ExitStack()
        for one in self._spanning:
            stack.enter_context(one.span(kind, unit, purpose, ends))
        if profiles and unit is not None and label is not None:
            stack.enter_context(profiled(label, unit.name))
        return stack


def _call_all(calls: list[Callable[..., object]], *args: object) -> None:
    for call in calls:
        call(*args)


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """A range ``flatshard::label (unit)`` in the profile under way, if there is one."""
    # Asked first: a range costs microseconds per unit also where nobody profiles.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")
