"""Functions that run torch's operators on sharded tensors (``FlatShardTensor``).

An element-wise operation needs no communication: each rank runs the operation only on its own range
of the elements. For random numbers, every rank draws numbers for the full tensor, and uses only the
numbers for its own range. In a reduction over all elements, such as a norm, each rank reduces its
own range, and one collective combines the results.
"""

import math
import weakref
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.memory import checksum
from flatshard.precision import tensors_in
from flatshard.tensor import sharded_tensor
from flatshard.tensor.shard_spec import NeedsFullTensor
from flatshard.tensor.sharded_tensor import Caller, FlatShardTensor, Origin, Source, first_sharded
from flatshard.tensor.unsharded import edge_of, use_outside
from flatshard.units.module_tree import unit_text

# For each narrow dtype: the wider dtype in which elements are added.
_SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

Comms = Sequence[Communicator]
aten = torch.ops.aten

_POINTWISE = frozenset(
    """abs add sub rsub mul div true_divide floor_divide neg sign sgn sqrt rsqrt square reciprocal
    pow exp exp2 expm1 log log1p log2 log10 sin cos tan tanh sigmoid relu erf erfinv floor ceil
    round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv eq ne
    lt le gt ge isnan isinf isfinite logical_and logical_or logical_xor logical_not bitwise_and
    bitwise_or bitwise_not where nan_to_num zero fill clone positive remainder fmod hypot atan2
    xlogy masked_fill copysign conj_physical zeros_like ones_like empty_like full_like _to_copy
    copy tanh_backward sigmoid_backward threshold_backward""".split()
)

_ROLE_LENGTH = 80  # maximum length of the text that `_role_of` returns, without the digest


def _local(value: Any, like: FlatShardTensor, func: Any) -> Any:
    """Return this rank's range of ``value``, an operand of ``func``: the elements of ``like``.

    Collective if ``func`` writes ``like`` in place, and ``value`` is a parameter with other ranges,
    such as a momentum encoder's parameter in another unit.
    """
    if isinstance(value, FlatShardTensor):
        if value.spec.place == like.spec.place:
            return value.local
        value = _whole(value, like, func)
    if isinstance(value, Tensor) and value.dim() > 0:
        if torch.is_grad_enabled() and value.requires_grad:
            # Refuse: the gradient of `value` depends on the elements of all ranks, but autograd
            # would use only this rank's elements.
            like.spec.refuse("a product with a tensor that requires a gradient")
        return like.spec.slice(value)
    return value


def _whole(value: FlatShardTensor, like: FlatShardTensor, func: Any) -> Tensor:
    """Return the full tensor of ``value``, which ``func`` must only read. Collective.

    Raises NeedsFullTensor if ``func`` may write to ``value``, or returns a new tensor, or if the
    ranks' ranges of ``like`` or ``value`` may be parts of different full tensors.
    """
    # Fused optimizers write to several lists. Writes to a gathered copy would be lost.
    is_read = func._schema.is_mutable and not func._opname.startswith("_fused")
    if not is_read or not like.is_alike or not value.is_alike or len(value.spec.comms) > 1:
        raise NeedsFullTensor(
            f"parameter {like.spec.name!r} {like.spec.shape} and {value.spec.name!r} "
            f"{value.spec.shape} are sharded with different shapes, strides or ranges, so one "
            "operation cannot combine them. Call full_tensor() of both on all ranks, and combine "
            "the full tensors.",
            like.spec,
        )
    with torch.no_grad():  # autograd has already recorded the in-place operation
        return value.full_tensor()


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = (*args, *kwargs.values())
    like = first_sharded(args, kwargs)
    spec = like.spec
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], FlatShardTensor):
        spec.refuse(f"writing into a plain tensor with {func._schema.name}")
    caller = sharded_tensor.caller_of_operator()
    origin = sharded_tensor.origin_of(operands, caller)
    if not in_place and (refused := _needs_full(func, operands, origin, caller)) is not None:
        if func._schema.name.endswith("_like"):
            return _full_like(func, args, kwargs)
        # `__torch_function__` catches `NeedsFullTensor`, and runs the program's operation again
        # with full tensors. Operations of a derivative formula are not called through
        # `__torch_function__`, so run them with full tensors here.
        if caller is not Caller.AUTOGRAD or torch.is_grad_enabled():
            like.refuse(f"{func._schema.name} {refused}")
        result = spec.owner.run_full(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if origin.source >= Source.OTHER:
        _check_gradient(func, operands)
    # Remove the argument `memory_format`: this rank's range is 1-D, and the result always has the
    # parameter's memory format.
    kwargs = {key: _local(v, like, func) for key, v in kwargs.items() if key != "memory_format"}
    result = func(*(_local(value, like, func) for value in args), **kwargs)
    if in_place:
        sharded_tensor.wrote(args[:1])
        _record_write(args[0], origin, func, args)
        return args[0]
    target = spec.state_target
    if target is not None and func._schema.name.endswith("_like"):
        # An optimizer makes its state with ``zeros_like``. Put the state where the user wants it
        # (on disk, for example).
        result = target.take_in(result) if result.device == like.local.device else result
    return FlatShardTensor(result, spec, role=_role_of(func, args), origin=origin)


def _needs_full(func: Any, operands: Sequence[Any], origin: Origin, caller: Caller) -> str | None:
    """Return why an operation must compute with full tensors. None: it may compute with ranges.

    The reason is a phase of the step, such as "in forward", in which the ranks may compute
    different results. A sharded result would mix ranges of these different results.
    """
    sharded = [value for value in operands if isinstance(value, FlatShardTensor)]
    if not all(tensor.is_alike and not tensor.shard_origin.is_arriving for tensor in sharded):
        return None
    # This rank's gradient must stay full. A user's `torch.autograd.Function` or hook may add it to
    # ``zeros_like(weight)``, and in a derivative formula, a plain operand may be this gradient.
    is_mixed = origin.source >= Source.OTHER
    if caller is Caller.PROGRAM_FOR_GRADIENT or (caller is Caller.AUTOGRAD and is_mixed):
        return "in the computation of a gradient"
    # In forward, three cases need full tensors. An operand may differ between ranks, such as an
    # activation of this rank's batch. The module may compute in another dtype than the shard's.
    # The user may fill the result of ``empty_like`` with numbers for this rank's batch.
    spec, name = sharded[0].spec, func._schema.name
    if sharded[0].shard_origin.source is Source.PARAMETERS and spec.owner.is_in_forward:
        is_cast = spec.original is not None and spec.original.full.dtype is not sharded[0].dtype
        if is_mixed or is_cast or name.endswith("_like"):
            return "in forward"
    return None


def _full_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``zeros_like`` or a similar function so that the result is a full plain tensor."""
    like: FlatShardTensor = args[0]
    like.spec.refuse_part(func._schema.name)
    # If ``like`` was computed from parameters, use the dtype and device in which modules compute.
    original = like.spec.original if like.shard_origin.source is Source.PARAMETERS else None
    full = like.spec.empty(like.local if original is None else original.full)
    return func(full, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _check_gradient(func: Any, operands: Sequence[Any]) -> None:
    """Raise if autograd records an operation with random numbers or plain tensors."""
    # Refuse, because the gradient would be wrong. The ranks have different random numbers or plain
    # tensors, and DistributedDataParallel averages the gradients of all ranks. Here, an element's
    # gradient would come only from the rank that stores the element.
    sharded = [value for value in operands if isinstance(value, FlatShardTensor)]
    is_drawn = any(value.shard_origin.source is Source.DRAWN for value in sharded)
    has_plain = sum(isinstance(value, Tensor) for value in operands) > len(sharded)
    if (is_drawn or has_plain) and torch.is_grad_enabled():
        for value in sharded:
            if value.requires_grad:
                others = "random numbers" if is_drawn else "a tensor that may differ between ranks"
                value.refuse(f"the gradient of {func._schema.name} with {others}")


def _role_of(func: Any, args: Sequence[Any]) -> str:
    """Return the ``role`` of an operation's result, such as ``mul of parameter, 2``.

    The role is a part of the names of later collectives (a norm of the result, for example), and
    contains checksums of plain tensors. Ranks compare these names, so the norm raises if the plain
    tensors differ between ranks.
    """
    text = f"{func._schema.name.removeprefix('aten::')} of {', '.join(map(_operand, args))}"
    # Limit the length. For a running average, for example, each step's role contains the role of
    # the step before.
    digest = f"... {zlib.crc32(text.encode()):08x}"
    return text if len(text) < _ROLE_LENGTH else text[:_ROLE_LENGTH] + digest


def _operand(value: Any) -> str:
    if isinstance(value, FlatShardTensor):
        return value.shard_role + value.shard_origin.written
    # Leave out numbers in tensors on an accelerator. Optimizers have such numbers, and a checksum
    # would make the host wait for the accelerator.
    if isinstance(value, Tensor) and (value.dim() > 0 or value.is_cpu):
        return f"tensor {zlib.crc32(repr(checksum(value)).encode()):08x}"
    return repr(value) if isinstance(value, int | float) else ""


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach or fused operation, which combines tensors at the same position in lists."""
    # The first sharded tensor at each position, or None. Other lists may have plain tensors at this
    # position, such as updates of sharded parameters.
    likes = [
        next((value for value in values if isinstance(value, FlatShardTensor)), None)
        for values in zip_longest(*(value for value in args if isinstance(value, list | tuple)))
    ]

    def local(values: Any) -> Any:
        if not isinstance(values, list | tuple) or not any(isinstance(v, Tensor) for v in values):
            return values
        pairs = zip(values, likes, strict=False)
        return [v if one is None else _local(v, one, func) for v, one in pairs]

    is_mutable = func._schema.is_mutable
    if not is_mutable:
        operands: list[Any] = tensors_in((args, kwargs))
        caller = sharded_tensor.caller_of_operator()
        origin = sharded_tensor.origin_of(operands, caller)
        if _needs_full(func, operands, origin, caller) is not None:
            first_sharded(args, kwargs).refuse(func._schema.name)
        _check_gradient(func, operands)
    for value, like in zip(args[0] if is_mutable else (), likes, strict=False):
        if like is not None and not isinstance(value, FlatShardTensor):
            like.spec.refuse(f"writing into a plain tensor with {func._schema.name}")
    result = func(*map(local, args), **{key: local(v) for key, v in kwargs.items()})
    if not is_mutable:
        first, pairs = first_sharded(args, kwargs), [*zip(result, likes, strict=True)]
        if any(one is not None and value.shape != one.local.shape for value, one in pairs):
            first.refuse(func._schema.name)  # a reduction, such as `_foreach_powsum`
        role = f"{func._opname} of {first.shard_role}"
        return [v if one is None else FlatShardTensor(v, one.spec, role=role) for v, one in pairs]
    for argument, values in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            sharded_tensor.wrote((values,))
            for position, value in enumerate(values):
                if isinstance(value, FlatShardTensor) and value.shard_origin.may_change:
                    operands = [_at(operand, position) for operand in (*args, *kwargs.values())]
                    _record_write(value, sharded_tensor.origin_of(operands), func, operands)
    return None


def _record_write(tensor: FlatShardTensor, result: Origin, func: Any, args: Sequence[Any]) -> None:
    """Update a tensor's origin after a write in place. ``result``: the origin of the new values."""
    origin = tensor.shard_origin
    if origin.may_change:
        origin.source, origin.graph_task = result.source, result.graph_task
        # Ranks compare `written`. So do not add operands that may differ between ranks (OTHER).
        if result.source < Source.OTHER:
            text = f"{origin.written}{_role_of(func, args)}"
            origin.written = f", written {zlib.crc32(text.encode()):08x}"


def _at(value: Any, position: int) -> Any:
    """Return ``value[position]`` if ``value`` is a list with this position, otherwise ``value``."""
    return value[position] if isinstance(value, list | tuple) and position < len(value) else value


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw random numbers for a sharded tensor. The numbers do not depend on the world size."""
    tensor: FlatShardTensor = args[0]
    spec, local = tensor.spec, tensor.local
    if func is aten.bernoulli.default:
        tensor.refuse("bernoulli() with its elements as probabilities")
    if tensor.is_alike and not func._schema.is_mutable:
        caller = sharded_tensor.caller_of_operator()
        if caller is Caller.PROGRAM_FOR_GRADIENT or spec.owner.is_in_forward:
            return _full_like(func, args, kwargs)
    if tensor.is_alike and spec.owner.is_in_forward:
        # Refuse in forward, where the program may want different random numbers on each rank.
        spec.refuse(f"{func._schema.name} in forward")
    # Refuse parts of a DTensor, which would all get the same random numbers.
    spec.refuse_part(func._schema.name)
    # Draw the full tensor on every rank. Then the generators of all ranks stay in the same state,
    # and the values do not depend on the world size.
    role = f"{_role_of(func, args)}, generator {_generator_digest(local.device, kwargs)}"
    part = spec.slice(func(spec.empty(local), *args[1:], **kwargs))
    if not func._schema.is_mutable:
        # Clone, because a view would keep the drawn full tensor in memory.
        return FlatShardTensor(part.clone(), spec, role=role, origin=Origin(Source.DRAWN))
    local.copy_(part)
    sharded_tensor.wrote((tensor,))
    if not tensor.shard_origin.is_fixed:
        tensor.shard_origin.source, tensor.shard_role = Source.DRAWN, role
    return tensor


def _generator_digest(device: torch.device, kwargs: dict[str, Any]) -> str:
    """Return a digest of the state of the generator that an operator is about to use.

    Ranks compare the digest. With different states, the ranks would draw different full tensors.
    """
    if kwargs.get("generator") is not None:
        state = kwargs["generator"].get_state()
    elif device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return f"{zlib.crc32(state.numpy()):08x}"


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    tensor, *rest = args
    if rest and (func is not aten.view.default or tuple(rest[0]) != tensor.spec.shape):
        tensor.refuse(f"{func._schema.name} to another shape or dtype")
    if rest:
        # Refuse parts of a DTensor: `orthogonal_()` calls `view_as()`, and would write a result
        # that is computed from one part only.
        tensor.spec.refuse_part("view_as()")
    # Return a new object with the same `local`, and so with the same version counter. Leave
    # inference mode: a tensor that is made in inference mode has no version counter, and autograd
    # raises when it reads the counter.
    with torch.inference_mode(False):
        origin = tensor.shard_origin
        twin = FlatShardTensor(tensor.local, tensor.spec, role=tensor.shard_role, origin=origin)
    origin.aliases = origin.aliases or weakref.WeakValueDictionary()
    origin.aliases[id(twin)] = twin
    return twin


def _refuse_draws(*args: Any, **kwargs: Any) -> Any:
    """Raise NeedsFullTensor for dropout on a trained sharded parameter.

    The gradients for the ranks' random numbers would not be averaged. Raises before a number is
    drawn, so that the function can run again with full tensors.
    """
    tensor = first_sharded(args, kwargs)
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor.refuse("the gradient of a function with random numbers")
    return NotImplemented


_DRAWING = "dropout alpha_dropout feature_dropout feature_alpha_dropout gumbel_softmax".split()
for _module in (nn.functional, torch):
    _found = (getattr(_module, name, None) for name in _DRAWING)
    sharded_tensor.ABOVE_AUTOGRAD.update(dict.fromkeys(filter(None, _found), _refuse_draws))

_DRAWS = """normal_ uniform_ bernoulli_ random_ log_normal_ cauchy_ exponential_ bernoulli
    rand_like randn_like""".split()

sharded_tensor.HANDLERS.update(
    _foreach=_foreach,
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys((f"{name}_" for name in (*_POINTWISE, "detach")), _pointwise),
    **dict.fromkeys(("detach", "alias", "view"), _same),
    **dict.fromkeys(_DRAWS, _random),
    **dict.fromkeys(
        ("new_empty", "new_zeros", "new_ones", "new_full"),
        lambda func, args, kwargs: func(args[0].local, *args[1:], **kwargs),
    ),
)


# ------------------------------------------------------------ reductions


def _reduced(values: Tensor, comms: Comms, op: str, op_name: str) -> Tensor:
    """Reduce a few numbers in place, over one communicator after another. Collective."""
    for comm in comms:
        values = comm.reduce_scalars(values, op, op_name=op_name)
    return values


def own_part(tensor: FlatShardTensor) -> Tensor:
    """Return this rank's elements of a sharded tensor. Raises for an unreduced gradient."""
    if (unit := tensor.unreduced_unit) is not None:
        where = f"{unit_text(unit)}, {tensor.spec.name!r}, rank {tensor.spec.comm.rank}"
        raise RuntimeError(sharded_tensor.not_reduced(where, "a norm or sum"))
    return tensor.local


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name. Refuses ``dim``, for example."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    if given.pop("keepdim", False) or given.pop("dim", None) not in (None, []):
        first_sharded(args, kwargs).refuse(f"{func._schema.name} along a dimension")
    for name in given.keys() - {"self", "ord", "dtype"}:
        first_sharded(args, kwargs).refuse(f"the argument {name}")
    return given


def norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the p-norm of each tensor. The norms have the same dtypes and devices as in torch.

    Collective: all ranks that share ``tensors``. One collective reduces the norms of all tensors
    that have the same communicators. ``dtype``: dtype in which to compute the norms.
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
            # Cast all norms together, once for each pair (device, dtype): this is faster than
            # casting each norm.
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
    """Return the norms of several tensors, in float64, ``(len(parts),)``.

    Collective: all ranks of ``comms``, which together hold all elements. ``parts``: this rank's
    elements of each tensor. ``names``: texts that ranks compare. ``dtype``: dtype in which to
    compute the norms of the parts. None: the dtype of each part, but at least float32.
    """
    # Replace complex numbers by absolute values. The norm stays the same, and torch does not warn
    # about order 0.
    parts = [part.abs() if part.is_complex() else part for part in parts]
    on_host = comms[0].host.device if comms else torch.device("cpu")
    device = parts[0].device if parts[0].device.type != "cpu" else on_host
    # Norm for a tensor without elements on this rank. This norm must not change the result: with a
    # negative order, infinity raised to the order adds 0 to the sum.
    nothing = torch.full((), 0.0 if order >= 0 else math.inf, device=device)
    found = dict.fromkeys(range(len(parts)), nothing)
    for kind in {part.dtype for part in parts if part.numel() > 0}:
        some = {i: p for i, p in enumerate(parts) if p.dtype == kind and p.numel() > 0}
        norms = torch._foreach_norm([*some.values()], order, dtype or _SUM_DTYPES.get(kind))
        found.update(zip(some, (norm.to(device) for norm in norms), strict=True))
    # Use float64, because powers of the norms are added: the square of 1e20 overflows float32.
    local = torch.stack([*found.values()]).to(torch.float64)
    digest = zlib.crc32(", ".join(names).encode())
    others = f" and {len(names) - 1} more tensors, digest {digest:08x}" if len(names) > 1 else ""
    op_name = f"norm of order {order:g} of {names[0]}{others}"
    if math.isinf(order):
        return _extremes(local, comms, largest=order > 0, op_name=op_name)
    # The norm of order 0 is the number of nonzero elements: add these numbers without powers.
    return _reduced(local.pow(order or 1.0), comms, "SUM", op_name).pow(1 / (order or 1.0))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | list[Tensor]:
    given = _bind(func, args, kwargs)
    tensors = [given["self"]] if isinstance(given["self"], Tensor) else given["self"]
    found = norms(tensors, float(given.get("ord", 2)), given.get("dtype"))
    return found if tensors is given["self"] else found[0]


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run ``sum`` or ``mean`` over all elements. Collective: all ranks that share the tensor."""
    given = _bind(func, args, kwargs)
    tensor = given["self"]
    spec, part = tensor.spec, own_part(tensor).to(given.get("dtype") or tensor.dtype)
    # Round to float16 or bfloat16 only once, after adding the sums of all ranks.
    total = part.sum(dtype=_SUM_DTYPES.get(part.dtype))
    name = func._schema.name.removeprefix("aten::")
    _reduced(total, spec.comms, "SUM", f"{name} of {tensor.described}")
    total = total / math.prod(spec.whole.shape) if name == "mean" else total
    return total.to(part.dtype) if part.dtype in _SUM_DTYPES else total


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
    """Return the maximum or minimum over the ranks, for each element of ``values``. Collective."""
    op = "MAX" if largest else "MIN"
    if not values.is_floating_point():
        return _reduced(values, comms, op, op_name)
    is_nan = values.isnan()
    # With NaN, a backend's MAX and MIN may return a number, and different numbers on the ranks. So
    # replace NaN by 0, and reduce marks together with the values. Where a rank has NaN, its mark is
    # 1 for MAX and -1 for MIN; otherwise 0.
    marks = is_nan.to(values.dtype) * (1 if largest else -1)
    both = torch.cat([values.masked_fill(is_nan, 0), marks])
    found, marks = _reduced(both, comms, op, op_name).chunk(2)
    return found.masked_fill(marks != 0, math.nan)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the operator by which ``GradScaler`` unscales gradients and looks for overflows.

    If one rank finds inf or NaN, ``found_inf`` becomes 1 on all ranks, so that all ranks skip the
    optimizer step. Collective: all ranks that share the gradients.
    """
    gradients, found_inf, inverse_scale = args
    func([sharded_tensor.local_range(g) for g in gradients], found_inf, inverse_scale)
    sharded_tensor.wrote(gradients)
    # Remove duplicate communicators with a dictionary, because a set has no fixed order. All ranks
    # must use the communicators in the same order.
    comms = (comm for g in sharded_tensor.sharded_in(gradients) for comm in g.spec.comms)
    for comm in dict.fromkeys(comms):
        comm.reduce_scalars(found_inf, "MAX", op_name="GradScaler's check for inf and NaN")


_IN_SET = "set_(), as in register_parametrization(), which must be called before wrapping,"

sharded_tensor.HANDLERS.update(
    linalg_vector_norm=_norm,
    set_=lambda _, args, __: first_sharded(args, {}).refuse(_IN_SET),
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
    return total / math.prod(source.spec.whole.shape) if kind == "mean" else total


def _gradients(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``torch.autograd.grad`` and ``backward`` if ``inputs`` contains sharded parameters.

    Only calls of ``grad`` in the backward of a user's ``torch.autograd.Function`` (a checkpoint, or
    the adjoint method of an ODE) are supported. These calls return this rank's full gradients. A
    hook (see `OriginalParam.show_chunk`) averages the gradients that the user's function returns.
    """
    given = sharded_tensor.sharded_in((*args[1:], *kwargs.values()))
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
    # A graph may use the full parameter, the sharded parameter, or both. So ask torch for both
    # gradients, and allow None. If both are None, raise below.
    allow_unused, kwargs["allow_unused"] = kwargs["allow_unused"], True
    # Pass edges of the graph instead of the full parameters: while a unit is resharded, operations
    # on its full parameters raise (`FreedParameter`).
    edges = [edge_of(t) if id(t) in params else t for t in args[1]]
    found = func(args[0], edges + [edge_of(p.full) for p in params.values()], **kwargs)
    # For each input, a pair: the input's gradient, and the gradient of its full parameter or None.
    of_full = dict(zip(params, found[len(edges) :], strict=False))
    pairs: Any = [(grad, of_full.get(id(t))) for t, grad in zip(args[1], found, strict=False)]
    if not allow_unused and any(g is f is None for g, f in pairs):
        text = "One of the differentiated Tensors appears to not have been used in the graph."
        raise RuntimeError(f"{text} Set allow_unused=True if this is the desired behavior.")
    return tuple(g if f is None else f if g is None else f + g.full_tensor() for g, f in pairs)


def _is_leaf_of_parameter(tensor: FlatShardTensor) -> bool:
    """Whether autograd would add the gradient of ``tensor`` to ``.grad`` of a parameter.

    True for a parameter, and for the tensor that ``ctx.saved_tensors`` returns if a parameter was
    saved.
    """
    original: Any = tensor.spec.original
    may_be = original is not None and tensor.requires_grad and tensor.is_leaf
    return may_be and edge_of(tensor).node is edge_of(original.sharded).node


for _kind, _functions in (
    ("sum", (torch.sum, Tensor.sum)),
    ("mean", (torch.mean, Tensor.mean)),
    ("norm", (torch.norm, Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm)),
):
    sharded_tensor.ABOVE_AUTOGRAD.update(dict.fromkeys(_functions, partial(_differentiable, _kind)))
for _function in (torch.autograd.grad, torch.autograd.backward, Tensor.backward):
    sharded_tensor.ABOVE_AUTOGRAD[_function] = partial(_gradients, _function)
