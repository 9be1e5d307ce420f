"""``ReduceQueue``: starts and finishes the reductions of gradients, in one order on all ranks.

Each flat parameter is reduced separately. A flat parameter is ready once autograd has computed all
its gradients.
"""

import time
from collections import Counter, OrderedDict

import torch

from flatshard.engine.end_of_backward import Agreement, exchange_end_of_backward
from flatshard.engine.events import Kind
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState

# Longest wait for a reduction before the end of backward. A rank that lacks a gradient starts the
# reduction only at the end of its backward, and may be waiting for this rank: a deadlock.
_STALL_SECONDS = 1.0

_POLL_SECONDS = 1e-4

# Number of backwards in which no rank waits early for the reduction of a flat parameter, after a
# rank lacked a gradient of this flat parameter (`ReduceQueue._uneven`).
_REMEMBERED = 100


class ReduceQueue:
    """Starts and finishes the reductions of a model, in the same order on all ranks.

    All ranks must start collectives in the same order, but flat parameters may become ready in
    different orders on different ranks, or never. So a reduction starts only after all reductions
    before it in the order. The remaining reductions start at the end of backward. In the order,
    flat parameters are identified by their indices (``FlatParamHandle.number``).
    """

    def __init__(self, state: RunState) -> None:
        self._state, self._handles = state, state.handles
        # For the first backward, guess that flat parameters become ready in the reverse order of
        # construction, but the root unit last: forward uses some of its parameters (embeddings, for
        # example) first, so backward computes their gradients last. After this backward, the ranks
        # adopt the real order.
        backwards = reversed(range(len(self._handles)))
        self._adopt(sorted(backwards, key=lambda n: self._handles[n].unit is state.root))
        self.is_order_agreed = False  # whether the ranks have adopted the real order
        self._num_started = 0  # number of reductions that were started in this backward
        # Indices of the flat parameters that are ready, in the order in which they became ready.
        self._ready: dict[int, None] = {}
        # Uneven flat parameters: in a recent backward, some ranks lacked a gradient, and started
        # the reduction only at the end of backward. So no rank waits for this reduction before the
        # end. The keys are the indices of the flat parameters. The values are the numbers of
        # backwards for which the entries stay in this dict.
        self._uneven: dict[int, int] = {}
        # Unfinished reductions, in the order of their start.
        self._in_flight: OrderedDict[FlatParamHandle, GradReduce] = OrderedDict()
        self._must_wait = False  # whether all reductions start at the end of backward
        # How many flat parameters, counted from the beginning of the order, may be reduced before
        # the end of backward. If users' communication hooks reduce some of them, the limit begins
        # at 0, and the extra `reduction` raises the limit.
        self.limit = 0

    def refresh(self) -> None:
        """Recompute the memory limit of unfinished reductions, after buffers were reallocated."""
        # The limit is twice the size of the largest unit's gradients. On an accelerator, it is
        # twice the size of the largest flat parameter's gradients: the host runs far ahead of the
        # device, so the memory always rises to the limit.
        on_accelerator = any(handle.device.type != "cpu" for handle in self._handles)
        sizes: Counter[object] = Counter()
        for handle in self._handles:
            sizes[handle if on_accelerator else handle.unit] += handle.grads.plan.full_bytes
        self.max_bytes_in_flight = 2 * max(sizes.values(), default=0)

    def begin_backward(self, *, must_wait: bool) -> None:
        """Reset the queue for a new backward.

        ``must_wait``: whether reductions may start only at the end of backward
        (``Backward._may_reduce_early``).
        """
        self._must_wait, self.limit = must_wait, len(self._handles)
        self._num_started, self._ready = 0, {}
        for number, handle in enumerate(self._handles):
            if not handle.reduces:
                # This backward does not reduce the flat parameter. Mark it as ready, so that later
                # flat parameters in the order do not wait for it.
                self._ready[number] = None
            elif handle.grads.plan.hook is not None:
                self.limit = 0

    def add(self, handle: FlatParamHandle) -> None:
        """Mark a flat parameter as ready. Then start the reductions that may start now.

        Finishes old reductions, and may wait for the oldest one to limit memory (``_finish_old``).
        """
        self._ready[handle.number] = None
        self.start_ready()
        self._finish_old()

    def start_ready(self) -> None:
        """Start, in order, the reductions that may start now. Collective."""
        while self._num_started < self.limit and not self._must_wait:
            handle = self._handles[self._order[self._num_started]]
            if handle.number not in self._ready or handle.unit.may_diverge:
                return
            self._num_started += 1
            if handle.reduces:
                self._start(handle)

    def num_ready(self) -> int:
        """Return how many flat parameters precede the first unready flat parameter in the order."""
        rest = (n for n, number in enumerate(self._order) if number not in self._ready)
        return next(rest, len(self._order))

    def _start(self, handle: FlatParamHandle) -> None:
        """Start to reduce the gradients of a flat parameter. Collective."""
        with self._state.span(Kind.STARTING, handle.unit, purpose="reduce"):
            reduction = handle.grads.start_reduction(handle.unit.sync)
        if reduction is None:  # the user's communication hook has already reduced the gradients
            self._tell_reduced(handle)
        else:
            self._in_flight[handle] = reduction

    def _tell_reduced(self, handle: FlatParamHandle) -> None:
        for extension in self._state.extensions:
            extension.reduced(handle.unit)

    def _finish_old(self) -> None:
        """Keep the results of reductions that are over.

        If unfinished reductions take more memory than ``max_bytes_in_flight``, wait for the oldest
        reduction, but only for a limited time.
        """
        self._state.pending_sends.drop_sent()
        for reduction in self._in_flight.values():
            if reduction.later_stages:
                with self._state.span(Kind.STARTING, purpose="reduce"):
                    second_has_started = reduction.advance()
                # Second stages (across nodes) start in order, so later reductions must wait, too.
                if not second_has_started:
                    break
        while self._in_flight:
            handle, reduction = next(iter(self._in_flight.items()))
            if not reduction.done():
                in_flight = sum([one.grads.plan.bytes_in_flight for one in self._in_flight])
                # With gloo, do not wait: `done` is False until somebody waits, so the reduction may
                # be over. A wait is also useless if another rank lacks a gradient, because that
                # rank starts this reduction only at the end of its backward. A rank probably lacks
                # one if it did in a recent backward (`_uneven`), or has no more input (`join`).
                can_wait = reduction.work.reports_end and handle.number not in self._uneven
                is_late = not can_wait or self._state.lacks_ranks
                if in_flight <= self.max_bytes_in_flight or is_late:
                    return
                with self._state.span(Kind.REDUCE_WAIT, handle.unit, ends=False):
                    if not wait_until_reduced(reduction):
                        return
            self._finish_first()
            self._tell_reduced(handle)

    def _finish_first(self) -> None:
        handle, reduction = self._in_flight.popitem(last=False)
        with self._state.span(Kind.REDUCE_WAIT, handle.unit):
            handle.grads.finish_reduction(reduction)

    # ------------------------------------------------------------ the end of backward

    def reduce_rest(self) -> Agreement:
        """Reduce all remaining gradients, at the end of backward. Collective.

        First, the ranks exchange which parameters each rank has used (``end_of_backward.py``).
        Returns the result of this exchange.
        """
        rest = self._order[self._num_started :]
        agreed = exchange_end_of_backward(self._state, set(rest))
        remembered = {number: left - 1 for number, left in self._uneven.items() if left > 1}
        self._uneven = remembered | dict.fromkeys(agreed.uneven, _REMEMBERED)
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
        # First start the second stages (across nodes) of all reductions, so that they overlap.
        for handle, reduction in self._in_flight.items():
            if reduction.later_stages:
                with self._state.span(Kind.REDUCE_WAIT, handle.unit, ends=False):
                    reduction.start_second_stage()
        while self._in_flight:
            self._finish_first()

    def _agree_on_order(self) -> None:
        """Adopt the order in which gradients became ready on rank 0. Collective, once per model."""
        world = self._state.world
        # Flat parameters that did not become ready come last.
        found = [*self._ready, *(number for number in self._order if number not in self._ready)]
        order = torch.tensor(found, device=world.host.device)
        with self._state.span(Kind.RANKS_WAIT):
            world.broadcast(order, op_name="order of reductions")
        self._adopt(order.tolist())
        self.is_order_agreed = True

    def _adopt(self, order: list[int]) -> None:
        # Move units that some ranks may skip to the end of the order. The reductions of such units
        # start only at the end of backward, and later reductions in the order would have to wait.
        self._order = sorted(order, key=lambda n: self._handles[n].unit.may_diverge)

    def drop(self) -> None:
        """Finish all reductions under way, after a backward that failed. Collective."""
        try:
            # Nobody needs the results, but this rank must run every stage. If it skipped a stage,
            # the other ranks' collectives of this stage would match this rank's next collectives.
            self._finish_all()
        finally:
            self._in_flight.clear()


def wait_until_reduced(reduction: GradReduce) -> bool:
    """Wait for a reduction, at most ``_STALL_SECONDS``, and return whether it is finished."""
    # Wait on the host, not on the stream. An all-gather that is queued behind a stream wait would
    # deadlock with a rank that lacks a gradient, and starts this reduction only at the end of its
    # backward.
    deadline = time.monotonic() + _STALL_SECONDS
    while not (reduction.advance() and reduction.done()):
        if reduction.computed is not None and not reduction.computed.query():
            # The device has not computed the gradients yet. Count the time only afterwards.
            deadline = time.monotonic() + _STALL_SECONDS
        elif time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
