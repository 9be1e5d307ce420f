"""``Backward``: the second half of a step, from the first gradient of an output to ``.grad``.

Autograd calls this class through the hooks of outputs, parameters and inputs of units:

1.  The gradient of a unit's output is computed. ``enter`` unshards the unit and waits, because the
    next nodes of the graph read the parameters. Then the all-gather of the unit whose backward is
    expected next starts, and overlaps with this unit's backward.
2.  The gradient of a parameter is computed. ``receive`` moves the gradient from the parameter to
    the ``Gradients`` of the flat parameter.
3.  All gradients of a flat parameter have arrived. Its reduction starts, in one order on all ranks
    (``reduce_queue``), and overlaps with the rest of backward.
4.  The gradients of the unit's inputs have arrived too. No computation needs the unit's parameters
    any more, so the unit is resharded.
5.  Autograd has run the last node, and calls ``_end``. The ranks reduce the remaining gradients,
    this rank waits for all reductions, and ``.grad`` gets the averages.

Extensions (``StepExtension``) are optional features that may act in a backward. Watchers are
extensions that only watch a step, such as reports.

[Note: the end of backward]
A parameter may be used on one rank and unused on another. So at the end of a backward, the ranks
exchange which parameters each rank used (``end_of_backward``). If any rank used a unit, all ranks
reduce the unit's gradients, in one order. Parameters that no rank used keep their ``.grad``. Only
here may a rank wait for a reduction without a time limit: a peer that lacks a gradient starts the
reduction only at the end of its own backward, so an earlier wait could be a deadlock.
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

# The ``Backward`` of each model whose backward is running or has failed (see
# `Backward._may_reduce_early`).
_running: weakref.WeakSet[Backward] = weakref.WeakSet()


class Backward:
    """Runs the backward passes of one model. The methods are in the order of their calls."""

    def __init__(self, state: RunState, prefetch: Prefetch) -> None:
        self._state, self._prefetch = state, prefetch
        self.queue = ReduceQueue(state)
        # Whether a backward has begun, but not ended: it is running, or has failed.
        self.is_active = False
        self.is_empty = False  # whether `run_empty` has started the backward
        self._graph_task = -1  # autograd's ID of this backward's graph task

        # Weak reference to the callback (`_end`) that autograd holds. The reference returns None
        # once autograd has dropped the callback, because the backward is over or has failed.
        # `NoneType` is a callable that returns None, too.
        self._end_callback: Callable[[], object] = NoneType
        # whether a failed backward would lose gradients accumulated under no_sync
        self.had_accumulated = False

        # Flat parameters that are resharded, but whose unsharded buffer keeps its memory for now,
        # because views of the buffer still exist.
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

        Returns False, and does nothing, if autograd is running no backward.
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
            # The earlier backward failed, so autograd dropped its callback. A new backward begins.
            self._drop()
        for extension in self._state.extensions:
            extension.begin_backward()
        self.is_active, self._graph_task = True, graph_task
        must_wait = not self._may_reduce_early()
        _running.add(self)
        # Autograd calls `_end` after the last node. If the backward fails, autograd drops the
        # callback: then the weak reference is dead, and Python calls `_fail`.
        callback = partial(self._end)
        self._end_callback = weakref.ref(callback, self._fail)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self.had_accumulated = self._state.has_inner_backward = False
        for unit in self._state.units:
            unit.begin_model_backward()
        self.had_accumulated = any(h.grads.waits_for(GradSync.FULL) for h in self._state.handles)
        self.queue.begin_backward(must_wait=must_wait)
        return True

    def _may_reduce_early(self) -> bool:
        """Whether this model may start reductions before the end of its backward.

        One backward may compute gradients of two models. If a transport (the native backend, for
        example) matches reductions by order, the second model's reductions must not start between
        the reductions of the first: a rank that lacks a gradient of the first model starts the
        first model's reductions only at the end, so its peers would be matched with the wrong
        model. So all reductions of the second model start in its ``_end``, after the first model's
        ``_end``.
        """
        return all(not other.is_running for other in _running if other is not self) or all(
            handle.grads.plan.is_unordered for handle in self._state.handles
        )

    def run_empty(self) -> None:
        """Run a backward that computes no gradients on this rank. Collective.

        The rank takes part in the reductions at the end of the backward. Gradients that the rank
        has accumulated in earlier backwards are reduced, too.
        """
        for handle in self._state.handles:
            handle.count_trainable()
        with torch.enable_grad(), temporarily([self], is_empty=True):
            # Run a backward of a dummy tensor: autograd then calls `_end`.
            nothing = torch.zeros((), requires_grad=True) * 1
            nothing.register_hook(self._begin_empty)
            nothing.backward()

    def _begin_empty(self, _: Tensor) -> None:
        self.begin()

    # ------------------------------------------------------------ a unit's backward

    @untraced  # keep Dynamo from tracing this hook, which may run in a compiled function
    def enter(self, unit: Unit, call: Call, _: Tensor) -> None:
        """Unshard a unit at the beginning of the backward of ``call``. Collective.

        Autograd calls this hook when the gradient of an output of ``call`` is computed.
        """
        self.begin()
        unit.begin_call_backward(call)
        for watcher in self._state.watchers:
            watcher.enter_backward(unit)
        self.unshard(unit)
        if any(handle.clean_version != version for handle, version in call.versions.items()):
            raise written_since_forward(unit)
        # Prefetch only now, after this unit's all-gather is complete: an earlier prefetch would
        # have taken bandwidth from this all-gather.
        self._prefetch.in_backward(unit, is_over=False)

    def unshard(self, unit: Unit) -> None:
        """Unshard the parameters that a unit's backward reads, and wait for them. Collective."""
        # backward(create_graph=True) records a graph that needs the unsharded buffers later.
        if torch.is_grad_enabled() and not unit.running and self.is_running:
            unit.keep_unsharded()
        if unit.phase is Phase.BACKWARD:
            return
        if unit.for_backward:
            # Wait for the all-gather here: the next nodes of the graph read the parameters.
            self._state.unshard(unit, "backward")
        else:
            # Backward reads no parameter of the unit (an embedding table, for example), so start no
            # all-gather. But a recomputed forward reads the unsharded parameters from the modules.
            unit.wait_unshard()
        unit.phase = Phase.BACKWARD

    def unshard_again(self, unit: Unit) -> None:
        """Unshard all parameters of a unit, and wait for them.

        Called if a recomputed forward needs the parameters, or autograd needs a saved view of the
        unsharded buffer. Collective, unless all parameters are unsharded already.
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

        Autograd calls this function after it has filled ``.grad`` of a full parameter, which has
        the number ``index`` in the flat parameter. The reduction starts when all gradients of the
        flat parameter have arrived, and the reductions of all earlier flat parameters have started.
        """
        handle, grad = owner(), full.grad
        if handle is None or grad is None:
            return
        grads, unit = handle.grads, handle.unit
        self: Backward = unit.backward
        if grads.shown:
            grad = grads.take_back(handle.params[index], grad)
        # Empty `.grad`: otherwise autograd would add the next gradient in place, into a tensor that
        # `grads` may have kept without a copy.
        full.grad = None
        # Begin the backward first: `begin` drops the gradients of a backward that failed.
        if not self.is_active or torch._C._current_graph_task_id() != self._graph_task:
            self.begin()
        if index in grads.held:  # this backward has computed two gradients of the parameter
            grads.receive_held(more_to_come=unit.sync is GradSync.ACCUMULATE)
        # This function runs for each parameter. To save time, hold small gradients until all
        # gradients of the flat parameter have arrived.
        held = grads.held
        held[index] = grad
        for watcher in self._state.watchers:
            watcher.on_grad(unit, handle.params[index], grad)
        if len(held) + len(grads.arrived) < handle.num_trainable and index not in grads.large:
            return
        grads.receive_held(more_to_come=unit.sync is GradSync.ACCUMULATE)
        if len(grads.arrived) < handle.num_trainable:
            return
        if unit.sync is not GradSync.ACCUMULATE:
            # Start the reduction, if all earlier reductions have started. Also finish older
            # reductions, because each unfinished reduction takes memory.
            self.queue.add(handle)
            for extension in self._state.extensions:
                extension.between_units()
        self._reshard_if_over(unit)

    @untraced
    def receive_of_input(self, unit: Unit, call: weakref.ref[Call], _: Tensor) -> None:
        """Count a gradient of an input of ``call``. Reshard the unit if its backward is over."""
        if unit.receive_input_gradient(call()):
            self._reshard_if_over(unit)

    def _reshard_if_over(self, unit: Unit) -> None:
        """Reshard a unit if the rest of this backward cannot need the unit's parameters."""
        if not unit.ends_backward:
            return
        unit.reshard(ReshardPoint.AFTER_BACKWARD)
        # By now, the last views of buffers that were resharded earlier may be gone.
        for handle in self._deferred:
            if handle.is_free_deferred:
                handle.reshard(though_held=False)
        self._deferred = [h for h in (*self._deferred, *unit.handles) if h.is_free_deferred]
        for watcher in self._state.watchers:
            watcher.leave_backward(unit)
        for extension in self._state.extensions:
            extension.between_units()
        self._prefetch.in_backward(unit, is_over=True)

    # ------------------------------------------------------------ the end of backward

    @untraced
    def _end(self) -> None:
        """Reduce the remaining gradients, publish ``.grad``, and reshard all units. Collective."""
        state, failed = self._state, True
        is_outermost = state.depth == 0
        used: dict[FlatParamHandle, list[bool]] = {}
        try:
            # If a gradient is missing, the other gradients of the flat parameter are still held.
            for handle in state.handles:
                handle.grads.receive_held(more_to_come=handle.unit.sync is GradSync.ACCUMULATE)
            if any(unit.sync is not GradSync.ACCUMULATE for unit in state.units):
                used = self._reduce_rest()
            failed = False
        finally:
            for unit in state.units:
                # Leave a unit in phase FORWARD unsharded: a forward may run a backward inside (to
                # compute forces, for example) and then continue. Reshard all other units, which
                # also frees buffers that kept their memory because of views.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.reshard(ReshardPoint.BACKWARD_OVER)
                if is_outermost:
                    unit.end_iteration()
            # Set `is_active` last: if an exception interrupts the loop above, `is_active` stays
            # True. Then the next step calls `_drop`, which reshards the remaining units.
            self.is_active = failed
        # Drop the weak reference before autograd drops the callback: a dead reference calls
        # `_fail`.
        self._end_callback = NoneType
        if is_outermost:
            state.forward.saved.backward_has_ended = True
            # Wait until the other ranks have received this rank's data: the optimizer may write the
            # shards next. If this backward is inside a forward, the end of that forward waits.
            with state.span(Kind.RANKS_WAIT):
                state.pending_sends.wait_sends()
        # Complete `.grad` before the users' hooks, which may raise.
        for handle in state.handles:
            if handle.unit.sync is not GradSync.FULL:
                handle.grads.show()
        self._run_hooks(used)
        # Watchers come last in `EXTRAS`. So if Python raises a watcher's warning as an error, all
        # collectives are over, and no other rank waits for this rank.
        for extension in state.extensions:
            extension.end_backward(has_gradients=any(any(flags) for flags in used.values()))

    def _reduce_rest(self) -> dict[FlatParamHandle, list[bool]]:
        """Reduce all remaining gradients, and publish the averages in ``.grad``. Collective.

        Returns, for each flat parameter, whether any rank used each original parameter.
        """
        agreed = self.queue.reduce_rest()
        # Raising is safe here: all ranks raise, and no collective is under way.
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
        """Let the modules hold sharded parameters again, because this backward has failed.

        Called before the caller of ``backward()`` sees the exception: a value that the caller
        writes to an unsharded parameter would be lost.
        """
        # Only do work that cannot wait or raise: the destructor of autograd's graph task calls this
        # method, so Python would only print an exception. With accelerators, the destructor may run
        # on a device's thread. That is safe, because the thread holds Python's lock, and no hook of
        # this backward runs any more. `_drop` does the rest later, including all waits.
        for unit in self._state.units if self.is_active else ():
            unit.leave_failed_backward()

    def recover(self) -> None:
        """Drop the gradients and reductions of the last backward, if it failed."""
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
