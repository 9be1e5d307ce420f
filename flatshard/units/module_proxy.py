"""``ModuleProxy``: a module around another module, which behaves like the inner module."""

import contextlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType, MethodType
from typing import Any, Self, TypeVar

from torch import nn

# Attribute of the modules of units: the ``Unit``.
UNIT = "_sharded_unit"

Proxy = TypeVar("Proxy", bound="ModuleProxy")


def _of_module(function: Callable[..., Any]) -> Any:
    """Return a method that calls ``function`` with the inner module in place of the wrapper."""
    return lambda self, *args: function(self.module, *args)


class ModuleProxy(nn.Module):
    """Forwards calls, attributes, indexing and names to ``module``, its only child."""

    hidden_in_names = True  # names of parameters do not contain the attribute name `module`

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        # Without this property, each access would call `__getattr__`.
        return self._modules["module"]  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Collective."""
        return self._modules["module"](*args, **kwargs)  # type: ignore[misc]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped module. ``type()`` returns the class of the wrapper.

        So ``isinstance(x, Model)`` is true for a wrapped ``Model``. ``isinstance(x,
        ShardedWrapper)`` is true as well, because Python checks ``type(x)`` first.
        """
        module = self._module_if_set()
        return type(self) if module is None else module.__class__

    @__class__.setter
    def __class__(self, kind: type) -> None:
        self.module.__class__ = kind  # type: ignore[assignment]

    def _module_if_set(self) -> nn.Module | None:
        # `Module.__init__` and unpickling read attributes before the wrapped module is set.
        modules: dict[str, nn.Module] = self.__dict__.get("_modules", {})
        return modules.get("module")

    def _get_name(self) -> str:
        return type(self).__name__

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *super().__dir__()})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (module := self._module_if_set()) is None:
                raise
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the wrapper if the wrapper has it, otherwise on the module."""
        module = self._module_if_set()
        if name == "module" and not hasattr(value, "_orig_mod") and not is_sharded(value):
            text = "its gradients would not be averaged. Wrap it in a new ShardedWrapper"
            raise ValueError(f"model.module = {type(value).__name__}(...): {text}.")
        if module is None or self._has(name) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if self._has(name) else delattr(self.module, name)

    def _has(self, name: str) -> bool:
        own = self.__dict__
        return any(name in names for names in (own, own["_modules"], own["_buffers"]))

    # For an operator such as `model[0]`, Python does not call `__getattr__`.
    __getitem__, __setitem__ = _of_module(operator.getitem), _of_module(operator.setitem)
    __delitem__, __contains__ = _of_module(operator.delitem), _of_module(operator.contains)
    __len__, __iter__ = _of_module(len), _of_module(iter)

    def __bool__(self) -> bool:
        # `if model:` would call `__len__`, and raise for a wrapped module without a length.
        return True

    # Leave the wrapper out of lists of modules. The wrapper, too, is an instance of the module's
    # class, so a program that edits all modules of the class would edit each parameter twice.

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the unwrapped model, with their names. Wrappers are left out.

        Raises ValueError if the caller is DistributedDataParallel or a similar wrapper, which would
        broadcast rank 0's shards to all ranks, or shard the shards.
        """
        refuse_foreign_wrapper()
        return self.module.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children of the wrapped module."""
        refuse_foreign_wrapper()
        return self.module.named_children()

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        refuse_foreign_wrapper()
        return self.module._named_members(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Call ``train`` of the wrapped module, which may keep some modules in evaluation mode."""
        self.module.train(mode)
        return self

    # Register buffers, parameters and modules on the wrapped module, whose forward reads them.

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self.module.add_module(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Add ``module.`` to the keys: torch loads the child from keys with this prefix."""
        inner = prefix + "module."
        for key in list(state_dict):
            if key.startswith(prefix):
                state_dict[inner + key.removeprefix(prefix)] = state_dict.pop(key)
        # The last arguments are lists of missing keys, unexpected keys and error messages.
        _, _, *lists_of_names = args

        def clean(*_: Any) -> None:
            for names in lists_of_names:
                names[:] = [name.replace(inner, prefix) for name in names]
            hook.remove()  # the next call of `load_state_dict` has other lists of names

        hook = self.register_load_state_dict_post_hook(clean)


def put_in_place(proxy: Proxy, module: nn.Module) -> Proxy:
    """Let ``proxy`` wrap ``module``, and return ``proxy``."""
    # Import here, because the import is slow.
    from torch._dynamo.decorators import skip

    proxy._modules["module"] = module
    proxy.__dict__["_parameters"] = module._parameters
    # Delete these attributes of the proxy. Then `__getattr__` returns the module's attributes.
    del proxy.__dict__["training"], proxy.__dict__["_non_persistent_buffers_set"]

    def forward(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    # The graph of a compiled caller must end at this call: Dynamo cannot trace the unit's hooks.
    for function in (forward, type(proxy).forward, ModuleProxy.forward):
        skip(function)
    with contextlib.suppress(TypeError, ValueError):  # some functions have no signature
        own = inspect.signature(module.forward)
        # Trainers read the names of a model's arguments from the signature of `forward`. Add one
        # parameter, because `inspect.signature` leaves out the first parameter of a method.
        bound = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        own = own.replace(parameters=[bound, *own.parameters.values()])
        forward.__signature__ = own  # type: ignore[attr-defined]
        proxy.__dict__["forward"] = MethodType(forward, proxy)
    return proxy


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper, or a module of a unit."""
    return isinstance(module, ModuleProxy) or UNIT in module.__dict__


def callers() -> Iterator[FrameType]:
    """Yield the frames on this thread's call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# ---------------------------------------------------------------- wrappers of torch

# Torch's wrappers that must not be applied to sharded parameters. Keys: the module and name of the
# function that makes or runs the wrapper. Values: the wrapper's name for error messages.
_MAKERS = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "forward"): "DataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    # "": read the wrapper's name (such as `fully_shard`) from the decorated function.
    ("torch.distributed._composable.contract", "wrapper"): "",
    ("torch.distributed.tensor._api", "distribute_tensor"): "distribute_tensor",
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): "parallelize_module",
}


def refuse_foreign_wrapper() -> None:
    """Raise ValueError if another wrapper of torch is being applied to sharded parameters."""
    frame = sys._getframe(1)
    while frame is not None:  # not `callers`, because each `model.parameters()` runs this loop
        place = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if place in _MAKERS:
            made = _MAKERS[place] or getattr(frame.f_locals.get("func"), "__name__", "")
            if made in ("distribute_tensor", "parallelize_module"):
                raise ValueError(
                    f"{made}() cannot follow ShardedWrapper: each rank holds only its range of the "
                    "parameters. First call parallelize_module(model, mesh['tp'], plan) or "
                    "distribute_module(), then ShardedWrapper(model, device_mesh=mesh['dp'])."
                )
            if made in (*_MAKERS.values(), "fully_shard", "replicate"):
                raise ValueError(
                    f"{made} cannot wrap a ShardedWrapper: both would shard or average the same "
                    f"gradients. Either leave {made} out, or use {made} without ShardedWrapper. "
                    "For Accelerate, Trainer and Lightning, use flatshard.integrations."
                )
        frame = frame.f_back  # type: ignore[assignment]
