"""``MixedPrecision``: in which dtypes a unit computes, all-gathers and reduces."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatshard.options.extras import extra

# The types that `MixedPrecision.overrides` accepts.
Overrides: TypeAlias = (
    Mapping[str, torch.dtype] | Callable[[nn.Parameter], torch.dtype | None] | None
)

# The types that this torch has.
FLOAT8 = tuple(
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
)

# Whether a gradient can have another dtype than its parameter.
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


class ReduceMode(enum.Enum):
    """Who adds up the ranks' gradients, and in which order."""

    AUTO = "auto"
    """What fits: on gloo, here, as ``FIXED_ORDER``, but for all-reduces in fp32 or wider; else the
    backend, in ``reduce_dtype`` and in an order of its own."""
    FIXED_ORDER = "fixed_order"
    """Here, in rank order and in no less than fp32, whatever the backend."""


@dataclass(frozen=True)
class MixedPrecision:
    """In which precision parameters are all-gathered and gradients reduced.

    The shard, its gradient as the optimizer sees it, and the optimizer state stay in the
    parameter's own dtype; so do state dicts and ``summon_full_params``. Only floating point
    tensors are ever cast. See docs/precision.md.

    Attributes:
        param_dtype: dtype of the unsharded parameters: the shard is cast before the all-gather.
            None: the parameter's own.
        reduce_dtype: dtype in which gradients are sent to be reduced. None: ``param_dtype``.
        buffer_dtype: dtype of buffers, cast once, when the model is wrapped; state dicts give them
            in their own. None: as they are.
        output_dtype: dtype of the unit's outputs. None: as its module gives them.
        keep_low_precision_grads: leave reduced gradients in the dtype of the reduction, where
            the optimizer finds them, instead of the parameter's own.
        cast_forward_inputs: cast the inputs of units below the root to ``param_dtype``.
        cast_root_forward_inputs: cast the root's.
        module_classes_to_ignore: modules of these classes, and all below them, compute as without
            a policy: parameters in their own dtype, their inputs cast to it, and their outputs
            back to the dtype that the module was called with. By default BatchNorm's. Their
            buffers are left alone.
        overrides: by name in the unwrapped model, where ``*`` stands for anything, another dtype
            than ``param_dtype``. The name of a module is for all below it too, and its inputs and
            outputs are cast as above; that of a parameter is for that alone, and whoever uses it
            is to expect it. The innermost decides, and of patterns the first. Or a function of a
            parameter that gives its dtype, or None for ``param_dtype``, alike on all ranks.
            Gradients are reduced in that dtype, or in ``reduce_dtype`` where that is wider.
        reduce_mode: who adds gradients up: a ``ReduceMode`` or its value, ``"auto"`` or
            ``"fixed_order"``, which makes them the same, bit for bit, in every run with as many
            ranks, by whatever transport or backend.
        gather_dtype: a float8 type, in which weights of ``nn.Linear`` are sent to the other ranks,
            with a scale per 256 elements, and then cast to ``param_dtype``. None: they are sent
            in ``param_dtype``.

    Raises:
        TypeError: a dtype is not a floating point one, a flag no bool, a class no module's, or
            ``overrides`` something else.
        ValueError: an unknown ``reduce_mode``.
        NotImplementedError: ``keep_low_precision_grads``, and this torch has no
            ``Tensor.grad_dtype``.
        MissingExtraError: ``overrides`` is given, and the folder of that extra is not installed.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True
    cast_root_forward_inputs: bool = True
    module_classes_to_ignore: Iterable[type[nn.Module]] = (_BatchNorm,)
    overrides: Overrides = None
    reduce_mode: ReduceMode | str = ReduceMode.AUTO
    gather_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce_mode", _as_reduce_mode(self.reduce_mode))
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not is_float_dtype(dtype):
                raise TypeError(
                    f"MixedPrecision: {name} must be a floating point torch.dtype or None, "
                    f"got {dtype!r}"
                )
        if self.gather_dtype is not None and self.gather_dtype not in FLOAT8:
            raise TypeError(
                f"MixedPrecision: gather_dtype must be None or one of {', '.join(map(str, FLOAT8))}"
                f", got {self.gather_dtype!r}"
            )
        for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"MixedPrecision: {name} must be True or False, got {getattr(self, name)!r}"
                )
        if self.keep_low_precision_grads and not HAS_GRAD_DTYPE:
            raise NotImplementedError(
                "MixedPrecision: keep_low_precision_grads needs Tensor.grad_dtype, which torch "
                f"{torch.__version__} lacks. Leave it out, and gradients get the parameter's dtype."
            )
        object.__setattr__(
            self, "module_classes_to_ignore", _as_classes(self.module_classes_to_ignore)
        )
        if self.overrides is not None:
            read = extra("overrides", "MixedPrecision(overrides=...)").as_overrides
            object.__setattr__(self, "overrides", read(self.overrides))

    @property
    def changes_nothing(self) -> bool:
        """Whether parameters, gradients and buffers keep their own dtypes."""
        dtypes = (self.param_dtype, self.reduce_dtype, self.buffer_dtype, self.gather_dtype)
        return all(dtype is None for dtype in dtypes) and not self.overrides

    def describe(self) -> str:
        """The settings that must be the same on every rank; without the answers of a function."""
        overrides = "a function" if callable(self.overrides) else self.overrides
        fields = {**self.__dict__, "overrides": overrides}
        return f"MixedPrecision({', '.join(f'{name}={value}' for name, value in fields.items())})"


@dataclass(frozen=True)
class ParamPrecision:
    """The dtypes of one flat parameter under a policy."""

    compute_dtype: torch.dtype | None = None  # of the unsharded parameters; None: their own
    reduce_dtype: torch.dtype | None = None  # gradients are sent in it; None: `compute_dtype`
    gather_dtype: torch.dtype | None = None  # float8, the shard's; None: `compute_dtype`
    keeps_reduce_dtype: bool = False  # reduced gradients stay in the dtype of their reduction
    fixed_order: bool = False  # and are added up in rank order, whatever the backend

    def unsharded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which parameters of ``dtype`` compute."""
        return (self.compute_dtype or dtype) if dtype.is_floating_point else dtype

    def reduced_dtype(self, dtype: torch.dtype, of_hook: torch.dtype | None = None) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtype`` are reduced."""
        reduce_dtype = of_hook or self.reduce_dtype or self.compute_dtype or dtype
        return reduce_dtype if dtype.is_floating_point else dtype


@dataclass(frozen=True)
class GradDtypes:
    """The dtypes of one flat parameter's gradients."""

    reduce_dtype: torch.dtype  # they are collected and sent in it
    accum_dtype: torch.dtype  # more than one are added up in it, before they are reduced
    grad_dtype: torch.dtype  # of the reduced gradient


def is_float_dtype(dtype: object) -> bool:
    """Whether a value that a user gave is a floating point dtype."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


# FullyShardedDataParallel's and `fully_shard`'s names for fields that have others here.
_OTHER_NAMES = {
    "_module_classes_to_ignore": "module_classes_to_ignore",
    "param_dtype_override_fn": "overrides",
}


def _as_classes(value: object) -> tuple[type[nn.Module], ...]:
    classes = tuple(value) if isinstance(value, Iterable) else (value,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(
                f"MixedPrecision: module_classes_to_ignore must be classes of modules, got {one!r}"
            )
    return classes


def _as_reduce_mode(value: object) -> ReduceMode:
    try:
        return ReduceMode(value)
    except ValueError:
        choices = " or ".join(f'"{one.value}"' for one in ReduceMode)
        raise ValueError(f"MixedPrecision: reduce_mode must be {choices}, got {value!r}") from None


def as_mixed_precision(value: object) -> MixedPrecision:
    """Read ``mixed_precision``: ours, torch's dataclasses by field name, or None."""
    if value is None:
        return MixedPrecision()
    if isinstance(value, MixedPrecision):
        return value
    if not hasattr(value, "param_dtype"):
        raise TypeError(f"mixed_precision: expected a MixedPrecision, got {value!r}")
    ours = MixedPrecision.__dataclass_fields__
    fields: dict[str, Any] = {}
    for name, given in vars(value).items():
        name = _OTHER_NAMES.get(name, name)
        if name in ours:
            fields[name] = given
        elif given is not None and given is not False:
            raise NotImplementedError(
                f"mixed_precision: {name}={given!r} is not supported. Leave it out; "
                f"flatshard.MixedPrecision has {', '.join(ours)}."
            )
    # FSDP1 has both; elsewhere the one says it of the root as well.
    fields.setdefault("cast_root_forward_inputs", fields.get("cast_forward_inputs", True))
    return MixedPrecision(**fields)
