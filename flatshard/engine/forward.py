"""``Forward``: the first half of a step, from the call of the outermost module to its return.

Torch's module hooks call ``before_module`` and ``after_module`` around each unit's forward:

1.  The outermost module is called. ``begin`` cleans up after a failed step, checks the model, and
    sets how backward will reduce gradients. Then the buffers of rank 0 are broadcast.
2.  A unit's module is called. ``enter`` starts the unit's all-gather, unless a prefetch has started
    it, and waits for it, because the module reads the parameters next. The unit's modules hold
    unsharded parameters, and the all-gather of the next unit starts.
3.  The module computes, while the next all-gather is under way. Where autograd saves a view of an
    unsharded buffer, ``saved_tensors`` saves the view's position in the buffer instead.
4.  The module returns. ``check`` raises if the module edited its unsharded parameters, because
    resharding would lose the edit.
5.  ``leave`` lets the modules hold sharded parameters again, and reshards the unit if the strategy
    reshards after forward.
6.  The outermost module returns. ``end`` reshards units that were prefetched but did not run, and
    waits until no other rank reads this rank's shards: an optimizer may write the shards next.

Extensions (``StepExtension``) are optional features that may act in a forward. Watchers are
extensions that only watch a step, such as reports.

[Note: recomputation]
Activation checkpointing runs forwards inside backward. Such a forward unshards its unit, but does
not reshard it, because backward needs the parameters next. Neither does it record the order of
units. A non-reentrant checkpoint stops the forward with an exception once all saved tensors are
recomputed, and later units do not run. So a recomputed forward prefetches no unit.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatshard.comm.work import CollectiveError
from flatshard.engine.backward import Backward
from flatshard.engine.events import Kind
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.run_state import RunState
from flatshard.engine.saved_tensors import SavedTensors
from flatshard.engine.unit import Call, Phase, Unit
from flatshard.memory import give_back_kept
from flatshard.precision import tensors_in
from flatshard.tensor.sharded_tensor import untraced


class Forward:
    """Runs the forward passes of one model. The methods are in the order of their calls."""

    def __init__(
        self, state: RunState, backward: Backward, prefetch: Prefetch, root_module: Any
    ) -> None:
        self._state = state
        self._backward, self._prefetch = backward, prefetch
        self._root_module = root_module  # `RootChecks` (`module.run`)
        # Units that were unsharded for an operation outside of their own forward, in order, each
        # with the number of nested forwards around the operation.
        self._used_outside: list[tuple[int, Unit]] = []

    def refresh(self) -> None:
        """Rebuild saved-tensor hooks and lists of units, after buffers were reallocated."""
        units, handles = self._state.units, self._state.handles
        self.saved = SavedTensors(self._state, self._backward)
        self._units_of_several = [unit for unit in units if len(unit.modules) > 1]
        self._handles_across_nodes = [h for h in handles if h.topology.inter_group.size > 1]

    def recover(self) -> None:
        """Clean up after a step that failed: restore parameters, and drop unfinished gradients."""
        # Restore the parameters first: a failed optimizer step may have replaced parameters.
        self._root_module.recover()
        for extension in self._state.extensions:
            extension.recover()
        self._backward.recover()

    def give_back(self) -> None:
        """Free the memory that is cached for the gradients and buffers of the next step."""
        for handle in self._state.handles:
            if (output := handle.grads.plan.output) is not None:
                output.give_back()
        for give_back in give_back_kept:
            give_back()

    # ------------------------------------------------------------ the outermost forward begins

    def begin(self, unit: Unit | None = None) -> None:
        """Begin the outermost forward. Collective.

        ``unit`` owns the called module. None: no module was called, but an operation uses sharded
        parameters (``OutOfForwardUse``).
        """
        state = self._state
        self.recover()
        # A failing check raises on all ranks, before any communication.
        self._root_module.check()
        self.saved.begin_forward()
        for extension in state.extensions:
            extension.begin_forward(of_root=unit is state.root)
        state.has_run = True  # set after the checks: some checks run only in the first forward

        # Restart the counts of calls, and the recording of the order of units.
        for unit in state.units:
            unit.begin_iteration()
        self._prefetch.order.begin_forward()
        state.expects_backward = torch.is_grad_enabled()
        if state.expects_backward:
            # As in DistributedDataParallel, `no_sync` around the forward decides whether backward
            # reduces.
            state.plan_syncs()
        else:
            # Evaluation needs no memory for gradients, and often runs larger batches.
            self.give_back()
        # All-gathers across nodes are slow. Start those of all units now, to overlap with forward.
        with self._state.span(Kind.STARTING, purpose="forward"):
            for handle in self._handles_across_nodes:
                handle.gather.begin_refresh(handle.flat_param.detach(), handle.version)

    # ------------------------------------------------------------ a module's forward

    def before_module(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Unshard the unit of a module that is called, and cast the inputs. Collective.

        Also hooks the inputs, so that backward counts their gradients.
        """
        # Under `summon_full_params`, modules hold plain full parameters, so there is nothing to
        # unshard. With `rank0_only`, only rank 0 has them, and `check_shown` raises elsewhere.
        if unit.is_summoned:
            for handle in unit.handles:
                handle.summoned.check_shown()
            return None
        call = self.enter(unit)
        changed = unit.casts[module].cast_inputs(args, kwargs, is_root=unit.is_root)
        call.ends_with_gradients = self.saved.ends_with_gradients(unit, call)
        if not torch.is_grad_enabled() or call.ends_with_gradients:
            return changed
        receive = partial(self._backward.receive_of_input, unit, weakref.ref(call))
        given, named = (args, kwargs) if changed is None else changed
        for tensor in tensors_in((*given, *named.values())):
            # Do not count a parameter that is passed as an input: autograd may accumulate its
            # gradient long after this unit's backward is over.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                call.num_inputs += 1
                hook = tensor.register_hook(receive)
                # Reshard this unit before the unit that made the tensor is unsharded: that unit's
                # hook (`Backward.enter`) is on the same tensor.
                call_first(hook, tensor)
                # A leaf tensor outlives the graph, so hooks would pile up on an input of every
                # step. Remove the hook when the call is freed.
                if tensor.grad_fn is None:
                    weakref.finalize(call, hook.remove).atexit = False
        return changed

    def after_module(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> Any:
        """Cast the output, copy views of unsharded buffers in the output, and end the forward.

        If the forward raised an exception, torch calls this hook with ``output=None``.
        """
        if not unit.running:  # `before_module` raised before recording a call
            return None
        call = unit.running.pop()
        changed = output
        try:
            if output is not None:
                self.check(unit, module)
                # Cast first: the result of a cast is no view of an unsharded buffer, so `protect`
                # need not copy it.
                changed = unit.casts[module].cast_output(output)
                changed = self.saved.protect(changed, unit.name)
                self.saved.end_call(unit, call)
                if torch.is_grad_enabled():
                    for tensor in tensors_in(changed):
                        if tensor.grad_fn is not None:
                            tensor.register_hook(partial(self._backward.enter, unit, call))
        finally:
            error = sys.exc_info()[1] if output is None else None
            if error is not None:
                self._root_module.explain(error, unit.name)
            self.leave(unit, changed, failed=error is not None)
        return changed

    def enter(self, unit: Unit) -> Call:
        """Unshard a unit before the forward of a module of the unit. Collective.

        Returns the record of this call, which counts the gradients of the call's inputs in
        backward.
        """
        state, backward = self._state, self._backward
        if state.depth == 0 and not backward.is_running:
            # The call is usually the beginning of a new outermost forward. But if the full model is
            # in a reentrant activation checkpoint, backward begins with a recomputation of the full
            # model, and the call may be the beginning of the recomputation.
            if not self.begins_recomputation():
                self.begin(unit)
        recomputes = backward.is_active and backward.is_running
        # Broadcast before any module reads the buffers, but not if only a part of the model is
        # called.
        if state.buffers is not None and state.depth == 0 and unit is state.root:
            state.buffers.before_forward(recomputes, state.under_no_sync)
        for watcher in state.watchers:
            watcher.enter_forward(unit, recomputes)
        call = Call()
        self.saved.begin_call(unit, call, recomputes=recomputes)
        state.depth += 1
        unit.running.append(call)
        if recomputes:  # the forward belongs to backward, see [Note: recomputation]
            backward.unshard(unit)
            backward.unshard_again(unit)
            return call
        unit.outstanding_backwards += state.expects_backward
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            # Do not record units that ranks may skip: ranks would predict and prefetch different
            # units.
            if not unit.may_diverge:
                self._prefetch.order.record(unit.index)
            # The module reads the parameters next, so wait.
            self.unshard(unit)
            if len(unit.running) == 1:
                state.edits.begin(unit)
            # Prefetch only now: this unit's all-gather had the full bandwidth, and the next one
            # overlaps with this unit's computation.
            self._prefetch.in_forward()
        return call

    def unshard(self, unit: Unit) -> None:
        """Unshard a unit for the forward under way, and wait for the all-gather. Collective."""
        self._state.unshard(unit, "forward")
        unit.phase = Phase.FORWARD

    def unshard_outside(self, unit: Unit) -> None:
        """Unshard a unit for an operation outside of the unit's own forward.

        The unit stays unsharded until the forward around the operation ends. Collective, unless the
        unit is unsharded already.
        """
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            if not unit.running:
                self._used_outside.append((self._state.depth, unit))
            self.unshard(unit)
            self._state.edits.begin(unit)
            # The modules hold unsharded parameters now, also for later operations of the forward.
            if not self.saved.had_hooks:
                self.saved.keep_views(unit)

    def check(self, unit: Unit, module: nn.Module) -> None:
        """Raise if the finished forward of ``module`` edited unsharded parameters in place."""
        if unit.phase is not Phase.FORWARD or unit.running:
            return
        self._state.edits.check(unit, module)
        for depth, used in self._used_outside:
            # A unit that was used at another depth belongs to another forward, whose end checks the
            # unit.
            is_ours = depth == self._state.depth and used.phase is Phase.FORWARD
            if is_ours and not used.running:
                for used_module in used.modules:
                    self._state.edits.check(used, used_module)

    def leave(self, unit: Unit, output: object, *, failed: bool) -> None:
        """End the forward of a module, and reshard the unit if the strategy says so.

        ``output``: the module's output; None if the forward raised an exception (``failed``).
        """
        state, has_output = self._state, output is not None
        if unit.phase is Phase.FORWARD and not unit.running:
            # A reentrant activation checkpoint runs its forward with gradients disabled, although a
            # backward follows.
            backward_follows = has_output and (torch.is_grad_enabled() or state.expects_backward)
            if unit.end_call(backward_follows=backward_follows) or not has_output:
                unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))
        if state.depth == 0:
            return
        state.depth -= 1
        self.saved.pop()
        if self._used_outside:
            self.reshard_used_outside()
        for watcher in state.watchers:
            watcher.leave_forward(unit)
        if self._backward.is_active and self._backward.is_running:
            return  # a recomputed forward, after which backward continues
        if state.expects_backward and not failed:
            # If this was the last unit, start the all-gathers that backward needs first.
            self._prefetch.after_forward()
        if state.depth == 0:
            self.end(output, failed=failed)

    def interrupt(self) -> None:
        """End all forwards under way, which ended with an exception that is no ``Exception``.

        After ``KeyboardInterrupt`` and ``SystemExit``, torch does not call ``leave``. The exception
        may have come at any line, even in this class. So this method relies on no count, and may be
        called again.
        """
        state = self._state
        was_running, state.depth = state.depth > 0, 0
        while self.saved.active:
            self.saved.pop()
        self._used_outside.clear()
        for unit in state.units:
            unit.running.clear()
        if self._backward.is_running:  # a recomputed forward; the backward ends with the exception
            return
        # Wait for all-gathers only afterwards: the user may interrupt the wait, too.
        for unit in state.units:
            unit.put_back()
        for unit in state.units:
            if not unit.is_summoned:
                unit.reshard()
        if was_running:
            self.end(failed=True)

    def reshard_used_outside(self) -> None:
        """Reshard units that an ended forward had unsharded outside of their own forward."""
        while self._used_outside and self._used_outside[-1][0] > self._state.depth:
            _, unit = self._used_outside.pop()
            unit.backward_follows = self._state.expects_backward
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))

    def begins_recomputation(self) -> bool:
        """Whether a reentrant activation checkpoint starts to recompute the full model.

        If so, begin the model's backward: no part of the backward has run yet.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        # A reentrant checkpoint runs the original forward without gradients, so `begin` has planned
        # no reductions.
        self._state.plan_syncs()
        return self._backward.begin()

    # ------------------------------------------------------------ the outermost forward is over

    def end(self, output: object = None, *, failed: bool) -> None:
        """End the outermost forward. Collective.

        Args:
            output: the output of the outermost module. None: there is no output.
            failed: whether the forward ended with an exception.
        """
        for extension in self._state.extensions:
            extension.end_forward(output, failed)
        # A unit of several modules is resharded after as many calls as in the last forward. This
        # forward may have made fewer.
        for unit in self._units_of_several:
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))
        # If units ran in the order of the last forward, all-gathers under way are for the first
        # units of backward. Otherwise one may be for a unit that did not run.
        if failed or not self._prefetch.order.is_complete:
            self._drop_prefetched(failed)
        # Wait until no other rank reads this rank's shards: the optimizer may write the shards
        # next. Waiting once, and not at each unit, lets a rank run ahead.
        with self._state.span(Kind.RANKS_WAIT):
            for handle in self._handles_across_nodes:
                if handle.gather.secondary is not None:
                    handle.gather.secondary.finish_refresh()
            if not failed:  # an error of this wait would hide the error that ended the forward
                self._state.pending_sends.wait_sends()
        for watcher in self._state.watchers:
            watcher.after_forward()

    def _drop_prefetched(self, failed: bool) -> None:
        """Reshard units that were prefetched but did not run."""
        for unit in self._state.units:
            while unit.is_prefetched:
                try:
                    # Resharding waits for the all-gather, which still writes into the buffer.
                    with self._state.span(Kind.GATHER_WAIT, unit):
                        unit.reshard()
                except CollectiveError:
                    # Do not hide the error of the forward.
                    if not failed:
                        raise


def register_forward_hooks(unit: Unit, module: nn.Module) -> None:
    """Let ``module``, a module of ``unit``, call ``Forward`` before and after its forward.

    ``module.compile()`` compiles the call of a module together with the module's hooks. But Dynamo
    cannot trace all-gathers, so a compiled graph would end at each of flatshard's hooks. So for a
    compiled module, this function calls the hooks around the compiled call, which stays one graph.
    If the caller of the module is compiled, too, the caller's graph ends before the unit, and a new
    graph begins after the unit.

    Must be called again after each ``module.compile()``.
    """
    before, after = _ModuleHook(unit, "before_module"), _ModuleHook(unit, "after_module")
    compiled = module._compiled_call_impl
    if compiled is not None:
        held: Any
        for held in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in held.items() if isinstance(hook, _ModuleHook)]:
                del held[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)

        @untraced
        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            try:
                args, kwargs = before(module, args, kwargs) or (args, kwargs)
                output = compiled(*args, **kwargs)
            finally:
                output = after(module, args, output)
            return output

        module._compiled_call_impl = call
        # A copy of a unit's module without the wrapper must raise an error. A copied hook raises,
        # but a compiled module has none registered, so store the hook in an attribute.
        module.__dict__["_unit_hook"] = before
    elif not any(isinstance(hook, _ModuleHook) for hook in module._forward_pre_hooks.values()):
        # Run `before` first (`prepend`), so that users' pre-hooks see unsharded parameters. Run
        # `after` even if the forward raised (`always_call`), so that the user can catch the
        # exception and use the model again.
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


class _ModuleHook:
    """A module hook that calls a method of ``Forward`` with the module's unit.

    Copying the hook raises an error, unless the whole wrapper is copied: only then is there a copy
    of the unit for the copied hook.
    """

    def __init__(self, unit: Unit, method: str) -> None:
        self._unit, self._method = unit, method

    @untraced  # a compiled caller runs the hook without compilation, between two graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._unit.forward, self._method)(self._unit, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        return _ModuleHook(memo.get(id(self._unit)) or self._unit.refuse_to_part(), self._method)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._unit.refuse_to_part()


def call_first(hook: RemovableHandle, tensor: Tensor) -> None:
    """Let autograd call ``hook``, the last hook of ``tensor``, before the tensor's other hooks."""
    hooks: Any = tensor._backward_hooks or {}
    # Autograd ignores the order that `OrderedDict.move_to_end` makes.
    for key in [key for key in hooks if key != hook.id]:
        hooks[key] = hooks.pop(key)
