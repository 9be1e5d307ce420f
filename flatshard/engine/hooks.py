"""Hooks that call ``Forward`` before and after the forward of a unit's module."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from flatshard.engine.unit import Unit
from flatshard.tensor.sharded_tensor import untraced


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
