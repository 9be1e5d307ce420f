"""``ForwardEdits``: finds what a module's forward writes into its gathered parameters.

That would be lost with the buffer they lie in, on every rank. Operations on parameters are counted
by autograd. Those on ``p.data`` are not, so after some forwards of a unit its parameters are
compared with what they were before.

[Note: which forwards]
To compare reads the buffer twice, some percent of a step's time. So it is done in the 1st, 10th,
100th, ... forward, where it is soon less than a thousandth of the time; and of training and of
evaluation each, as a module may edit in one of them alone.
"""

from __future__ import annotations

from torch import nn

from flatshard.comm.consistency import Checksum, checksum
from flatshard.engine.handle import FlatParamHandle


class ForwardEdits:
    """Of one flat parameter."""

    def __init__(self, handle: FlatParamHandle) -> None:
        """Nothing has run."""
        self._handle = handle
        self._version = -1
        self._before: Checksum | None = None
        self._training = True
        self._num_forwards = {True: 0, False: 0}  # in training, in evaluation
        self._next_compared = {True: 1, False: 1}

    def begin(self, *, training: bool) -> None:
        """The parameters are gathered and installed, and the forward begins.

        Args:
            training: whether the module is in training mode.
        """
        if self._handle.params.are_full:
            return  # what they are written to stays
        self._version = self._handle.buffer._version
        self._training = training
        self._num_forwards[training] += 1
        is_compared = self._num_forwards[training] >= self._next_compared[training]
        self._before = checksum(self._handle.buffer) if is_compared else None

    def check(self, module: nn.Module) -> None:
        """The forward is over, and nothing was freed yet.

        Args:
            module: whose forward; parameters elsewhere are not looked for.

        Raises:
            RuntimeError: a parameter was edited, or replaced.
        """
        if self._version < 0 or self._handle.params.are_full:
            return
        before, self._before = self._before, None
        was_edited = self._handle.buffer._version != self._version
        if before is not None:
            self._next_compared[self._training] *= 10
            was_edited = was_edited or before != checksum(self._handle.buffer)
        if was_edited:
            names = ", ".join(repr(spec.name) for spec in self._handle.params.specs[:3])
            raise RuntimeError(
                f"unit {self._handle.unit_name!r}: its forward edited parameters in place ({names}"
                f"{', or others' if len(self._handle.params.specs) > 3 else ''}), which are "
                "gathered copies there: the edit would be lost. nn.Embedding(max_norm=...) does "
                "that, too. Compute with the changed value instead (w = self.weight.clamp(...)), "
                "edit parameters between steps, or use NO_SHARD."
            )
        self._handle.params.check_installed(module)
