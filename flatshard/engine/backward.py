"""``Backward``: the order of a backward, from the first gradient of an output to ``.grad``.

1.  ``enter``, from the hook of a unit's output: the unit is unsharded again, and the all-gather of
    the unit whose backward is expected next starts.
2.  ``receive``, from the hook of a parameter: its gradient goes into the buffer of the flat
    parameter.
3.  When a bucket's gradients are complete, its reduction starts, in one order on all ranks
    (``reduce_queue``).
4.  When the gradients of the unit's inputs have arrived too, no more computation needs the unit's
    parameters, and the unit is resharded.
5.  ``_end``, a callback that autograd runs after the last node: see the note.

Observers are told of each step and change nothing. Extensions (``StepExtension``) may act in the
places that call them.

[Note: the end of backward]
At the end of a backward ranks may differ: a parameter may be used on one rank and unused on
another. Every rank tells the other ranks which parameters it used. All ranks reduce the units that
any rank used, in one order. Parameters that no rank used keep their ``.grad``. Only at the end may
a rank wait for a reduction without a time limit: earlier, a peer may be unable to start the
reduction until its own backward is over.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flatshard.engine.events import Kind
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.grad_publish import edited
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.reduce_queue import ReduceQueue
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Call, Moment, Phase, Unit
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import untraced

# Backwards of all models that are running or have failed.
_running: weakref.WeakSet[Backward] = weakref.WeakSet()


class Backward:
    def __init__(self, state: RunState, prefetch: Prefetch) -> None:
        self._state, self._observers, self._prefetch = state, state.observers, prefetch
        self.queue = ReduceQueue(state)
        self._is_active = False
        self._graph_task = -1
        self._end_callback: Callable[[], object] = lambda: None
        self._had_accumulated = False
        self._lingering: list[FlatParamHandle] = []

    @property
    def is_running(self) -> bool:
        """Whether this model's backward is running now, on this thread."""
        return (
            self._is_active
            and torch._C._current_graph_task_id() != -1
            and self._end_callback() is not None
        )

    def begin(self) -> bool:
        """Register the end of the present backward, once; returns False outside of a backward."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if self._is_active:
            if graph_task == self._graph_task:  # the usual case: this runs for every gradient
                return True
            if self._end_callback() is not None:
                self._state.has_inner_backward = True
                return True
            # The earlier backward failed, and autograd dropped its callback. This is another
            # backward.
            self._drop()
        for extension in self._state.extensions:
            extension.begin_backward()
        for observer in self._observers.all:
            observer.begin_backward()
        self._is_active, self._graph_task = True, graph_task
        must_wait = not self._may_reduce_early()
        _running.add(self)
        # Keep only a weak reference: autograd owns the callback, and drops the callback if the
        # backward fails. A dead reference then shows the failure.
        callback = partial(self._end)
        self._end_callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._had_accumulated = self._state.has_inner_backward = False
        for unit in self._state.units:
            unit.begin_model_backward()
        self._had_accumulated = any(h.grad_publish.holds_gradients for _, h in self._state.handles)
        self.queue.begin_backward(must_wait=must_wait)
        return True

    def _may_reduce_early(self) -> bool:
        """Whether reductions that start now match this model's reductions on all ranks.

        If a transport matches reductions by their order, this model's reductions must not start
        between those of another model whose backward is running: some ranks start the other model's
        at the end of this backward. In that case this model's reductions wait for the end, and its
        end comes after the other model's end.
        """
        return all(not other.is_running for other in _running if other is not self) or all(
            handle.reduce_plan.is_unordered for _, handle in self._state.handles
        )

    # ------------------------------------------------------------ a unit, in the order of events

    @untraced  # autograd may call this inside of a compiled function
    def enter(self, unit: Unit, call: Call, _: Tensor) -> None:
        """Unshard a unit for backward: a gradient of an output has come. Collective."""
        self.begin()
        unit.begin_call_backward(call)
        for observer in self._observers.all:
            observer.enter_backward(unit)
        self.unshard(unit)
        # Prefetch only after this unit's own all-gather, which needs the full bandwidth.
        self._prefetch.before_backward(unit)

    def unshard(self, unit: Unit) -> None:
        """Unshard the parameters that a unit's backward needs, if not unsharded. Collective."""
        if torch.is_grad_enabled() and not unit.running and self.is_running:
            unit.stick()
        if unit.phase is Phase.BACKWARD:
            return
        if unit.for_backward:
            # All ranks come here, so users' hooks can reduce the buckets that all ranks have.
            if self.begin() and self.queue.asks_hooks and not unit.may_diverge:
                self.queue.call_hooks()
            self._state.unshard(unit, "backward")
        else:
            unit.wait_unshard()  # recomputed forwards use the modules' parameters
        unit.enter(Phase.BACKWARD)

    def unshard_again(self, unit: Unit) -> None:
        """Unshard all parameters again, for a saved view or to recompute a forward.

        Collective, unless they are unsharded.
        """
        if unit.is_current:
            return
        self._state.unshard(unit, "backward", everything=True)
        if self.begin():
            unit.enter(Phase.BACKWARD)

    def bring_back(self, unit: Unit) -> bool:
        """Unshard parameters again that backward was expected not to use, but did use.

        Returns whether the unit's backward is running, so that this was done.
        """
        if unit.phase is not Phase.BACKWARD or not self.is_running:
            return False
        self.unshard_again(unit)
        return True

    def receive(
        self, unit: Unit, handle: FlatParamHandle, param: OriginalParam, full: Tensor
    ) -> None:
        """Take the gradient in ``full.grad``, and start the reduction if its bucket is complete."""
        if full.grad is None:
            return
        grad = handle.grad_publish.unreduced.take_back(param, full.grad)
        # Remove the gradient from the parameter: autograd would add the next gradient to it, but
        # the buffer may keep it without a copy.
        full.grad = None
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter {param.name!r}: backward(create_graph=True) gives gradients that are "
                "differentiable themselves, which sharded ones cannot be. Use torch.autograd.grad "
                "for the inner gradient and backward() for the outer one."
            )
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        # Call `begin` before the buffer receives the gradient: `begin` clears the marks of the last
        # backward.
        self.begin()
        handle.grad_buffer.receive(param.index, grad, more_to_come=unit.sync is Sync.NONE)
        for observer in self._observers.all:
            observer.on_grad(unit, param, grad)
        bucket = self.queue.bucket_of[handle]
        if not bucket.is_complete():
            return
        if unit.sync is not Sync.NONE:
            self.queue.add(bucket)
            for extension in self._state.extensions:
                extension.between_units()
        self._reshard_if_over(unit)

    @untraced
    def receive_of_input(self, unit: Unit, call: weakref.ref[Call], _: Tensor) -> None:
        if unit.receive_input_gradient(call()):
            self._reshard_if_over(unit)

    def _reshard_if_over(self, unit: Unit) -> None:
        if not unit.ends_backward:
            return
        unit.reshard(Moment.AFTER_BACKWARD)
        for handle in self._lingering:
            if handle.lingers:
                handle.reshard(though_held=False)
        self._lingering = [h for h in (*self._lingering, *unit.handles) if h.lingers]
        for observer in self._observers.all:
            observer.leave_backward(unit)
        for extension in self._state.extensions:
            extension.between_units()
        self._prefetch.after_backward(unit)

    # ------------------------------------------------------------ it ends

    @untraced
    def _end(self) -> None:
        state, failed = self._state, True
        used: dict[FlatParamHandle, list[bool]] = {}
        try:
            if any(unit.sync is not Sync.NONE for unit in state.units):
                used = self._reduce_rest()
            failed = False
        finally:
            self._is_active = failed  # after a failure, the next step drops the remains
            for unit in state.units:
                # Leave units in forward unsharded: a forward may run a backward inside (to compute
                # forces, for example) and then continue.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.reshard(Moment.AFTER_BACKWARD)
            for _, handle in state.handles:
                if handle.lingers:
                    handle.reshard()
        is_outermost = state.depth == 0
        # Wait after units are resharded. Sends of a forward around this backward are released at
        # the end of that forward.
        if is_outermost:
            with self._observers.span(Kind.RANKS_WAIT):
                state.pending_sends.wait_sends()
        self._run_hooks(used)
        if is_outermost:
            for unit in state.units:
                unit.end_iteration()
        for extension in state.extensions:
            extension.end_backward(has_gradients=any(any(flags) for flags in used.values()))
        for unit, handle in state.handles:
            if unit.sync is not Sync.ALL:
                handle.grad_publish.show_unreduced()
        # Call observers last: if a warning is raised as an error, no other rank waits for this one.
        for observer in self._observers.all:
            observer.end_backward()

    def _reduce_rest(self) -> dict[FlatParamHandle, list[bool]]:
        """Reduce and publish the rest; returns which original parameters any rank used."""
        agreed = self.queue.reduce_rest()
        if agreed.edited:  # no collective is under way here that another rank would wait for
            raise edited(agreed.edited[0].name)
        for unit, handle in self._state.handles:
            if unit.sync is Sync.ALL:
                handle.publish(agreed.used[handle])
            elif unit.sync is Sync.INTRA:
                handle.grad_buffer.mark_used(agreed.used[handle])
        for extension in self._state.extensions:
            extension.reduced_late([unit for unit, _ in agreed.left_over])
        return agreed.used

    def _run_hooks(self, used: dict[FlatParamHandle, list[bool]]) -> None:
        try:
            for unit, handle in self._state.handles:
                if used and unit.sync is Sync.ALL:
                    for param in handle.params:
                        if used[handle][param.index]:
                            param.run_hooks()
        finally:
            for _, handle in self._state.handles:
                if handle.is_aliased:
                    handle.give_hooks_back()

    def recover(self) -> None:
        """Drop the remains of a failed backward, unless a backward is running."""
        if self._is_active and torch._C._current_graph_task_id() == -1:
            self._drop()

    def _drop(self) -> None:
        self._is_active = False
        if self._had_accumulated:
            warnings.warn(
                "a backward failed, and gradients accumulated before it are lost with it. "
                "Accumulate them again.",
                stacklevel=4,
            )
        try:
            self.queue.drop()
        finally:
            for unit in self._state.units:
                unit.reset()
