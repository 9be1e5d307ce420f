"""Reductions of sharded tensors over all their elements: local part, one collective, result.

Sums, norms, extremes, ``GradScaler``'s search for overflows, and what autograd needs of them. On
import they enter themselves into ``sharded_tensor``'s tables.

[Note: padding]
A flat parameter's gradient has zeros between the originals and behind them. They add nothing to a
sum or to a norm of positive order; extremes and norms of negative order leave them out.

[Note: NaN]
A backend's MAX may drop a NaN, and which of two operands it keeps may depend on the rank. Extremes
of floating numbers are therefore sent with a mark for NaN, in the same vector.

[Note: gradients through a sharded parameter]
``loss + p.pow(2).sum()`` outside forward differentiates through this type. The loss may be scaled
differently on each rank, and the gradient that data parallelism wants is the average: the backward
of every reduction therefore averages what arrives over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.tensor.sharded_tensor import (
    DIFFERENTIABLE,
    HANDLERS,
    FlatShardTensor,
    first_sharded,
    local_range,
)

aten = torch.ops.aten


def _part(tensor: FlatShardTensor, *, with_padding: bool) -> Tensor:
    """This rank's part; a copy if there is padding to leave out.

    Raises:
        RuntimeError: a gradient of which every rank still has its own.
    """
    spec = tensor.spec
    unit = getattr(tensor, "unreduced_of", None)
    if unit is not None:
        raise RuntimeError(
            f"unit {unit!r}, {spec.name!r}, rank {spec.comm.rank}: a norm or sum of a gradient "
            "that was accumulated under no_sync and not reduced. Ask for it after a backward "
            "outside of no_sync."
        )
    if with_padding or spec.originals is None:
        return tensor.local
    return torch.cat([tensor.local[span.start : span.end] for span in spec.originals])


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """In which dtype to add up elements of ``dtype``; None: their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _bind(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments by name; a keyword that the handler does not implement raises."""
    values = dict(zip(names, defaults, strict=True)) | dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        if key not in values:
            first_sharded(args, kwargs).spec.refuse(f"the argument {key}")
        values[key] = value
    return tuple(values.values())


def _check_no_dim(tensor: FlatShardTensor, func: Any, dim: Any, keepdim: Any) -> None:
    if keepdim or (dim is not None and len(dim) > 0):
        tensor.spec.refuse(f"{func._schema.name} along a dimension")


# ---------------------------------------------------------------- norms


def norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The p-norm of each tensor, plain or sharded, over all its elements.

    Collective: all ranks that hold parts of ``tensors``; one reduction per communicator.

    Args:
        tensors: of any dtypes and devices, alike on all ranks.
        order: p; 0 counts what is not zero, ``inf`` and ``-inf`` take the extremes.
        dtype: to compute in; None for each tensor's own.

    Returns:
        0-dimensional tensors, each with the dtype and device that torch would give it.
    """
    results: dict[int, Tensor] = {}
    positions_of: dict[Communicator | None, list[int]] = {}
    for position, tensor in enumerate(tensors):
        comm = tensor.spec.comm if isinstance(tensor, FlatShardTensor) else None
        positions_of.setdefault(comm, []).append(position)
    for comm, positions in positions_of.items():
        some: list[Any] = [tensors[position] for position in positions]
        if comm is None:
            found = list(torch._foreach_norm(some, order, dtype))
        else:
            found = _like(_sharded_norms(some, order, dtype, comm), some, dtype)
        results.update(zip(positions, found, strict=True))
    return [results[position] for position in range(len(tensors))]


def _like(found: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """One norm each, with the device and dtype that torch would give it; cast all at once."""
    kinds = [(tensor.device, (dtype or tensor.dtype).to_real()) for tensor in tensors]
    cast = {kind: found.to(*kind).unbind() for kind in dict.fromkeys(kinds)}
    return [cast[kind][number] for number, kind in enumerate(kinds)]


def _sharded_norms(
    tensors: list[FlatShardTensor], order: float, dtype: torch.dtype | None, comm: Communicator
) -> Tensor:
    """Norms of tensors that one communicator shares, float64, ``(len(tensors),)``."""
    # Padding is zeros: nothing to a positive order, but a negative one would divide by them.
    parts = [_part(tensor, with_padding=order >= 0) for tensor in tensors]
    if dtype is not None:
        parts = [part.to(dtype) for part in parts]
    # Of complex numbers only the sizes matter; torch warns when it counts those that are not zero.
    parts = [part.abs() if part.is_complex() else part for part in parts]
    device = parts[0].device if parts[0].device.type != "cpu" else comm.control_device
    local = _local_norms(parts, order, device)
    op_name = tensors[0].spec.name if len(tensors) == 1 else "norms"
    if math.isinf(order):
        return _extremes(local, comm, largest=order > 0, op_name=op_name)
    if order == 0:
        return comm.reduce_scalars(local, "SUM", op_name=op_name)
    return comm.reduce_scalars(local.pow(order), "SUM", op_name=op_name).pow(1 / order)


def _local_norms(parts: list[Tensor], order: float, device: torch.device) -> Tensor:
    """Norms of this rank's parts; that of an empty one leaves the other ranks' as they are.

    In float64, since powers of them are summed: of 1e20, say, which float32 could not square.
    """
    nothing = torch.full((), 0.0 if order >= 0 else float("inf"), device=device)
    found = [nothing] * len(parts)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for position, part in enumerate(parts):
        if part.numel() > 0:
            by_dtype.setdefault(part.dtype, []).append(position)
    for dtype, positions in by_dtype.items():
        computed = torch._foreach_norm([parts[p] for p in positions], order, _sum_dtype(dtype))
        for position, norm in zip(positions, computed, strict=True):
            found[position] = norm.to(device)
    return torch.stack(found).to(torch.float64)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, order, dim, keepdim, dtype = _bind(
        args, kwargs, ("self", "ord", "dim", "keepdim", "dtype"), (None, 2, None, False, None)
    )
    _check_no_dim(tensor, func, dim, keepdim)
    return norms([tensor], float(order), dtype)[0]


def _foreach_norm(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, order, dtype = _bind(args, kwargs, ("self", "ord", "dtype"), (None, 2, None))
    return norms(tensors, float(order), dtype)


# ---------------------------------------------------------------- sums, extremes, overflows


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``sum`` and ``mean`` of everything."""
    along_dimensions = func in (aten.sum.dim_IntList, aten.mean.dim)
    names = ("self", "dim", "keepdim", "dtype") if along_dimensions else ("self", "dtype")
    bound = dict(zip(names, _bind(args, kwargs, names, (None,) * len(names)), strict=True))
    tensor: FlatShardTensor = bound["self"]
    _check_no_dim(tensor, func, bound.get("dim"), bound.get("keepdim"))
    spec, part = tensor.spec, _part(tensor, with_padding=True)
    if bound["dtype"] is not None:
        part = part.to(bound["dtype"])
    # Narrow dtypes are rounded once, after the ranks' sums are added.
    total = part.sum(dtype=_sum_dtype(part.dtype))
    spec.comm.reduce_scalars(total, "SUM", op_name=spec.name)
    if func._schema.name == "aten::mean":
        total = total / spec.total_numel
    return total if _sum_dtype(part.dtype) is None else total.to(part.dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    name = func._schema.name.removeprefix("aten::")
    is_full = len(args) == 1 or (len(args) == 2 and name in ("amax", "amin") and args[1] == [])
    if not is_full or kwargs:
        tensor.spec.refuse(f"{name} along a dimension")
    part = _part(tensor, with_padding=False)
    is_logical = name in ("any", "all") or part.dtype is torch.bool
    if is_logical:
        part = (part != 0).to(torch.uint8)
    largest = name in ("max", "amax", "any")
    if part.numel() > 0:
        value = part.amax() if largest else part.amin()
    else:
        # A rank that holds nothing takes part, with the value that every other one beats.
        least, greatest = _bounds(part.dtype)
        value = part.new_full((), least if largest else greatest)
    comm, op_name = tensor.spec.comm, tensor.spec.name
    value = _extremes(value.view(1), comm, largest=largest, op_name=op_name)[0]
    return value.to(torch.bool) if is_logical else value


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _extremes(values: Tensor, comm: Communicator, *, largest: bool, op_name: str) -> Tensor:
    """The largest, or smallest, of each number over the ranks; see the note on NaN."""
    op = "MAX" if largest else "MIN"
    if not values.is_floating_point():
        return comm.reduce_scalars(values, op, op_name=op_name)
    is_nan = values.isnan()
    # A mark that the same operation prefers: 1 for MAX, -1 for MIN.
    marks = is_nan.to(values.dtype) * (1 if largest else -1)
    both = torch.cat([values.masked_fill(is_nan, 0), marks])
    found, marks = comm.reduce_scalars(both, op, op_name=op_name).chunk(2)
    return found.masked_fill(marks != 0, math.nan)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler: an overflow on one rank is an overflow on all."""
    gradients, found_inf, inverse_scale = args
    func([local_range(g) for g in gradients], found_inf, inverse_scale)
    sharded = [g for g in gradients if isinstance(g, FlatShardTensor)]
    for gradient in sharded:
        torch.autograd.graph.increment_version(gradient.local)
    # Not a set: all ranks must meet the communicators in one order.
    for comm in dict.fromkeys(gradient.spec.comm for gradient in sharded):
        comm.reduce_scalars(found_inf, "MAX", op_name="found_inf")


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    first_sharded(args, kwargs).spec.refuse(func._schema.name)


HANDLERS.update(
    linalg_vector_norm=_vector_norm,
    _foreach_norm=_foreach_norm,
    _foreach_max=_refuse,
    sum=_sum,
    mean=_sum,
    _amp_foreach_non_finite_check_and_unscale_=_unscale,
    **dict.fromkeys(("max", "min", "amax", "amin", "any", "all"), _extreme),
)


# ---------------------------------------------------------------- autograd


class OutsideUses:
    """Counts differentiable uses of sharded tensors outside of a forward.

    One count for all models: an operation on parameters of two would count for the first alone.
    """

    count = 0


def _average(value: Tensor, spec: ShardSpec) -> Tensor:
    """The mean of a small tensor over all ranks, as a new one. Collective: both groups."""
    # A clone: the reduction is in place, and autograd may hand the tensor to others too.
    total = spec.comm.reduce_scalars(value.clone(), "SUM", op_name=spec.name)
    total = spec.replicas.reduce_scalars(total, "SUM", op_name=spec.name)
    return total / (spec.comm.size * spec.replicas.size)


class _Sum(torch.autograd.Function):
    """The sum of all elements."""

    @staticmethod
    def forward(ctx: Any, tensor: FlatShardTensor) -> Tensor:  # type: ignore[override]
        OutsideUses.count += 1
        # Only dtype and device are needed: the shard itself is not to be kept for backward.
        ctx.spec, ctx.like = tensor.spec, tensor.local.new_empty(0)
        return _sum(aten.sum.default, (tensor,), {})

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> FlatShardTensor:  # type: ignore[override]
        ctx.spec.on_outside_grad()
        local = ctx.like.new_empty(ctx.spec.numel).copy_(_average(gradient, ctx.spec))
        return FlatShardTensor(local, ctx.spec)


class _Norm(torch.autograd.Function):
    """The p-norm over all elements; zero has the subgradient zero, as in torch."""

    @staticmethod
    def forward(ctx: Any, tensor: FlatShardTensor, order: float) -> Tensor:  # type: ignore[override]
        OutsideUses.count += 1
        norm = norms([tensor], order)[0]
        ctx.spec, ctx.order = tensor.spec, order
        ctx.save_for_backward(tensor.local, norm)
        return norm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[FlatShardTensor, None]:  # type: ignore[override]
        ctx.spec.on_outside_grad()
        local, norm = ctx.saved_tensors
        # x |x|^(p-2) / norm^(p-1), without 1 / 0.
        slope = local.sgn() * local.abs().pow(ctx.order - 1).masked_fill(local == 0, 0)
        scale = norm.pow(1 - ctx.order).masked_fill(norm == 0, 0)
        return FlatShardTensor(slope * (scale * _average(gradient, ctx.spec)), ctx.spec), None


def _differentiable_sum(input: Any, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs:
        input.spec.refuse("a sum along a dimension or in another dtype")
    return _Sum.apply(input)  # type: ignore[no-any-return]


def _differentiable_mean(input: FlatShardTensor, *args: Any, **kwargs: Any) -> Tensor:
    return _differentiable_sum(input, *args, **kwargs) / input.numel()


def _differentiable_norm(
    input: FlatShardTensor, p: float | str | None = 2, *args: Any, **kwargs: Any
) -> Tensor:
    order = kwargs.pop("ord", p)
    order = 2 if order in (None, "fro") else order
    if args or any(value is not None and value is not False for value in kwargs.values()):
        input.spec.refuse("a norm along a dimension or in another dtype")
    if not isinstance(order, int | float) or order in (0, float("inf"), float("-inf")):
        input.spec.refuse(f"the gradient of a norm of order {order}")
    return _Norm.apply(input, float(order))  # type: ignore[no-any-return]


DIFFERENTIABLE.update(dict.fromkeys((torch.sum, torch.Tensor.sum), _differentiable_sum))
DIFFERENTIABLE.update(dict.fromkeys((torch.mean, torch.Tensor.mean), _differentiable_mean))
DIFFERENTIABLE.update(dict.fromkeys((torch.norm, torch.Tensor.norm), _differentiable_norm))
DIFFERENTIABLE.update(
    dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm), _differentiable_norm)
)
