"""``ModuleProxy``: stands in place of a wrapped module, and has the wrapped module's attributes."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ModuleProxy(nn.Module):
    """Passes on calls, attributes, indices and names to ``module``, its only child."""

    hidden_in_names = True  # the attribute name `module` is not part of the parameters' names
    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective."""
        return self.module(*args, **kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped module's class, so that ``isinstance`` accepts it; ``type()`` is the wrapper.

        ``isinstance(x, ShardedWrapper)`` is true as well, because Python checks ``type(x)`` first.
        """
        # `Module.__init__` and unpickling read this before the wrapped module is set.
        module = self.__dict__.get("_modules", {}).get("module")
        return type(self) if module is None else module.__class__  # type: ignore[no-any-return]

    def _get_name(self) -> str:
        return type(self).__name__

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *super().__dir__()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # the wrapped module is not set yet; avoid an endless recursion
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the wrapper's own attribute, if it has one of this name; otherwise the module's.

        Raises:
            RuntimeError: the value is a module or parameter, or a tensor that replaces a parameter.
        """
        if name != "module" and isinstance(value, nn.Module | nn.Parameter):
            raise RuntimeError(
                f"a {type(value).__name__} assigned to {name!r} of a sharded module would belong "
                "to the wrapper, and the wrapped module would compute without it. Assign it before "
                "wrapping."
            )
        module = self.__dict__.get("_modules", {}).get("module")
        if isinstance(value, Tensor) and module is not None and name in module._parameters:
            raise RuntimeError(
                f"parameter {name!r} of a unit ({module.__class__.__name__}) was replaced by a "
                "tensor, by torch.func.functional_call(), say, while the unit computes with what "
                "it all-gathers. Assign values with p.copy_(...), or call the unwrapped model."
            )
        is_own = module is None or self._has(name) or hasattr(type(self), name)
        if is_own:
            super().__setattr__(name, value)
        # The module's forward reads the module's own attributes, so set `training` on both.
        if not is_own or (name == "training" and module is not None):
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if self._has(name) else delattr(self.module, name)

    def _has(self, name: str) -> bool:
        own = self.__dict__
        return any(name in names for names in (own, own["_modules"], own["_buffers"]))

    # Python looks up operators on the class, so `__getattr__` does not forward them.

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __bool__(self) -> bool:
        # True even if the wrapped module has a length of zero.
        return True

    def register_forward_hook(self, hook: Any, **keywords: Any) -> RemovableHandle:
        """Register the hook, unless the wrapped module has the same hook.

        Some libraries search for instances of a class and register a hook on each. They find the
        wrapped module and, by ``__class__``, also the wrapper: transformers would collect every
        hidden state twice.
        """
        if any(_are_alike(hook, other) for other in self.module._forward_hooks.values()):
            return RemovableHandle(OrderedDict())
        return super().register_forward_hook(hook, **keywords)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) pairs under the names that the model had before it was wrapped."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        # Do not use `super()`, which would add `module.` to every name below.
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Rename keys for torch's recursion, which looks for names with ``module.``."""
        inner = prefix + "module."
        for key in list(state_dict):
            if key.startswith(prefix):
                state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
        _, _, *lists_of_names = args  # lists of missing keys, unexpected keys and error messages

        def clean(*_: Any) -> None:
            for names in lists_of_names:
                names[:] = [name.replace(inner, prefix) for name in names]
            hook.remove()  # the hook closes over the lists of this load only

        hook = self.register_load_state_dict_post_hook(clean)


def put_in_place(proxy: ModuleProxy, module: nn.Module) -> None:
    """Let ``proxy`` wrap ``module``: the proxy calls the module and has the module's signature."""
    from torch._dynamo.decorators import skip  # slow to import; optimizers import it anyway

    proxy.module, proxy.training = module, module.training

    def forward(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    # Let a compiled caller's graph end at this call, not inside a hook that Dynamo would trace.
    for function in (forward, type(proxy).forward, ModuleProxy.forward):
        skip(function)
    with contextlib.suppress(TypeError, ValueError):  # some functions have no signature
        own = inspect.signature(module.forward)
        # Trainers read the arguments of a model from its signature. Python omits the first
        # parameter of a bound method, so add a placeholder.
        bound = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        own = own.replace(parameters=[bound, *own.parameters.values()])
        forward.__signature__ = own  # type: ignore[attr-defined]
        proxy.__dict__["forward"] = MethodType(forward, proxy)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two objects are identical, or functions with the same code and closed-over values."""
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other or (isinstance(one, str | int) and one == other)
    cells = zip(one.__closure__ or (), other.__closure__ or (), strict=False)
    return one.__code__ is other.__code__ and all(
        _are_alike(a.cell_contents, b.cell_contents) for a, b in cells
    )
