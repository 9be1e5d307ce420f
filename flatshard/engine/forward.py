"""``Forward``: the first half of a step, from the call of the outermost module to its return.

Each call of a unit's module calls ``before_module`` and ``after_module`` (``surround_calls``):

1.  The outermost module is called. ``begin`` cleans up after a failed step, checks the model, and
    sets how backward will reduce gradients. Then the module buffers of rank 0 are broadcast.
2.  A unit's module is called. ``enter`` starts the unit's all-gather (if no prefetch has started
    the all-gather already), and waits, because the module reads the parameters next. Then the
    unit's modules have unsharded parameters, and the all-gather of the next unit starts.
3.  The module computes, while the next all-gather runs. Where autograd saves a view of an unsharded
    buffer, ``saved_tensors.py`` saves only the view's position in the buffer.
4.  The module returns. ``check`` raises if the module has edited unsharded parameters, because
    resharding would lose the edit.
5.  ``leave`` puts sharded parameters into the modules again, and frees the unsharded buffer if the
    strategy reshards after forward.
6.  The outermost module returns. ``end`` reshards units that were prefetched but did not run, and
    waits until no other rank reads this rank's shards: an optimizer may write the shards next.

Extensions are optional features that act in a step; watchers are extensions that only observe it.

[Note: recomputation]
Activation checkpointing recomputes forwards inside backward. A recomputed forward unshards its
unit, but does not reshard the unit, because backward needs the parameters next. A recomputed
forward neither records the order of units nor prefetches, because the next unit may not run: a
non-reentrant checkpoint stops the forward by an exception once all saved tensors are recomputed.
"""

import sys
import traceback
import weakref
from collections.abc import Callable
from functools import cache, partial
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatshard.comm.work import CollectiveError, watch
from flatshard.engine.backward import Backward
from flatshard.engine.events import Kind
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.run_state import RunState
from flatshard.engine.saved_tensors import SavedTensors
from flatshard.engine.unit import Call, Phase, ReshardPoint, Unit
from flatshard.precision import tensors_in
from flatshard.tensor.sharded_tensor import untraced
from flatshard.units.module_proxy import ModuleProxy


class Forward:
    """Runs the forward passes of one model. The methods are in the order of their calls."""

    def __init__(
        self, state: RunState, backward: Backward, prefetch: Prefetch, root_module: Any
    ) -> None:
        self._state = state
        self._backward, self._prefetch = backward, prefetch
        self._root_module = root_module  # `RootChecks` (`module.run`)
        self.thread = 0  # id of the latest thread that called a module
        # Units that were unsharded for an operation outside of their own forward, in order. Each
        # entry: the number of nested forwards around the operation, and the unit.
        self._used_outside: list[tuple[int, Unit]] = []

    def refresh(self) -> None:
        """Rebuild saved-tensor hooks and lists of units, after unsharded buffers were replaced."""
        units, handles = self._state.units, self._state.handles
        self.saved = SavedTensors(self._state, self._backward)
        self._units_of_several = [unit for unit in units if len(unit.modules) > 1]
        self._handles_across_nodes = [h for h in handles if h.topology.inter_group.size > 1]

    def recover(self) -> None:
        """Clean up after a step that failed: restore parameters, and drop unfinished gradients."""
        # Undo a failed optimizer step first, because it may have left other parameters in the
        # modules.
        self._root_module.recover()
        for extension in self._state.extensions:
            extension.recover()
        self._backward.recover()

    def give_back(self) -> None:
        """Free the memory that is cached for the gradients of the next step."""
        for handle in self._state.handles:
            if (output := handle.grads.plan.output) is not None:
                output.give_back()

    # ------------------------------------------------------------ the outermost forward begins

    def begin(self, unit: Unit | None = None) -> None:
        """Begin a forward of the model. Collective.

        ``unit``: the unit of the called module. None: no module was called, but an operation uses
        sharded parameters outside of forward (``OutOfForwardUse``).
        """
        state = self._state
        self.recover()
        # If a check fails, it raises on all ranks, before any communication.
        self._root_module.check()
        self.saved.begin_forward()
        for extension in state.extensions:
            extension.begin_forward(unit)
        state.has_run = True  # set after the checks, some of which run only in the first forward

        for unit in state.units:
            unit.begin_iteration()
        self._prefetch.begin_forward()
        state.expects_backward = torch.is_grad_enabled()
        if state.expects_backward:
            # As in DistributedDataParallel, backward does not reduce if `no_sync` was around the
            # forward. (`no_sync` around the backward has no effect.)
            state.plan_syncs()
        else:
            # Free the memory that is cached for gradients: evaluation computes no gradients, and
            # often runs larger batches.
            self.give_back()
        # With HYBRID_SHARD_OP, start the slow all-gathers across nodes of all units now, so that
        # they overlap with the forward.
        if self._handles_across_nodes:
            with self._state.span(Kind.STARTING, purpose="forward"):
                for handle in self._handles_across_nodes:
                    handle.gather.begin_refresh(handle.flat_param.detach(), handle.version)

    # ------------------------------------------------------------ a module's forward

    @untraced
    def take_turn(self) -> None:
        """Let this thread call modules. Raises CollectiveError if another thread is in a step."""
        self.thread = watch().take_turn(self.thread)

    @untraced  # a compiled caller runs this method without compilation, between two graphs
    def before_module(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Unshard the unit of a module that is called, and cast the inputs. Collective.

        Also registers hooks on the inputs, to see when the call's backward is over.
        """
        # Under `summon_full_params`, modules hold plain full parameters, so there is nothing to
        # unshard. With `rank0_only`, only rank 0 has full parameters: `check_shown` raises on other
        # ranks.
        if unit.is_summoned:
            for handle in unit.handles:
                handle.summoned.check_shown()
            return None
        casts, call = unit.casts[module], self.enter(unit)
        changed = casts.cast_inputs(args, kwargs, is_root=unit.is_root)
        call.ends_with_gradients = self.saved.ends_with_gradients(unit, call)
        if not torch.is_grad_enabled() or call.ends_with_gradients:
            return changed
        receive = partial(self._backward.receive_of_input, unit, weakref.ref(call))
        given, named = (args, kwargs) if changed is None else changed
        for tensor in tensors_in((*given, *named.values())):
            # Do not count parameters that are passed as inputs: autograd may compute the gradient
            # of a parameter long after this unit's backward is over.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                call.num_inputs += 1
                hook = tensor.register_hook(receive)
                # The tensor may be the output of another unit. Then the other unit's hook on the
                # tensor (`Backward.enter`) unshards the other unit in backward. Call `receive`
                # before the other unit's hook: this unit is resharded first, which saves memory.
                call_first(hook, tensor)
                # A leaf tensor outlives the graph, and may be an input in every step. Then the
                # hooks would pile up. So remove the hook when the call is freed.
                if tensor.grad_fn is None:
                    weakref.finalize(call, hook.remove).atexit = False
        return changed

    @untraced
    def after_module(
        self, unit: Unit, module: nn.Module, output: Any, *, failed: bool = False
    ) -> Any:
        """End a module's forward: cast the output, register backward's hooks, and reshard.

        Returns the changed output. ``failed``: whether the forward raised an exception.
        """
        # No call is running if `before_module` has raised, or if full parameters are summoned.
        if not unit.running:
            return output
        call, changed = unit.running.pop(), output
        try:
            if output is not None:
                self.check(unit, module)
                # Cast before `protect`, which copies views of an unsharded buffer. The result of a
                # cast is not a view, so `protect` need not copy it.
                changed = unit.casts[module].cast_output(output)
                changed = self.saved.protect(changed, unit.name)
                self.saved.end_call(unit, call)
                for tensor in tensors_in(changed) if torch.is_grad_enabled() else ():
                    if tensor.grad_fn is not None:
                        tensor.register_hook(partial(self._backward.enter, unit, call))
        finally:
            self.leave(unit, changed, failed=failed)
        return changed

    def explain(self, unit: Unit, error: BaseException) -> None:
        """Add a note to an error of a unit's forward, or clean up after an interruption."""
        if isinstance(error, Exception):
            self._root_module.explain(error, unit.name)
        else:
            self.interrupt()

    def enter(self, unit: Unit) -> Call:
        """Unshard a unit before the forward of one of its modules. Collective.

        Returns the record of this call, which counts the gradients of inputs in backward.
        """
        state, backward = self._state, self._backward
        # A call at depth 0 usually begins a forward of the model. But if the full model is inside
        # of a reentrant activation checkpoint, backward begins with a recomputation of the model,
        # and this call may be the beginning of the recomputation.
        if state.depth == 0 and not (backward.is_running or self.begins_recomputation()):
            self.begin(unit)
        recomputes = backward.is_active and backward.is_running
        # Broadcast module buffers before any module reads them, but not if only a part of the model
        # is called.
        if state.buffers is not None and state.depth == 0 and unit is state.root:
            # As in DistributedDataParallel, broadcast again if a checkpoint around the wrapper
            # recomputes the forward. But not while some ranks have no input (`join`): these ranks
            # do not know of the recomputation.
            of_wrapper = calls_wrapper(unit, recomputes) and not (recomputes and state.lacks_ranks)
            state.buffers.before_forward(state.under_no_sync, of_wrapper)
        for watcher in state.watchers:
            watcher.enter_forward(unit, recomputes)
        call = Call()
        self.saved.begin_call(unit, call, recomputes=recomputes)
        state.depth += 1
        unit.running.append(call)
        if recomputes:  # see [Note: recomputation]
            backward.unshard(unit)
            backward.unshard_again(unit)
            return call
        unit.outstanding_backwards += state.expects_backward
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            # Record the order of units, to prefetch them in the next forward. Leave out units that
            # some ranks may skip: otherwise ranks would prefetch different units.
            if not unit.may_diverge:
                self._prefetch.order.append(unit.index)
            self.unshard(unit)
            if len(unit.running) == 1:
                state.edits.begin(unit)
            # Prefetch the next unit only after this unit's all-gather, which needs the full
            # bandwidth. The next unit's all-gather overlaps with this unit's computation.
            self._prefetch.in_forward()
        return call

    def unshard(self, unit: Unit) -> None:
        """Unshard a unit for forward, and wait for the all-gather. Collective."""
        self._state.unshard(unit, "forward")
        unit.phase = Phase.FORWARD

    def unshard_outside(self, unit: Unit) -> None:
        """Unshard a unit for an operation that uses its parameters outside of the unit's forward.

        The unit stays unsharded until the end of the forward (of another unit) that contains the
        operation. Collective, unless the unit is unsharded already.
        """
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            if not unit.running:
                self._used_outside.append((self._state.depth, unit))
            self.unshard(unit)
            self._state.edits.begin(unit)
            # Later operations may read the unsharded parameters from the modules without a call of
            # this method. Without saved-tensor hooks, autograd saves plain views of the buffer for
            # backward. So keep the buffer's memory.
            if not self.saved.had_hooks:
                self.saved.keep_views(unit)

    def check(self, unit: Unit, module: nn.Module) -> None:
        """Raise if the finished forward of ``module`` edited unsharded parameters in place."""
        if unit.phase is not Phase.FORWARD or unit.running:
            return
        self._state.edits.check(unit, module)
        for depth, used in self._used_outside:
            # Also check the units whose parameters this module's forward used directly, without a
            # call of the units. Units used at another depth are checked when that forward ends.
            is_ours = depth == self._state.depth and used.phase is Phase.FORWARD
            if is_ours and not used.running:
                for used_module in used.modules:
                    self._state.edits.check(used, used_module)

    def leave(self, unit: Unit, output: object, *, failed: bool) -> None:
        """End the forward of a module, and reshard the unit if the strategy says so.

        ``output``: the module's output. None: the forward raised an exception (``failed``).
        """
        state, has_output = self._state, output is not None
        if unit.phase is Phase.FORWARD and not unit.running:
            # Do not ask only `is_grad_enabled`: a reentrant activation checkpoint runs its forward
            # with gradients disabled, although a backward follows.
            backward_follows = has_output and (torch.is_grad_enabled() or state.expects_backward)
            if unit.end_call(backward_follows=backward_follows) or not has_output:
                is_needed_soon = self._prefetch.needs_soon(unit)
                unit.reshard(ReshardPoint.AFTER_FORWARD, is_needed_soon=is_needed_soon)
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
            # After the last unit of a forward, start the all-gathers that backward needs first.
            self._prefetch.after_forward()
        if state.depth == 0:
            self.end(output, failed=failed)

    def interrupt(self) -> None:
        """Clean up after ``KeyboardInterrupt`` or ``SystemExit`` in a forward.

        The exception may have come at any line, even in this class. So this method does not rely on
        counts such as ``depth``, and may be called again.
        """
        state = self._state
        was_running, state.depth = state.depth > 0, 0
        while self.saved.active:
            self.saved.pop()
        self._used_outside.clear()
        for unit in state.units:
            unit.running.clear()
        if self._backward.is_running:  # in a recomputed forward; the backward will fail, too
            return
        # First put sharded parameters into all modules, which needs no wait. Resharding waits for
        # all-gathers, and the user may interrupt these waits, too.
        for unit in state.units:
            unit.put_back()
        for unit in state.units:
            if not unit.is_summoned:
                unit.reshard()
        if was_running:
            self.end(failed=True)

    def reshard_used_outside(self) -> None:
        """Reshard the units that ``unshard_outside`` has unsharded in a forward that is over."""
        while self._used_outside and self._used_outside[-1][0] > self._state.depth:
            _, unit = self._used_outside.pop()
            unit.backward_follows = self._state.expects_backward
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))

    def begins_recomputation(self) -> bool:
        """Whether a reentrant activation checkpoint begins to recompute the full model.

        If so, also begins the model's backward, because no hook has begun it yet.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        # Set how backward reduces gradients. `begin` has not done so, because a reentrant
        # checkpoint runs the original forward with gradients disabled.
        self._state.plan_syncs()
        return self._backward.begin()

    # ------------------------------------------------------------ the outermost forward is over

    def end(self, output: object = None, *, failed: bool) -> None:
        """End a forward of the model. Collective.

        Args:
            output: the output of the outermost module, or None.
            failed: whether the forward ended with an exception.
        """
        for extension in self._state.extensions:
            extension.end_forward(output, failed)
        # A unit of several modules is resharded after as many calls as in the last forward. If this
        # forward has made fewer calls, reshard the unit now.
        for unit in self._units_of_several:
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))
        # Drop prefetched units that did not run. If all units ran in the order of the last forward,
        # drop nothing: then unfinished all-gathers are prefetches for backward.
        if failed or not self._prefetch.is_complete:
            self._drop_prefetched(failed)
        # Wait until no other rank reads this rank's shards: the optimizer may write the shards
        # next. Waiting once, and not at each unit, lets a rank run ahead.
        with self._state.span(Kind.RANKS_WAIT):
            for handle in self._handles_across_nodes:
                if handle.gather.secondary is not None:
                    handle.gather.secondary.finish_refresh()
            if not failed:  # otherwise an error of this wait could hide the error of the forward
                self._state.pending_sends.wait_sends()
        for watcher in self._state.watchers:
            watcher.after_forward()

    def _drop_prefetched(self, failed: bool) -> None:
        """Reshard all units whose all-gather was started but not awaited."""
        for unit in self._state.units:
            while unit.is_prefetched:
                try:
                    # Resharding waits for the all-gather, which still writes into the buffer.
                    with self._state.span(Kind.GATHER_WAIT, unit):
                        unit.reshard()
                except CollectiveError:
                    if not failed:  # if failed, the error of the forward is raised
                        raise


# The code of `Module.__call__`.
_CALLS = nn.Module._wrapped_call_impl.__code__  # type: ignore[attr-defined]
# Recognise a wrapper's frame by its file: Dynamo may replace the frame's code object.
_WRAPPERS = ModuleProxy.forward.__code__.co_filename


def calls_wrapper(unit: Unit, recomputes: bool) -> bool:
    """Whether the program called the unit's wrapper, not the wrapped module (``model.module(x)``).

    Also returns True if Dynamo calls the module, because then the stack does not show the caller.
    ``recomputes``: whether activation checkpointing recomputes the forward. Dynamo never calls a
    recomputed forward.
    """
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    calls = [one for one in frames if one.f_code is _CALLS and one.f_locals["self"] in unit.modules]
    proxies = [one.f_locals.get("self") for one in frames if one.f_code.co_filename == _WRAPPERS]
    is_ours = any(getattr(one, "module", None) in unit.modules for one in proxies)
    return is_ours or not (calls or recomputes)


def _call_module(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return type(module)._call_impl(module, *args, **kwargs)


@cache
def _call_of_torchs_class(_kind: Any) -> Callable[..., Any]:
    # Make one function per class, because Dynamo compiles each function only for a few modules.
    return FunctionType(_call_module.__code__.replace(), globals())


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls ``module`` without ``before_module`` and ``after_module``."""
    kind: Any = type(module)
    # Dynamo compiles a call of a torch class only inside another function, here `_call_module`.
    is_torchs = kind.__module__.startswith(("torch.nn.", "torch.ao."))
    return MethodType(_call_of_torchs_class(kind) if is_torchs else kind._call_impl, module)


def surround_calls(unit: Unit, module: nn.Module) -> None:
    """Let each call of ``module`` call ``before_module`` first, and ``after_module`` at the end.

    The program's own hooks of the module run in between, so they see unsharded parameters. After
    ``module.compile()``, the compiled call runs in between.
    """
    # Import here, because the import is slow.
    from torch._dynamo.decorators import skip

    own = module.__dict__.get("_call_impl")
    # The program's own `_call_impl`, if any. In a copy of a unit's module, `call.own` stores it.
    own = getattr(own, "own", own)
    inner = module._compiled_call_impl or own or call_of(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        # A shallow copy of the module has the same attributes, and so this function, too.
        if (caller := sys._getframe(1)).f_code is _CALLS and caller.f_locals["self"] is not module:
            raise RuntimeError(
                f"a copy of a {type(module).__name__} was called that shares the attributes of a "
                "module of a ShardedWrapper. Instead of copy.copy(model.module), call "
                "copy.deepcopy(model)."
            )
        # Before `try`: if this raises, `except` must not end the other thread's forward.
        if get_ident() != unit.forward.thread:
            unit.forward.take_turn()
        try:
            args, kwargs = unit.forward.before_module(unit, module, args, kwargs) or (args, kwargs)
            output = inner(*args, **kwargs)
        except BaseException as error:
            unit.forward.explain(unit, error)
            unit.forward.after_module(unit, module, None, failed=True)
            raise
        try:
            return unit.forward.after_module(unit, module, output)
        except BaseException as error:
            unit.forward.explain(unit, error)
            raise

    call.own = own  # type: ignore[attr-defined]
    # `Module.__call__` calls the compiled call if there is one, otherwise `_call_impl`. `skip` ends
    # the graph of a compiled caller before this call, because Dynamo cannot trace all-gathers.
    module.__dict__["_call_impl"] = skip(call)
    module.__dict__.pop("_compiled_call_impl", None)


def call_first(hook: RemovableHandle, tensor: Tensor) -> None:
    """Move ``hook``, the latest hook of ``tensor``, to the front: autograd calls it first."""
    hooks: Any = tensor._backward_hooks or {}
    # Do not use `OrderedDict.move_to_end`: autograd ignores the order that `move_to_end` makes.
    for key in [key for key in hooks if key != hook.id]:
        hooks[key] = hooks.pop(key)
