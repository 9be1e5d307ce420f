"""``UnitHooks``: the functions that torch calls for modules, tensors and parameters of a unit.

Torch calls the module hooks before and after a forward. Autograd calls the tensor hooks when the
gradient of a tensor or parameter is computed. All hooks call ``Forward`` or ``Backward``.
"""

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
    """The hooks of one unit. ``attach`` connects the hooks to the forward and backward of a model.

    ``surround`` registers ``pre_forward`` and ``post_forward`` on the unit's modules.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def attach(self, forward: Forward, backward: Backward) -> None:
        self._forward, self._backward = forward, backward

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        """Make ``handles`` the unit's flat parameters, and register hooks for their gradients."""
        self.unit.own(handles)
        for handle in self.unit.handles:
            with torch.inference_mode(False):
                for param in handle.params:
                    param.connect(partial(self._grad_hook, handle))

    def copy_into(
        self, memo: dict[int, Any], twin: UnitHooks, unit: Unit, handles: Iterable[FlatParamHandle]
    ) -> None:
        """Copy this object's unit into ``unit``, and connect ``unit`` to ``twin``.

        Called when the wrapper is copied. The copied modules already call ``twin``.

        Args:
            memo: maps ids of modules to copied modules.
            twin: the copy of this object.
            unit: the copy of this object's unit, still empty.
            handles: the flat parameters of the copied unit.
        """
        self.unit.copy_into(memo, unit)
        twin.unit = unit
        twin.own(handles)

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        unit = self.unit
        # Under `summon_full_params`, modules hold plain full parameters, so there is nothing to
        # unshard. With `rank0_only`, only rank 0 has them, and `check_shown` raises elsewhere.
        if unit.is_summoned:
            for handle in unit.handles:
                handle.summoned.check_shown()
            return None
        call = self._forward.enter(unit)
        changed = unit.casts[module].cast_inputs(args, kwargs, is_root=unit.is_root)
        if torch.is_grad_enabled():
            self._hook_inputs((args, kwargs) if changed is None else changed, call)
        return changed

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast the output, copy views of unsharded buffers in the output, and end the forward.

        If the forward raised an exception, torch calls this hook with ``output=None``.
        """
        unit = self.unit
        if not unit.running:  # `pre_forward` raised before recording a call
            return None
        call = unit.running.pop()
        changed = output
        try:
            if output is not None:
                self._forward.check(unit, module)
                # Cast before `protect` copies views of unsharded buffers: the result of a cast is
                # not a view of a buffer, so `protect` need not copy the result.
                changed = unit.casts[module].cast_output(output)
                changed = self._forward.saved.protect(changed, unit.name)
                if torch.is_grad_enabled():
                    for tensor in tensors_in(changed):
                        if tensor.grad_fn is not None:
                            tensor.register_hook(partial(self._backward.enter, unit, call))
        finally:
            failed = output is None and sys.exc_info()[0] is not None
            self._forward.leave(unit, changed, failed=failed)
        return changed

    def _hook_inputs(self, value: Any, call: Call) -> None:
        """Register hooks on the tensors in ``value``, the inputs of ``call``.

        The hooks count the gradients of the inputs in backward.
        """
        receive = partial(self._backward.receive_of_input, self.unit, weakref.ref(call))
        for tensor in tensors_in(value):
            # Skip parameters that are passed as inputs: autograd accumulates gradients of
            # parameters long after this unit's backward is over.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                call.num_inputs += 1
                hook = tensor.register_hook(receive)
                # A leaf tensor outlives the graph and keeps its hooks, so hooks would pile up on an
                # input that is used in every step. Remove the hook when the call is freed.
                if tensor.grad_fn is None:
                    weakref.finalize(call, hook.remove).atexit = False

    def _grad_hook(
        self, handle: FlatParamHandle, original: OriginalParam
    ) -> Callable[[Tensor], None]:
        """Make the hook that autograd calls after it has filled ``.grad`` of a full parameter."""
        # Let the hook keep only weak references. Python's garbage collector does not see the
        # references from autograd to the hook. So the collector could never free a reference cycle
        # through the hook.
        this, owner, param_of = weakref.ref(self), weakref.ref(handle), weakref.ref(original)

        @untraced
        def hook(full: Tensor) -> None:
            hooks, handle, param = this(), owner(), param_of()
            if hooks is not None and handle is not None and param is not None:
                hooks._backward.receive(hooks.unit, handle, param, full)

        hook.of_flatshard = True
        return hook


def surround(hooks: UnitHooks, module: nn.Module) -> None:
    """Let ``module`` call ``hooks`` before and after its forward.

    ``module.compile()`` compiles the call of a module together with the module's hooks. But Dynamo
    cannot trace all-gathers, so a compiled graph would end at each of flatshard's hooks. So for a
    compiled module, this function calls the hooks around the compiled call, which stays one graph.
    If the caller of the module is compiled, too, the caller's graph ends before the unit, and a new
    graph begins after the unit.

    Must be called again after each ``module.compile()``.
    """
    before, after = _ModuleHook(hooks, "pre_forward"), _ModuleHook(hooks, "post_forward")
    compiled = module._compiled_call_impl
    if compiled is not None:
        _remove(module)
        module._compiled_call_impl = _compiled_call(module, before, after, compiled)
        # A copy of a unit's module without the wrapper must raise an error. Usually the registered
        # hook raises the error when the hook is copied. A compiled module has no registered hook,
        # so store the hook in an attribute: a copy of the module also copies its attributes.
        module.__dict__["_unit_hook"] = before
    elif not any(isinstance(hook, _ModuleHook) for hook in module._forward_pre_hooks.values()):
        # Run before users' pre-hooks (`prepend`), so that users' hooks see unsharded parameters.
        # Run the post hook even after an exception (`always_call`), so that the unit is resharded:
        # the user may catch the exception and use the model again.
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
    """A module hook that calls a method of ``UnitHooks``.

    Copying the hook raises an error, unless the whole wrapper is copied: only then is there a copy
    of the ``UnitHooks`` for the copied hook to call.
    """

    def __init__(self, hooks: UnitHooks, method: str) -> None:
        self._hooks, self._method = hooks, method
        self._call = getattr(hooks, method)

    @untraced  # a compiled caller runs the hook without compilation, between two graphs
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
    """Return a function that calls ``before``, the compiled module, and ``after``."""

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
