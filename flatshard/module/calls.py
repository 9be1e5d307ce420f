"""``surround``: a unit's hooks around the calls of its modules, outside of what is compiled.

[Note: compiled modules]
Dynamo cannot trace all-gathers, so each of our hooks is where a graph ends. ``module.compile()``
compiles the call of a module with its hooks; ours go around that call, which stays one graph.
Where the caller is compiled as well, its graph ends at the unit and goes on behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from flatshard.engine.hooks import UnitHooks
from flatshard.tensor.sharded_tensor import untraced


def surround(hooks: UnitHooks, module: nn.Module) -> None:
    """Let ``module``, one of the unit's, call its hooks; again after it was compiled."""
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
