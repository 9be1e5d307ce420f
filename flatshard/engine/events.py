"""``StepObserver``: hears what a run does, and changes nothing of it.

The engine knows nobody who listens. Reports attach themselves to ``Observers``. What acts in a step
is called by its name in ``forward`` and ``backward``, or is a ``StepExtension``.
"""

from __future__ import annotations

import contextlib
import enum
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from flatshard.engine.unit import Unit
from flatshard.tensor.flat_parameter import OriginalParam

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
    """Hears what a run does, and changes nothing of it.

    Subclasses override the events that they want to hear.
    """

    # The outermost forward begins.
    def begin_forward(self) -> None: ...
    # The outermost forward is over.
    def end_forward(self) -> None: ...
    # A unit's forward begins; `recomputes`: a checkpoint runs it again in backward.
    def enter_forward(self, unit: Unit, recomputes: bool) -> None: ...
    # A unit's forward is over, or failed.
    def leave_forward(self, unit: Unit) -> None: ...
    # The model's backward begins.
    def begin_backward(self) -> None: ...
    # A unit's backward begins.
    def enter_backward(self, unit: Unit) -> None: ...
    # A unit's backward is over, and its parameters are sharded.
    def leave_backward(self, unit: Unit) -> None: ...
    # The gradient of an original parameter has come, and is unreduced.
    def on_grad(self, unit: Unit, param: OriginalParam, grad: Tensor) -> None: ...
    # The model's backward is over, and so is all its communication.
    def end_backward(self) -> None: ...

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """Around a stretch of time; see ``Observers.starting`` and ``Observers.waiting``."""
        return _NOTHING


O = TypeVar("O", bound=StepObserver)  # noqa: E741


class Observers:
    """The observers of one model's steps."""

    def __init__(self) -> None:
        # Whoever calls an event calls it of each of these. A tuple, which an observer that removes
        # itself in an event does not change under the loop.
        self.all: tuple[StepObserver, ...] = ()

    def add(self, observer: StepObserver) -> None:
        """Tell ``observer`` the events from now on, after the observers that are there."""
        self.all += (observer,)

    def remove(self, observer: StepObserver) -> None:
        """Tell ``observer`` no more, if it is there; may be called in an event."""
        self.all = tuple(one for one in self.all if one is not observer)

    def find(self, kind: type[O]) -> O | None:
        return next((one for one in self.all if isinstance(one, kind)), None)

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
        if not (self.all or profiles):
            return _NOTHING
        # Entered already: the caller enters what this returns at once, which does nothing more.
        stack = contextlib.ExitStack()
        for one in self.all:
            stack.enter_context(one.span(kind, unit, purpose, ends))
        if profiles and unit is not None and label is not None:
            stack.enter_context(profiled(label, unit.name))
        return stack


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """A range ``flatshard::label (unit)`` in the profile under way, if there is one."""
    # Asked first: a range costs microseconds per unit also where nobody profiles.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")
