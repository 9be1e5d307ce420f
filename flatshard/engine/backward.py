"""``Backward``: the second half of a step, from the first gradient of an output to ``.grad``.

Autograd calls this class through hooks on the outputs, parameters and inputs of units:

1.  The gradient of a unit's output is computed. ``enter`` unshards the unit and waits, because the
    next nodes of the graph read the parameters. Then the all-gather of the unit whose backward is
    expected next starts, and overlaps with this unit's backward.
2.  The gradient of a parameter is computed. ``receive`` moves the gradient from the parameter to
    the ``Gradients`` of the flat parameter.
3.  All gradients of a flat parameter are computed. Its reduction starts (``reduce_queue.py``), in
    the same order on all ranks, and overlaps with the rest of backward.
4.  The gradients of the unit's inputs are computed too. No computation needs the unit's parameters
    any more, so the unit is resharded.
5.  Autograd has run the last node of the graph, and calls ``_end``. The ranks reduce the remaining
    gradients, and wait for all reductions. Then ``.grad`` gets the averages.

Extensions are optional features that act in a step; watchers are extensions that only observe it.

[Note: the end of backward]
At the end of a backward, the ranks exchange which parameters each rank used
(``end_of_backward.py``). If any rank used a unit, all ranks reduce the unit's gradients. Parameters
that no rank used keep their ``.grad``. Only here may a rank wait for a reduction without a time
limit: a rank that lacks a gradient starts the reduction only at the end of its backward, so an
earlier wait could be a deadlock.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from itertools import compress, count
from types import NoneType

import torch
from torch import Tensor

from flatshard.engine.events import Kind
from flatshard.engine.gradients import GradSync, edited
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.reduce_queue import ReduceQueue
from flatshard.engine.run_state import RunState, temporarily
from flatshard.engine.unit import Call, Phase, ReshardPoint, Unit, written_since_forward
from flatshard.tensor.sharded_tensor import untraced

# The ``Backward`` objects of all models that have ever begun a backward.
BEGUN: weakref.WeakSet[Backward] = weakref.WeakSet()


class Backward:
    """Runs the backward passes of one model. The methods are in the order of their calls."""

    def __init__(self, state: RunState, prefetch: Prefetch) -> None:
        self._state, self._prefetch = state, prefetch
        self.queue = ReduceQueue(state)
        # Whether a backward has begun but not ended: the backward is running, or has failed.
        self.is_active = False
        self.is_empty = False  # whether this rank computes no gradients (`run_empty`)
        self._graph_task = -1  # autograd's ID of this backward's graph task

        # Weak reference to the callback (`_end`) that autograd calls after the last node. A call of
        # the reference returns None if autograd has dropped the callback, because the backward is
        # over or has failed. Before the first backward, `NoneType()` returns None, too.
        self._end_callback: Callable[[], object] = NoneType
        # Whether gradients had been accumulated under no_sync when the backward began. If the
        # backward fails, these gradients are lost, with a warning.
        self.had_accumulated = False

        # Resharded flat parameters whose unsharded buffers still have memory, because views of the
        # buffers exist.
        self._deferred: list[FlatParamHandle] = []

    @property
    def is_running(self) -> bool:
        """Whether this model's backward is running now, on this thread."""
        return (
            self.is_active
            and torch._C._current_graph_task_id() != -1
            and self._end_callback() is not None
        )

    def begin(self) -> bool:
        """Begin this model's backward, unless it has begun already.

        Returns False, and does nothing, if this is called outside of any backward of autograd.
        """
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if self.is_active:
            if graph_task == self._graph_task:  # the usual case: `begin` runs for every gradient
                return True
            if self._end_callback() is not None:
                self._state.has_inner_backward = True
                return True
            # The last backward has failed: it never ended, but autograd dropped the callback.
            self._drop()
        for extension in self._state.extensions:
            extension.begin_backward()
        self.is_active, self._graph_task = True, graph_task
        BEGUN.add(self)
        # Autograd calls `_end` after the last node. If the backward fails, autograd drops the
        # callback instead. Then Python calls `_fail`, because the callback is freed.
        callback = partial(self._end)
        self._end_callback = weakref.ref(callback, self._fail)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self.had_accumulated = self._state.has_inner_backward = False
        for unit in self._state.units:
            unit.begin_model_backward()
        self.had_accumulated = any(h.grads.waits_for(GradSync.FULL) for h in self._state.handles)
        self.queue.begin_backward(must_wait=not self._may_reduce_early())
        return True

    def _may_reduce_early(self) -> bool:
        """Whether this model may start reductions before the end of its backward.

        One call of ``backward()`` may compute gradients of two models. A rank that lacks a gradient
        of the first model starts the first model's reductions only at the end. If such a rank had
        already started reductions of the second model, the rank's order would differ from the other
        ranks, and a transport that matches reductions by order (NCCL) would mix the two models. So
        the second model starts all reductions in its ``_end``, after the ``_end`` of the first.
        """
        return all(not other.is_running for other in BEGUN if other is not self) or all(
            handle.grads.plan.is_unordered for handle in self._state.handles
        )

    def run_empty(self) -> None:
        """Run a backward that computes no gradients on this rank. Collective.

        This rank takes part in the reductions of the other ranks, at the end of the backward, with
        the gradients that it accumulated under ``no_sync`` or with zeros.
        """
        for handle in self._state.handles:
            handle.count_trainable()
        with torch.enable_grad(), temporarily([self], is_empty=True):
            # Run a backward of a dummy tensor, so that autograd calls `_end`.
            nothing = torch.zeros((), requires_grad=True) * 1
            nothing.register_hook(self._begin_empty)
            nothing.backward()

    def _begin_empty(self, _: Tensor) -> None:
        self.begin()

    # ------------------------------------------------------------ a unit's backward

    @untraced  # keep Dynamo from tracing this hook, which may run in a compiled function
    def enter(self, unit: Unit, call: Call, _: Tensor) -> None:
        """Unshard a unit at the beginning of the backward of ``call``. Collective.

        Autograd calls this hook when the gradient of an output of the call is computed.
        """
        self.begin()
        unit.begin_call_backward(call)
        for watcher in self._state.watchers:
            watcher.enter_backward(unit)
        self.unshard(unit)
        if any(handle.clean_version != version for handle, version in call.versions.items()):
            raise written_since_forward(unit)
        # Prefetch the next unit only now, after this unit's all-gather: an earlier prefetch would
        # have taken bandwidth from this all-gather, for which the computation waits.
        self._prefetch.in_backward(unit, is_over=False)

    def unshard(self, unit: Unit) -> None:
        """Unshard the parameters that a unit's backward reads, and wait for them. Collective."""
        # With gradients enabled, this is backward(create_graph=True), which records a graph whose
        # nodes need the unsharded buffers later.
        if torch.is_grad_enabled() and not unit.running and self.is_running:
            unit.keep_unsharded()
        if unit.phase is Phase.BACKWARD:
            return
        if unit.for_backward:
            # Wait for the all-gather here: the next nodes of the graph read the parameters.
            self._state.unshard(unit, "backward")
        else:
            # The unit has only embedding tables, which backward does not read, so start no
            # all-gather. But put unsharded parameters into the modules, for a recomputed forward.
            unit.wait_unshard()
        unit.phase = Phase.BACKWARD

    def unshard_again(self, unit: Unit) -> None:
        """Unshard all parameters of a unit in backward, and wait for them.

        Called if activation checkpointing recomputes the unit's forward, or if autograd asks for a
        saved view of the unsharded buffer. Collective, unless the parameters are unsharded already.
        """
        if unit.is_current:
            return
        self._state.unshard(unit, "backward", everything=True)
        if self.begin():
            unit.phase = Phase.BACKWARD

    @staticmethod
    @untraced
    def receive(owner: weakref.ref[FlatParamHandle], index: int, full: Tensor) -> None:
        """Move the gradient in ``full.grad`` to the flat parameter, and start reductions.

        Autograd calls this hook after filling ``full.grad``, where ``full`` is the unsharded
        parameter number ``index`` of the flat parameter ``owner()``. After the flat parameter's
        last gradient, the reduction starts, if all earlier reductions in the order have started.
        """
        handle, grad = owner(), full.grad
        if handle is None or grad is None:
            return
        grads, unit = handle.grads, handle.unit
        self: Backward = unit.backward
        if grads.shown:
            grad = grads.take_back(handle.params[index], grad)
        # Empty `.grad`: otherwise autograd would add the next gradient in place, into a tensor that
        # `grads` keeps without a copy.
        full.grad = None
        # Call `begin` before storing the gradient, because `begin` may drop all stored gradients
        # (of a failed backward).
        if not self.is_active or torch._C._current_graph_task_id() != self._graph_task:
            self.begin()
        if index in grads.pending:  # second gradient of the parameter: first store the earlier one
            grads.receive_pending(more_to_come=unit.sync is GradSync.ACCUMULATE)
        # Small gradients are only collected, until the flat parameter has all: this saves time.
        grads.pending[index] = grad
        for watcher in self._state.watchers:
            watcher.on_grad(unit)
        has_all = len(grads.pending) + len(grads.arrived) >= handle.num_trainable
        if not (has_all or index in grads.large):
            return
        grads.receive_pending(more_to_come=unit.sync is GradSync.ACCUMULATE)
        if len(grads.arrived) < handle.num_trainable:
            return
        if unit.sync is not GradSync.ACCUMULATE:
            self.queue.add(handle)
            for extension in self._state.extensions:
                extension.between_units()
        self._reshard_if_over(unit)

    @untraced
    def receive_of_input(self, unit: Unit, call: weakref.ref[Call], _: Tensor) -> None:
        """Count a gradient of an input of ``call``. After the last gradient, reshard the unit."""
        if unit.receive_input_gradient(call()):
            self._reshard_if_over(unit)

    def _reshard_if_over(self, unit: Unit) -> None:
        """Reshard a unit if the rest of this backward cannot need the unit's parameters."""
        if not unit.ends_backward:
            return
        unit.reshard(ReshardPoint.AFTER_BACKWARD)
        # Try again to free the buffers of earlier units that had views: the views may be gone now.
        for handle in self._deferred:
            if handle.is_free_deferred:
                handle.reshard(though_viewed=False)
        self._deferred = [h for h in (*self._deferred, *unit.handles) if h.is_free_deferred]
        for watcher in self._state.watchers:
            watcher.leave_backward(unit)
        for extension in self._state.extensions:
            extension.between_units()
        self._prefetch.in_backward(unit, is_over=True)

    # ------------------------------------------------------------ the end of backward

    @untraced
    def _end(self) -> None:
        """Reduce the remaining gradients, set ``.grad``, and reshard all units. Collective."""
        state, failed = self._state, True
        is_outermost = state.depth == 0
        used: dict[FlatParamHandle, list[bool]] = {}
        try:
            # A flat parameter that did not get all of its gradients still has pending gradients.
            # Store these gradients.
            for handle in state.handles:
                handle.grads.receive_pending(more_to_come=handle.unit.sync is GradSync.ACCUMULATE)
            if any(unit.sync is not GradSync.ACCUMULATE for unit in state.units):
                used = self._reduce_rest()
            failed = False
        finally:
            for unit in state.units:
                # A unit in phase FORWARD stays unsharded, because its forward continues after this
                # backward, which runs inside of the forward (to compute forces, for example).
                # Resharding all other units also frees buffers that had to keep their memory,
                # because views of the buffers existed.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.reshard(ReshardPoint.BACKWARD_OVER)
                if is_outermost:
                    unit.end_iteration()
            # Set `is_active` last: if an exception interrupts the loop above, `is_active` stays
            # True, so the next step calls `_drop`, which reshards the remaining units.
            self.is_active = failed
        # Drop the weak reference before autograd frees the callback. Otherwise Python would call
        # `_fail`.
        self._end_callback = NoneType
        if is_outermost:
            state.forward.saved.backward_has_ended = True
            # Wait until the other ranks have received this rank's shards, which the optimizer may
            # write next. If this backward runs inside a forward, the end of the forward waits
            # instead.
            with state.span(Kind.RANKS_WAIT):
                state.pending_sends.wait_sends()
        # Complete `.grad` before calling the users' hooks, which may raise.
        for handle in state.handles:
            if handle.unit.sync is not GradSync.FULL:
                handle.grads.show()
        self._run_hooks(used)
        # Watchers come last in `state.extensions`. So if Python's warning filter turns a watcher's
        # warning into an error, all collectives are over, and no rank waits for this rank.
        for extension in state.extensions:
            extension.end_backward(has_gradients=any(any(flags) for flags in used.values()))

    def _reduce_rest(self) -> dict[FlatParamHandle, list[bool]]:
        """Reduce all remaining gradients, and publish the averages in ``.grad``. Collective.

        Returns, for each flat parameter, whether any rank used each original parameter.
        """
        agreed = self.queue.reduce_rest()
        # Raising is safe here: all ranks raise, and no collective is unfinished.
        if agreed.edited:
            unit = agreed.edited[0]
            raise self._state.edits.error_of(unit) or edited(unit.name)
        for handle in self._state.handles:
            if handle.unit.sync is GradSync.FULL:
                handle.grads.publish(agreed.used[handle])
            elif handle.unit.sync is GradSync.SHARD_ONLY:
                # The result contains gradients also of parameters that only other ranks used.
                handle.grads.used_by_rank.update(compress(count(), agreed.used[handle]))
        for extension in self._state.extensions:
            extension.reduced_late([handle.unit for handle in agreed.left_over])
        return agreed.used

    def _run_hooks(self, used: dict[FlatParamHandle, list[bool]]) -> None:
        """Run users' post-accumulate hooks of used parameters, whose ``.grad`` is complete now."""
        try:
            for handle in self._state.handles:
                if used and handle.unit.sync is GradSync.FULL:
                    for param in handle.params:
                        if param.post_accumulate_hooks and used[handle][param.index]:
                            param.run_hooks()
        finally:
            for handle in self._state.handles:
                handle.give_hooks_back()

    def _fail(self, _: object) -> None:
        """Put sharded parameters into the modules again, because this backward has failed.

        Runs before the caller of ``backward()`` can catch the exception: if modules still had
        unsharded parameters, values that the caller writes to them would be lost.
        """
        # Do no work that waits or raises, because the destructor of autograd's graph task calls
        # this method: Python only prints exceptions in destructors. `_drop` does the rest later.
        # The destructor may run on another thread (of a device). This is safe: the thread holds the
        # GIL, and no other hook of this backward runs any more.
        for unit in self._state.units if self.is_active else ():
            unit.leave_failed_backward()

    def recover(self) -> None:
        """If the last backward failed, drop the gradients and reductions of that backward."""
        if self.is_active and torch._C._current_graph_task_id() == -1:
            self._drop()

    def _drop(self) -> None:
        """Finish the reductions of a failed backward, drop all gradients, and reset all units."""
        self.is_active = False
        if self.had_accumulated:
            warnings.warn(
                "a backward failed, and the gradients that were accumulated before this backward "
                "are lost, too. Run all backward passes of this step again.",
                stacklevel=4,
            )
        try:
            self.queue.drop()
        finally:
            for unit in self._state.units:
                unit.reset()
