"""``ReduceBucket``: flat parameters of a unit whose gradients are reduced together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.handle import FlatParamHandle

U = TypeVar("U")

_STALL_SECONDS = 1.0
"""How long a reduction may hold up backward; past this the peers may be waiting for us."""

_POLL_SECONDS = 1e-4


class ReduceBucket(Generic[U]):
    """The flat parameters of a unit whose gradients are reduced together: mostly all.

    Attributes:
        unit: the unit.
        handles: the flat parameters.
        index: its number in the run.
    """

    __slots__ = ("_num_trainable", "handles", "index", "unit")

    def __init__(
        self,
        unit: U,
        handles: Sequence[FlatParamHandle],
        num_trainable: Mapping[FlatParamHandle, int],
    ) -> None:
        """Take a part of a unit.

        Args:
            unit: the unit.
            handles: the flat parameters.
            num_trainable: of each, how many gradients a whole backward brings; the unit keeps it
                up to date.
        """
        self.unit, self.handles = unit, list(handles)
        self.index = -1
        self._num_trainable = num_trainable

    def trainable_handles(self) -> list[FlatParamHandle]:
        """Flat parameters with something to reduce."""
        return [handle for handle in self.handles if self._num_trainable[handle]]

    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        for handle in self.handles:  # a loop: asked for every gradient
            if len(handle.grad_buffer.arrived) < self._num_trainable[handle]:
                return False
        return True

    def is_reduced(self) -> bool:
        """Whether what was started is over."""
        return all(reduce.done() for reduce in self._reduces())

    def _reduces(self) -> list[GradReduce]:
        """The reductions under way."""
        reduces = (handle.grad_reduce for handle in self.handles)
        return [reduce for reduce in reduces if reduce is not None and not reduce.is_finished]

    def advance(self) -> bool:
        """Begin second stages whose first is over; False when one must wait."""
        return all(reduce.advance() for reduce in self._reduces())

    def cross(self) -> None:
        """Start second stages that wait for their first. Collective: in the same order."""
        for reduce in self._reduces():
            reduce.cross()

    def wait_until_reduced(self) -> bool:
        """Wait a while; False when a peer seems unable to take part yet.

        The host waits, for accelerators too. Were it the stream, gathers queued behind would wait
        for that peer, and the peer, which takes part at the end of its backward, for them.
        """
        if not all(reduce.tells_when_done() for reduce in self._reduces()):
            return False
        deadline = time.monotonic() + _STALL_SECONDS
        while not (self.advance() and self.is_reduced()):
            if not all(reduce.is_computed() for reduce in self._reduces()):
                deadline = time.monotonic() + _STALL_SECONDS  # no peer's fault
            elif time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def split(
    unit: U, handles: Sequence[FlatParamHandle], num_trainable: Mapping[FlatParamHandle, int]
) -> list[ReduceBucket[U]]:
    """The portions of a unit: what ``reduces_alone``, and the rest; one or more."""
    together = [handle for handle in handles if not handle.reduces_alone]
    alone = [[handle] for handle in handles if handle.reduces_alone]
    return [
        ReduceBucket(unit, one, num_trainable) for one in (together, *alone) if one or not alone
    ]
