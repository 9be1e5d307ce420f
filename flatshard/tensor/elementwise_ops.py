"""Operations that each rank runs on its own range without communication.

Element-wise operations, random numbers, and operations on shapes.
"""

from __future__ import annotations

import weakref
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import NeedsFullTensor, ShardSpec
from flatshard.tensor.sharded_tensor import (
    ABOVE_AUTOGRAD,
    HANDLERS,
    FlatShardTensor,
    digest_of,
    first_sharded,
    wrote,
)

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

_ROLE_LENGTH = 80


def _local(value: Any, spec: ShardSpec) -> Any:
    """The elements of an operand that correspond to the local range of ``spec``."""
    if isinstance(value, FlatShardTensor):
        if value.spec.place != spec.place:
            raise NeedsFullTensor(
                f"parameter {spec.name!r} {spec.shape} meets {value.spec.name!r} "
                f"{value.spec.shape}: sharded tensors of different shapes, strides or layouts "
                "cannot be combined. Use full_tensor() on both.",
                spec,
            )
        return value.local
    if isinstance(value, Tensor) and value.dim() > 0:
        if torch.is_grad_enabled() and value.requires_grad:
            # The gradient of ``value`` needs the ranges of all ranks. Here the gradient would come
            # from this rank's range only.
            spec.refuse("a product with a tensor that requires a gradient")
        return spec.slice(value)
    return value


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = first_sharded(args, kwargs)
    spec = like.spec
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], FlatShardTensor):
        spec.refuse(f"writing it into a plain tensor with {func._schema.name}")
    digest = digest_of(func._schema.name, (*args, *kwargs.values()))
    if like.is_alike and not in_place and spec.owner.is_in_forward:
        # In forward each rank has its own batch, so the ranges of the result would not belong
        # together. If the unit computes in another dtype than the shard's, this operation must use
        # that dtype too. A tensor made by ``empty_like`` may be filled with random numbers, which
        # each rank draws for its own batch.
        is_cast = spec.original is not None and spec.original.full.dtype is not like.dtype
        if digest is None or is_cast or func._schema.name.endswith("_like"):
            spec.refuse(f"{func._schema.name} in forward")
    is_drawn = digest is None and _has_draws(func, args)
    _check_memory_format(func, like, kwargs.get("memory_format"))
    if in_place and like.is_alike:
        args = (like, *(_whole_if_cut_elsewhere(value, spec) for value in args[1:]))
    # The local range is 1-D: memory formats of tensors with more dimensions do not apply.
    kwargs = {key: _local(v, spec) for key, v in kwargs.items() if key != "memory_format"}
    result = func(*(_local(value, spec) for value in args), **kwargs)
    if in_place:
        wrote(args[:1])
        args[0].origin.write(digest)
        args[0].origin.is_drawn |= is_drawn and not args[0].origin.is_parameter
        return args[0]
    target = spec.state_target
    if target is not None and func._schema.name.endswith("_like"):
        # Optimizers make their state with ``zeros_like`` and similar functions.
        result = target.take_in(result) if result.device == like.local.device else result
    computed = FlatShardTensor(result, spec, role=_role_of(func, args))
    computed.origin.digest, computed.origin.is_drawn = digest, is_drawn
    return computed


def _has_draws(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether random numbers went into an operand.

    Raises where autograd would differentiate a function of a parameter and of random numbers.
    Under DistributedDataParallel each rank draws for the full parameter, and the gradients are
    averaged. Here each rank would draw for its range only, and nothing would be averaged.
    """
    sharded = [value for value in args if isinstance(value, FlatShardTensor)]
    is_drawn = any(value.origin.is_drawn for value in sharded)
    if is_drawn and torch.is_grad_enabled():
        for value in sharded:
            if value.requires_grad:
                value.refuse(f"the gradient of {func._schema.name} with random numbers")
    return is_drawn


def _whole_if_cut_elsewhere(value: Any, spec: ShardSpec) -> Any:
    """The full tensor of ``value``, if ``value`` is another parameter with other ranges.

    Example: a momentum encoder follows an encoder, and the two lie in flat parameters of different
    lengths.

    Collective: the ranks of ``value``'s shard group, if the ranges differ.
    """
    is_other = isinstance(value, FlatShardTensor) and value.spec.place != spec.place
    if is_other and value.is_alike and value.spec.shape == spec.shape and len(value.spec.comms) < 2:
        return value.full_tensor()
    return value


def _role_of(func: Any, args: tuple[Any, ...]) -> str:
    """Role of a computed tensor: the operation, its numbers, and the roles of its operands."""
    operands = (
        value.role if isinstance(value, FlatShardTensor) else repr(value)
        for value in args
        if isinstance(value, FlatShardTensor | int | float)
    )
    # The text is cut: the role of an average that is updated in each step would grow without end.
    return f"{func._schema.name.removeprefix('aten::')} of {', '.join(operands)}"[:_ROLE_LENGTH]


def _check_memory_format(func: Any, tensor: FlatShardTensor, memory_format: Any) -> None:
    """Refuse a memory format with another order of elements: reordering would need all ranks."""
    is_kept = memory_format in (None, torch.preserve_format)
    if not is_kept and not tensor.is_contiguous(memory_format=memory_format):
        spec = tensor.spec
        raise RuntimeError(
            f"parameter {spec.name!r} ({unit_text(spec.unit)}) is sharded and keeps the memory "
            f"format that it was wrapped with: strides are {spec.strides}, {func._schema.name} "
            f"asks for {memory_format}. Call model.to(memory_format=...) before "
            "ShardedWrapper(model), or use p.full_tensor()."
        )


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on lists of tensors, matched by position; plain entries stay plain."""
    lists = [value for value in args if isinstance(value, list | tuple)]
    # One spec per position: a gradient in one list may be plain while the parameter at the same
    # position in another list is sharded.
    specs = [
        next((value.spec for value in values if isinstance(value, FlatShardTensor)), None)
        for values in zip_longest(*lists)
    ]

    def local(values: Any) -> Any:
        if not isinstance(values, list | tuple) or not any(isinstance(v, Tensor) for v in values):
            return values
        return [
            value if spec is None else _local(value, spec)
            for value, spec in zip(values, specs, strict=False)
        ]

    is_mutable = func._schema.is_mutable
    for value, spec in zip(args[0] if is_mutable else (), specs, strict=False):
        if spec is not None and not isinstance(value, FlatShardTensor):
            spec.refuse(f"writing it into a plain tensor with {func._schema.name}")
    result = func(*(local(value) for value in args), **{key: local(v) for key, v in kwargs.items()})
    if not is_mutable:
        role = f"{func._schema.name.removeprefix('aten::')} of {first_sharded(args, kwargs).role}"
        return [
            value if spec is None else FlatShardTensor(value, spec, role=role)
            for value, spec in zip(result, specs, strict=True)
        ]
    for argument, values in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            wrote((values,))
            for position, value in enumerate(values):
                if isinstance(value, FlatShardTensor) and value.is_alike:
                    operands = (_at(operand, position) for operand in (*args, *kwargs.values()))
                    value.origin.write(digest_of(func._schema.name, operands))
    return None


def _at(value: Any, position: int) -> Any:
    """Entry ``position`` of a list; a value that is not a list, or is a shorter list, unchanged."""
    return value[position] if isinstance(value, list | tuple) and position < len(value) else value


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    """Draw as many numbers as the unwrapped model would, and keep this rank's range."""
    tensor: FlatShardTensor = args[0]
    spec, local = tensor.spec, tensor.local
    if func is aten.bernoulli.default:
        tensor.refuse("bernoulli() with its elements as probabilities")
    if tensor.is_alike and spec.owner.is_in_forward:
        # In forward the generators of the ranks differ, because each rank draws for its own batch.
        spec.refuse(f"{func._schema.name} in forward")
    _check_memory_format(func, tensor, kwargs.get("memory_format"))
    # A tensor-parallel part would get the same numbers as the other parts.
    spec.refuse_part(func._schema.name)
    # Draw the full tensor on every rank: then all generators stay in step, and the values do not
    # depend on the world size.
    part = spec.slice(func(spec.empty(local), *args[1:], **kwargs))
    if not func._schema.is_mutable:
        # A clone: a view of the range would keep the full tensor alive.
        drawn = FlatShardTensor(part.clone(), spec, role=_role_of(func, args))
        drawn.origin.is_drawn = True
        return drawn
    local.copy_(part)
    wrote((tensor,))
    tensor.origin.write(None)
    tensor.origin.is_drawn = not tensor.origin.is_parameter
    return tensor


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    tensor, *rest = args
    if rest and (func is not aten.view.default or tuple(rest[0]) != tensor.spec.shape):
        tensor.refuse(f"{func._schema.name} to another shape or dtype")
    if rest:
        # `orthogonal_()` writes its result by `view_as()`, and would have computed the result from
        # a tensor-parallel part only.
        tensor.spec.refuse_part("view_as()")
    # Do not make a view here: the view would have another version counter than the tensor. If
    # inference mode is on, a new tensor has no version counter, and autograd, which reads the
    # counter, would raise.
    with torch.inference_mode(False):
        twin = FlatShardTensor(tensor.local, tensor.spec, role=tensor.role)
    twin.origin = origin = tensor.origin
    if origin.aliases is None:
        origin.aliases = weakref.WeakValueDictionary()
    origin.aliases[id(twin)] = twin
    return twin


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Refuse dropout on a trained parameter: each rank must draw for the full parameter."""
    if training and isinstance(input, FlatShardTensor) and input.requires_grad:
        input.refuse("the gradient of dropout")
    return NotImplemented


ABOVE_AUTOGRAD.update(dict.fromkeys((nn.functional.dropout, torch.dropout), _dropout))

_DRAWS = """normal_ uniform_ bernoulli_ random_ log_normal_ cauchy_ exponential_ bernoulli
    rand_like randn_like""".split()

HANDLERS.update(
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
