"""Mixed precision: casts of inputs, outputs and buffers, and gradients in another dtype.

Before anything is sharded, ``PrecisionPlan`` finds the parameters and modules in a unit whose dtype
differs from ``param_dtype`` of the unit's ``MixedPrecision``. These are modules of the classes in
``module_classes_to_ignore``, and with the extra ``overrides`` also modules and parameters that the
user chooses by name. Such parameters are in a separate flat parameter.

[Note: modules in a dtype of their own]
Example: a float32 norm inside a bfloat16 unit. A forward pre-hook casts the norm's inputs to
float32. A forward hook casts its outputs back to the dtype of the inputs. Both hooks run inside of
the hooks that users registered before wrapping, which see the tensors of the caller.
"""

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from flatshard.options.extras import extra
from flatshard.options.precision import MixedPrecision, ParamPrecision, ReduceMode
from flatshard.units.module_proxy import is_sharded

# The arguments of a call.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Name of an attribute that modules with cast buffers get. Its value is a pair: the dtype after the
# cast, and a dict from the buffers' names to the buffers' original dtypes.
CAST_BUFFERS = "_flatshard_cast_buffers"


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with floating point tensors cast, also in nested containers and dataclasses.

    Returns ``value`` itself if no tensor needs a cast.
    """
    if isinstance(value, Tensor):  # the usual case, without a walk through a tree
        return _cast_leaf(value, dtype)
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda one: isinstance(one, PackedSequence))
    cast = [_cast_leaf(leaf, dtype) for leaf in leaves]
    # Return the same object, because the module may append to a list of the caller.
    if all(after is before for after, before in zip(cast, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(cast, spec)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=_cast_leaf(leaf.data, dtype))
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    cast = {name: cast_floats(value, dtype) for name, value in values.items()}
    if all(cast[name] is values[name] for name in values):
        return leaf
    twin = copy.copy(leaf)
    for name, value in cast.items():
        object.__setattr__(twin, name, value)  # also works on frozen dataclasses
    return twin


def _cast_arguments(args: Args, kwargs: Kwargs, dtype: torch.dtype) -> tuple[Args, Kwargs]:
    # Cast each argument separately, so that an argument that needs no cast stays the same object.
    return (
        tuple(cast_floats(value, dtype) for value in args),
        {name: cast_floats(value, dtype) for name, value in kwargs.items()},
    )


class UnitCasts(NamedTuple):
    """The dtypes to which a unit's inputs and outputs are cast. None means no cast."""

    as_root: torch.dtype | None = None  # dtype of the inputs if the unit is the root
    below_root: torch.dtype | None = None  # dtype of the inputs if the unit is not the root
    outputs: torch.dtype | None = None  # dtype of the outputs

    def cast_inputs(
        self, args: Args, kwargs: Kwargs, *, is_root: bool
    ) -> tuple[Args, Kwargs] | None:
        """Return the unit's arguments after the cast, or None if the unit casts no inputs."""
        dtype = self.as_root if is_root else self.below_root
        return None if dtype is None else _cast_arguments(args, kwargs, dtype)

    def cast_output(self, output: Any) -> Any:
        return output if self.outputs is None else cast_floats(output, self.outputs)


@dataclass(eq=False)
class ModuleCasts:
    """Hooks on a module that computes in another dtype than the parent module.

    See [Note: modules in a dtype of their own].
    """

    # Dtype in which the module computes. None means the dtype of the module's parameters, or of its
    # buffers if the module has no parameters.
    dtype: torch.dtype | None
    # The parent module's dtype, to which outputs are cast if no input is a floating point tensor.
    outside: torch.dtype | None
    called_with: torch.dtype | None = None  # dtype of the caller's inputs in the running call

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, prepend=True)

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        # Store the dtype of the caller's arguments, to which `_after` casts the output. `_after`
        # itself gets only the cast arguments.
        self.called_with = _first_float(pytree.tree_leaves((args, kwargs))) or self.outside
        # Look up the dtype in each call, because the user may convert the module after wrapping.
        own = _first_float(chain(module.parameters(), module.buffers())) or torch.float32
        return _cast_arguments(args, kwargs, self.dtype or own)

    def _after(self, module: nn.Module, args: Args, output: Any) -> Any:
        return output if self.called_with is None else cast_floats(output, self.called_with)


def _first_float(values: Iterable[Any]) -> torch.dtype | None:
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def cast_buffers(wanted: Mapping[nn.Module, torch.dtype], left_alone: Collection[int]) -> None:
    """Cast the floating point buffers of modules. State dicts keep the original dtypes."""
    # Record the dtypes before any buffer is cast, because modules may share a buffer.
    for module, dtype in wanted.items():
        held = ((name, one) for name, one in module._buffers.items() if id(one) not in left_alone)
        own = {name: one.dtype for name, one in held if one is not None and one.is_floating_point()}
        if own:
            module.__dict__[CAST_BUFFERS] = dtype, own
            # Register a new `partial`, because torch sets an attribute on the hook.
            module.register_state_dict_post_hook(partial(_give_own_dtypes))
    for module in wanted:
        cast_again(module)


def cast_again(module: nn.Module) -> None:
    """Cast the buffers of a module to the policy's dtype, after a conversion by the user."""
    dtype, own = module.__dict__.get(CAST_BUFFERS, (None, {}))
    for buffer in map(module._buffers.get, own):  # None if the user has deleted the buffer
        if buffer is not None and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)


def _give_own_dtypes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _, own = module.__dict__[CAST_BUFFERS]
    for name, dtype in own.items():
        value = state_dict.get(prefix + name)
        # With keep_vars=True the state dict must contain the module's own buffers.
        if isinstance(value, Tensor) and value is not module._buffers.get(name):
            state_dict[prefix + name] = value.to(dtype)


# torch's optimizers that do not work if gradients have another dtype than the parameter
# (MixedPrecision(keep_low_precision_grads=True)): they raise, or keep state in the gradient dtype.
_NEED_SAME_DTYPE = set("Adafactor Adam AdamW Adamax LBFGS Muon NAdam RAdam Rprop".split())


# Under DisableTorchFunctionSubclass, these functions are three times as fast as attribute access.
_GRAD: Any = Tensor.grad
_DTYPE: Any = Tensor.dtype
get_grad, put_grad, get_dtype = _GRAD.__get__, _GRAD.__set__, _DTYPE.__get__


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign ``param.grad``. The gradient may have any floating point dtype."""
    if grad is not None and get_dtype(grad) != get_dtype(param):
        # With `grad_dtype` None, torch accepts a gradient of any dtype.
        param.grad_dtype = None
    put_grad(param, grad)


def check_dtype(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> None:
    """Raise if gradient and parameter differ in dtype, and the optimizer does not support this."""
    if (grad := param.grad) is None or grad.dtype == param.dtype:
        return
    # Find the class that defines `step`, because a subclass may have a `step` that works.
    step = inspect.unwrap(type(optimizer).step)
    kind = step.__qualname__.partition(".")[0] if step.__module__.startswith("torch.") else ""
    has_momentum = kind == "SGD" and group["momentum"]
    if kind in _NEED_SAME_DTYPE or group.get("fused") or has_momentum:
        spec = getattr(param, "shard_spec", None)  # None if the parameter is not sharded
        where = "" if spec is None else f"parameter {spec.name!r}: "
        raise RuntimeError(
            f"{where}the gradient is {grad.dtype} and the parameter {param.dtype}, because of "
            f"MixedPrecision(keep_low_precision_grads=True), but {type(optimizer).__name__} needs "
            "equal dtypes, or would keep its state in the gradients' dtype. Leave "
            "keep_low_precision_grads out, or use an optimizer without this need: Adadelta, "
            "Adagrad, ASGD, RMSprop, SGD without momentum (none with fused=True), or your own."
        )


_OPAQUE = (type(None), bool, int, float, complex, str, bytes, type, nn.Module)
_CONTAINERS = (tuple, list, Mapping)


def tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """Return the tensors in the arguments or outputs of a module."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, Mapping) else value
        return [tensor for item in items for tensor in tensors_in(item, depth)]
    if depth and not isinstance(value, _OPAQUE):
        leaves = pytree.tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            return tensors_in(leaves, depth - 1)
        if hasattr(value, "__dict__"):
            return tensors_in(list(vars(value).values()), depth - 1)
    return []


class Override(NamedTuple):
    """A dtype that replaces ``param_dtype`` of the unit's precision for a module or a parameter.

    ``dtype=None``: unsharded parameters have the dtype of the sharded parameters.
    """

    dtype: torch.dtype | None

    def __str__(self) -> str:
        return "its own dtype" if self.dtype is None else str(self.dtype)


class PrecisionPlan:
    """Dtypes for all modules and parameters of a model, chosen before the model is changed."""

    def __init__(
        self,
        module: nn.Module,
        # The user's precision for every planned unit, including the root. If an inner unit has
        # another precision than the outer unit, overrides of the outer unit stop at the inner unit.
        precisions: Mapping[nn.Module, MixedPrecision],
        # Ids of parameters and buffers that are ignored, or belong to units wrapped earlier.
        left_alone: Collection[int],
    ) -> None:
        self._module, self._precisions, self._left_alone = module, precisions, left_alone
        # `ChosenDtypes` of the extra `overrides`. None: no unit has the option `overrides`.
        self.chosen: Any = None
        if any(precision.overrides for precision in precisions.values()):
            overrides = extra("overrides", "MixedPrecision(overrides=...)")
            self.chosen = overrides.ChosenDtypes(module, precisions.values())
        self._precision_of: dict[nn.Module, MixedPrecision] = {}
        self._override_of: dict[nn.Module, Override | None] = {}
        self._casts: dict[nn.Module, ModuleCasts] = {}
        self._override_of_param: dict[int, Override | None] = {}  # keyed by the parameter's id
        self._not_linear: set[int] = set()  # ids of parameters that are not a weight of nn.Linear
        if not all(precision.changes_nothing for precision in precisions.values()):
            self._plan(module, precisions[module], None)

    def _plan(self, module: nn.Module, precision: MixedPrecision, around: Override | None) -> None:
        if module in self._precision_of or is_sharded(module):
            return
        if (own := self._precisions.get(module, precision)) != precision:
            precision, around = own, None
        override = around
        if isinstance(module, tuple(precision.module_classes_to_ignore)):
            override = Override(None)
        elif precision.overrides:
            override = self.chosen.of_module(module, precision) or around
        self._precision_of[module], self._override_of[module] = precision, override
        outside = _dtype_of(precision, around)
        if override is not None and override.dtype != outside:
            self._casts[module] = ModuleCasts(override.dtype, outside)
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in self._left_alone:
                self._plan_param(module, attribute, param)
        for child in module.children():
            self._plan(child, precision, override)

    def _plan_param(self, module: nn.Module, attribute: str, param: nn.Parameter) -> None:
        if not param.is_floating_point():
            return
        if not (isinstance(module, nn.Linear) and attribute == "weight"):
            self._not_linear.add(id(param))
        precision, override = self._precision_of[module], self._override_of[module]
        if precision.overrides:
            override = self.chosen.of_param(module, attribute, param, precision) or override
        before = self._override_of_param.setdefault(id(param), override)
        if before != override:
            named = self._module.named_parameters(remove_duplicate=False)
            names = [repr(name) for name, tied in named if tied is param]
            raise ValueError(
                f"mixed_precision: parameters {' and '.join(names)} are tied, but are to be "
                f"unsharded in {before or 'param_dtype'} and in {override or 'param_dtype'}. Tied "
                "parameters share memory: give all of these names the same dtype in overrides."
            )

    def of_param(self, param: nn.Parameter, precision: MixedPrecision) -> ParamPrecision:
        override = self._override_of_param.get(id(param))
        compute_dtype, reduce_dtype = precision.param_dtype, precision.reduce_dtype
        gather_dtype = None if id(param) in self._not_linear else precision.gather_dtype
        if not param.is_floating_point():
            compute_dtype = reduce_dtype = gather_dtype = None
        elif override is not None:
            compute_dtype, gather_dtype = override.dtype, None
            if reduce_dtype is not None:
                # Reduce in the wider of the two dtypes. For example, if an override selects fp32
                # for a parameter, its gradient must not be rounded to a `reduce_dtype` of bf16.
                own = override.dtype or param.dtype
                wider = torch.promote_types(own, reduce_dtype)
                reduce_dtype = None if wider == own else wider
        return ParamPrecision(
            compute_dtype,
            reduce_dtype,
            gather_dtype,
            keeps_reduce_dtype=precision.keep_low_precision_grads,
            fixed_order=precision.reduce_mode is ReduceMode.FIXED_ORDER,
        )

    def of_unit(self, module: nn.Module) -> UnitCasts:
        """Return the dtypes to which the unit of ``module`` casts inputs and outputs."""
        precision = self._precisions[module]
        # If the module has `ModuleCasts`, the unit casts no inputs, because the hooks of
        # `ModuleCasts` must see the dtype of the caller's inputs.
        override = self._override_of.get(module)
        inputs = None if module in self._casts else _dtype_of(precision, override)
        return UnitCasts(
            as_root=inputs if precision.cast_root_forward_inputs else None,
            below_root=inputs if precision.cast_forward_inputs else None,
            outputs=precision.output_dtype,
        )

    def install(self) -> None:
        """Register the hooks that cast inputs and outputs of modules, and cast buffers."""
        for module, casts in self._casts.items():
            casts.install(module)
        wanted = {
            module: precision.buffer_dtype
            for module, precision in self._precision_of.items()
            if precision.buffer_dtype is not None and self._override_of[module] is None
        }
        cast_buffers(wanted, self._left_alone)


def _dtype_of(precision: MixedPrecision, override: Override | None) -> torch.dtype | None:
    """Return the dtype of unsharded parameters. None means each parameter's own dtype."""
    return precision.param_dtype if override is None else override.dtype
