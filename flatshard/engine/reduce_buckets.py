"""``ReduceBucket``: flat parameters of a unit whose gradients are reduced together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from flatshard.engine.grad_buffer import Sync
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit

# How long a reduction may hold up backward; past this the peers may be waiting for us.
_STALL_SECONDS = 1.0

_POLL_SECONDS = 1e-4


class ReduceBucket:
    """The flat parameters of a unit whose gradients are reduced together: mostly all."""

    __slots__ = ("bytes_in_flight", "handles", "index", "unit")

    def __init__(self, unit: Unit, handles: Sequence[FlatParamHandle], index: int) -> None:
        self.unit, self.handles, self.index = unit, list(handles), index
        self.bytes_in_flight = 0  # what its reduction holds until it is finished

    @property
    def trainable_handles(self) -> list[FlatParamHandle]:
        return [handle for handle in self.handles if self.unit.num_trainable[handle]]

    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        for handle in self.handles:  # a loop: asked for every gradient
            if len(handle.grad_buffer.arrived) < self.unit.num_trainable[handle]:
                return False
        return True

    # ------------------------------------------------------------ a reduction

    def start(self, handles: Iterable[FlatParamHandle]) -> None:
        """Start averaging gradients over the ranks; those that did not arrive count as zero.

        Collective: all ranks of the unit, in the same order of calls.
        """
        sync, self.bytes_in_flight = self.unit.sync, 0
        for handle in handles:
            # Its result would be lost: a handle keeps one reduction.
            assert not handle.is_reducing, "the reduction before was not finished"
            chunks, plan = handle.grad_buffer.take_chunks(), handle.reduce_plan
            if plan.hook is not None:
                assert sync is Sync.ALL, "units with a hook have one stage"
                handle.grad_publish.add(plan.reduce_by_hook(chunks))
                continue
            held = handle.grad_buffer.take_intra_reduced() if sync is Sync.ALL else None
            handle.grad_reduce = GradReduce(plan, chunks, hold=sync is Sync.INTRA, held=held)
            self.bytes_in_flight += plan.bytes_in_flight(chunks)

    def under_way(self) -> list[GradReduce]:
        reduces = (handle.grad_reduce for handle in self.handles)
        return [reduce for reduce in reduces if reduce is not None and not reduce.is_finished]

    def is_reduced(self) -> bool:
        """Whether ``finish`` would return at once."""
        return all(reduce.done() for reduce in self.under_way())

    def advance(self) -> bool:
        """Begin second stages whose first is over; False when one must wait."""
        return all(reduce.advance() for reduce in self.under_way())

    def cross(self) -> None:
        """Start second stages that wait for their first. Collective: in the same order."""
        for reduce in self.under_way():
            reduce.cross()

    def wait_until_reduced(self) -> bool:
        """Wait a while; False when a peer seems unable to take part yet."""
        if not all(reduce.tells_when_done() for reduce in self.under_way()):
            return False
        # Wait on the host, not the stream: all-gathers queued after a stream wait would deadlock
        # with a peer that issues this reduction only at the end of its backward.
        deadline = time.monotonic() + _STALL_SECONDS
        while not (self.advance() and self.is_reduced()):
            if not all(reduce.is_computed() for reduce in self.under_way()):
                deadline = time.monotonic() + _STALL_SECONDS  # no peer's fault
            elif time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def finish(self) -> None:
        """Wait for what was started, and keep the result to be published.

        Collective where a second stage was not started: in the same order on all ranks.
        """
        for handle in self.handles:
            reduce = handle.grad_reduce
            if reduce is None or reduce.is_finished:
                continue
            out = reduce.finish()
            if not reduce.hold:
                handle.grad_publish.add(out)
                continue
            with torch.no_grad():
                handle.grad_buffer.add_intra_reduced(out)


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
