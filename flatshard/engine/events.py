"""Interfaces to a step: ``StepObserver`` watches, ``StepExtension`` acts, ``Voter`` compares ranks.

The engine knows no observer, extension or voter by name. Observers receive the events of a run, and
change nothing; reports add themselves to ``Observers``. Extensions are extras that act in a step:
``forward``, ``backward`` and ``reduce_queue`` (at the end of a reduction) call them. If several
extensions act at the same moment, they act in the order of the table ``EXTRAS`` in
``flatshard.options.extras``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.tensor.flat_parameter import OriginalParam

_NOTHING: AbstractContextManager[object] = nullcontext()


class Kind(enum.Enum):
    """Activity on which a range of time was spent. Values are names of tracks in a trace."""

    FORWARD_PASS = "forward pass"
    """From the beginning of the outermost forward to its end."""
    BACKWARD_PASS = "backward pass"
    """From the first gradient of an output to the end of backward."""
    FORWARD = "compute forward"
    """The thread is in a unit's forward, but not in a nested unit's forward."""
    BACKWARD = "compute backward"
    """The unit's backward is the most recent unfinished one; recomputation included."""
    STARTING = "starting collectives"
    """The thread prepares and starts a unit's all-gather or reduction."""
    GATHER_WAIT = "waiting for all-gathers"
    """The thread waits for a unit's parameters, or reads them from other ranks' memory."""
    REDUCE_WAIT = "waiting for reductions"
    """The thread waits for a unit's gradients, or reads and adds other ranks' gradients."""
    RANKS_WAIT = "waiting for all ranks"
    """The thread waits for all ranks, for no single unit: ``StepReport.ranks_wait_seconds``."""
    GATHER = "all-gather in flight"
    """From the start of a unit's all-gather until the thread has the result."""
    REDUCE = "reduction in flight"
    """From the start of a unit's reduction until the thread has the result."""


class StepObserver:
    """Receives the events of a run, and changes nothing.

    Subclasses override the events that they handle.
    """

    # The outermost forward begins.
    def begin_forward(self) -> None: ...
    # The outermost forward is over.
    def end_forward(self) -> None: ...
    # A unit's forward begins; `recomputes`: a checkpoint recomputes the forward in backward.
    def enter_forward(self, unit: Unit, recomputes: bool) -> None: ...
    # A unit's forward is over, or failed.
    def leave_forward(self, unit: Unit) -> None: ...
    # The model's backward begins.
    def begin_backward(self) -> None: ...
    # A unit's backward begins.
    def enter_backward(self, unit: Unit) -> None: ...
    # A unit's backward is over, and its parameters are sharded.
    def leave_backward(self, unit: Unit) -> None: ...
    # The unreduced gradient of an original parameter has arrived.
    def on_grad(self, unit: Unit, param: OriginalParam, grad: Tensor) -> None: ...
    # The model's backward is over, and so is all its communication.
    def end_backward(self) -> None: ...

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """Return a context manager around a range of time; see ``Observers.span``."""
        return _NOTHING


O = TypeVar("O", bound=StepObserver)  # noqa: E741


class Observers:
    """The observers of one model's steps."""

    def __init__(self) -> None:
        # Callers of an event loop over this. It is a tuple, so that an observer can remove itself
        # in an event without changing the loop.
        self.all: tuple[StepObserver, ...] = ()

    def add(self, observer: StepObserver) -> None:
        """Add ``observer`` after the present observers."""
        self.all += (observer,)

    def remove(self, observer: StepObserver) -> None:
        """Remove ``observer``, if present; may be called in an event."""
        self.all = tuple(one for one in self.all if one is not observer)

    def find(self, kind: type[O]) -> O | None:
        return next((one for one in self.all if isinstance(one, kind)), None)

    def span(
        self,
        kind: Kind,
        unit: Unit | None = None,
        *,
        purpose: str | None = None,
        ends: bool = True,
    ) -> AbstractContextManager[object]:
        """Return a context manager around a range of time, for all observers and torch's profiler.

        Args:
            kind: activity in this range of time.
            unit: the unit that the collectives belong to; None: no single unit.
            purpose: "forward" and "backward" start all-gathers, "reduce" starts reductions. Without
                a purpose the range is a wait.
            ends: whether the unit's collectives under way are finished after the wait.
        """
        profiles = torch._C._autograd._profiler_enabled()
        if not (self.all or profiles):
            return _NOTHING
        label = "reduce" if purpose == "reduce" else "unshard"
        if purpose is None:
            label = "wait_unshard"
            # Second stages of reductions start in waits for first stages.
            purpose = "other" if unit is None else "reduce"
        # The stack's contexts are entered here. The caller enters the returned stack at once, which
        # has no further effect.
        stack = contextlib.ExitStack()
        for observer in self.all:
            stack.enter_context(observer.span(kind, unit, purpose, ends))
        if profiles and unit is not None and kind in (Kind.STARTING, Kind.GATHER_WAIT):
            stack.enter_context(profiled(label, unit.name))
        return stack


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """Mark a range ``flatshard::label (unit)`` in a running profile, if there is one."""
    # Check first: a range costs microseconds per unit even if no profiler runs.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")


class Voter:
    """Compares bytes between ranks in the exchange at the end of each backward."""

    def votes(self) -> bytes:
        """This rank's bytes, the same number on all ranks; called right before the exchange."""
        return b""

    def tally(self, maxima: bytes) -> None:
        """Receive, for each byte of ``votes``, the maximum over all ranks.

        Must not raise: the other ranks wait for this rank's reductions.
        """


class StepExtension(Voter):
    """Acts in the steps of a model. Subclasses override some moments."""

    name: str
    """The extra's name in ``EXTRAS``."""

    is_made_anew = False
    """Whether the extension is also added when a module around the model is wrapped later."""

    # A forward, or an operation between steps, begins; the last step may have failed.
    def recover(self) -> None: ...
    # The outermost forward begins; `of_root`: the forward is the root's. May raise, on all ranks.
    def begin_forward(self, of_root: bool) -> None: ...
    # All-gathers of flat parameters were started, for "forward" or "backward".
    def gathering(self, handles: Sequence[FlatParamHandle], purpose: str) -> None: ...
    # The outermost forward has computed, or failed; no rank waits yet for other ranks to read its
    # memory.
    def end_forward(self, failed: bool) -> None: ...
    # The model's backward begins. May raise.
    def begin_backward(self) -> None: ...
    # All of a unit's gradients are reduced.
    def reduced(self, unit: Unit) -> None: ...
    # Backward has started all possible collectives: an extension can do its own work now.
    def between_units(self) -> None: ...
    # These units got gradients after their reduction; no collective is under way. May raise, on all
    # ranks.
    def reduced_late(self, units: Sequence[Unit]) -> None: ...
    # `.grad` is complete; `has_gradients`: this backward brought gradients, on any rank.
    def end_backward(self, has_gradients: bool) -> None: ...

    # `caller`, a method such as "join()", needs all gradients after backward. May raise, on all
    # ranks.
    def needs_gradients(self, caller: str) -> None: ...

    def clipping(self, module: Any, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Context around ``module.clip_grad_norm_(*arguments)``; ``module`` is a wrapper."""
        return nullcontext()
