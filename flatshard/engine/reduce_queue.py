"""``ReduceQueue``: starts and finishes the reductions of a backward, in one order on all ranks.

[Note: hooks]
A user's communication hook blocks until the hook runs on all other ranks, and backward blocks with
it. So all ranks must call the hook at the same place of the program. When a unit is unsharded for
backward, all ranks take part anyway. There they exchange how many units each could reduce by now,
and call the hooks that all ranks can call. Once a rank is at the end of its backward, all ranks
leave the remaining hooks to the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from flatshard.engine.agreement import Agreement, agree
from flatshard.engine.events import Kind
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit

# Longest wait for a reduction in backward: after that, the peers may be waiting for this rank.
_STALL_SECONDS = 1.0

_POLL_SECONDS = 1e-4

# Number of even backwards after which an uneven bucket counts as even again.
_REMEMBERED = 100


class ReduceOrder:
    """The order in which all ranks start the reductions of a backward.

    Collectives match by order. Ranks may finish units at different times, or never: so a later unit
    waits for an earlier unit that is incomplete. The units of this class are buckets.
    """

    def __init__(self, num_units: int) -> None:
        # The first guess is the reversed registration order. The first backward corrects the guess.
        # The outermost unit, numbered last, stays last: its parameters, such as embeddings, are
        # used first in forward.
        self.sequence: list[int] = [*range(num_units - 1)[::-1], num_units - 1]
        self.num_taken = 0  # number of units whose reduction was started
        self._ready: dict[int, None] = {}  # ready units, in order of readiness

    def adopt(self, sequence: list[int]) -> None:
        """Use another order from the next backward on; the caller ensures that all ranks agree."""
        assert sorted(sequence) == sorted(self.sequence), "not a permutation of the units"
        self.sequence = list(sequence)

    def begin_backward(self) -> None:
        self._ready.clear()
        self.num_taken = 0

    def ready(self, unit: int) -> None:
        self._ready[unit] = None

    def turns(self, allows: Callable[[int], bool] = lambda _: True) -> Iterator[int]:
        """Yield the units whose turn has come, in order, until ``allows`` returns False.

        ``allows`` is asked about a unit after the units before it were started.
        """
        while self.num_taken < len(self.sequence):
            head = self.sequence[self.num_taken]
            if head not in self._ready or not allows(head):
                return
            self.num_taken += 1
            yield head

    def num_ready(self) -> int:
        """Number of units, from the first in the order, that are ready without a gap."""
        rest = (n for n, unit in enumerate(self.sequence) if unit not in self._ready)
        return next(rest, len(self.sequence))

    def rest(self) -> list[int]:
        """The units that were not started, in order."""
        return self.sequence[self.num_taken :]

    def suggested(self) -> list[int]:
        """The order in which units became ready on this rank; units that never did come last."""
        return [*self._ready, *(unit for unit in self.sequence if unit not in self._ready)]


@dataclass(eq=False, slots=True)
class ReduceBucket:
    """Flat parameters of a unit with a common reduction: usually all of them."""

    unit: Unit
    handles: list[FlatParamHandle]
    index: int
    # The bucket's unfinished reductions, and the bytes held by these reductions.
    under_way: list[tuple[FlatParamHandle, GradReduce]] = field(default_factory=list)
    bytes_in_flight: int = 0
    has_stages: bool = False  # whether one of these reductions has later stages

    @property
    def trainable_handles(self) -> list[FlatParamHandle]:
        return [handle for handle in self.handles if self.unit.num_trainable[handle]]

    def is_complete(self) -> bool:
        for handle in self.handles:  # a loop, not `all()`: this runs for every gradient
            if len(handle.grad_buffer.arrived) < self.unit.num_trainable[handle]:
                return False
        return True

    def start(self, handles: Iterable[FlatParamHandle]) -> None:
        """Start averaging gradients over the ranks; absent gradients count as zero."""
        # Results of an earlier start would be lost: a handle keeps one reduction.
        assert not self.under_way, "the reduction before was not finished"
        sync, self.bytes_in_flight, self.has_stages = self.unit.sync, 0, False
        for handle in handles:
            chunks, plan = handle.grad_buffer.take_chunks(), handle.reduce_plan
            if plan.hook is not None:
                assert sync is Sync.ALL, "units with a hook have one stage"
                handle.grad_publish.add(plan.reduce_by_hook(chunks))
                continue
            held = handle.grad_buffer.take_intra_reduced() if sync is Sync.ALL else None
            reduce = GradReduce(plan, chunks, hold=sync is Sync.INTRA, held=held)
            handle.grad_reduce = reduce
            self.under_way.append((handle, reduce))
            self.bytes_in_flight += plan.bytes_in_flight
            self.has_stages |= bool(reduce.to_come)

    def is_reduced(self) -> bool:
        return all(reduce.done() for _, reduce in self.under_way)

    def advance(self) -> bool:
        """Begin later stages whose turn has come; returns False if a stage must wait."""
        return all(reduce.advance() for _, reduce in self.under_way)

    def wait_until_reduced(self) -> bool:
        """Wait for a limited time; returns False if a peer seems unable to take part yet."""
        if not all(reduce.tells_when_done() for _, reduce in self.under_way):
            return False
        # Wait on the host, not the stream: all-gathers queued after a stream wait would deadlock
        # with a peer that issues this reduction only at the end of its backward.
        deadline = time.monotonic() + _STALL_SECONDS
        while not (self.advance() and self.is_reduced()):
            if not all(reduce.is_computed() for _, reduce in self.under_way):
                # The gradients are not computed yet, so no peer causes the wait.
                deadline = time.monotonic() + _STALL_SECONDS
            elif time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def finish(self) -> None:
        """Wait for the reductions, and keep the results to be published."""
        under_way, self.under_way = self.under_way, []
        for handle, reduce in under_way:
            out = reduce.finish()
            if reduce.hold:
                handle.grad_buffer.add_intra_reduced(out)
            else:
                handle.grad_publish.add(out)


class ReduceQueue:
    """The reductions of a model. All ranks start them in the same order."""

    def __init__(self, state: RunState) -> None:
        self._state, self._observers = state, state.observers
        self.buckets = split(state.units)
        self.bucket_of = {handle: one for one in self.buckets for handle in one.handles}
        self._order = ReduceOrder(len(self.buckets))
        self._adopt(self._order.sequence)
        self._is_order_agreed = False
        # For indices of uneven buckets: the number of backwards for which they are remembered. In
        # a recent backward, some ranks reduced the bucket during backward and others only at its
        # end: these ranks lack a gradient, so a wait before the end never succeeds.
        self._uneven: dict[int, int] = {}
        self._in_flight: list[ReduceBucket] = []
        # Per unit, the buckets still to reduce in this backward.
        self._to_reduce: Counter[Unit] = Counter()
        self._must_wait = False  # whether all reductions wait for the end of backward
        self._hooked: set[Unit] = set()  # units that a user's hook reduces in this backward
        # Whether to call hooks before the end of backward; False once any rank is at its end.
        self.asks_hooks = False
        self._num_agreed = 0  # number of buckets, from the first on, that all ranks can reduce

    def refresh(self) -> None:
        """Recompute cached sizes after the units' buffers were reallocated."""
        units = self._state.units
        # The host runs far ahead of an accelerator, so reductions always fill the whole allowance.
        # There the allowance is two buckets; elsewhere it is two units.
        on_accelerator = any(h.device.type != "cpu" for _, h in self._state.handles)
        together = [one.handles for one in (self.buckets if on_accelerator else units)]
        sizes = (sum(h.reduce_plan.full_bytes for h in handles) for handles in together)
        self.max_bytes_in_flight = 2 * max(sizes, default=0)

    def begin_backward(self, *, must_wait: bool) -> None:
        self._must_wait = must_wait
        self._order.begin_backward()
        self._to_reduce.clear()
        self._hooked = {
            unit
            for unit, handle in self._state.handles
            if handle.reduce_plan.hook is not None
            and unit.sync is Sync.ALL
            and unit.num_trainable[handle]
        }
        self.asks_hooks = bool(self._hooked)
        self._num_agreed = 0
        for bucket in self.buckets:
            if bucket.unit.sync is Sync.NONE or not bucket.trainable_handles:
                # The bucket is never reduced, so it must not hold up later buckets.
                self._order.ready(bucket.index)
            else:
                self._to_reduce[bucket.unit] += 1

    def add(self, bucket: ReduceBucket) -> None:
        """Start a bucket whose gradients are complete, and waiting ones; finish old reductions."""
        self._order.ready(bucket.index)
        self._start_ready()
        self._finish_old()

    def call_hooks(self) -> None:
        """Call the hooks that all ranks can call. Collective, while there are hooks to call."""
        self._agree_on_hooks()
        self._start_ready()

    def _start_ready(self) -> None:
        if not self._must_wait:
            for index in self._order.turns(self._allows):
                self._start(self.buckets[index])

    def _allows(self, index: int) -> bool:
        unit = self.buckets[index].unit
        is_agreed = self._order.num_taken < self._num_agreed or unit not in self._hooked
        return is_agreed and not unit.may_diverge

    def _agree_on_hooks(self, *, at_end: bool = False) -> None:
        """Tell the other ranks how many buckets are ready here; see the note. Collective."""
        world = self._state.world.apart
        said = [self._order.num_ready(), int(not at_end)]
        values = torch.tensor(said, device=world.control_device)
        op_name = "communication hooks that can be called in backward"
        world.reduce_scalars(values, "MIN", op_name=op_name)
        # Take the smallest number: a hook that any rank cannot call yet would block the other
        # ranks.
        self._num_agreed, go_on = values.tolist()
        self.asks_hooks = bool(go_on)

    def _start(
        self, bucket: ReduceBucket, handles: Iterable[FlatParamHandle] | None = None
    ) -> None:
        unit = bucket.unit
        if unit.sync is Sync.NONE:
            return
        with self._observers.span(Kind.STARTING, unit, purpose="reduce"):
            bucket.start(bucket.trainable_handles if handles is None else handles)
        if bucket.under_way:
            self._in_flight.append(bucket)
        elif bucket.trainable_handles:  # a user's hook has reduced the bucket
            self._note_reduced(unit)

    def _note_reduced(self, unit: Unit) -> None:
        self._to_reduce[unit] -= 1
        if self._to_reduce[unit] == 0:
            for extension in self._state.extensions:
                extension.reduced(unit)

    def _finish_old(self) -> None:
        """Finish reductions that are over; wait while more bytes are in flight than allowed."""
        self._state.pending_sends.drop_sent()
        with self._observers.span(Kind.STARTING, purpose="reduce"):
            for bucket in self._in_flight:
                # Second stages start in the order of the first stages.
                if bucket.has_stages and not bucket.advance():
                    break
        while self._in_flight:
            bucket = self._in_flight[0]
            if not bucket.is_reduced():
                bytes_in_flight = sum([one.bytes_in_flight for one in self._in_flight])
                over = bytes_in_flight > self.max_bytes_in_flight
                if not (over and self._wait_until_reduced(bucket)):
                    return
            self._finish_first()
            self._note_reduced(bucket.unit)

    def _wait_until_reduced(self, bucket: ReduceBucket) -> bool:
        # A peer without this gradient starts the reduction only at the end of its backward, so the
        # wait has a limit. Buckets for which that happened lately are not waited for at all.
        if self._state.lacks_ranks or bucket.index in self._uneven:
            return False
        with self._observers.span(Kind.REDUCE_WAIT, bucket.unit, ends=False):
            return bucket.wait_until_reduced()

    def _finish_first(self) -> None:
        bucket = self._in_flight.pop(0)
        with self._observers.span(Kind.REDUCE_WAIT, bucket.unit):
            bucket.finish()

    # ------------------------------------------------------------ at its end

    def reduce_rest(self) -> Agreement:
        """Agree with the other ranks on the used parameters, and reduce the rest. Collective."""
        if self.asks_hooks:
            self._agree_on_hooks(at_end=True)
        rest = self._order.rest()
        # These buckets reduce their gradients in their turn, on every rank.
        to_come = {handle for index in rest for handle in self.buckets[index].trainable_handles}
        agreed = agree(self._state, len(self.buckets), set(rest), to_come)
        self._uneven = {index: left - 1 for index, left in self._uneven.items() if left > 1}
        self._uneven.update(dict.fromkeys(agreed.uneven, _REMEMBERED))
        for bucket in (self.buckets[index] for index in rest):
            if any(any(agreed.used[handle]) for handle in bucket.handles):
                self._start(bucket)
        self._finish_all()
        for _, handle in agreed.left_over:
            self._start(self.bucket_of[handle], [handle])
        self._finish_all()
        if not self._is_order_agreed and all(u.sync is Sync.ALL for u in self._state.units):
            self._agree_on_order()
        return agreed

    def _finish_all(self) -> None:
        # Start all second stages before waiting for any second stage.
        for bucket in self._in_flight:
            with self._observers.span(Kind.REDUCE_WAIT, bucket.unit, ends=False):
                for _, reduce in bucket.under_way:
                    reduce.cross()
        while self._in_flight:
            self._finish_first()

    def _agree_on_order(self) -> None:
        """Adopt the order in which rank 0's units became ready. Collective, once."""
        world = self._state.world
        order = torch.tensor(self._order.suggested(), device=world.control_device)
        with self._observers.span(Kind.RANKS_WAIT):
            world.broadcast(order, op_name="order of reductions")
        self._adopt(order.tolist())
        self._is_order_agreed = True

    def _adopt(self, sequence: list[int]) -> None:
        # Units that some ranks may skip come last: their reductions start at the end, and block no
        # other unit.
        self._order.adopt(sorted(sequence, key=lambda i: self.buckets[i].unit.may_diverge))

    def drop(self) -> None:
        """Finish all reductions under way, after a backward that failed. Collective."""
        try:
            # All ranks started these reductions. If a rank skipped a second stage, its next
            # collective would match the second stage of other ranks.
            self._finish_all()
        finally:
            for bucket in self._in_flight:
                bucket.under_way = []
            self._in_flight.clear()


def split(units: Sequence[Unit]) -> list[ReduceBucket]:
    """Make the buckets of all units.

    Each flat parameter with ``reduces_alone`` is a bucket. The rest of a unit is one bucket, before
    these.
    """
    buckets: list[ReduceBucket] = []
    for unit in units:
        together = [handle for handle in unit.handles if not handle.reduces_alone]
        alone = [[handle] for handle in unit.handles if handle.reduces_alone]
        # A unit without parameters has an empty bucket: the order of reductions needs a place for
        # it.
        for handles in (together, *alone) if together or not alone else alone:
            buckets.append(ReduceBucket(unit, handles, len(buckets)))
    return buckets
