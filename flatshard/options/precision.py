"""``MixedPrecision``: the dtypes in which a unit computes, all-gathers and reduces."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatshard.options import as_member, check_flags
from flatshard.options.extras import extra

# Float8 dtypes of the installed torch.
FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


class ReduceMode(enum.Enum):
    """Whether flatshard or the backend adds the ranks' gradients, and in which order."""

    AUTO = "auto"
    """The best order for the backend.

    On gloo, flatshard adds gradients as with ``FIXED_ORDER``, except in all-reduces in fp32 or a
    wider dtype, in which gloo adds them. Other backends add all gradients themselves, in
    ``reduce_dtype`` and in their own order.
    """
    FIXED_ORDER = "fixed_order"
    """On every backend, flatshard adds gradients in rank order and at least in fp32."""


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which units compute, parameters are all-gathered and gradients are reduced.

    The shard, the gradient for the optimizer and the optimizer state keep the parameter's own
    dtype, as do state dicts and ``summon_full_params``. Only floating point tensors are cast.

    Example:
        ```python
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = ModuleWrapPolicy({Block})
        model = ShardedWrapper(model, auto_wrap_policy=policy, mixed_precision=bf16)
        loss_fn(model(inputs).float(), labels).backward()
        ```

    Attributes:
        param_dtype: dtype of the unsharded parameters: the shard is cast before the all-gather.
            None: the parameter's own dtype.
        reduce_dtype: dtype in which gradients are reduced and sent. None: ``param_dtype``.
        buffer_dtype: dtype of buffers, which are cast once, when the model is wrapped. State dicts
            contain buffers in their original dtype. None: buffers are not cast.
        output_dtype: dtype of the unit's outputs. None: outputs are not cast.
        keep_low_precision_grads: give the optimizer reduced gradients in the dtype of the
            reduction, instead of the parameter's own dtype.
        cast_forward_inputs: cast the inputs of units below the root to ``param_dtype``.
        cast_root_forward_inputs: cast the inputs of the root to ``param_dtype``.
        module_classes_to_ignore: modules of these classes, and all modules below them, compute
            without mixed precision: parameters and buffers keep their own dtype, inputs of the
            module are cast to the parameters' dtype, and outputs back to the dtype of the inputs.
            By default BatchNorm's classes.
        overrides: dtypes to use instead of ``param_dtype``. The dict maps names in the unwrapped
            model to dtypes; ``*`` matches any text. A module's name also applies to all modules
            below, and the module's inputs and outputs are cast as with
            ``module_classes_to_ignore``. A parameter's name applies to this parameter only, and
            code that uses the parameter must expect its dtype. If names of nested modules match,
            the innermost name decides. If several patterns match a name, the first in the dict
            decides. Gradients are reduced in the wider of the chosen dtype and ``reduce_dtype``.
        reduce_mode: how gradients are added up: a ``ReduceMode`` or its value, ``"auto"`` or
            ``"fixed_order"``. ``"fixed_order"`` makes gradients bitwise equal in every run with the
            same number of ranks, on every transport and backend.
        gather_dtype: a float8 type in which weights of ``nn.Linear`` are all-gathered, with one
            scale per 256 elements. The gathered weights are cast to ``param_dtype``. None:
            all-gather in ``param_dtype``.

    Raises:
        TypeError: a dtype is not a floating point dtype, a flag is not a bool, a class is not a
            module class, or ``overrides`` has another type.
        ValueError: ``reduce_mode`` is unknown.
        MissingExtraError: ``overrides`` is given, and ``flatshard/extras/overrides`` is missing.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = True
    module_classes_to_ignore: Iterable[type[nn.Module]] = (_BatchNorm,)
    overrides: Mapping[str, torch.dtype] | None = None
    reduce_mode: ReduceMode | str = ReduceMode.AUTO
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        mode = as_member(ReduceMode, self.reduce_mode, "MixedPrecision: reduce_mode")
        object.__setattr__(self, "reduce_mode", mode)
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not is_float_dtype(dtype):
                expected = "must be a floating point torch.dtype or None"
                raise TypeError(f"MixedPrecision: {name} {expected}, got {dtype!r}.")
        if self.gather_dtype is not None and self.gather_dtype not in FLOAT8:
            expected = f"must be None or one of {', '.join(map(str, FLOAT8))}"
            raise TypeError(f"MixedPrecision: gather_dtype {expected}, got {self.gather_dtype!r}.")
        check_flags(
            self, "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"
        )
        classes = _as_classes(self.module_classes_to_ignore)
        object.__setattr__(self, "module_classes_to_ignore", classes)
        if self.overrides is not None:
            read = extra("overrides", "MixedPrecision(overrides=...)").as_overrides
            object.__setattr__(self, "overrides", read(self.overrides))

    @property
    def changes_nothing(self) -> bool:
        """Whether all tensors keep their own dtypes."""
        dtypes = (self.param_dtype, self.reduce_dtype, self.buffer_dtype, self.gather_dtype)
        return all(dtype is None for dtype in dtypes) and not self.overrides


@dataclass(frozen=True)
class ParamPrecision:
    """The dtypes in which one flat parameter is computed, sent and reduced."""

    compute_dtype: torch.dtype | None = None  # None: the shard's dtype
    reduce_dtype: torch.dtype | None = None  # None: `compute_dtype`
    gather_dtype: torch.dtype | None = None  # float8. None: `compute_dtype`
    keeps_reduce_dtype: bool = False  # whether reduced gradients are not cast to the shard's dtype
    fixed_order: bool = False  # whether gradients are added in rank order on every backend

    def unsharded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of unsharded parameters whose shard has ``dtype``."""
        return (self.compute_dtype or dtype) if dtype.is_floating_point else dtype

    def grad_dtypes(self, dtype: torch.dtype, of_hook: torch.dtype | None = None) -> "GradDtypes":
        """Return the dtypes of gradients, for parameters of ``dtype``.

        ``of_hook``: reduce dtype of a communication hook, which has priority over the policy.
        """
        reduce_dtype = of_hook or self.reduce_dtype or self.compute_dtype or dtype
        if not dtype.is_floating_point:
            reduce_dtype = dtype
        # Accumulate in the wider dtype: a sum in the narrower dtype would lose small gradients.
        wider = dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype
        return GradDtypes(reduce_dtype, wider, reduce_dtype if self.keeps_reduce_dtype else dtype)


class GradDtypes(NamedTuple):
    """The dtypes of one flat parameter's gradients."""

    reduce_dtype: torch.dtype  # dtype in which gradients are collected and sent
    accum_dtype: torch.dtype  # dtype in which gradients of several backwards are added
    grad_dtype: torch.dtype  # dtype of the reduced gradient


def is_float_dtype(dtype: object) -> bool:
    """Whether ``dtype``, an argument from the user, is a floating point torch.dtype."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _as_classes(value: object) -> tuple[type[nn.Module], ...]:
    classes = tuple(value) if isinstance(value, Iterable) else (value,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(
                f"MixedPrecision: module_classes_to_ignore must be classes of modules, got {one!r}."
            )
    return classes


def as_mixed_precision(value: object) -> MixedPrecision:
    """Convert the user's ``mixed_precision`` (a policy of flatshard, FSDP1 or FSDP2, or None)."""
    if value is None:
        return MixedPrecision()
    if isinstance(value, MixedPrecision):
        return value
    if not hasattr(value, "param_dtype"):
        raise TypeError(f"mixed_precision: expected a MixedPrecision policy, got {value!r}.")
    torch_names = extra("torch_names", f"mixed_precision={type(value).__name__}(...)")
    return torch_names.as_mixed_precision(value)  # type: ignore[no-any-return]
