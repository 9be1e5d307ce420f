"""``StepExtension``: the interface of extensions, which act in a training step or observe a step.

An extension is an optional feature (a folder of ``flatshard.extras``, which can be deleted). The
engine calls the methods of all extensions at fixed points of a step, in the order of the table
``EXTRAS`` in ``flatshard.options.extras``. Extensions that only observe, such as reports, are last
in this table.
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.memory import NOTHING


class Kind(enum.Enum):
    """Kinds of time ranges in a report: an activity of the thread, or an unfinished collective.

    The values are the names of the ranges in reports.
    """

    FORWARD_PASS = "forward pass"
    """From the beginning to the end of a forward of the model."""
    BACKWARD_PASS = "backward pass"
    """From the first gradient of an output to the end of backward."""
    FORWARD = "compute forward"
    """The thread is in the forward of a unit, but not in the forward of a nested unit."""
    BACKWARD = "compute backward"
    """The thread is in the backward of a unit, or in a recomputed forward inside that backward.

    If several units' backwards are unfinished, the time counts for the unit that began last.
    """
    STARTING = "starting collectives"
    """The thread prepares and starts a unit's all-gather or reduction."""
    GATHER_WAIT = "waiting for all-gathers"
    """The thread waits for a unit's parameters, or copies them from the memory of other ranks."""
    REDUCE_WAIT = "waiting for reductions"
    """The thread waits for a unit's averaged gradients, or adds gradients of other ranks."""
    RANKS_WAIT = "waiting for all ranks"
    """The thread waits for other ranks, but the wait belongs to no single unit.

    ``StepReport.ranks_wait_seconds`` counts these waits.
    """
    GATHER = "all-gather in flight"
    """From the start of a unit's all-gather until the thread has the result."""
    REDUCE = "reduction in flight"
    """From the start of a unit's reduction until the thread has the result."""


class StepExtension:
    """Interface of an extension. A subclass overrides the methods that it needs.

    A method that raises an error must raise on all ranks. Otherwise the other ranks would wait
    forever for the rank that raised.
    """

    name: str
    """The extra's name in ``EXTRAS``."""

    is_made_anew = False
    """Whether the extension may be dropped when the model becomes a part of a larger model.

    The larger model gets a new extension, if necessary.
    """

    exchange_name = ""
    """Description of the ``votes``: a part of the name of the exchange at the end of backward.

    Ranks compare this name, so all ranks must have the same extensions.
    """

    watches = False
    """Whether the engine also calls the methods from ``enter_forward`` to ``span``, below.

    False for most extensions, because these methods are called often and would take time.
    """

    # ------------------------------------------------------------ a step

    # A forward of the model, or an operation between steps, begins. Clean up if the last step
    # failed.
    def recover(self) -> None: ...
    # A forward of the model begins. `unit`: the unit of the module that was called. None: no module
    # was called (see `OutOfForwardUse`). May raise.
    def begin_forward(self, unit: Unit | None) -> None: ...
    # The all-gather of a flat parameter was started. `purpose`: "forward" or "backward".
    def gathering(self, handle: FlatParamHandle, purpose: str) -> None: ...
    # A forward of the model has computed `output`, or has `failed`. `output` is None after a failed
    # forward, and after an operation on parameters outside of every forward (`OutOfForwardUse`).
    # Other ranks may still be reading this rank's shards.
    def end_forward(self, output: object, failed: bool) -> None: ...
    # The model's backward begins. May raise.
    def begin_backward(self) -> None: ...
    # The gradients of a flat parameter of `unit` are reduced. Called for each flat parameter.
    def reduced(self, unit: Unit) -> None: ...
    # Backward has started all collectives that can start now. Work that the extension does in this
    # method overlaps with these collectives.
    def between_units(self) -> None: ...
    # `units` have received gradients after their reduction. These late gradients were reduced
    # separately. No collective is unfinished. May raise.
    def reduced_late(self, units: Sequence[Unit]) -> None: ...
    # `.grad` is complete, and all communication of the backward is over. `has_gradients`: whether
    # this backward computed gradients on any rank.
    def end_backward(self, has_gradients: bool) -> None: ...

    def votes(self) -> bytes:
        """Return bytes that this rank sends in the exchange at the end of each backward.

        All ranks must return the same number of bytes. ``tally`` receives the result.
        """
        return b""

    def tally(self, maxima: bytes) -> None:
        """Receive, for each byte of ``votes``, the maximum over all ranks. May raise."""

    # ------------------------------------------------------------ only if `watches`

    # A unit's forward begins. `recomputes`: whether activation checkpointing runs the forward
    # again, in backward.
    def enter_forward(self, unit: Unit, recomputes: bool) -> None: ...
    # A unit's forward is over, or raised an exception.
    def leave_forward(self, unit: Unit) -> None: ...
    # A forward of the model is over, and this rank has waited for the other ranks.
    def after_forward(self) -> None: ...
    # A unit's backward begins.
    def enter_backward(self, unit: Unit) -> None: ...
    # A unit's backward is over, and the unit is resharded.
    def leave_backward(self, unit: Unit) -> None: ...
    # Autograd has computed this rank's gradient of a parameter of `unit`.
    def on_grad(self, unit: Unit) -> None: ...

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """Return a context manager in which the engine runs a part of a step, to measure its time.

        The arguments say what the thread does in this part (see ``RunState.span``).
        """
        return NOTHING

    # ------------------------------------------------------------ calls of the user

    # The user has called the method `caller` ("join()", for example), which needs all gradients in
    # `.grad` after backward. Raise an error if this extension uses up gradients during backward (an
    # optimizer that steps in backward).
    def needs_gradients(self, caller: str) -> None: ...

    def clipping(self, module: Any, arguments: tuple[Any, ...]) -> AbstractContextManager[object]:
        """Return a context manager that surrounds ``module.clip_grad_norm_(*arguments)``.

        ``module`` is the ``ShardedWrapper`` whose method was called.
        """
        return NOTHING


def profiled(label: str, unit_name: str) -> AbstractContextManager[object]:
    """Return a context that torch's profiler, if it runs, shows as ``flatshard::label (unit)``."""
    # Check for a profiler first, because a range takes microseconds even without a profiler.
    if not profiler._is_profiler_enabled:
        return NOTHING
    return torch.profiler.record_function(f"flatshard::{label} ({unit_name or 'root'})")
