"""``UnitHooks``: torch's hooks of modules, tensors and parameters become calls of a step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flatshard.engine.backward import Backward
from flatshard.engine.forward import Forward
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Call, Unit
from flatshard.precision.casts import tensors_in
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import untraced


class UnitHooks:
    """The hooks of one unit; ``attach`` says whose step they belong to.

    ``flatshard.engine.hooks`` puts ``pre_forward`` and ``post_forward`` around modules.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def attach(self, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        """Let the unit own flat parameters, and hear what autograd does with them."""
        self.unit.own(handles)
        for handle in self.unit.handles:
            with torch.inference_mode(False):
                for param in handle.params:
                    param.connect(partial(self._grad_hook, handle))

    def copy_into(
        self,
        memo: dict[int, Any],
        twin: UnitHooks,
        unit: Unit,
        handles: Iterable[FlatParamHandle],
    ) -> None:
        """Make ``twin``, which copied modules already call, the hooks of ``unit``, a copy."""
        self.unit.copy_into(memo, unit)
        twin.unit = unit
        twin.own(handles)

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self.unit
        if unit.is_summoned:  # modules hold full plain parameters, or this rank must not run them
            for handle in unit.handles:
                handle.summoned.check_shown()
            return None
        call = self._forward.enter(unit)
        changed = unit.casts[module].cast_inputs(args, kwargs, is_root=unit.is_root)
        if torch.is_grad_enabled():
            self._hook_inputs((args, kwargs) if changed is None else changed, call)
        return changed

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after an exception too, with ``output`` None."""
        unit = self.unit
        if not unit.running:  # the outermost forward raised before it began
            return None
        call = unit.running.pop()
        changed = output
        try:
            if output is not None:
                self._forward.check(unit, module)
                # The cast first: a copy in another dtype looks into no buffer.
                changed = unit.casts[module].cast_output(output)
                changed = self._forward.saved.protect(changed, unit.name)
                if torch.is_grad_enabled():
                    for tensor in tensors_in(changed):
                        if tensor.grad_fn is not None:
                            tensor.register_hook(partial(self._backward.enter, unit, call))
        finally:
            failed = output is None and sys.exc_info()[0] is not None
            self._forward.leave(unit, has_output=output is not None, failed=failed)
        return changed

    def _hook_inputs(self, value: Any, call: Call) -> None:
        """Hear when the gradients of what ``value`` holds have come."""
        receive = partial(self._backward.receive_of_input, self.unit, weakref.ref(call))
        for tensor in tensors_in(value):
            # Gradients of parameters come at the end, long after the unit's backward.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                call.num_inputs += 1
                hook = tensor.register_hook(receive)
                if tensor.grad_fn is None:  # a leaf outlives the graph, and must not collect hooks
                    weakref.finalize(call, hook.remove).atexit = False

    def _grad_hook(
        self, handle: FlatParamHandle, original: OriginalParam
    ) -> Callable[[Tensor], None]:
        """Make what the full parameter calls once autograd has filled its ``.grad``."""
        # Weakly: Python's collector does not see what autograd holds, and would free no cycle.
        this, owner, param_of = weakref.ref(self), weakref.ref(handle), weakref.ref(original)

        @untraced
        def hook(full: Tensor) -> None:
            hooks, handle, param = this(), owner(), param_of()
            if hooks is not None and handle is not None and param is not None:
                hooks._backward.receive(hooks.unit, handle, param, full)

        hook.of_flatshard = True
        return hook


def surround(hooks: UnitHooks, module: nn.Module) -> None:
    """Let ``module``, one of the unit's, call its hooks; again after it was compiled.

    Dynamo cannot trace all-gathers, so each of our hooks is where a graph ends.
    ``module.compile()`` compiles the call of a module with its hooks; ours go around that call,
    which stays one graph. Where the caller is compiled as well, its graph ends at the unit and goes
    on behind it.
    """
    before, after = _ModuleHook(hooks, "pre_forward"), _ModuleHook(hooks, "post_forward")
    compiled = module._compiled_call_impl
    if compiled is not None:
        _remove(module)
        module._compiled_call_impl = _compiled_call(module, before, after, compiled)
        # Copies are not compiled, but are refused as those of other modules are.
        module.__dict__["_unit_hook"] = before
    elif not any(isinstance(hook, _ModuleHook) for hook in module._forward_pre_hooks.values()):
        # First: users' own hooks see unsharded parameters. After an exception, too: whoever
        # catches it may go on with the model.
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


def _remove(module: nn.Module) -> None:
    held: Any
    for held in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in held.items() if isinstance(hook, _ModuleHook)]:
            del held[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


class _ModuleHook:
    """A method of ``UnitHooks`` as a module's hook; is copied with them, or not at all."""

    def __init__(self, hooks: UnitHooks, method: str) -> None:
        self._hooks, self._method = hooks, method
        self._call = getattr(hooks, method)

    @untraced  # compiled callers run it as it is, between two graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        twin = memo.get(id(self._hooks)) or self._hooks.unit.refuse_to_part()
        return _ModuleHook(twin, self._method)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._hooks.unit.refuse_to_part()


def _compiled_call(
    module: nn.Module, before: _ModuleHook, after: _ModuleHook, compiled: Callable[..., Any]
) -> Any:
    """What a compiled module calls in place of its graph, which is ``compiled``."""

    @untraced
    def call(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = before(module, args, kwargs) or (args, kwargs)
            output = compiled(*args, **kwargs)
        finally:
            output = after(module, args, output)
        return output

    return call
