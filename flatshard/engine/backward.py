"""``Backward``: the order of a backward, from the first gradient of an output to ``.grad``.

1.  ``enter``, from the hook of an output: the unit is unsharded again, and the one whose backward
    is expected next starts to be.
2.  ``receive``, from the hook of a parameter: its gradient goes into the buffer of the flat
    parameter.
3.  When a bucket's gradients are complete, its reduction starts, in one order on all ranks
    (``reduce_queue``).
4.  When the gradients of the unit's inputs are there too, nothing can need its parameters: it is
    resharded.
5.  ``_end``, a callback that autograd runs after the last node: see the note.

Observers hear of each step and change nothing. Extensions (``StepExtension``) act where they are
called.

[Note: the end of backward]
Ranks may differ by then: one used a parameter that another did not. Every rank tells the others
which parameters it used; units that any rank used are reduced by all, in the one order, and
parameters that none used keep their ``.grad``. Only then may a rank wait for a reduction without a
limit: before, a peer might be unable to start it until its own backward is over.
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

# Backwards of all models that are running, or failed.
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
        """Prepare the end of the backward that runs now, once; False outside of a backward."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if self._is_active:
            if graph_task == self._graph_task:  # asked for every gradient
                return True
            if self._end_callback() is not None:
                self._state.has_inner_backward = True
                return True
            # Autograd dropped the callback with the backward that failed; this is another one.
            self._drop()
        for extension in self._state.extensions:
            extension.begin_backward()
        for observer in self._observers.all:
            observer.begin_backward()
        self._is_active, self._graph_task = True, graph_task
        must_wait = not self._may_reduce_early()
        _running.add(self)
        # Autograd alone holds the callback: where a backward fails, both are gone.
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
        """Whether reductions that begin now meet this model's on all ranks.

        Where they meet by order, they must not come between those of another model, which some
        ranks begin at the end of this backward. This model's end is after that one's.
        """
        return all(not other.is_running for other in _running if other is not self) or all(
            handle.reduce_plan.is_unordered for _, handle in self._state.handles
        )

    # ------------------------------------------------------------ a unit, in the order of events

    @untraced  # as all that autograd calls, which may be inside of a compiled function
    def enter(self, unit: Unit, call: Call, _: Tensor) -> None:
        """A gradient of an output has come: unshard the unit that gave it. Collective."""
        self.begin()
        unit.begin_call_backward(call)
        for observer in self._observers.all:
            observer.enter_backward(unit)
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
            if self.begin() and self.queue.asks_hooks and not unit.may_diverge:
                self.queue.call_hooks()
            self._state.unshard(unit, "backward")
        else:
            unit.wait_unshard()  # recomputed forwards look at the modules
        unit.enter(Phase.BACKWARD)

    def unshard_again(self, unit: Unit) -> None:
        """Bring all parameters back, for a saved view or to compute a forward again.

        Collective, unless they are there.
        """
        if unit.is_current:
            return
        self._state.unshard(unit, "backward", everything=True)
        if self.begin():
            unit.enter(Phase.BACKWARD)

    def bring_back(self, unit: Unit) -> bool:
        """``unshard_again``, if a backward has begun; what it does without was used after all."""
        if unit.phase is not Phase.BACKWARD or not self.is_running:
            return False
        self.unshard_again(unit)
        return True

    def receive(
        self, unit: Unit, handle: FlatParamHandle, param: OriginalParam, full: Tensor
    ) -> None:
        """Take what autograd left in ``full.grad``; start the reduction that it completes."""
        if full.grad is None:
            return
        grad = handle.grad_publish.unreduced.take_back(param, full.grad)
        # Autograd would add the next gradient to it, and the buffer may keep it as it is.
        full.grad = None
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter {param.name!r}: backward(create_graph=True) gives gradients that are "
                "differentiable themselves, which sharded ones cannot be. Use torch.autograd.grad "
                "for the inner gradient and backward() for the outer one."
            )
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        # Before the buffer gets it: `begin` clears what the last backward marked there.
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
            self._is_active = failed  # what is left of it is dropped before the next one
            for unit in state.units:
                # A forward that runs a backward inside, for forces say, goes on afterwards.
                if unit.phase is not Phase.FORWARD and not unit.is_at_rest:
                    unit.reshard(Moment.AFTER_BACKWARD)
            for _, handle in state.handles:
                if handle.lingers:
                    handle.reshard()
        is_outermost = state.depth == 0
        # After units are resharded: other ranks wait for that likewise. What a forward around this
        # backward still needs is released at its end.
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
        # Last: where warnings are errors, the other ranks have nothing to wait for.
        for observer in self._observers.all:
            observer.end_backward()

    def _reduce_rest(self) -> dict[FlatParamHandle, list[bool]]:
        """Reduce and publish what is left; returns which original parameters any rank used."""
        agreed = self.queue.reduce_rest()
        if agreed.edited:  # raised where nothing is under way that a rank would wait for
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
        """Drop what is left of a backward that failed, unless one is running."""
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
