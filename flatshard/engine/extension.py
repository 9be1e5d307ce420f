"""``StepExtension``: an extra that acts in a step.

``forward``, ``backward``, and ``reduce_queue`` where a reduction ends, name the moments. Several
extensions act at one moment in the order of the table ``EXTRAS`` in ``flatshard.options.extras``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit


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
