"""``MixedPrecision``: in which dtypes a unit computes, gathers and reduces."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class ReduceMode(enum.Enum):
    """Who adds up the ranks' gradients, and in which order."""

    AUTO = "auto"
    """What fits: on gloo, here, as ``FIXED_ORDER``, but for all-reduces in fp32 or wider; else the
    backend, in ``reduce_dtype`` and in an order of its own."""
    FIXED_ORDER = "fixed_order"
    """Here, in rank order and in no less than fp32, whatever the backend."""


@dataclass(frozen=True)
class MixedPrecision:
    """In which precision parameters are gathered and gradients reduced.

    The shard, its gradient as the optimizer sees it, and the optimizer state stay in the
    parameter's own dtype.

    Attributes:
        param_dtype: dtype of the gathered parameters, and of the floating point inputs of every
            unit. None: the parameter's own.
        reduce_dtype: dtype in which gradients travel when they are reduced. None: ``param_dtype``.
        reduce_mode: who adds them up: a ``ReduceMode`` or its value, ``"auto"`` or
            ``"fixed_order"``, which makes gradients the same, bit for bit, in every run with as
            many ranks, by whatever transport or backend.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce_mode: ReduceMode | str = ReduceMode.AUTO

    def __post_init__(self) -> None:
        """Check the dtypes.

        Raises:
            TypeError: a field is neither None nor a floating point dtype.
            ValueError: an unknown ``reduce_mode``.
        """
        object.__setattr__(self, "reduce_mode", _as_reduce_mode(self.reduce_mode))
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise TypeError(
                    f"MixedPrecision: {name} must be a floating point torch.dtype or None, "
                    f"got {dtype!r}"
                )


def _as_reduce_mode(value: object) -> ReduceMode:
    try:
        return ReduceMode(value)
    except ValueError:
        choices = " or ".join(f'"{one.value}"' for one in ReduceMode)
        raise ValueError(f"MixedPrecision: reduce_mode must be {choices}, got {value!r}") from None


def as_mixed_precision(value: object) -> MixedPrecision:
    """Read ``mixed_precision``: ours, torch's dataclasses by field name, or None.

    Raises:
        TypeError: ``value`` has no ``param_dtype``.
        NotImplementedError: it sets a field that is not supported.
    """
    if value is None:
        return MixedPrecision()
    if isinstance(value, MixedPrecision):
        return value
    if not hasattr(value, "param_dtype"):
        raise TypeError(f"mixed_precision: expected a MixedPrecision, got {value!r}")
    for name in ("buffer_dtype", "output_dtype", "keep_low_precision_grads"):
        if getattr(value, name, None):
            raise NotImplementedError(
                f"mixed_precision: {name} is not supported; param_dtype and reduce_dtype are"
            )
    # FSDP1's dataclass has both, and casts the root's inputs alone by default: what follows from
    # them is cast already.
    has_both = hasattr(value, "cast_root_forward_inputs")
    name = "cast_root_forward_inputs" if has_both else "cast_forward_inputs"
    if value.param_dtype is not None and not getattr(value, name, True):
        raise NotImplementedError(
            f"mixed_precision: {name}=False is not supported: floating point inputs of every unit "
            "are cast to param_dtype"
        )
    return MixedPrecision(value.param_dtype, getattr(value, "reduce_dtype", None))
