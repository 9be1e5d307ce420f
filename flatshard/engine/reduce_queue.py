"""``ReduceQueue``: starts and finishes the reductions of a backward, in one order on all ranks.

A bucket is a set of flat parameters whose gradients are reduced together.

[Note: hooks]
A user's communication hook blocks this rank's backward until the hook runs on all other ranks. So
all ranks must call the hook at the same place of the step. A good place is just before the
all-gather of a unit for backward, because all ranks take part in this all-gather. There the ranks
exchange how many buckets each rank has ready, and call the hooks of the buckets that are ready on
all ranks. Once one rank has reached the end of its backward, all ranks call the remaining hooks at
the end of backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flatshard.engine.agreement import Agreement, agree
from flatshard.engine.events import Kind
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.gradients import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit

# Longest wait for a reduction before the end of backward. A peer that lacks a gradient may itself
# be waiting for this rank, so a longer wait could be a deadlock.
_STALL_SECONDS = 1.0

_POLL_SECONDS = 1e-4

# After some rank lacked a gradient of a bucket, the bucket counts as uneven (`ReduceQueue._uneven`)
# for this number of backwards.
_REMEMBERED = 100


class ReduceOrder:
    """The order in which all ranks start the reductions of a backward.

    Collectives match by order, but ranks may complete the gradients of buckets in different orders,
    or never complete a bucket. So the reduction of a complete bucket waits until the reductions of
    all earlier buckets have started.
    """

    def __init__(self, num_buckets: int) -> None:
        # For the first backward, guess the reverse of the order in which modules were registered.
        # After the first backward, the ranks adopt the real order. The root's bucket has the last
        # index and stays last: forward uses some parameters of the root (embeddings, for example)
        # first, so backward computes the gradients of these parameters last.
        self.sequence: list[int] = [*range(num_buckets - 1)[::-1], num_buckets - 1]
        self.num_taken = 0  # number of buckets whose reduction was started
        self._ready: dict[int, None] = {}  # complete buckets, in the order in which they completed

    def adopt(self, sequence: list[int]) -> None:
        """Make ``sequence`` the order of buckets in later backwards; the same on all ranks."""
        assert sorted(sequence) == sorted(self.sequence), "not a permutation of the buckets"
        self.sequence = list(sequence)

    def begin_backward(self) -> None:
        self._ready.clear()
        self.num_taken = 0

    def ready(self, bucket: int) -> None:
        self._ready[bucket] = None

    def turns(self, allows: Callable[[int], bool] = lambda _: True) -> Iterator[int]:
        """Yield the buckets whose reduction may start now, in order, until ``allows`` is False.

        A reduction may start if the bucket is complete, and the reductions of all earlier buckets
        have started. The caller starts each reduction before it asks for the next bucket, so
        ``allows(bucket)`` runs after all earlier reductions were started.
        """
        while self.num_taken < len(self.sequence):
            head = self.sequence[self.num_taken]
            if head not in self._ready or not allows(head):
                return
            self.num_taken += 1
            yield head

    def num_ready(self) -> int:
        """Return the number of complete buckets at the beginning of the order.

        The first incomplete bucket ends the count.
        """
        rest = (n for n, bucket in enumerate(self.sequence) if bucket not in self._ready)
        return next(rest, len(self.sequence))

    def rest(self) -> list[int]:
        """Return the buckets whose reduction has not started yet, in order."""
        return self.sequence[self.num_taken :]

    def suggested(self) -> list[int]:
        """Return the order in which buckets became complete on this rank, as an order to adopt.

        Buckets that did not become complete come last.
        """
        return [*self._ready, *(bucket for bucket in self.sequence if bucket not in self._ready)]


@dataclass(eq=False, slots=True)
class ReduceBucket:
    """Flat parameters of a unit that are reduced together: usually the whole unit."""

    unit: Unit
    handles: list[FlatParamHandle]
    index: int
    # The bucket's unfinished reductions, and the bytes held by these reductions.
    under_way: list[tuple[FlatParamHandle, GradReduce]] = field(default_factory=list)
    bytes_in_flight: int = 0
    has_stages: bool = False  # whether a reduction has a second stage (between nodes, for example)

    @property
    def to_reduce(self) -> list[FlatParamHandle]:
        """Flat parameters whose gradients this backward reduces."""
        if self.unit.sync is Sync.NONE:
            return []
        return [handle for handle in self.handles if handle.num_trainable]

    def is_complete(self) -> bool:
        """Whether all gradients of the bucket have arrived in this backward."""
        # A plain loop is faster than `all()` with a generator, and backward calls this method for
        # every gradient.
        for handle in self.handles:
            if len(handle.grads.arrived) < handle.num_trainable:
                return False
        return True

    def start(self, handles: Iterable[FlatParamHandle]) -> None:
        """Start to average the gradients of ``handles`` over the ranks.

        A gradient that this rank has not computed counts as zero. Collective: all ranks that train
        the unit.
        """
        # The handle of a flat parameter has room for one reduction, so a second start would lose
        # the result of the first.
        assert not self.under_way, "the earlier reduction is not finished"
        sync, self.bytes_in_flight, self.has_stages = self.unit.sync, 0, False
        for handle in handles:
            grads, plan, intra_reduced = handle.grads, handle.reduce_plan, None
            chunks = grads.take_chunks()
            if plan.hook is not None:
                assert sync is Sync.ALL, "a communication hook reduces over all ranks"
                grads.add_reduced(plan.reduce_by_hook(chunks))
                continue
            if sync is Sync.ALL:
                intra_reduced, grads.intra_reduced = grads.intra_reduced, None
            reduce = GradReduce(
                plan, chunks, is_intra_only=sync is Sync.INTRA, intra_reduced=intra_reduced
            )
            handle.grad_reduce = reduce
            self.under_way.append((handle, reduce))
            self.bytes_in_flight += plan.bytes_in_flight
            self.has_stages |= bool(reduce.to_come)

    def is_reduced(self) -> bool:
        return all(reduce.done() for _, reduce in self.under_way)

    def advance(self) -> bool:
        """Start the stages after the first (between nodes, for example) that need no wait.

        ``GradReduce`` describes the stages. Returns False if a second stage cannot start yet.
        """
        return all(reduce.advance() for _, reduce in self.under_way)

    def wait_until_reduced(self) -> bool:
        """Wait for the reductions for a limited time, and return whether all are finished.

        A reduction may be unfinished because a peer lacks a gradient, and takes part only at the
        end of its backward. So a wait without a limit could be a deadlock.
        """
        if not all(reduce.tells_when_done() for _, reduce in self.under_way):
            return False
        # Wait on the host, not on the stream. An all-gather that is queued behind a stream wait
        # would deadlock with a peer that starts this reduction only at the end of its backward.
        deadline = time.monotonic() + _STALL_SECONDS
        while not (self.advance() and self.is_reduced()):
            if not all(reduce.is_computed() for _, reduce in self.under_way):
                # This rank's device has not computed the gradients yet, so the reduction cannot be
                # over. Start counting the time limit when the gradients are computed.
                deadline = time.monotonic() + _STALL_SECONDS
            elif time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def finish(self) -> None:
        """Wait for the reductions, and keep the results for the end of backward."""
        under_way, self.under_way = self.under_way, []
        for handle, reduce in under_way:
            out = reduce.finish()
            if reduce.is_intra_only:
                handle.grads.add_intra_reduced(out)
            else:
                handle.grads.add_reduced(out)


class ReduceQueue:
    """Starts and finishes the reductions of a model, in the same order on all ranks."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.buckets = split(state.units)
        self.bucket_of = {handle: one for one in self.buckets for handle in one.handles}
        self._order = ReduceOrder(len(self.buckets))
        self._adopt(self._order.sequence)
        self._is_order_agreed = False
        # Uneven buckets: in a recent backward, some ranks started the bucket's reduction during
        # backward, and other ranks only at the end, because these ranks lacked a gradient. So do
        # not wait for such a bucket before the end of backward. Maps the index of each uneven
        # bucket to the number of further backwards for which the bucket is treated as uneven.
        self._uneven: dict[int, int] = {}
        self._in_flight: list[ReduceBucket] = []
        self._must_wait = False  # whether all reductions start at the end of backward

        # Units that a user's communication hook reduces in this backward.
        self._hooked_units: set[Unit] = set()
        # Whether to call communication hooks before the end of backward. False once a rank is at
        # the end of its backward.
        self.asks_hooks = False
        # How many buckets, counted from the beginning of the order, are ready on all ranks.
        self._num_agreed = 0

    def refresh(self) -> None:
        """Recompute the memory limit of unfinished reductions, after buffers were reallocated."""
        units = self._state.units
        # Limit the memory of unfinished reductions to twice the gradients of the largest unit. On
        # an accelerator, the limit is smaller: twice the gradients of the largest bucket. The host
        # runs far ahead of an accelerator, so the unfinished reductions always reach the limit.
        on_accelerator = any(h.device.type != "cpu" for _, h in self._state.handles)
        together = [one.handles for one in (self.buckets if on_accelerator else units)]
        sizes = (sum(h.reduce_plan.full_bytes for h in handles) for handles in together)
        self.max_bytes_in_flight = 2 * max(sizes, default=0)

    def begin_backward(self, *, must_wait: bool) -> None:
        """Reset the queue for a new backward.

        ``must_wait``: whether all reductions start only at the end of backward (see
        ``Backward._may_reduce_early``).
        """
        self._must_wait = must_wait
        self._order.begin_backward()
        self._hooked_units.clear()
        self._num_agreed = 0
        for bucket in self.buckets:
            if not bucket.to_reduce:
                # This backward does not reduce the bucket, so later buckets must not wait for it.
                self._order.ready(bucket.index)
            elif any(handle.reduce_plan.hook is not None for handle in bucket.to_reduce):
                self._hooked_units.add(bucket.unit)
        self.asks_hooks = bool(self._hooked_units)

    def add(self, bucket: ReduceBucket) -> None:
        """Mark a bucket as complete, start all reductions that may start, and finish old ones.

        May wait for the oldest reduction, to limit memory (``_finish_old``).
        """
        self._order.ready(bucket.index)
        self._start_ready()
        self._finish_old()

    def call_hooks(self) -> None:
        """Call the communication hooks of the buckets that are ready on all ranks. Collective.

        Must be called only if ``asks_hooks`` is True. All ranks have the same ``asks_hooks``.
        """
        self._agree_on_hooks()
        self._start_ready()

    def _start_ready(self) -> None:
        if not self._must_wait:
            for index in self._order.turns(self._allows):
                self._start(self.buckets[index], self.buckets[index].to_reduce)

    def _allows(self, index: int) -> bool:
        unit = self.buckets[index].unit
        is_agreed = self._order.num_taken < self._num_agreed or unit not in self._hooked_units
        return is_agreed and not unit.may_diverge

    def _agree_on_hooks(self, *, at_end: bool = False) -> None:
        """Exchange how many buckets each rank has ready; see [Note: hooks]. Collective."""
        world = self._state.world.apart
        said = [self._order.num_ready(), int(not at_end)]
        values = torch.tensor(said, device=world.control_device)
        op_name = "communication hooks that can be called in backward"
        world.reduce_scalars(values, "MIN", op_name=op_name)
        # Use the minimum over the ranks: if some rank cannot call a hook yet, the ranks that call
        # the hook would wait for that rank.
        self._num_agreed, go_on = values.tolist()
        self.asks_hooks = bool(go_on)

    def _start(self, bucket: ReduceBucket, handles: Sequence[FlatParamHandle]) -> None:
        """Start to reduce gradients of ``handles``, flat parameters of ``bucket``. Collective."""
        if not handles:
            return
        with self._state.span(Kind.STARTING, bucket.unit, purpose="reduce"):
            bucket.start(handles)
        if bucket.under_way:
            self._in_flight.append(bucket)
        else:  # a communication hook has reduced the bucket already
            self._tell_reduced(bucket)

    def _tell_reduced(self, bucket: ReduceBucket) -> None:
        for extension in self._state.extensions:
            extension.reduced(bucket.unit)

    def _finish_old(self) -> None:
        """Finish the reductions that are over.

        If the unfinished reductions take more memory than ``max_bytes_in_flight``, wait for the
        oldest reduction, for a limited time.
        """
        self._state.pending_sends.drop_sent()
        with self._state.span(Kind.STARTING, purpose="reduce"):
            for bucket in self._in_flight:
                # A second stage (between nodes, for example) starts only after the second stages of
                # all earlier buckets. So stop at the first bucket whose second stage cannot start.
                if bucket.has_stages and not bucket.advance():
                    break
        while self._in_flight:
            bucket = self._in_flight[0]
            if not bucket.is_reduced():
                bytes_in_flight = sum([one.bytes_in_flight for one in self._in_flight])
                # A peer that lacks a gradient of this bucket starts the reduction only at the end
                # of its backward, and then a wait would run into its time limit. This is likely if
                # some peer lacked a gradient of the bucket lately, or if some ranks compute no
                # gradients at all (`join`). So do not wait in these cases.
                is_late = self._state.lacks_ranks or bucket.index in self._uneven
                if bytes_in_flight <= self.max_bytes_in_flight or is_late:
                    return
                with self._state.span(Kind.REDUCE_WAIT, bucket.unit, ends=False):
                    if not bucket.wait_until_reduced():
                        return
            self._finish_first()
            self._tell_reduced(bucket)

    def _finish_first(self) -> None:
        bucket = self._in_flight.pop(0)
        with self._state.span(Kind.REDUCE_WAIT, bucket.unit):
            bucket.finish()

    # ------------------------------------------------------------ the end of backward

    def reduce_rest(self) -> Agreement:
        """Reduce all remaining gradients, at the end of backward. Collective.

        First, the ranks exchange which parameters each rank used (``agreement``). Returns the
        result of the exchange.
        """
        if self.asks_hooks:
            self._agree_on_hooks(at_end=True)
        rest = self._order.rest()
        # `to_come`: flat parameters in the buckets of `rest`, which are reduced below if any rank
        # used the bucket. So their gradients do not count as left over (`Agreement.left_over`).
        to_come = {handle for index in rest for handle in self.buckets[index].to_reduce}
        agreed = agree(self._state, len(self.buckets), set(rest), to_come)
        self._uneven = {index: left - 1 for index, left in self._uneven.items() if left > 1}
        self._uneven.update(dict.fromkeys(agreed.uneven, _REMEMBERED))
        for bucket in (self.buckets[index] for index in rest):
            if any(any(agreed.used[handle]) for handle in bucket.handles):
                self._start(bucket, bucket.to_reduce)
        self._finish_all()
        for _, handle in agreed.left_over:
            self._start(self.bucket_of[handle], [handle])
        self._finish_all()
        if not self._is_order_agreed and all(u.sync is Sync.ALL for u in self._state.units):
            self._agree_on_order()
        return agreed

    def _finish_all(self) -> None:
        """Wait for all reductions without a time limit, in the order of their start. Collective."""
        # Start the second stages (between nodes, for example) of all reductions first, so that they
        # overlap. Then wait for each reduction.
        for bucket in self._in_flight:
            if bucket.has_stages:
                with self._state.span(Kind.REDUCE_WAIT, bucket.unit, ends=False):
                    for _, reduce in bucket.under_way:
                        reduce.cross()
        while self._in_flight:
            self._finish_first()

    def _agree_on_order(self) -> None:
        """Adopt the order in which buckets became ready on rank 0. Collective, once per model."""
        world = self._state.world
        order = torch.tensor(self._order.suggested(), device=world.control_device)
        with self._state.span(Kind.RANKS_WAIT):
            world.broadcast(order, op_name="order of reductions")
        self._adopt(order.tolist())
        self._is_order_agreed = True

    def _adopt(self, sequence: list[int]) -> None:
        # Move units that some ranks may skip to the end of the order. The reductions of these units
        # start only at the end of backward, and all later reductions in the order would have to
        # wait.
        self._order.adopt(sorted(sequence, key=lambda i: self.buckets[i].unit.may_diverge))

    def drop(self) -> None:
        """Finish all reductions under way, after a backward that failed. Collective."""
        try:
            # Run all remaining stages of the reductions, although the results are dropped. If this
            # rank skipped the stage between nodes, for example, the other ranks' collectives of
            # this stage would match this rank's next collectives.
            self._finish_all()
        finally:
            for bucket in self.buckets:  # also a bucket whose start was interrupted
                bucket.under_way = []
            self._in_flight.clear()


def split(units: Sequence[Unit]) -> list[ReduceBucket]:
    """Make the buckets of all units.

    The flat parameters of a unit form one common bucket. Flat parameters with ``reduces_alone`` are
    exceptions: each of them is a separate bucket, after the common bucket.
    """
    buckets: list[ReduceBucket] = []
    for unit in units:
        together = [handle for handle in unit.handles if not handle.plan.reduces_alone]
        alone = [[handle] for handle in unit.handles if handle.plan.reduces_alone]
        # A unit without parameters gets an empty bucket, so that every unit has a bucket.
        for handles in (together, *alone) if together or not alone else alone:
            buckets.append(ReduceBucket(unit, handles, len(buckets)))
    return buckets
