"""Reductions over all elements of sharded tensors (``FlatShardTensor``), such as norms.

Each rank reduces its own range of the elements, and one collective combines the results.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.tensor import sharded_tensor
from flatshard.tensor.sharded_tensor import FlatShardTensor, first_sharded, sharded_in
from flatshard.tensor.unsharded import use_outside
from flatshard.units.module_tree import unit_text

aten = torch.ops.aten
Comms = Sequence[Communicator]


def _reduced(values: Tensor, comms: Comms, op: str, op_name: str) -> Tensor:
    """Reduce a few numbers, in place, over the ranks of each communicator in turn. Collective."""
    for comm in comms:
        values = comm.reduce_scalars(values, op, op_name=op_name)
    return values


def own_part(tensor: FlatShardTensor) -> Tensor:
    """Return this rank's elements of a sharded tensor.

    Raises:
        RuntimeError: the tensor is a gradient that was not reduced over all ranks yet.
    """
    unit = sharded_tensor.UNREDUCED.get(tensor)
    if unit is not None:
        where = f"{unit_text(unit)}, {tensor.spec.name!r}, rank {tensor.spec.comm.rank}"
        raise RuntimeError(sharded_tensor.not_reduced(where, "a norm or sum"))
    return tensor.local


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which elements of ``dtype`` are added. None: ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator, keyed by name.

    Raises:
        NeedsFullTensor: no handler in this file implements an argument, such as ``dim``.
    """
    names = (argument.name for argument in func._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor = first_sharded(args, kwargs)
    if given.pop("keepdim", False) or given.pop("dim", None) not in (None, []):
        tensor.refuse(f"{func._schema.name} along a dimension")
    for name in given.keys() - {"self", "ord", "dtype"}:
        tensor.refuse(f"the argument {name}")
    return given


def norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the p-norm of each tensor, with the dtype and device that torch's result would have.

    Collective: all ranks that hold elements of ``tensors``. The norms of all tensors with the same
    communicators are reduced together.

    Args:
        tensors: plain or sharded tensors.
        order: the p of the norm.
        dtype: dtype in which to compute the norms. None: the dtype of each tensor.
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
            names = [tensor.described for tensor in some]
            together = joined_norms([*map(own_part, some)], names, order, dtype, comms)
            # One cast of all norms for each pair (device, dtype) is faster than one cast of each
            # norm.
            kinds = [(tensor.device, (dtype or tensor.dtype).to_real()) for tensor in some]
            cast = {kind: together.to(*kind).unbind() for kind in set(kinds)}
            found = [cast[kind][number] for number, kind in enumerate(kinds)]
        results.update(zip(positions, found, strict=True))
    return [results[position] for position in range(len(tensors))]


def joined_norms(
    parts: Sequence[Tensor],
    names: Sequence[str],
    order: float,
    dtype: torch.dtype | None,
    comms: Comms,
) -> Tensor:
    """Return norms of tensors, in float64, ``(len(parts),)``.

    Collective: all ranks of ``comms``, the communicators of each of the tensors.

    Args:
        parts: this rank's elements of each tensor.
        names: descriptions of the tensors, which ranks compare.
        order: the p of the norms.
        dtype: dtype in which to compute the norms of the parts. None: the dtype of each part, but
            at least float32.
        comms: the communicators whose ranks together hold all elements.
    """
    # torch warns when it counts nonzero complex numbers (order 0). A norm depends only on absolute
    # values.
    parts = [part.abs() if part.is_complex() else part for part in parts]
    on_host = comms[0].host.device if comms else torch.device("cpu")
    device = parts[0].device if parts[0].device.type != "cpu" else on_host
    # The value of a rank without elements, which does not change the result: a negative power of
    # infinity adds 0 to the sum.
    nothing = torch.full((), 0.0 if order >= 0 else math.inf, device=device)
    found = dict.fromkeys(range(len(parts)), nothing)
    for kind in {part.dtype for part in parts}:
        some = {i: p for i, p in enumerate(parts) if p.dtype == kind and p.numel() > 0}
        sums = dtype or _sum_dtype(kind)
        norms = torch._foreach_norm([*some.values()], order, sums) if some else []
        found.update(zip(some, (norm.to(device) for norm in norms), strict=True))
    # Use float64: powers of the norms are added, and the square of 1e20 would overflow float32.
    local = torch.stack([*found.values()]).to(torch.float64)
    op_name = f"norm of order {order:g} of {names[0]}"
    if len(parts) > 1:
        op_name = f"norms of order {order:g} of {len(parts)} tensors from {names[0]} on, set "
        op_name += f"{zlib.crc32(', '.join(names).encode()):08x}"
    if math.isinf(order):
        return _extremes(local, comms, largest=order > 0, op_name=op_name)
    power = order or 1.0  # the norm of order 0 is the number of nonzero elements
    return _reduced(local.pow(power), comms, "SUM", op_name).pow(1 / power)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | list[Tensor]:
    given = _bind(func, args, kwargs)
    tensors = [given["self"]] if isinstance(given["self"], Tensor) else given["self"]
    found = norms(tensors, float(given.get("ord", 2)), given.get("dtype"))
    return found if tensors is given["self"] else found[0]


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Handle ``sum`` and ``mean`` over all elements.

    Collective: all ranks that hold elements of the tensor.
    """
    given = _bind(func, args, kwargs)
    tensor = given["self"]
    spec, part = tensor.spec, own_part(tensor).to(given.get("dtype") or tensor.dtype)
    # Round to float16 or bfloat16 only once, after the sums of all ranks are added.
    total = part.sum(dtype=_sum_dtype(part.dtype))
    name = func._schema.name.removeprefix("aten::")
    _reduced(total, spec.comms, "SUM", f"{name} of {tensor.described}")
    total = total / spec.unsharded_numel if name == "mean" else total
    return total if _sum_dtype(part.dtype) is None else total.to(part.dtype)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, name = _bind(func, args, kwargs)["self"], func._schema.name.removeprefix("aten::")
    part = own_part(tensor)
    is_logical = name in ("any", "all") or part.dtype is torch.bool
    if is_logical:
        part = (part != 0).to(torch.uint8)
    largest = name in ("max", "amax", "any")
    if part.numel() > 0:
        value = part.amax() if largest else part.amin()
    else:
        # A rank without elements must not change the result: it contributes the smallest value to
        # a maximum, and the largest value to a minimum.
        least, greatest = -math.inf, math.inf
        if not part.is_floating_point():
            least, greatest = torch.iinfo(part.dtype).min, torch.iinfo(part.dtype).max
        value = part.new_full((), least if largest else greatest)
    op_name = f"{name} of {tensor.described}"
    value = _extremes(value.view(1), tensor.spec.comms, largest=largest, op_name=op_name)[0]
    return value.to(torch.bool) if is_logical else value


def _extremes(values: Tensor, comms: Comms, *, largest: bool, op_name: str) -> Tensor:
    """Return the maximum or minimum over the ranks, for each element of ``values``.

    An element of the result is NaN if it is NaN on at least one rank. Collective: all ranks of
    ``comms``.
    """
    op = "MAX" if largest else "MIN"
    if not values.is_floating_point():
        return _reduced(values, comms, op, op_name)
    is_nan = values.isnan()
    # The MAX and MIN of a backend may lose a NaN, and differ between ranks. So replace NaN by 0,
    # and reduce marks together with the values: 1 for MAX, and -1 for MIN, where a rank has NaN.
    marks = is_nan.to(values.dtype) * (1 if largest else -1)
    both = torch.cat([values.masked_fill(is_nan, 0), marks])
    found, marks = _reduced(both, comms, op, op_name).chunk(2)
    return found.masked_fill(marks != 0, math.nan)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle the operator with which ``GradScaler`` unscales gradients and looks for overflows.

    If one rank finds inf or NaN, ``found_inf`` becomes 1 on all ranks, so that all ranks skip the
    optimizer step. Collective: all ranks that hold elements of the gradients.
    """
    gradients, found_inf, inverse_scale = args
    func([sharded_tensor.local_range(g) for g in gradients], found_inf, inverse_scale)
    sharded_tensor.wrote(gradients)
    # Remove duplicate communicators with a dictionary instead of a set, which has no fixed order:
    # all ranks must use the communicators in the same order.
    for comm in dict.fromkeys(comm for g in sharded_in(gradients) for comm in g.spec.comms):
        comm.reduce_scalars(found_inf, "MAX", op_name="GradScaler's check for inf and NaN")


sharded_tensor.HANDLERS.update(
    linalg_vector_norm=_norm,
    _foreach_norm=_norm,
    _foreach_max=lambda func, args, _: first_sharded(args, {}).refuse(func._schema.name),
    sum=_sum,
    mean=_sum,
    _amp_foreach_non_finite_check_and_unscale_=_unscale,
    **dict.fromkeys(("max", "min", "amax", "amin", "any", "all"), _extreme),
)


def _differentiable(kind: str, *args: Any, **kwargs: Any) -> Any:
    source = first_sharded(args, kwargs)
    if not (source.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    if kind == "norm" or len(args) + len(kwargs) > 1:
        source.spec.refuse(f"the gradient of a {kind}")
    total = use_outside(source, lambda tensor: _sum(aten.sum.default, (tensor,), {}))
    return total / source.spec.unsharded_numel if kind == "mean" else total


def _gradients(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.autograd.grad`` and ``backward`` if ``inputs`` has sharded parameters.

    The graph of a loss leads to the full parameters. In the backward of a user's
    ``torch.autograd.Function`` (a checkpoint, or the adjoint method of an ODE), return the
    gradients of the full parameters for this rank's batch. Later, ``average_full_gradients``
    averages the gradients that the user's function returns.
    """
    given = sharded_in((*args[1:], *kwargs.values()))
    params = {id(t): t.spec.original for t in given if _is_leaf_of_parameter(t)}
    if not params:
        return NotImplemented
    if func is not torch.autograd.grad or torch._C._current_graph_task_id() == -1:
        raise RuntimeError(
            f"parameter {next(iter(params.values())).name!r} is sharded: torch.autograd.grad(loss, "
            "inputs) and backward(inputs=...) do not support sharded parameters. Call loss."
            "backward() and read p.grad, or work under ShardedWrapper.summon_full_params(model). "
            "For one layer, such as the last layer of a decoder (VQGAN's adaptive weight), do not "
            "shard the layer: auto_wrap_policy=CustomPolicy(lambda module: "
            "{'sharding_strategy': 'NO_SHARD'} if module is layer else False)."
        )
    # A graph may use the full parameter, the sharded one, or both, so ask torch for both gradients.
    # Torch must allow None for one of them; inputs without any gradient raise below.
    allow_unused, kwargs["allow_unused"] = kwargs["allow_unused"], True
    # Edges instead of the full parameters, which may be resharded (`FreedParameter`). A sum of a
    # parameter (`OutsideUse`) leads to the sharded parameter, so ask for both gradients.
    edges = [_edge(t) if id(t) in params else t for t in args[1]]
    found = func(args[0], edges + [_edge(p.full) for p in params.values()], **kwargs)
    # For each input, the gradient of the input, and of the full parameter if there is one.
    of_full = dict(zip(params, found[len(edges) :], strict=False))
    pairs: Any = [(grad, of_full.get(id(t))) for t, grad in zip(args[1], found, strict=False)]
    if not allow_unused and any(g is f is None for g, f in pairs):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(g if f is None else f if g is None else f + g.full_tensor() for g, f in pairs)


def _edge(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(tensor)


def _is_leaf_of_parameter(tensor: FlatShardTensor) -> bool:
    """Whether autograd would add the gradient of ``tensor`` to ``.grad`` of a parameter.

    True for the parameter, and for the tensor that ``ctx.saved_tensors`` returns in its place.
    """
    original: Any = tensor.spec.original
    may_be = original is not None and tensor.requires_grad and tensor.is_leaf
    return may_be and _edge(tensor).node is _edge(original.sharded).node


for _kind, _functions in (
    ("sum", (torch.sum, Tensor.sum)),
    ("mean", (torch.mean, Tensor.mean)),
    ("norm", (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)),
):
    sharded_tensor.ABOVE_AUTOGRAD.update(dict.fromkeys(_functions, partial(_differentiable, _kind)))
for _function in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
    sharded_tensor.ABOVE_AUTOGRAD[_function] = partial(_gradients, _function)
