"""Operations on sharded tensors that need communication.

Reductions over all elements: each rank reduces its own range, and one collective combines the
results.

Collectives that the user's program calls on a parameter: under DistributedDataParallel every rank
holds the full parameter, and programs average, compare or broadcast the ranks' copies. On a sharded
tensor a backend would send the range of one rank, or a temporary copy. So a collective on a sharded
tensor either raises before any communication, or returns the result for equal full tensors on all
ranks without sending values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import ShardSpec, refuse_foreign_wrapper
from flatshard.tensor.sharded_tensor import (
    ABOVE_AUTOGRAD,
    GRADIENT,
    HANDLERS,
    UNREDUCED,
    FlatShardTensor,
    first_sharded,
    local_range,
    sharded_in,
    wrote,
)
from flatshard.tensor.unsharded import OutsideUse

aten = torch.ops.aten
Comms = Sequence[Communicator]


def _reduced(values: Tensor, comms: Comms, op: str, op_name: str) -> Tensor:
    """Combine a few numbers over the ranks of each communicator, in place.

    Collective: all ranks of ``comms``.
    """
    for comm in comms:
        values = comm.reduce_scalars(values, op, op_name=op_name)
    return values


def _part(tensor: FlatShardTensor) -> Tensor:
    """Return this rank's range. Raises RuntimeError for a gradient that is not reduced."""
    spec = tensor.spec
    unit = UNREDUCED.get(tensor)
    if unit is not None:
        raise RuntimeError(
            f"{unit_text(unit)}, {spec.name!r}, rank {spec.comm.rank}: a norm or sum of a gradient "
            "that was accumulated under no_sync and not reduced. Compute the norm or sum after a "
            "backward outside of no_sync."
        )
    return tensor.local


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which elements of ``dtype`` are added. None: ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name. Raise for an argument that no handler implements."""
    names = (argument.name for argument in func._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    spec = first_sharded(args, kwargs).spec
    if given.pop("keepdim", False) or given.pop("dim", None) not in (None, []):
        spec.refuse(f"{func._schema.name} along a dimension")
    for name in given.keys() - {"self", "ord", "dtype"}:
        spec.refuse(f"the argument {name}")
    return given


def norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the p-norm of each tensor, with the dtype and device that torch's result would have.

    ``tensors`` may be plain or sharded. ``order`` is the p of the norm.

    Collective: all ranks that hold ranges of ``tensors``. One reduction per communicator.
    """
    results: dict[int, Tensor] = {}
    positions_of: dict[tuple[Communicator, ...], list[int]] = {}
    for position, tensor in enumerate(tensors):
        comms = tensor.spec.comms if isinstance(tensor, FlatShardTensor) else ()
        positions_of.setdefault(comms, []).append(position)
    for comms, positions in positions_of.items():
        some: list[Any] = [tensors[position] for position in positions]
        if not comms:
            found = list(torch._foreach_norm(some, order, dtype))
        else:
            together = _sharded_norms(some, order, dtype, comms)
            # Each norm must have the device and dtype that torch would give it. Cast all norms
            # together, once for each (device, dtype), instead of each norm by itself.
            kinds = [(tensor.device, (dtype or tensor.dtype).to_real()) for tensor in some]
            cast = {kind: together.to(*kind).unbind() for kind in set(kinds)}
            found = [cast[kind][number] for number, kind in enumerate(kinds)]
        results.update(zip(positions, found, strict=True))
    return [results[position] for position in range(len(tensors))]


def _sharded_norms(
    tensors: list[FlatShardTensor], order: float, dtype: torch.dtype | None, comms: Comms
) -> Tensor:
    """Return the norms of tensors with the same communicators, float64, ``(len(tensors),)``."""
    parts = [_part(tensor) for tensor in tensors]
    if dtype is not None:
        parts = [part.to(dtype) for part in parts]
    # Take the absolute values of complex numbers first, because torch warns when it counts nonzero
    # complex numbers (order 0). A norm depends only on absolute values, so it stays the same.
    parts = [part.abs() if part.is_complex() else part for part in parts]
    device = parts[0].device if parts[0].device.type != "cpu" else comms[0].control_device
    local = _local_norms(parts, order, device)
    op_name = _name_of_norms(tensors, order)
    if math.isinf(order):
        return _extremes(local, comms, largest=order > 0, op_name=op_name)
    if order == 0:
        return _reduced(local, comms, "SUM", op_name)
    return _reduced(local.pow(order), comms, "SUM", op_name).pow(1 / order)


def _name_of_norms(tensors: list[FlatShardTensor], order: float) -> str:
    first = tensors[0].described
    if len(tensors) == 1:
        return f"norm of order {order:g} of {first}"
    which = zlib.crc32(", ".join(f"{one.role} {one.spec.name}" for one in tensors).encode())
    return f"norms of order {order:g} of {len(tensors)} tensors from {first} on, set {which:08x}"


def _local_norms(parts: list[Tensor], order: float, device: torch.device) -> Tensor:
    # A rank with no elements must not change the result, so its norm is the neutral element of the
    # reduction over the ranks: 0, or infinity for negative orders.
    nothing = torch.full((), 0.0 if order >= 0 else math.inf, device=device)
    found = dict.fromkeys(range(len(parts)), nothing)
    for dtype in {part.dtype for part in parts}:
        some = {i: p for i, p in enumerate(parts) if p.dtype == dtype and p.numel() > 0}
        # torch's foreach kernels reject an empty list.
        local = torch._foreach_norm([*some.values()], order, _sum_dtype(dtype)) if some else []
        found.update(zip(some, (norm.to(device) for norm in local), strict=True))
    # Use float64, because powers of the norms are added: the square of 1e20 would overflow float32.
    return torch.stack([*found.values()]).to(torch.float64)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = _bind(func, args, kwargs)
    return norms([given["self"]], float(given.get("ord", 2)), given.get("dtype"))[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = _bind(func, args, kwargs)
    return norms(given["self"], float(given.get("ord", 2)), given.get("dtype"))


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``sum`` and ``mean`` over all elements."""
    given = _bind(func, args, kwargs)
    tensor, dtype = given["self"], given.get("dtype")
    spec, part = tensor.spec, _part(tensor)
    if dtype is not None:
        part = part.to(dtype)
    # Add narrow dtypes in float32, and round only once, after adding the sums of all ranks.
    total = part.sum(dtype=_sum_dtype(part.dtype))
    name = func._schema.name.removeprefix("aten::")
    _reduced(total, spec.comms, "SUM", f"{name} of {tensor.described}")
    if func._schema.name == "aten::mean":
        total = total / spec.unsharded_numel
    return total if _sum_dtype(part.dtype) is None else total.to(part.dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, name = _bind(func, args, kwargs)["self"], func._schema.name.removeprefix("aten::")
    part = _part(tensor)
    is_logical = name in ("any", "all") or part.dtype is torch.bool
    if is_logical:
        part = (part != 0).to(torch.uint8)
    largest = name in ("max", "amax", "any")
    if part.numel() > 0:
        value = part.amax() if largest else part.amin()
    else:
        # A rank without elements contributes the neutral element.
        least, greatest = -math.inf, math.inf
        if not part.is_floating_point():
            least, greatest = torch.iinfo(part.dtype).min, torch.iinfo(part.dtype).max
        value = part.new_full((), least if largest else greatest)
    op_name = f"{name} of {tensor.described}"
    value = _extremes(value.view(1), tensor.spec.comms, largest=largest, op_name=op_name)[0]
    return value.to(torch.bool) if is_logical else value


def _extremes(values: Tensor, comms: Comms, *, largest: bool, op_name: str) -> Tensor:
    """Return the maximum or minimum over the ranks for each position; NaN if a rank has NaN."""
    op = "MAX" if largest else "MIN"
    if not values.is_floating_point():
        return _reduced(values, comms, op, op_name)
    is_nan = values.isnan()
    # A backend's MAX and MIN may lose a NaN, and may return different results on different ranks.
    # So replace NaN by 0, and reduce marks together with the values: the mark of NaN is 1 for MAX
    # and -1 for MIN, all other marks are 0.
    marks = is_nan.to(values.dtype) * (1 if largest else -1)
    both = torch.cat([values.masked_fill(is_nan, 0), marks])
    found, marks = _reduced(both, comms, op, op_name).chunk(2)
    return found.masked_fill(marks != 0, math.nan)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for ``GradScaler``. If one rank finds an overflow, all ranks report it."""
    gradients, found_inf, inverse_scale = args
    func([local_range(g) for g in gradients], found_inf, inverse_scale)
    wrote(gradients)
    # Collect the communicators in a dictionary, because all ranks must use the communicators in the
    # same order, and a set has no fixed order.
    specs = [g.spec for g in gradients if isinstance(g, FlatShardTensor)]
    for comm in dict.fromkeys(comm for spec in specs for comm in spec.comms):
        comm.reduce_scalars(found_inf, "MAX", op_name="GradScaler's check for inf and NaN")


HANDLERS.update(
    linalg_vector_norm=_vector_norm,
    _foreach_norm=_foreach_norm,
    _foreach_max=lambda func, args, _: first_sharded(args, {}).spec.refuse(func._schema.name),
    sum=_sum,
    mean=_sum,
    _amp_foreach_non_finite_check_and_unscale_=_unscale,
    **dict.fromkeys(("max", "min", "amax", "amin", "any", "all"), _extreme),
)


def _differentiable(kind: str, *args: Any, **kwargs: Any) -> Any:
    source = first_sharded(args, kwargs)
    if not source.requires_grad:
        return NotImplemented
    if kind == "norm" or len(args) + len(kwargs) > 1:
        source.spec.refuse(f"the gradient of a {kind}")
    apply: Any = OutsideUse.apply
    total = apply(source, lambda tensor: _sum(aten.sum.default, (tensor,), {}))
    return total / source.spec.unsharded_numel if kind == "mean" else total


def _refuse_gradients_of(*args: Any, **kwargs: Any) -> Any:
    """Raise for ``torch.autograd.grad(loss, parameters)`` with sharded parameters.

    The loss was computed from the full parameters, so autograd would find no path to the sharded
    parameters and return None.
    """
    for value in sharded_in((*args[1:], *kwargs.values())):
        if getattr(value, "_is_param", False):
            raise RuntimeError(
                f"parameter {value.spec.name!r} is sharded: torch.autograd.grad(loss, inputs) and "
                "backward(inputs=...) do not support sharded parameters. Call loss.backward() and "
                "read p.grad, or work under ShardedWrapper.summon_full_params(model)."
            )
    return NotImplemented


for _kind, _functions in (
    ("sum", (torch.sum, Tensor.sum)),
    ("mean", (torch.mean, Tensor.mean)),
    ("norm", (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)),
):
    ABOVE_AUTOGRAD.update(dict.fromkeys(_functions, partial(_differentiable, _kind)))
for _function in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
    ABOVE_AUTOGRAD[_function] = _refuse_gradients_of


# The reductions that `_all_reduce` supports, because it can compute them without sending values: on
# N equal tensors SUM multiplies by N, and the other reductions change nothing.
_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN")


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a collective that the user's program calls on a sharded tensor, or raise.

    Only an all-reduce is supported.
    """
    if (func.__module__, func.__name__) == (dist.distributed_c10d.__name__, "all_reduce"):
        _all_reduce(*args, **kwargs)
    else:
        _refuse(first_sharded(args, kwargs), func.__name__.removesuffix(".default"))


def _all_reduce(
    tensor: FlatShardTensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> None:
    """Write into ``tensor`` the result that an all-reduce of equal full tensors would have.

    No values are sent: SUM multiplies the tensor by the number of ranks, and AVG, MAX and MIN
    change nothing.

    Collective: the ranks that train the parameter. They first check that all ranks call the same
    operation on the same tensor.
    """
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None or async_op or not tensor.is_alike or not _trains(tensor.spec, group):
        _refuse(tensor, "all_reduce")
    spec, asked = tensor.spec, (name, tensor.origin.digest)
    for comm in (spec.comm, spec.replicas):
        if len(comm.host.gather_unless_equal(asked, f"all-reduce of {spec.name!r}")) > 1:
            raise RuntimeError(
                f"{spec.where()}: all_reduce() of a sharded tensor whose values the ranks computed "
                "differently, so that the ranks' ranges do not form one tensor. Expected the same "
                "operations with the same numbers on all ranks. Compute under "
                "ShardedWrapper.summon_full_params(model), where each rank has full tensors."
            )
    if name == "SUM":
        with torch.no_grad():
            tensor.mul_(spec.comm.size * spec.replicas.size)


def _trains(spec: ShardSpec, group: Any) -> bool:
    """Whether ``group`` has exactly the ranks that train the parameter.

    False if the parameter is tensor-parallel.
    """
    if len(spec.comms) > 1 or not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = set(dist.get_process_group_ranks(group))
    # A rank knows only the members of its own shard group and replicate group, so each rank checks
    # that ``group`` contains these two groups.
    parts = [comm.ranks for comm in (spec.comm, spec.replicas) if comm.size > 1]
    return len(ranks) == spec.comm.size * spec.replicas.size and ranks.issuperset(chain(*parts))


def _refuse(tensor: FlatShardTensor, name: str) -> NoReturn:
    refuse_foreign_wrapper()
    remedy = (
        "The gradient is already averaged over all ranks: leave the collective out."
        if tensor.role == GRADIENT
        else f"Expected a synchronous all_reduce ({', '.join(_REDUCTIONS)}) of a parameter, over "
        "all ranks that train the parameter. To write values, communicate under "
        "ShardedWrapper.summon_full_params(model), or use model.load_state_dict()."
    )
    raise RuntimeError(
        f"{tensor.spec.where(tensor.described)} is sharded: {name}() would send only this rank's "
        f"range, or write to a temporary copy. {remedy} To read values, call full_tensor() on all "
        "ranks and communicate the result. [FS-COLLECTIVE]"
    )


HANDLERS["collective"] = _collective
