"""Casts around units and modules, and buffers and gradients in another dtype than their own.

A precision policy belongs to one unit. ``PrecisionPlan`` decides, before anything is sharded, which
parameters and modules inside the unit deviate from the policy: here modules of the classes in
``module_classes_to_ignore``, and in the extra ``overrides`` also modules and parameters by name or
by function. Parameters that deviate become flat parameters of their own, and modules that deviate
get hooks that cast at their boundary.

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
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from flatshard.options.precision import MixedPrecision, ParamPrecision, ReduceMode
from flatshard.plan.module_proxy import ModuleProxy

# In a module's `__dict__`: the dtype of its buffers, and by name the one that they had.
_CAST_BUFFERS = "_flatshard_cast_buffers"


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors in a value: in containers, and in fields of dataclasses."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda one: isinstance(one, PackedSequence))
    cast = [_cast_leaf(leaf, dtype) for leaf in leaves]
    # The object itself where nothing is cast: a list that a module appends to stays the same.
    if all(after is before for after, before in zip(cast, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(cast, spec)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=_cast_leaf(leaf.data, dtype))
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    cast = {name: cast_floats(value, dtype) for name, value in fields.items()}
    if all(cast[name] is fields[name] for name in fields):
        return leaf
    twin = copy.copy(leaf)
    for name, value in cast.items():
        object.__setattr__(twin, name, value)  # frozen ones too
    return twin


def _cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # One by one, so that what needs no cast stays the same object.
    return (
        tuple(cast_floats(value, dtype) for value in args),
        {name: cast_floats(value, dtype) for name, value in kwargs.items()},
    )


@dataclass(frozen=True)
class UnitCasts:
    """The casts of a unit's inputs and outputs; None: they stay as they are."""

    as_root: torch.dtype | None = None  # of its inputs, where it is the root
    below_root: torch.dtype | None = None  # of its inputs elsewhere
    outputs: torch.dtype | None = None

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_root: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The unit's arguments; None where nothing is cast."""
        dtype = self.as_root if is_root else self.below_root
        return None if dtype is None else _cast_arguments(args, kwargs, dtype)

    def cast_output(self, output: Any) -> Any:
        return output if self.outputs is None else cast_floats(output, self.outputs)


class ModuleCasts:
    """Hooks of one module that computes in another dtype than its parent module; see the note."""

    def __init__(self, dtype: torch.dtype | None, outside: torch.dtype | None) -> None:
        # None: the dtype that its parameters, or else buffers, have.
        self._dtype = dtype
        # In which its outputs are, where it is called without floating point tensors.
        self._outside = outside
        self._called_with: torch.dtype | None = None

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Kept here: the hook after forward is given the arguments already cast.
        self._called_with = _first_float(pytree.tree_leaves((args, kwargs))) or self._outside
        # Looked up at each call: the module may have been converted since it was wrapped.
        own = _first_float(chain(module.parameters(), module.buffers())) or torch.float32
        return _cast_arguments(args, kwargs, self._dtype or own)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._called_with is None else cast_floats(output, self._called_with)


def _first_float(values: Iterable[Any]) -> torch.dtype | None:
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def cast_buffers(wanted: Mapping[nn.Module, torch.dtype], left_alone: Collection[int]) -> None:
    """Cast modules' own floating point buffers, for good; state dicts give them uncast.

    Buffers whose ids are ``left_alone`` stay as they are.
    """
    for module, dtype in wanted.items():  # before any is cast: some may be the same
        own = {
            name: buffer.dtype
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_floating_point() and id(buffer) not in left_alone
        }
        if own:
            module.__dict__[_CAST_BUFFERS] = dtype, own
            # Torch marks the functions that it is given.
            module.register_state_dict_post_hook(partial(_give_own_dtypes))
    for module in wanted:
        _cast_again(module)


def convert_buffers(modules: Iterable[nn.Module], fn: Callable[[Tensor], Tensor]) -> None:
    """After a conversion that applied ``fn`` to buffers, give them their policy's dtype again."""
    for module in modules:
        # As unsharded parameters do, they compute in the policy's dtype whatever `module.to` says;
        # what changes is their own dtype, which state dicts give.
        _, own = module.__dict__.get(_CAST_BUFFERS, (None, {}))
        for name, dtype in own.items():
            own[name] = fn(torch.empty(0, dtype=dtype)).dtype
        _cast_again(module)


def _cast_again(module: nn.Module) -> None:
    dtype, own = module.__dict__.get(_CAST_BUFFERS, (None, {}))
    for buffer in (module._buffers[name] for name in own):
        if buffer is not None and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)


def _give_own_dtypes(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _: dict[str, Any]
) -> None:
    _, own = module.__dict__[_CAST_BUFFERS]
    for name, dtype in own.items():
        value = state_dict.get(prefix + name)
        # With keep_vars=True users want the buffers themselves.
        if isinstance(value, Tensor) and value is not module._buffers.get(name):
            state_dict[prefix + name] = value.to(dtype)


# Torch's optimizers, by name, that cannot step gradients of another dtype than the parameter's,
# as MixedPrecision(keep_low_precision_grads=True) leaves them, or should not; and why.
_NEEDS_SAME_DTYPE = "needs gradients in the parameters' dtype"
_REFUSALS = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam"), _NEEDS_SAME_DTYPE),
    **dict.fromkeys(
        ("Adafactor", "LBFGS", "Muon", "Rprop"), "would keep its state in the gradients' dtype"
    ),
}


# Under DisableTorchFunctionSubclass these take a third of the time of the attribute.
_GRAD: Any = Tensor.grad
get_grad, _put_grad = _GRAD.__get__, _GRAD.__set__


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign ``param.grad``, of whatever floating point dtype."""
    if grad is not None and grad.dtype != param.dtype:
        # None: any dtype. Where torch lacks the attribute, MixedPrecision has raised.
        param.grad_dtype = None
    _put_grad(param, grad)


def check_dtype(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: nn.Parameter, name: str | None
) -> None:
    """Check before a step that an optimizer accepts a gradient in another dtype.

    Raises:
        RuntimeError: it cannot, or its state would have that dtype too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grad = param.grad
        if grad is None or grad.dtype == param.dtype:
            return
    # The class whose `step` runs. A subclass may define its own `step`, with its own errors.
    step = inspect.unwrap(type(optimizer).step)
    kind = step.__qualname__.partition(".")[0] if step.__module__.startswith("torch.") else ""
    why = _REFUSALS.get(kind)
    if group.get("fused"):
        why = f"{_NEEDS_SAME_DTYPE} with fused=True"
    elif kind == "SGD" and group["momentum"]:
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


_OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors of arguments or outputs: in containers, and in the attributes of plain objects.

    ``depth``: how many objects may lie inside of one another; 0: only lists, tuples and mappings.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth)
    elif depth and not isinstance(value, _OPAQUE):
        leaves = pytree.tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            yield from tensors_in(leaves, depth - 1)
        elif hasattr(value, "__dict__"):
            yield from tensors_in(list(vars(value).values()), depth - 1)


@dataclass(frozen=True)
class Override:
    """The dtype of modules or parameters that deviate from the policy; None: their own dtype."""

    dtype: torch.dtype | None

    def __str__(self) -> str:
        return "its own dtype" if self.dtype is None else str(self.dtype)


class PrecisionPlan:
    """The precision of a model, decided before the model is changed.

    The extra ``overrides`` has a subclass that also chooses by name and by function.
    """

    def __init__(
        self,
        root: nn.Module,
        # The policy of every planned unit, including the root. An inner unit with its own policy
        # takes no overrides from the policy of an outer unit.
        policies: Mapping[nn.Module, MixedPrecision],
        left_alone: Collection[int],  # ids of parameters and buffers: ignored, or another unit's
    ) -> None:
        """Decide.

        Raises:
            TypeError: a function in ``overrides`` gives something else than a floating point dtype.
            ValueError: tied parameters would have to be in several dtypes.
        """
        self._root, self._policies, self._left_alone = root, policies, left_alone
        self._policy_of: dict[nn.Module, MixedPrecision] = {}
        self._override_of: dict[nn.Module, Override | None] = {}
        self._casts: dict[nn.Module, ModuleCasts] = {}
        self._override_of_param: dict[int, Override | None] = {}  # by the parameter's id
        self._not_linear: set[int] = set()  # ids of parameters
        if not all(policy.changes_nothing for policy in policies.values()):
            self._plan_module(root, policies[root], None)

    def _plan_module(
        self, module: nn.Module, policy: MixedPrecision, around: Override | None
    ) -> None:
        """Decide for a module and all below it.

        ``policy`` and ``around`` are the policy and the override of the module's parent.
        """
        if module in self._policy_of or isinstance(module, ModuleProxy):
            return
        if (own_policy := self._policies.get(module, policy)) != policy:
            policy, around = own_policy, None
        override = self.choose_for_module(module, policy, around)
        self._policy_of[module], self._override_of[module] = policy, override
        outside = _dtype_of(policy, around)
        if override is not None and override.dtype != outside:
            self._casts[module] = ModuleCasts(override.dtype, outside)
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in self._left_alone:
                self._plan_param(module, attribute, param)
        for child in module.children():
            self._plan_module(child, policy, override)

    def _plan_param(self, module: nn.Module, attribute: str, param: nn.Parameter) -> None:
        if not param.is_floating_point():
            return
        if not (isinstance(module, nn.Linear) and attribute == "weight"):
            self._not_linear.add(id(param))
        override = self.choose_for_param(module, attribute, param)
        before = self._override_of_param.setdefault(id(param), override)
        if before != override:
            named = self._root.named_parameters(remove_duplicate=False)
            names = [repr(name) for name, tied in named if tied is param]
            raise ValueError(
                f"mixed_precision: parameters {' and '.join(names)} are tied, and would be "
                f"unsharded in {before or 'param_dtype'} and in {override or 'param_dtype'}. Name "
                "all of them in overrides."
            )

    def choose_for_module(
        self, module: nn.Module, policy: MixedPrecision, around: Override | None
    ) -> Override | None:
        """The override of a module, in whose parent the override ``around`` holds."""
        is_ignored = isinstance(module, tuple(policy.module_classes_to_ignore))
        return Override(None) if is_ignored else around

    def choose_for_param(
        self, module: nn.Module, attribute: str, param: nn.Parameter
    ) -> Override | None:
        """The override of the parameter ``module.attribute``."""
        return self._override_of[module]

    def describe(self) -> str:
        """The choices that must be the same on every rank and are not in the policies."""
        return ""

    def warnings(self) -> list[str]:
        """Warnings about settings that have no effect."""
        casts = any(policy.param_dtype or policy.buffer_dtype for policy in self._policies.values())
        if not casts or os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") != "1":
            return []
        return [
            "mixed_precision: FSDP_USE_FULL_PREC_IN_EVAL=1 has no effect: after model.eval() "
            "param_dtype and buffer_dtype are used as in training. To evaluate in full precision, "
            "wrap without them, and train under torch.autocast"
        ]

    def of_param(self, param: nn.Parameter, policy: MixedPrecision) -> ParamPrecision:
        """The dtypes of a parameter and its gradient; ``policy`` is its unit's."""
        own = ParamPrecision(
            keeps_reduce_dtype=policy.keep_low_precision_grads,
            fixed_order=policy.reduce_mode is ReduceMode.FIXED_ORDER,
        )
        if not param.is_floating_point():
            return own
        override = self._override_of_param.get(id(param))
        if override is None:
            return replace(
                own,
                compute_dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype,
                gather_dtype=None if id(param) in self._not_linear else policy.gather_dtype,
            )
        computed, reduce_dtype = override.dtype or param.dtype, None
        if policy.reduce_dtype is not None:
            # A parameter kept in fp32, say, is not to have its gradient rounded to bf16.
            wider = torch.promote_types(computed, policy.reduce_dtype)
            reduce_dtype = None if wider == computed else wider
        return replace(own, compute_dtype=override.dtype, reduce_dtype=reduce_dtype)

    def of_unit(self, module: nn.Module, policy: MixedPrecision) -> UnitCasts:
        """The casts of a unit's inputs and outputs."""
        # What the module casts itself, the unit must not cast before.
        override = self._override_of.get(module)
        inputs = None if module in self._casts else _dtype_of(policy, override)
        return UnitCasts(
            as_root=inputs if policy.cast_root_forward_inputs else None,
            below_root=inputs if policy.cast_forward_inputs else None,
            outputs=policy.output_dtype,
        )

    def install(self) -> None:
        """Hook modules, and cast buffers."""
        for module, casts in self._casts.items():
            casts.install(module)
        wanted = {
            module: policy.buffer_dtype
            for module, policy in self._policy_of.items()
            if policy.buffer_dtype is not None and self._override_of[module] is None
        }
        cast_buffers(wanted, self._left_alone)


def _dtype_of(policy: MixedPrecision, override: Override | None) -> torch.dtype | None:
    """The dtype of unsharded parameters; None: their own."""
    return policy.param_dtype if override is None else override.dtype
