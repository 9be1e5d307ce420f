"""``ReduceQueue``: starts and finishes the reductions of a backward, in one order on all ranks.

Each flat parameter is reduced separately, once its gradients are complete.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from flatshard.engine.end_of_backward import Agreement, exchange_end_of_backward
from flatshard.engine.events import Kind
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState

# Longest wait for a reduction before the end of backward. A peer that lacks a gradient may itself
# be waiting for this rank, so a longer wait could be a deadlock.
_STALL_SECONDS = 1.0

_POLL_SECONDS = 1e-4

# After some rank lacked a gradient of a flat parameter, the flat parameter counts as uneven
# (`ReduceQueue._uneven`) for this number of backwards.
_REMEMBERED = 100


class ReduceOrder:
    """The order in which all ranks start the reductions of a backward.

    All ranks must start collectives in the same order, but gradients may become complete in
    different orders on different ranks, or never. So a reduction waits until all earlier ones in
    the order have started, at the latest at the end of backward.

    This class knows flat parameters only by their indices (``number``).
    """

    def __init__(self, number: int) -> None:
        self.sequence = list(range(number))
        self.num_taken = 0  # number of flat parameters whose reduction was started
        # Complete flat parameters, in the order in which they completed.
        self._ready: dict[int, None] = {}

    def adopt(self, sequence: list[int]) -> None:
        """Make ``sequence`` the order in later backwards; the same on all ranks."""
        assert sorted(sequence) == sorted(self.sequence), "not a permutation"
        self.sequence = list(sequence)

    def begin_backward(self) -> None:
        self._ready.clear()
        self.num_taken = 0

    def ready(self, number: int) -> None:
        self._ready[number] = None

    def turns(self, allows: Callable[[int], bool] = lambda _: True) -> Iterator[int]:
        """Yield the numbers whose reduction may start now, in order, until ``allows`` is False.

        The caller starts each reduction before it asks for the next number, so ``allows(number)``
        runs after all earlier reductions were started.
        """
        while self.num_taken < len(self.sequence):
            head = self.sequence[self.num_taken]
            if head not in self._ready or not allows(head):
                return
            self.num_taken += 1
            yield head

    def num_ready(self) -> int:
        """Return how many flat parameters at the beginning of the order are complete."""
        rest = (n for n, number in enumerate(self.sequence) if number not in self._ready)
        return next(rest, len(self.sequence))

    def rest(self) -> list[int]:
        """Return the numbers whose reduction has not started yet, in order."""
        return self.sequence[self.num_taken :]

    def suggested(self) -> list[int]:
        """Return the order in which gradients became complete on this rank, as an order to adopt.

        Flat parameters that did not become complete come last.
        """
        return [*self._ready, *(number for number in self.sequence if number not in self._ready)]


class ReduceQueue:
    """Starts and finishes the reductions of a model, in the same order on all ranks."""

    def __init__(self, state: RunState) -> None:
        self._state, self._handles = state, state.handles
        # For the first backward, guess the reverse of the order of registration; then the ranks
        # adopt the real order. The root comes last: forward uses some of its parameters
        # (embeddings, for example) first, so backward computes their gradients last.
        self.order = ReduceOrder(len(self._handles))
        backwards = self.order.sequence[::-1]
        self._adopt(sorted(backwards, key=lambda n: self._handles[n].unit is state.root))
        self.is_order_agreed = False  # whether the ranks have adopted the real order
        # A flat parameter is uneven if, in a recent backward, some ranks started its reduction only
        # at the end, because they lacked a gradient. No rank waits for such a reduction before the
        # end of backward. Maps its index to the number of later backwards for which it counts as
        # uneven.
        self._uneven: dict[int, int] = {}
        self._in_flight: dict[FlatParamHandle, GradReduce] = {}  # in the order of their start
        self._must_wait = False  # whether all reductions start at the end of backward
        # How many flat parameters, counted from the beginning of the order, may be reduced before
        # the end of backward. Not all of them if users' communication hooks reduce some: then the
        # extra `reduction` raises the limit.
        self.limit = 0

    def refresh(self) -> None:
        """Recompute the memory limit of unfinished reductions, after buffers were reallocated."""
        # The limit is twice the size of the largest unit's gradients. On an accelerator, the limit
        # is twice the largest flat parameter's gradient: the host runs far ahead there, so the
        # memory always rises to the limit.
        on_accelerator = any(handle.device.type != "cpu" for handle in self._handles)
        sizes: Counter[object] = Counter()
        for handle in self._handles:
            sizes[handle if on_accelerator else handle.unit] += handle.grads.plan.full_bytes
        self.max_bytes_in_flight = 2 * max(sizes.values(), default=0)

    def begin_backward(self, *, must_wait: bool) -> None:
        """Reset the queue for a new backward.

        ``must_wait``: whether all reductions start only at the end of backward (see
        ``Backward._may_reduce_early``).
        """
        self._must_wait, self.limit = must_wait, len(self._handles)
        self.order.begin_backward()
        for number, handle in enumerate(self._handles):
            if not handle.reduces:
                # This backward does not reduce the flat parameter, so later flat parameters must
                # not wait for it.
                self.order.ready(number)
            elif handle.grads.plan.hook is not None:
                self.limit = 0

    def add(self, handle: FlatParamHandle) -> None:
        """Mark a flat parameter as complete, start what may start, and finish old reductions.

        May wait for the oldest reduction, to limit memory (``_finish_old``).
        """
        self.order.ready(handle.number)
        self.start_ready()
        self._finish_old()

    def start_ready(self) -> None:
        """Start the reductions whose turn it is, in order. Collective."""
        if not self._must_wait:
            for number in self.order.turns(self._allows):
                if self._handles[number].reduces:
                    self._start(self._handles[number])

    def _allows(self, number: int) -> bool:
        return self.order.num_taken < self.limit and not self._handles[number].unit.may_diverge

    def _start(self, handle: FlatParamHandle) -> None:
        """Start to reduce the gradients of a flat parameter. Collective."""
        with self._state.span(Kind.STARTING, handle.unit, purpose="reduce"):
            reduction = handle.grads.start_reduction(handle.unit.sync)
        if reduction is None:  # a communication hook has reduced the gradients already
            self._tell_reduced(handle)
        else:
            self._in_flight[handle] = reduction

    def _tell_reduced(self, handle: FlatParamHandle) -> None:
        for extension in self._state.extensions:
            extension.reduced(handle.unit)

    def _finish_old(self) -> None:
        """Finish the reductions that are over.

        If the unfinished reductions take more memory than ``max_bytes_in_flight``, wait for the
        oldest reduction, for a limited time.
        """
        self._state.pending_sends.drop_sent()
        for reduction in self._in_flight.values():
            if reduction.to_come:
                with self._state.span(Kind.STARTING, purpose="reduce"):
                    has_crossed = reduction.advance()
                # A second stage (between nodes, for example) starts after all earlier second
                # stages.
                if not has_crossed:
                    break
        while self._in_flight:
            handle, reduction = next(iter(self._in_flight.items()))
            if not reduction.done():
                in_flight = sum([one.grads.plan.bytes_in_flight for one in self._in_flight])
                # A peer that lacks a gradient starts this reduction only at the end of its
                # backward, after the time limit of a wait. This is likely if a peer lacked such a
                # gradient lately, or if some ranks compute no gradients at all (`join`).
                is_late = self._state.lacks_ranks or handle.number in self._uneven
                if in_flight <= self.max_bytes_in_flight or is_late:
                    return
                with self._state.span(Kind.REDUCE_WAIT, handle.unit, ends=False):
                    if not wait_until_reduced(reduction):
                        return
            self._finish_first()
            self._tell_reduced(handle)

    def _finish_first(self) -> None:
        handle = next(iter(self._in_flight))
        reduction = self._in_flight.pop(handle)
        with self._state.span(Kind.REDUCE_WAIT, handle.unit):
            handle.grads.finish_reduction(reduction)

    # ------------------------------------------------------------ the end of backward

    def reduce_rest(self) -> Agreement:
        """Reduce all remaining gradients, at the end of backward. Collective.

        First, the ranks exchange which parameters each rank used (``end_of_backward``). Returns the
        result of the exchange.
        """
        rest = self.order.rest()
        agreed = exchange_end_of_backward(self._state, set(rest))
        self._uneven = {number: left - 1 for number, left in self._uneven.items() if left > 1}
        self._uneven.update(dict.fromkeys(agreed.uneven, _REMEMBERED))
        for handle in (self._handles[number] for number in rest):
            if handle.reduces and any(agreed.used[handle]):
                self._start(handle)
        self._finish_all()
        for handle in agreed.left_over:
            self._start(handle)
        self._finish_all()
        if not self.is_order_agreed and all(u.sync is GradSync.FULL for u in self._state.units):
            self._agree_on_order()
        return agreed

    def _finish_all(self) -> None:
        """Wait for all reductions without a time limit, in the order of their start. Collective."""
        # Start all second stages (between nodes, for example) first, so that they overlap.
        for handle, reduction in self._in_flight.items():
            if reduction.to_come:
                with self._state.span(Kind.REDUCE_WAIT, handle.unit, ends=False):
                    reduction.cross()
        while self._in_flight:
            self._finish_first()

    def _agree_on_order(self) -> None:
        """Adopt the order in which gradients became ready on rank 0. Collective, once per model."""
        world = self._state.world
        order = torch.tensor(self.order.suggested(), device=world.host.device)
        with self._state.span(Kind.RANKS_WAIT):
            world.broadcast(order, op_name="order of reductions")
        self._adopt(order.tolist())
        self.is_order_agreed = True

    def _adopt(self, sequence: list[int]) -> None:
        # Reductions of units that some ranks may skip start only at the end of backward, and all
        # later reductions would have to wait. So move these units to the end.
        self.order.adopt(sorted(sequence, key=lambda n: self._handles[n].unit.may_diverge))

    def drop(self) -> None:
        """Finish all reductions under way, after a backward that failed. Collective."""
        try:
            # The results are dropped, but this rank must run every stage: if it skipped the stage
            # between nodes, for example, the other ranks' collectives would match this rank's next
            # collectives.
            self._finish_all()
        finally:
            self._in_flight.clear()


def wait_until_reduced(reduction: GradReduce) -> bool:
    """Wait for a reduction for a limited time, and return whether it is finished.

    A peer that lacks a gradient takes part only at the end of its backward, so a wait without a
    limit could be a deadlock.
    """
    if not reduction.work.reports_end:  # with gloo, only a wait notices the end of a collective
        return False
    # Wait on the host, not on the stream. An all-gather that is queued behind a stream wait would
    # deadlock with a peer that starts this reduction only at the end of its backward.
    deadline = time.monotonic() + _STALL_SECONDS
    while not (reduction.advance() and reduction.done()):
        if reduction.computed is not None and not reduction.computed.query():
            # The device has not computed the gradients yet. Count the time from then on.
            deadline = time.monotonic() + _STALL_SECONDS
        elif time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
