"""``ForwardEdits``: finds what a module's forward writes into its gathered parameters.

That would be lost with the buffer they lie in, on every rank. Operations on parameters are counted
by autograd. Those on ``p.data`` are not, so after the first forward of a unit its parameters are
compared with what they were before.
"""

from __future__ import annotations

from torch import nn

from flatshard.handle import FlatParamHandle
from flatshard.starting import Checksum, checksum


class ForwardEdits:
    """Of one flat parameter."""

    def __init__(self, handle: FlatParamHandle) -> None:
        """Nothing has run."""
        self._handle = handle
        self._version = -1
        self._before: Checksum | None = None
        self._has_compared = False

    def begin(self) -> None:
        """The parameters are gathered and installed, and the forward begins."""
        if self._handle.params.are_full:
            return  # what they are written to stays
        self._version = self._handle.buffer._version
        self._before = None if self._has_compared else checksum(self._handle.buffer)

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
            self._has_compared = True
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
