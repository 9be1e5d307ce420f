"""Casts around units and modules, and buffers and gradients in another dtype than their own.

[Note: modules in a dtype of their own]
A norm in float32 inside a unit in bfloat16 is no unit: its parameters are a flat parameter of
their own in the unit. Two hooks cast what goes in, and what comes out back to the
dtype that the module was called with. They are the innermost ones of those that were there before,
so that users' hooks see what the caller sees.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

_OWN_DTYPES = "_flatshard_own_dtypes"


# ---------------------------------------------------------------- values


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors in a value: in containers, and in fields of dataclasses.

    What holds none is returned as it is, so that a list which a module appends to stays the same.
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf=_is_packed)
    cast = [_cast_leaf(leaf, dtype) for leaf in leaves]
    if all(after is before for after, before in zip(cast, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(cast, spec)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if _is_packed(leaf):
        return leaf._replace(data=_cast_leaf(leaf.data, dtype))
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return _cast_fields(leaf, dtype)
    return leaf


def _cast_fields(instance: Any, dtype: torch.dtype) -> Any:
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    cast = {name: cast_floats(value, dtype) for name, value in fields.items()}
    if all(cast[name] is fields[name] for name in fields):
        return instance
    twin = copy.copy(instance)
    for name, value in cast.items():
        object.__setattr__(twin, name, value)  # frozen ones too
    return twin


def _first_float(value: Any) -> torch.dtype | None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.dtype
    return None


def _cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # One by one, so that what needs no cast stays the same object.
    return (
        tuple(cast_floats(value, dtype) for value in args),
        {name: cast_floats(value, dtype) for name, value in kwargs.items()},
    )


# ---------------------------------------------------------------- units


@dataclass(frozen=True)
class UnitCasts:
    """The casts of a unit's inputs and outputs.

    Attributes:
        as_root: dtype of its inputs where it is the root; None: as they come.
        below_root: the same elsewhere.
        outputs: dtype of its outputs; None: as its module gives them.
    """

    as_root: torch.dtype | None = None
    below_root: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_root: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The unit's arguments; None where nothing is cast."""
        dtype = self.as_root if is_root else self.below_root
        return None if dtype is None else _cast_arguments(args, kwargs, dtype)

    def cast_output(self, output: Any) -> Any:
        """The unit's output."""
        return output if self.outputs is None else cast_floats(output, self.outputs)


# ---------------------------------------------------------------- modules


class ModuleCasts:
    """Hooks of one module that computes in another dtype than what is around it.

    Args:
        dtype: in which it computes; None: the one that its parameters, or else buffers, have.
        outside: in which what is around it computes, for a module that is called without floating
            point tensors; None: its outputs stay as they are then.
    """

    def __init__(self, dtype: torch.dtype | None, outside: torch.dtype | None) -> None:
        self._dtype, self._outside = dtype, outside
        self._called_with: torch.dtype | None = None

    def install(self, module: nn.Module) -> None:
        """Hook the module; see the note above."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Kept here: the hook after forward is given the arguments already cast.
        self._called_with = _first_float((args, kwargs)) or self._outside
        return _cast_arguments(args, kwargs, self._dtype or _own_dtype(module))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._called_with is None:
            return output
        return cast_floats(output, self._called_with)


def _own_dtype(module: nn.Module) -> torch.dtype:
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float32


# ---------------------------------------------------------------- buffers


def cast_buffers(wanted: Mapping[nn.Module, torch.dtype], left_alone: Collection[int]) -> None:
    """Cast modules' floating point buffers, for good; state dicts give them uncast.

    Args:
        wanted: modules, each with the dtype of its own buffers, not those of its children.
        left_alone: ids of buffers that stay as they are.
    """
    for module in wanted:  # before any is cast: some may be the same
        own = {
            name: buffer.dtype
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in left_alone
        }
        if own:
            module.__dict__[_OWN_DTYPES] = own
            # Torch marks the functions that it is given.
            module.register_state_dict_post_hook(partial(_give_own_dtypes))
    for module, dtype in wanted.items():
        _cast_to(module, dict.fromkeys(module.__dict__.get(_OWN_DTYPES, ()), dtype))


def convert_buffers(
    modules: Iterable[nn.Module], convert: Callable[[], object], fn: Callable[[Tensor], Tensor]
) -> None:
    """Call ``convert``, which applies ``fn`` to buffers, and leave them in the dtype of before.

    As unsharded parameters do, they compute in the policy's dtype whatever ``module.to`` says; what
    changes is their own dtype, which state dicts give.
    """
    cast = [module for module in modules if _OWN_DTYPES in module.__dict__]
    before = [
        {name: module._buffers[name].dtype for name in module.__dict__[_OWN_DTYPES]}  # type: ignore[union-attr]
        for module in cast
    ]
    convert()
    for module, dtypes in zip(cast, before, strict=True):
        own = module.__dict__[_OWN_DTYPES]
        for name, dtype in own.items():
            own[name] = fn(torch.empty(0, dtype=dtype)).dtype
        _cast_to(module, dtypes)


def _cast_to(module: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        buffer = module._buffers[name]
        if buffer is not None and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)


def _give_own_dtypes(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _: dict[str, Any]
) -> None:
    for name, dtype in module.__dict__[_OWN_DTYPES].items():
        value = state_dict.get(prefix + name)
        # With keep_vars=True users want the buffers themselves.
        if isinstance(value, Tensor) and value is not module._buffers.get(name):
            state_dict[prefix + name] = value.to(dtype)


# ---------------------------------------------------------------- gradients

# MixedPrecision(keep_low_precision_grads=True) leaves them in another dtype than the parameter's.
_NOT_IN_LOW_PRECISION: dict[Any, str] = {
    inspect.unwrap(kind.step): why
    for why, names in {
        "needs gradients in the parameters' dtype": ("Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        "would keep its state in the gradients' dtype": ("Adafactor", "LBFGS", "Muon", "Rprop"),
    }.items()
    for name in names
    if (kind := getattr(torch.optim, name, None)) is not None
}
_SGD = inspect.unwrap(torch.optim.SGD.step)


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign ``param.grad``, of whatever floating point dtype."""
    if grad is not None and grad.dtype != param.dtype:
        # None: any dtype. Where torch lacks the attribute, MixedPrecision has raised.
        param.grad_dtype = None
    param.grad = grad


def check_dtype(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter, name: str | None
) -> None:
    """Check before a step that an optimizer accepts a gradient in another dtype.

    Optimizers that are not torch's raise errors of their own.

    Args:
        optimizer: that is about to step.
        group: of its ``param_groups``, the one with ``param``.
        param: whose gradient to look at.
        name: what errors call it; None: nothing.

    Raises:
        RuntimeError: it cannot, or its state would have that dtype too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grad = param.grad
        if grad is None or grad.dtype == param.dtype:
            return
    step = inspect.unwrap(type(optimizer).step)
    why = _NOT_IN_LOW_PRECISION.get(step)
    if group.get("fused"):
        why = "needs gradients in the parameters' dtype with fused=True"
    elif step is _SGD and group["momentum"]:
        why = "would keep its momentum in the gradients' dtype"
    if why is not None:
        named = f"parameter {name!r}: " if name is not None else ""
        raise RuntimeError(
            f"{named}its gradient is {grad.dtype} and it is {param.dtype}, as "
            "MixedPrecision(keep_low_precision_grads=True) asks for, but "
            f"{type(optimizer).__name__} {why}. Leave keep_low_precision_grads out, or use an "
            "optimizer that accepts them: Adadelta, Adagrad, ASGD, RMSprop, SGD without momentum, "
            "or one of your own."
        )
