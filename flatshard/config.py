"""What users choose: strategies and policies as frozen data, and the checks of what they pass."""

from __future__ import annotations

import difflib
import enum
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Placement:
    """What a strategy means for the runtime, which asks this and never the strategy's name.

    Attributes:
        sharded: parameters, gradients and optimizer state are split over the shard group.
        reshard_after_forward: the unsharded buffer is freed between forward and backward.
    """

    sharded: bool
    reshard_after_forward: bool


class ShardingStrategy(enum.Enum):
    """How parameters, gradients and optimizer state are placed over the ranks."""

    NO_SHARD = "NO_SHARD"
    """Everything on every rank, gradients all-reduced: as DistributedDataParallel."""
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    """Parameters stay gathered from forward until their backward is over: ZeRO stage 2."""
    FULL_SHARD = "FULL_SHARD"
    """Parameters are freed after forward and gathered again for backward: ZeRO stage 3."""

    @property
    def placement(self) -> Placement:
        """The strategy as data."""
        return _PLACEMENTS[self]


_PLACEMENTS = {
    ShardingStrategy.NO_SHARD: Placement(sharded=False, reshard_after_forward=False),
    ShardingStrategy.SHARD_GRAD_OP: Placement(sharded=True, reshard_after_forward=False),
    ShardingStrategy.FULL_SHARD: Placement(sharded=True, reshard_after_forward=True),
}


class BackwardPrefetch(enum.Enum):
    """When the next unit's gather starts in backward; ``None`` in its place means never."""

    BACKWARD_PRE = "BACKWARD_PRE"
    """Before this unit's gradients are computed: most overlap."""
    BACKWARD_POST = "BACKWARD_POST"
    """After this unit was freed: one unit less in memory."""


@dataclass(frozen=True)
class CPUOffload:
    """Where shards, gradients and optimizer state live between uses.

    Attributes:
        offload_params: keep them in host memory. On a CPU-only host they already are.
    """

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """In which precision parameters are gathered and gradients reduced.

    The shard, its gradient as the optimizer sees it, and the optimizer state stay in the
    parameter's own dtype.

    Attributes:
        param_dtype: dtype of the gathered parameters, and of the floating point inputs of every
            unit. None: the parameter's own.
        reduce_dtype: dtype in which gradients are reduced. None: ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the dtypes.

        Raises:
            TypeError: a field is neither None nor a floating point dtype.
        """
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise TypeError(
                    f"MixedPrecision: {name} must be a floating point torch.dtype or None, "
                    f"got {dtype!r}"
                )


def as_strategy(value: object) -> ShardingStrategy:
    """Read a strategy: ours, torch's enum of the same member name, a name, or None.

    Raises:
        TypeError: ``value`` is something else.
        ValueError: the name is unknown or not supported.
    """
    if value is None:
        return ShardingStrategy.FULL_SHARD
    return _as_member(ShardingStrategy, value, "sharding_strategy")


def as_backward_prefetch(value: object) -> BackwardPrefetch | None:
    """Read ``backward_prefetch``: ours, torch's enum, a name, or None (no prefetch)."""
    return None if value is None else _as_member(BackwardPrefetch, value, "backward_prefetch")


def _as_member(kind: type[enum.Enum], value: object, keyword: str) -> Any:
    if isinstance(value, kind):
        return value
    name = value.name if isinstance(value, enum.Enum) else value
    choices = ", ".join(kind.__members__)
    if not isinstance(name, str):
        raise TypeError(
            f"{keyword}: expected a {kind.__name__}, got {value!r}. Use one of {choices}."
        )
    if name not in kind.__members__:
        raise ValueError(f"{keyword}: unknown or unsupported {name!r}. Use one of {choices}.")
    return kind[name]


def as_native(collectives: object) -> bool:
    """Read ``collectives``: whether to use the backend's own.

    Raises:
        ValueError: it is neither ``"auto"`` nor ``"native"``.
    """
    if collectives not in ("auto", "native"):
        raise ValueError(f'collectives: expected "auto" or "native", got {collectives!r}')
    return collectives == "native"


def as_cpu_offload(value: object) -> CPUOffload:
    """Read ``cpu_offload``: ours, torch's dataclass of the same field, a bool, or None."""
    if isinstance(value, CPUOffload):
        return value
    if value is None or isinstance(value, bool):
        return CPUOffload(offload_params=bool(value))
    flag = getattr(value, "offload_params", None)
    if not isinstance(flag, bool):
        raise TypeError(f"cpu_offload: expected CPUOffload(offload_params=...), got {value!r}")
    return CPUOffload(offload_params=flag)


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
    return MixedPrecision(value.param_dtype, getattr(value, "reduce_dtype", None))


_DDP_WITHOUT_EFFECT = {
    "output_device": "outputs stay where the module made them",
    "find_unused_parameters": "unused parameters are always found",
    "gradient_as_bucket_view": "gradients are always views of flat storage",
    "static_graph": "the order of units is always recorded",
    "bucket_cap_mb": "there are no buckets; auto_wrap_policy decides the size of units",
    "check_reduction": "reductions are always checked",
    "dim": "inputs are not scattered",
}
"""DistributedDataParallel's keywords that mean nothing here, and why."""


def check_extra_keywords(extra: dict[str, Any], known: Callable[..., Any]) -> list[str]:
    """Sort the keywords that the constructor does not know by name.

    Returns:
        One line for each that is accepted without effect.

    Raises:
        TypeError: a keyword is unknown; names the nearest known one.
    """
    notes = []
    for name in extra:
        if name in _DDP_WITHOUT_EFFECT:
            notes.append(f"{name}: {_DDP_WITHOUT_EFFECT[name]}")
            continue
        names = [*inspect.signature(known).parameters, *_DDP_WITHOUT_EFFECT]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"ShardedWrapper: unknown keyword {name!r}.{hint}")
    return notes


def check_launch_without_group() -> None:
    """Refuse to run alone where a launcher started several ranks.

    Raises:
        RuntimeError: ``WORLD_SIZE`` says that there are other ranks.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise RuntimeError(
            f"ShardedWrapper: {world_size} ranks were started (WORLD_SIZE), but there is no "
            "process group. Call torch.distributed.init_process_group() before wrapping."
        )
