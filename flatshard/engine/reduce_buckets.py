"""``ReduceBucket``: flat parameters of a unit whose gradients are reduced together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit

_STALL_SECONDS = 1.0
"""How long a reduction may hold up backward; past this the peers may be waiting for us."""

_POLL_SECONDS = 1e-4


class ReduceBucket:
    """The flat parameters of a unit whose gradients are reduced together: mostly all.

    Attributes:
        unit: the unit.
        handles: the flat parameters.
        index: its number in the run.
    """

    __slots__ = ("handles", "index", "unit")

    def __init__(self, unit: Unit, handles: Sequence[FlatParamHandle], index: int) -> None:
        self.unit, self.handles, self.index = unit, list(handles), index

    @property
    def trainable_handles(self) -> list[FlatParamHandle]:
        """Flat parameters with something to reduce."""
        return [handle for handle in self.handles if self.unit.num_trainable[handle]]

    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        for handle in self.handles:  # a loop: asked for every gradient
            if len(handle.grad_buffer.arrived) < self.unit.num_trainable[handle]:
                return False
        return True

    def is_reduced(self) -> bool:
        """Whether what was started is over."""
        return all(reduce.done() for reduce in self._reduces())

    def _reduces(self) -> list[GradReduce]:
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
        """Wait a while; False when a peer seems unable to take part yet."""
        if not all(reduce.tells_when_done() for reduce in self._reduces()):
            return False
        # Wait on the host, not the stream: all-gathers queued after a stream wait would deadlock
        # with a peer that issues this reduction only at the end of its backward.
        deadline = time.monotonic() + _STALL_SECONDS
        while not (self.advance() and self.is_reduced()):
            if not all(reduce.is_computed() for reduce in self._reduces()):
                deadline = time.monotonic() + _STALL_SECONDS  # no peer's fault
            elif time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def split(units: Sequence[Unit]) -> list[ReduceBucket]:
    """The buckets of all units: what ``reduces_alone``, and before it the rest of each unit."""
    buckets: list[ReduceBucket] = []
    for unit in units:
        together = [handle for handle in unit.handles if not handle.reduces_alone]
        alone = [[handle] for handle in unit.handles if handle.reduces_alone]
        # A unit without parameters has a bucket, too: the order of reductions has a place for it.
        for handles in (together, *alone) if together or not alone else alone:
            buckets.append(ReduceBucket(unit, handles, len(buckets)))
    return buckets
