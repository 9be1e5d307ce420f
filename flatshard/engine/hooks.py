"""``UnitHooks``: connects torch's hooks of modules, tensors and parameters to a step."""

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
from flatshard.precision import tensors_in
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import untraced


class UnitHooks:
    """The hooks of one unit. ``attach`` connects them to the forward and backward of a model.

    ``surround`` registers ``pre_forward`` and ``post_forward`` on modules.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def attach(self, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        """Let the unit own flat parameters, and receive their gradients from autograd."""
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
        """Turn ``twin``, which copied modules already call, into the hooks of ``unit``, a copy."""
        self.unit.copy_into(memo, unit)
        twin.unit = unit
        twin.own(handles)

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self.unit
        if unit.is_summoned:  # modules hold full plain parameters, or must not run here
            for handle in unit.handles:
                handle.summoned.check_shown()
            return None
        call = self._forward.enter(unit)
        changed = unit.casts[module].cast_inputs(args, kwargs, is_root=unit.is_root)
        if torch.is_grad_enabled():
            self._hook_inputs((args, kwargs) if changed is None else changed, call)
        return changed

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast and protect the output, and leave the forward.

        Torch calls this after an exception as well, with ``output`` None.
        """
        unit = self.unit
        if not unit.running:  # the outermost forward raised before it began
            return None
        call = unit.running.pop()
        changed = output
        try:
            if output is not None:
                self._forward.check(unit, module)
                # Cast first: a copy in another dtype is no view of a buffer, so `protect` copies
                # less.
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
        """Register hooks that report the gradients of the tensors in ``value``."""
        receive = partial(self._backward.receive_of_input, self.unit, weakref.ref(call))
        for tensor in tensors_in(value):
            # Skip parameters: their gradients come at the end of backward, long after the unit's.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                call.num_inputs += 1
                hook = tensor.register_hook(receive)
                # Remove the hook with the call: a leaf outlives the graph.
                if tensor.grad_fn is None:
                    weakref.finalize(call, hook.remove).atexit = False

    def _grad_hook(
        self, handle: FlatParamHandle, original: OriginalParam
    ) -> Callable[[Tensor], None]:
        """Make the full parameter's hook, called after autograd has filled ``.grad``."""
        # Hold all objects weakly: Python's garbage collector does not see references from autograd,
        # so a cycle through the hook would never be freed.
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

    Dynamo cannot trace all-gathers, so a graph ends at each of our hooks. ``module.compile()``
    compiles the call of a module together with its hooks. Our hooks therefore go around the
    compiled call, which stays one graph. If the caller is compiled as well, the caller's graph ends
    before the unit and a new graph begins after it.
    """
    before, after = _ModuleHook(hooks, "pre_forward"), _ModuleHook(hooks, "post_forward")
    compiled = module._compiled_call_impl
    if compiled is not None:
        _remove(module)
        module._compiled_call_impl = _compiled_call(module, before, after, compiled)
        # Copies of the module are not compiled. This attribute makes copying fail without the
        # wrapper, as for other modules.
        module.__dict__["_unit_hook"] = before
    elif not any(isinstance(hook, _ModuleHook) for hook in module._forward_pre_hooks.values()):
        # Register first, so that users' own hooks see unsharded parameters. Call the post hook
        # after an exception, too: the user may catch the exception and keep using the model.
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
    """A method of ``UnitHooks`` as a module's hook. Copied only together with the ``UnitHooks``."""

    def __init__(self, hooks: UnitHooks, method: str) -> None:
        self._hooks, self._method = hooks, method
        self._call = getattr(hooks, method)

    @untraced  # compiled callers run the hook uncompiled, between two graphs
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
    """Wrap ``compiled``, the module's compiled call, with the unit's hooks."""

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
