"""``Backward``: the order of a backward, from the first gradient of an output to ``.grad``.

1.  ``enter``, from the hook of an output: the unit is unsharded again, and the one whose backward
    is expected next starts to be.
2.  ``receive``: a hook has put a gradient into its buffer.
3.  When a bucket's gradients are complete, its reduction starts, in one order on all ranks.
4.  When the gradients of the unit's inputs are there too, nothing can need its parameters: it is
    resharded.
5.  ``_end``, a callback that autograd runs after the last node: see the note.

[Note: the end of backward]
Ranks may differ by then: one used a parameter that another did not. Every rank tells the others
which parameters it used; units that any rank used are reduced by all, in the one order, and
parameters that none used keep their ``.grad``. Only then may a rank wait for a reduction without a
limit: before, a peer might be unable to start it until its own backward is over.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from flatshard.engine import grad_publish, reduce_buckets
from flatshard.engine.agreement import Agreement
from flatshard.engine.comm_hook_order import HookTurns
from flatshard.engine.events import Kind, profiled
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.grad_reduce import GradReduce
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.reduce_buckets import ReduceBucket
from flatshard.engine.step_state import StepState
from flatshard.engine.unit import Call, Phase, Unit
from flatshard.plan.schedule import ReduceOrder, UnevenUnits

_running: weakref.WeakSet[Backward] = weakref.WeakSet()
"""Those of all models that are running, or failed."""


class Backward:
    """The backwards of one model.

    Attributes:
        buckets: of all units, by their index.
    """

    def __init__(self, state: StepState, prefetch: Prefetch) -> None:
        """None is running."""
        self._state, self._observers, self._prefetch = state, state.observers, prefetch
        self.buckets = reduce_buckets.split(state.units)
        self._buckets_of_unit = [list(g) for _, g in groupby(self.buckets, lambda one: one.unit)]
        self._bucket_of = {handle: one for one in self.buckets for handle in one.handles}
        self._to_reduce: Counter[Unit] = Counter()  # of each, buckets in this backward
        self._reduce_order = ReduceOrder(len(self.buckets))
        self._is_order_agreed = False
        self._uneven = UnevenUnits()
        self._hook_turns = HookTurns(self.buckets, self._reduce_order)
        self._in_flight: list[tuple[ReduceBucket, int]] = []  # with the bytes that it holds
        self._is_active = False
        self._graph_task = -1
        self._end_callback: Callable[[], object] = lambda: None
        self._had_accumulated = False
        self._must_wait = False  # with reductions, for the end of backward

    def refresh(self) -> None:
        """Look at the units again, after their buffers were made anew."""
        units = self._state.units
        # An accelerator's host is far ahead of it: reductions fill whatever they may.
        on_accelerator = any(h.device.type != "cpu" for unit in units for h in unit.handles)
        sizes = [
            sum(
                2 * h.layout.padded_numel * h.reduce_plan.reduce_dtype.itemsize for h in one.handles
            )
            for one in (self.buckets if on_accelerator else units)
        ]
        self.max_bytes_in_flight = max(sizes, default=0)

    @property
    def is_running(self) -> bool:
        """Whether this model's backward is running now, on this thread."""
        return (
            self._is_active
            and torch._C._current_graph_task_id() != -1
            and self._end_callback() is not None
        )

    # ------------------------------------------------------------ it begins

    def begin(self) -> bool:
        """Prepare the end of the backward that runs now, once; False outside of a backward."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if self._is_active and graph_task == self._graph_task:  # asked for every gradient
            return True
        if self._is_active and self._end_callback() is None:
            # Autograd dropped the callback with the backward that failed; this is another one.
            self._drop()
        if self._is_active:
            for hear in self._observers.begin_inner_backward:
                hear()
            return True
        for hear in self._observers.begin_backward:
            hear()
        self._is_active, self._graph_task = True, graph_task
        self._must_wait = not self._may_reduce_early()
        _running.add(self)
        # Autograd alone holds the callback: where a backward fails, both are gone.
        callback = partial(self._end)
        self._end_callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._begin_units()
        return True

    def _begin_units(self) -> None:
        self._reduce_order.begin_backward()
        self._hook_turns.begin_backward()
        self._to_reduce.clear()
        self._had_accumulated = False
        for unit in self._state.units:
            unit.begin_model_backward()
            self._had_accumulated |= any(h.grad_publish.holds_gradients for h in unit.handles)
        for bucket in self.buckets:
            if bucket.unit.sync is Sync.NONE or not bucket.trainable_handles:
                # Never reduced, so it must not hold up the others.
                self._reduce_order.ready(bucket.index)
            else:
                self._to_reduce[bucket.unit] += 1

    def _may_reduce_early(self) -> bool:
        """Whether reductions that begin now meet this model's on all ranks.

        Where they meet by order, they must not come between those of another model, which some
        ranks begin at the end of this backward. This model's end is after that one's.
        """
        return all(not other.is_running for other in _running if other is not self) or all(
            handle.reduce_plan.is_unordered for unit in self._state.units for handle in unit.handles
        )

    # ------------------------------------------------------------ a unit, in the order of events

    def enter(self, unit: Unit, call: Call) -> None:
        """A gradient of an output has come: unshard the unit that gave it. Collective."""
        self.begin()
        unit.begin_call_backward(call)
        for hear in self._observers.enter_backward:
            hear(unit)
        self.unshard(unit)
        # After this unit's own all-gather, which must not share the wires.
        self._prefetch.before_backward(unit)

    def unshard(self, unit: Unit) -> None:
        """Unshard what a unit's backward needs, unless that is there. Collective."""
        if torch.is_grad_enabled() and not unit.running and self.is_running:
            unit.stick()
        if unit.phase is Phase.BACKWARD:
            return
        if unit.for_backward:
            # All ranks come here, so hooks can reduce what all ranks have.
            if self.begin():
                self._hook_turns.agree()
                self._start_reduces()
            self._unshard_now(unit)
        unit.begin_backward()

    def unshard_again(self, unit: Unit) -> None:
        """Bring all parameters back, for a saved view or to compute a forward again.

        Collective, unless they are there.
        """
        if unit.is_current:
            return
        self._unshard_now(unit, everything=True)
        if self.begin():
            unit.enter(Phase.BACKWARD)

    def _unshard_now(self, unit: Unit, *, everything: bool = False) -> None:
        observers, name = self._observers, unit.name
        with observers.starting("backward", unit), profiled("unshard", name):
            unit.unshard("backward", everything=everything)
        with observers.waiting(Kind.GATHER_WAIT, unit), profiled("wait_unshard", name):
            unit.wait_unshard()

    def bring_back(self, unit: Unit) -> bool:
        """``unshard_again``, if a backward has begun; what it does without was used after all."""
        if unit.phase is not Phase.BACKWARD or not self.is_running:
            return False
        self.unshard_again(unit)
        return True

    def receive(self, unit: Unit, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """The gradient of an original parameter is in its buffer; ``begin`` was called before."""
        for hear in self._observers.on_grad:
            hear(unit, handle, index, grad)
        bucket = self._bucket_of[handle]
        if not bucket.is_complete():
            return
        if unit.sync is not Sync.NONE:
            self._reduce_order.ready(bucket.index)
            self._start_reduces()
            self._finish_old_reduces()
            self._let_observers_work()
        self._reshard_if_over(unit)

    def receive_of_input(self, unit: Unit, call: Call) -> None:
        """The gradient of an input of a call has come."""
        if unit.receive_input_gradient(call):
            self._reshard_if_over(unit)

    def _reshard_if_over(self, unit: Unit) -> None:
        if not unit.ends_backward:
            return
        unit.reshard_by_policy()
        for hear in self._observers.leave_backward:
            hear(unit)
        self._let_observers_work()
        self._prefetch.after_backward(unit)

    def _let_observers_work(self) -> None:
        for hear in self._observers.between_units:
            hear()

    # ------------------------------------------------------------ reductions

    def _start_reduces(self) -> None:
        """Start every reduction whose turn has come."""
        if not self._must_wait:
            for index in self._reduce_order.turns(self._hook_turns.allows):
                self._start_reduce(self.buckets[index])

    def _start_reduce(self, bucket: ReduceBucket) -> None:
        unit = bucket.unit
        if unit.sync is Sync.NONE:
            return
        with self._observers.starting("reduce", unit), profiled("reduce", unit.name):
            held = sum(_start(handle, unit.sync) for handle in bucket.trainable_handles)
        if any(handle.is_reducing for handle in bucket.handles):
            self._in_flight.append((bucket, held))
        else:
            self._note_reduced(unit)

    def _note_reduced(self, unit: Unit) -> None:
        """A bucket of a unit is reduced; perhaps it was the last."""
        self._to_reduce[unit] -= 1
        if self._to_reduce[unit] == 0:
            for hear in self._observers.reduced:
                hear(unit)

    def _finish_old_reduces(self) -> None:
        """Finish old reductions while more bytes are under way than ``max_bytes_in_flight``."""
        self._state.pending_sends.drop_sent()
        with self._observers.starting("reduce", None):
            for bucket, _ in self._in_flight:
                if not bucket.advance():  # second stages begin in the order of the first
                    break
        while self._in_flight:
            bucket, _ = self._in_flight[0]
            over = sum(held for _, held in self._in_flight) > self.max_bytes_in_flight
            if not bucket.is_reduced() and not (over and self._wait_until_reduced(bucket)):
                return
            del self._in_flight[0]
            self._finish(bucket)
            self._note_reduced(bucket.unit)

    def _wait_until_reduced(self, bucket: ReduceBucket) -> bool:
        # A peer without this gradient starts the reduction only at the end of its backward, so a
        # wait has a limit; for buckets where that happened lately there is no wait at all.
        if bucket.index in self._uneven:
            return False
        with self._observers.waiting(Kind.REDUCE_WAIT, bucket.unit, ends=False):
            return bucket.wait_until_reduced()

    def _finish(self, bucket: ReduceBucket) -> None:
        with self._observers.waiting(Kind.REDUCE_WAIT, bucket.unit):
            for handle in bucket.handles:
                _finish(handle)

    def _finish_all(self) -> None:
        """Finish all reductions under way, in order."""
        # All second stages start before any is waited for.
        for bucket, _ in self._in_flight:
            with self._observers.waiting(Kind.REDUCE_WAIT, bucket.unit, ends=False):
                bucket.cross()
        for bucket, _ in self._in_flight:
            self._finish(bucket)
        self._in_flight.clear()

    # ------------------------------------------------------------ it ends

    def _end(self) -> None:
        """Autograd has run the last node; see the note."""
        if not self._is_active:
            return
        state, used, failed = self._state, [], True
        try:
            if any(unit.sync is not Sync.NONE for unit in state.units):
                used = self._reduce_rest()
            failed = False
        finally:
            self._is_active = failed  # what is left of it is dropped before the next one
            for unit in state.units:
                # A forward that runs a backward inside, for forces say, goes on afterwards.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.reshard_by_policy()
        is_outermost = state.depth == 0
        # After units are resharded: other ranks wait for that likewise. What a forward around this
        # backward still needs is released at its end.
        if is_outermost:
            with self._observers.waiting(Kind.RANKS_WAIT):
                state.pending_sends.wait_sends()
        self._run_hooks(used)
        if is_outermost:
            for unit in state.units:
                unit.end_iteration()
            has_gradients = any(any(flags) for of_unit in used for flags in of_unit)
            for hear in self._observers.published:
                hear(has_gradients)
        for unit in state.units:
            if unit.sync is not Sync.ALL:
                for handle in unit.handles:
                    handle.grad_publish.show_unreduced()
        # Last: where warnings are errors, the other ranks have nothing to wait for.
        for end in self._observers.end_backward:
            end()

    def _reduce_rest(self) -> list[list[list[bool]]]:
        """Agree with the other ranks on what was used, reduce the rest, publish gradients.

        Returns per unit, flat parameter and original parameter whether any rank used it.
        """
        state = self._state
        self._hook_turns.agree(at_end=True)
        rest = self._reduce_order.rest()
        agreed = Agreement(state, self._buckets_of_unit, rest)
        self._uneven.note(agreed.uneven)
        for index in rest:
            if agreed.is_used(self.buckets[index]):
                self._start_reduce(self.buckets[index])
        self._finish_all()
        for unit, handle in agreed.left_over:
            with self._observers.starting("reduce", unit):
                self._in_flight.append((self._bucket_of[handle], _start(handle, unit.sync)))
        self._finish_all()
        if agreed.edited:  # raised where nothing is under way that a rank would wait for
            raise grad_publish.edited(agreed.edited[0])
        for unit, flags in zip(state.units, agreed.used, strict=True):
            for handle, handle_flags in zip(unit.handles, flags, strict=True):
                if unit.sync is Sync.ALL:
                    handle.publish(handle_flags)
                elif unit.sync is Sync.INTRA:
                    handle.grad_buffer.mark_used(handle_flags)
        if not self._is_order_agreed and all(unit.sync is Sync.ALL for unit in state.units):
            self._agree_on_order()
        # Now that nothing is under way that a rank would wait for.
        for hear in self._observers.reduced_late:
            hear([unit for unit, _ in agreed.left_over])
        return agreed.used

    def _agree_on_order(self) -> None:
        """From now on, use the order in which rank 0's units became ready. Collective, once."""
        world = self._state.world
        order = torch.tensor(self._reduce_order.suggested(), device=world.control_device)
        with self._observers.waiting(Kind.RANKS_WAIT):
            world.broadcast(order, op_name="order of reductions")
        self._reduce_order.adopt(order.tolist())
        self._is_order_agreed = True

    def _run_hooks(self, used: list[list[list[bool]]]) -> None:
        """Call users' post-accumulate hooks of what has a gradient."""
        try:
            for unit, flags in zip(self._state.units, used, strict=False):
                if unit.sync is Sync.ALL:
                    for handle, handle_flags in zip(unit.handles, flags, strict=True):
                        handle.grad_publish.run_post_accumulate_hooks(handle_flags)
        finally:
            for unit in self._state.units:
                for handle in unit.handles:
                    handle.grad_publish.give_hooks_back()

    # ------------------------------------------------------------ it failed

    def recover(self) -> None:
        """Drop what is left of a backward that failed, unless one is running."""
        if self._is_active and torch._C._current_graph_task_id() == -1:
            self._drop()

    def _drop(self) -> None:
        self._is_active = False
        for hear in self._observers.drop_backward:
            hear()
        if self._had_accumulated:
            warnings.warn(
                "a backward failed, and gradients accumulated before it are lost with it. "
                "Accumulate them again.",
                stacklevel=4,
            )
        try:
            # All ranks began these; where one left out a second stage, the next would meet it.
            self._finish_all()
        finally:
            self._in_flight.clear()
            for unit in self._state.units:
                unit.reset()


# ---------------------------------------------------------------- one flat parameter's reduction


def _start(handle: FlatParamHandle, sync: Sync) -> int:
    """Start averaging gradients over the ranks; those that did not arrive count as zero.

    Collective: all ranks of the unit, in the same order of calls.

    Returns:
        Bytes that are held until ``_finish``.
    """
    # Its result would be lost: a handle keeps one reduction.
    assert not handle.is_reducing, "the reduction before was not finished"
    chunks, plan = handle.grad_buffer.take_chunks(), handle.reduce_plan
    if plan.hook is not None:
        assert sync is Sync.ALL, "units with a hook have one stage"
        handle.grad_publish.add(plan.reduce_by_hook(chunks))
        return 0
    held = handle.grad_buffer.take_intra_reduced() if sync is Sync.ALL else None
    handle.grad_reduce = GradReduce(plan, chunks, hold=sync is Sync.INTRA, held=held)
    return plan.bytes_in_flight(chunks)


def _finish(handle: FlatParamHandle) -> None:
    """Wait for the reduction that was started, if any, and keep its result to be published.

    Collective where a second stage was not started: in the same order on all ranks.
    """
    reduce = handle.grad_reduce
    if reduce is None or reduce.is_finished:
        return
    out = reduce.finish()
    if reduce.hold:
        with torch.no_grad():
            handle.grad_buffer.add_intra_reduced(out)
    else:
        handle.grad_publish.add(out)
