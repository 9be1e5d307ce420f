"""The seams of a step: ``StepObserver`` watches, ``StepExtension`` acts, ``Voter`` compares ranks.

The engine knows none of them by name. Observers hear what a run does, and change nothing of it;
reports attach themselves to ``Observers``. Extensions are extras that act in a step: ``forward``,
``backward``, and ``reduce_queue`` where a reduction ends, name the moments. Several extensions act
at one moment in the order of the table ``EXTRAS`` in ``flatshard.options.extras``.
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
        """Around a stretch of time; see ``Observers.span``."""
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

    def span(
        self,
        kind: Kind,
        unit: Unit | None = None,
        *,
        purpose: str | None = None,
        ends: bool = True,
    ) -> AbstractContextManager[object]:
        """Around a stretch of time, for all observers and for torch's profiler.

        Args:
            kind: what the time is spent on.
            unit: the unit that the collectives belong to; None: no single unit.
            purpose: "forward" and "backward" start all-gathers, "reduce" starts reductions. Without
                a purpose the stretch is a wait.
            ends: whether the collectives under way for the unit are over after a wait.
        """
        profiles = torch._C._autograd._profiler_enabled()
        if not (self.all or profiles):
            return _NOTHING
        label = "reduce" if purpose == "reduce" else "unshard"
        if purpose is None:
            label = "wait_unshard"
            # Second stages of reductions start in waits for first stages.
            purpose = "other" if unit is None else "reduce"
        # Entered already: the caller enters what this returns at once, which does nothing more.
        stack = contextlib.ExitStack()
        for observer in self.all:
            stack.enter_context(observer.span(kind, unit, purpose, ends))
        if profiles and unit is not None and kind in (Kind.STARTING, Kind.GATHER_WAIT):
            stack.enter_context(profiled(label, unit.name))
        return stack


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """A range ``flatshard::label (unit)`` in the profile under way, if there is one."""
    # Asked first: a range costs microseconds per unit also where nobody profiles.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")


class Voter:
    """Compares something between ranks in the exchange at the end of each backward."""

    def votes(self) -> bytes:
        """This rank's bytes, as many as on the other ranks; asked right before the exchange."""
        return b""

    def tally(self, maxima: bytes) -> None:
        """Hear, for each of the ``votes``, the largest of any rank.

        Must not raise: the other ranks wait for this rank's reductions.
        """


class StepExtension(Voter):
    """Subclasses override the moments at which they act."""

    name: str
    """The extra's name in ``EXTRAS``."""

    is_made_anew = False
    """Whether the run of a module around the model, which is wrapped later, has it too."""

    # A forward, or something between steps, begins; the last step may have failed.
    def recover(self) -> None: ...
    # The outermost forward begins; `of_root`: it is the root's. May raise, on all ranks.
    def begin_forward(self, of_root: bool) -> None: ...
    # Flat parameters' all-gathers were started, for "forward" or "backward".
    def gathering(self, handles: Sequence[FlatParamHandle], purpose: str) -> None: ...
    # The outermost forward has computed, or failed; no rank waits yet for what it all-gathered.
    def end_forward(self, failed: bool) -> None: ...
    # The model's backward begins. May raise.
    def begin_backward(self) -> None: ...
    # All of a unit's gradients are reduced.
    def reduced(self, unit: Unit) -> None: ...
    # Backward has started all that it can: a moment for an extension's own work.
    def between_units(self) -> None: ...
    # These units got gradients after their reduction; nothing is under way. May raise, on all
    # ranks.
    def reduced_late(self, units: Sequence[Unit]) -> None: ...
    # `.grad` is complete; `has_gradients`: this backward brought some, on any rank.
    def end_backward(self, has_gradients: bool) -> None: ...

    # `caller`, a method such as "join()", needs all gradients after backward. May raise, on all
    # ranks.
    def needs_gradients(self, caller: str) -> None: ...

    def clipping(self, module: Any, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Around ``module.clip_grad_norm_(*arguments)``, where ``module`` is a wrapper."""
        return nullcontext()
