"""``FlatShardTensor``: an original parameter's true shape outside, this rank's 1-D range inside.

Every operation on it is right or raises. Element-wise operations run on the local ranges, full
reductions add the one collective that makes them right, writing a full tensor keeps this rank's
range of it, and everything else raises and names the parameter. Inside a unit's forward and
backward none of this is in the way: modules hold plain parameters there.

[Note: versions]
A gathered buffer is stale when its shard was written since. That is seen by the shard's version
counter, which views share; in-place operations under ``__torch_dispatch__`` do not move it, so
they do it here.

[Note: gradients through a sharded parameter]
``loss + p.pow(2).sum()`` outside forward differentiates through this type. The loss may be scaled
differently on each rank, and the gradient that data parallelism wants is the average: the backward
of every reduction therefore averages what arrives over the ranks.
"""

from __future__ import annotations

import copy
import importlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import hooks as torch_hooks

from flatshard.collectives import ALONE, Communicator
from flatshard.layout import strides_of

aten = torch.ops.aten


class ShardSpec:
    """What a ``FlatShardTensor`` knows about its place; shared by a parameter and its gradients.

    Attributes:
        name: the parameter's name in the unwrapped model.
        unit: the unit's name.
        shape: the parameter's shape.
        offset: index, among the parameter's elements in memory order, of this rank's first one.
        numel: elements that this rank holds.
        comm: the ranks that hold the rest.
        replicas: the ranks that hold the same.
        order: the order of the parameter's dimensions in memory, outermost first.
        strides: the parameter's strides, in elements.
        full: the parameter that computes while the unit is gathered; hooks for it go there.
        post_accumulate_hooks: run with the sharded parameter once its gradient is published.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        shape: Sequence[int],
        *,
        offset: int,
        numel: int,
        comm: Communicator,
        replicas: Communicator = ALONE,
        order: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.unit = unit
        self.shape = tuple(shape)
        self.offset = offset
        self.numel = numel
        self.comm = comm
        self.replicas = replicas
        self.order = tuple(range(len(self.shape)) if order is None else order)
        self.strides = strides_of(self.shape, self.order)
        self.full: nn.Parameter | None = None
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Two tensors can meet in an element-wise operation when this is equal."""
        return self.shape, self.strides, self.offset, self.numel

    def slice(self, tensor: Tensor) -> Tensor:
        """This rank's range of a full tensor of any strides, 1-D; smaller shapes broadcast.

        Raises:
            RuntimeError: ``tensor`` does not broadcast to the parameter's shape.
        """
        if tuple(tensor.shape) != self.shape:
            try:
                tensor = tensor.expand(self.shape)
            except RuntimeError:
                raise RuntimeError(
                    f"parameter {self.name!r}: expected a tensor of shape {self.shape} or one "
                    f"that broadcasts to it, got {tuple(tensor.shape)}"
                ) from None
        in_memory_order = tensor.permute(self.order).reshape(-1)
        return in_memory_order[self.offset : self.offset + self.numel]

    def empty(self, like: Tensor) -> Tensor:
        """A plain tensor of the parameter's shape and strides, dtype and device of ``like``."""
        return like.new_empty_strided(self.shape, self.strides)

    def average(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all ranks. Collective: both groups."""
        total = self.comm.reduce_scalars(value.clone(), "SUM", label=self.name)
        total = self.replicas.reduce_scalars(total, "SUM", label=self.name)
        return total / (self.comm.size * self.replicas.size)

    def refuse(self, operation: object) -> NoReturn:
        """Raise for an operation that this rank's part cannot do alone."""
        raise RuntimeError(
            f"parameter {self.name!r} (unit {self.unit!r}, rank {self.comm.global_rank}) is "
            f"sharded: {operation} needs the whole tensor. Use it inside the forward of the module "
            "that owns it, under ShardedWrapper.summon_full_params(model), or on p.full_tensor(). "
            "(For an optimizer that treats every element alike: flatshard.declare_elementwise.)"
        )


class FlatShardTensor(torch.Tensor):
    """A parameter, or its gradient, of which this rank holds a 1-D range.

    Shape, strides, dtype and device are those of the whole parameter, the range is one of its
    elements in memory order.
    """

    _local: Tensor
    _spec: ShardSpec
    _is_placeholder: bool = False

    @staticmethod
    def __new__(
        cls, local: Tensor, spec: ShardSpec, requires_grad: bool = False
    ) -> FlatShardTensor:
        """Wrap ``local``, ``(spec.numel,)``, without copying."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape,
            strides=spec.strides,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        self._local = local
        self._spec = spec
        return self  # type: ignore[no-any-return]

    @classmethod
    def parameter(cls, local: Tensor, spec: ShardSpec, requires_grad: bool) -> FlatShardTensor:
        """The same, counted as an ``nn.Parameter``."""
        self = cls(local, spec, requires_grad)
        self._is_param = True
        return self

    @classmethod
    def placeholder(cls, local: Tensor, spec: ShardSpec) -> FlatShardTensor:
        """The same, where a part of a ``FlatParameter`` was; it is frozen or trained with that."""
        self = cls(local, spec)
        self._is_placeholder = True
        return self

    def to_local(self) -> Tensor:
        """This rank's range in memory order, ``(numel held here,)``; shares memory.

        No communication.
        """
        return self._local

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole tensor, with its shape and strides.

        Collective: all ranks of the shard group.
        """
        spec, local = self._spec, self._local.detach()
        flat = local.new_zeros(self.numel())
        # Bytes of zero add nothing, so this sum only puts the ranges beside one another.
        full_bytes = _bytes(flat)
        size = local.element_size()
        full_bytes[spec.offset * size : (spec.offset + spec.numel) * size] = _bytes(
            local.contiguous()
        )
        spec.comm.reduce_scalars(full_bytes, "SUM", label=spec.name)
        return flat.as_strided(spec.shape, spec.strides)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values without autograd. Assigning copies into the shard."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        spec = self._spec
        if value.dtype != self.dtype or value.device != self.device:
            raise RuntimeError(
                f"parameter {spec.name!r} is sharded: its data is {self.dtype} on {self.device}, "
                f"got {value.dtype} on {value.device}. Convert the whole wrapper: model.to(...)."
            )
        if tuple(value.shape) != spec.shape:
            raise RuntimeError(
                f"parameter {spec.name!r}: expected data of shape {spec.shape}, "
                f"got {tuple(value.shape)}"
            )
        with torch.no_grad():
            self.copy_(value)

    def data_ptr(self) -> int:
        """The address of this rank's range."""
        return self._local.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShardTensor:
        """A copy of this rank's range, with memory of its own; no communication."""
        if id(self) not in memo:
            place = copy.copy(self._spec)
            # The copy takes part in no forward until a copied unit takes it over.
            place.full = None
            place.post_accumulate_hooks = OrderedDict()
            twin = type(self)(self._local.detach().clone(), place, self.requires_grad)
            private = {"_local", "_spec", "_twin"}
            twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in private})
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not available: one rank's range means nothing elsewhere.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"parameter {self._spec.name!r} is sharded and cannot be pickled. Save "
            "model.state_dict(), which holds full tensors, or p.full_tensor()."
        )

    def share_memory_(self) -> NoReturn:  # type: ignore[override]
        """Not available: the storage is part of a flat one."""
        self._spec.refuse("share_memory_()")

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with this rank's full gradient, before it is reduced."""
        if self._is_computing_elsewhere():
            assert self._spec.full is not None
            if self.requires_grad:  # unfrozen since the unit was last gathered
                self._spec.full.requires_grad_(True)
            return self._spec.full.register_hook(hook)
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter once its reduced gradient is in ``.grad``."""
        if not self._is_computing_elsewhere():
            return super().register_post_accumulate_grad_hook(hook)
        handle = torch_hooks.RemovableHandle(self._spec.post_accumulate_hooks)
        self._spec.post_accumulate_hooks[handle.id] = hook
        return handle

    def _is_computing_elsewhere(self) -> bool:
        return getattr(self, "_is_param", False) and self._spec.full is not None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shapes and range; never communicates."""
        spec = self._spec
        kind = "Parameter " if getattr(self, "_is_param", False) else ""
        return (
            f"{kind}FlatShardTensor({spec.name!r}, shape={spec.shape}, dtype={self.dtype}, "
            f"device={self.device}, here=[{spec.offset}, {spec.offset + spec.numel}))"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch, above autograd, what autograd would differentiate wrongly."""
        kwargs = kwargs or {}
        if torch.is_grad_enabled():
            if func in _DIFFERENTIABLE:
                source = args[0] if args else kwargs.get("input", kwargs.get("x"))
                if isinstance(source, cls) and source.requires_grad:
                    return _DIFFERENTIABLE[func](*args, **kwargs)
            elif func in _TAKES_GRADIENTS:
                _refuse_gradients_of(args, kwargs)
        if func in _SETS_REQUIRES_GRAD and getattr(args[0], "_is_placeholder", False):
            _refuse_requires_grad(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation on the local ranges, or raise."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(func, args, kwargs)
        if name.removesuffix("_") in _POINTWISE:
            return _pointwise(func, args, kwargs)
        if name.startswith(("_foreach_", "_fused_")):
            return _foreach(func, args, kwargs)
        return _first(args, kwargs)._spec.refuse(func._schema.name)


def _bytes(tensor: Tensor) -> Tensor:
    return (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1).view(torch.uint8)
    )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    everything = (*args, *kwargs.values())
    return next(t for t in _tensors(everything) if isinstance(t, FlatShardTensor))


# ---------------------------------------------------------------- element by element

_POINTWISE = frozenset(
    """abs add sub rsub mul div true_divide floor_divide neg sign sgn sqrt rsqrt square reciprocal
    pow exp exp2 expm1 log log1p log2 log10 sin cos tan tanh sigmoid relu erf erfinv floor ceil
    round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv eq ne
    lt le gt ge isnan isinf isfinite logical_and logical_or logical_xor logical_not bitwise_and
    bitwise_or bitwise_not where nan_to_num zero fill clone detach alias positive remainder fmod
    hypot atan2 xlogy masked_fill copysign conj_physical zeros_like ones_like empty_like full_like
    _to_copy copy tanh_backward sigmoid_backward threshold_backward""".split()
)


def _local(value: Any, spec: ShardSpec) -> Any:
    """The operand that meets the local range of ``spec``."""
    if isinstance(value, FlatShardTensor):
        if value._spec.place != spec.place:
            raise RuntimeError(
                f"parameter {spec.name!r} {spec.shape} meets {value._spec.name!r} "
                f"{value._spec.shape}: sharded tensors of different shapes, strides or layouts "
                "cannot be combined. Use full_tensor() on both."
            )
        return value._local
    if isinstance(value, Tensor) and value.dim() > 0:
        if torch.is_grad_enabled() and value.requires_grad:
            spec.refuse("a product with a tensor that requires a gradient")
        return spec.slice(value)
    return value


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _first(args, kwargs)
    spec = like._spec
    if func in (aten.detach.default, aten.alias.default):
        # The same tensor, not a view made here: its version counter would be another.
        return FlatShardTensor(like._local, spec)
    if "out" in kwargs:
        spec.refuse(f"{func._schema.name} with out=")
    in_place = func._schema.is_mutable
    if in_place and not isinstance(args[0], FlatShardTensor):
        spec.refuse(f"writing it into a plain tensor with {func._schema.name}")
    _check_memory_format(func, like, kwargs.get("memory_format"))
    # The local range is 1-D: formats of more dimensions mean nothing to it.
    kwargs = {key: _local(v, spec) for key, v in kwargs.items() if key != "memory_format"}
    result = func(*(_local(value, spec) for value in args), **kwargs)
    if in_place:
        torch.autograd.graph.increment_version(args[0]._local)
        return args[0]
    return FlatShardTensor(result, spec)


def _check_memory_format(
    func: Any, tensor: FlatShardTensor, memory_format: torch.memory_format | None
) -> None:
    """What is computed here keeps the order of the parameter; another one takes all ranks."""
    if memory_format is None or memory_format is torch.preserve_format:
        return
    if not tensor.is_contiguous(memory_format=memory_format):
        spec = tensor._spec
        raise RuntimeError(
            f"parameter {spec.name!r} (unit {spec.unit!r}) is sharded and keeps the memory format "
            f"that it was wrapped with: strides are {spec.strides}, {func._schema.name} asks for "
            f"{memory_format}. Call model.to(memory_format=...) before ShardedWrapper(model), or "
            "use p.full_tensor()."
        )


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lists of tensors, matched by position; plain entries stay plain."""
    lists = [value for value in args if isinstance(value, list | tuple)]
    length = max(len(values) for values in lists)
    specs: list[ShardSpec | None] = [None] * length
    for values in lists:
        for position, value in enumerate(values):
            if specs[position] is None and isinstance(value, FlatShardTensor):
                specs[position] = value._spec

    def local(values: Any) -> Any:
        if not isinstance(values, list | tuple) or not any(isinstance(v, Tensor) for v in values):
            return values
        return [
            value if spec is None else _local(value, spec)
            for value, spec in zip(values, specs, strict=False)
        ]

    in_place = func._schema.is_mutable
    if in_place:
        for value, spec in zip(args[0], specs, strict=True):
            if spec is not None and not isinstance(value, FlatShardTensor):
                spec.refuse(f"writing it into a plain tensor with {func._schema.name}")
    result = func(*(local(value) for value in args), **{key: local(v) for key, v in kwargs.items()})
    if in_place:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors((value,)):
                    if isinstance(tensor, FlatShardTensor):
                        torch.autograd.graph.increment_version(tensor._local)
        return None
    return [
        value if spec is None else FlatShardTensor(value, spec)
        for value, spec in zip(result, specs, strict=True)
    ]


# ---------------------------------------------------------------- reductions over everything


def _norm_of(tensor: Tensor, order: float) -> Tensor:
    """What is combined over ranks for a norm, before the last root; any length, empty too."""
    if order in (float("inf"), float("-inf")):
        if tensor.numel() == 0:
            rest = 0.0 if order > 0 else float("inf")
            return torch.full((), rest, dtype=tensor.abs().dtype, device=tensor.device)
        value = torch.linalg.vector_norm(tensor, order)
        # The back ends' MAX may drop a NaN: let it show as an infinite norm.
        return torch.where(value.isnan(), torch.full_like(value, float("inf")), value)
    if order == 0:
        return (tensor != 0).sum().to(tensor.abs().dtype)
    return torch.linalg.vector_norm(tensor, order).pow(order)


def _combine_norms(values: Tensor, order: float, comm: Communicator, label: str) -> Tensor:
    if order in (float("inf"), float("-inf")):
        return comm.reduce_scalars(values, "MAX" if order > 0 else "MIN", label=label)
    total = comm.reduce_scalars(values, "SUM", label=label)
    return total if order == 0 else total.pow(1.0 / order)


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Norms of plain and sharded tensors; one collective per process group and dtype."""
    results: list[Tensor] = [torch.empty(0)] * len(tensors)
    sharded: dict[tuple[Communicator, torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, FlatShardTensor):
            key = (tensor._spec.comm, tensor.dtype, tensor.device)
            sharded.setdefault(key, []).append(position)
        else:
            results[position] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for (comm, tensor_dtype, _), positions in sharded.items():
        # Sums of low-precision squares are kept in fp32: they are combined further.
        wide = torch.float32 if tensor_dtype in (torch.float16, torch.bfloat16) else None
        parts = []
        for position in positions:
            value = tensors[position]._local  # type: ignore[attr-defined]
            parts.append(_norm_of(value if wide is None else value.to(wide), order))
        values = _combine_norms(torch.stack(parts), order, comm, "norm")
        for position, value in zip(positions, values.unbind(), strict=True):
            results[position] = value if wide is None else value.to(tensor_dtype)
            if dtype is not None:
                results[position] = results[position].to(dtype)
    return results


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, order, dim, keepdim, dtype = _bind(
        args, kwargs, ("self", "ord", "dim", "keepdim", "dtype"), (None, 2, None, False, None)
    )
    _only_whole(tensor, func, dim, keepdim)
    return _norms([tensor], float(order), dtype)[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors, order, dtype = _bind(args, kwargs, ("self", "ord", "dtype"), (None, 2, None))
    return _norms(tensors, float(order), dtype)


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``sum`` and ``mean`` of everything."""
    along_dimensions = func in (aten.sum.dim_IntList, aten.mean.dim)
    names = ("self", "dim", "keepdim", "dtype") if along_dimensions else ("self", "dtype")
    bound = dict(zip(names, _bind(args, kwargs, names, (None,) * len(names)), strict=True))
    tensor: FlatShardTensor = bound["self"]
    _only_whole(tensor, func, bound.get("dim"), bound.get("keepdim"))
    total = tensor._local.sum(dtype=bound["dtype"])
    tensor._spec.comm.reduce_scalars(total, "SUM", label=tensor._spec.name)
    return total / tensor.numel() if func._schema.name == "aten::mean" else total


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    name = func._schema.name.removeprefix("aten::")
    whole = len(args) == 1 or (len(args) == 2 and name in ("amax", "amin") and args[1] == [])
    if not whole or kwargs:
        tensor._spec.refuse(f"{name} along a dimension")
    largest = name in ("max", "amax", "any")
    local = tensor._local
    if name in ("any", "all"):
        # A byte on every rank, also where nothing is held.
        value = getattr(local, name)().to(torch.uint8)
    elif local.numel():
        value = getattr(local, "amax" if largest else "amin")()
    else:
        info = torch.finfo if local.dtype.is_floating_point else torch.iinfo
        extremes = info(local.dtype)
        value = local.new_full((), extremes.min if largest else extremes.max)
    tensor._spec.comm.reduce_scalars(value, "MAX" if largest else "MIN", label=tensor._spec.name)
    return value.to(torch.bool) if name in ("any", "all") else value


def _bind(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...], defaults: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments by name; a keyword that the handler does not implement raises."""
    values = dict(zip(names, defaults, strict=True)) | dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        if key not in values:
            _first(args, kwargs)._spec.refuse(f"the argument {key}")
        values[key] = value
    return tuple(values.values())


def _only_whole(tensor: FlatShardTensor, func: Any, dim: Any, keepdim: Any) -> None:
    if keepdim or (dim is not None and len(dim) > 0):
        tensor._spec.refuse(f"{func._schema.name} along a dimension")


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler: an overflow on one rank is an overflow on all."""
    gradients, found_inf, inverse_scale = args
    func([getattr(g, "_local", g) for g in gradients], found_inf, inverse_scale)
    comms = {g._spec.comm for g in gradients if isinstance(g, FlatShardTensor)}
    for gradient in gradients:
        if isinstance(gradient, FlatShardTensor):
            torch.autograd.graph.increment_version(gradient._local)
    for comm in comms:
        comm.reduce_scalars(found_inf, "MAX", label="found_inf")


# ---------------------------------------------------------------- random numbers, shapes


def _random_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    """Draw as many numbers as the unwrapped model would, keep this rank's."""
    tensor: FlatShardTensor = args[0]
    local = tensor._local
    full = tensor._spec.empty(local)
    func(full, *args[1:], **kwargs)
    local.copy_(tensor._spec.slice(full))
    torch.autograd.graph.increment_version(local)
    return tensor


def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    tensor: FlatShardTensor = args[0]
    _check_memory_format(func, tensor, kwargs.get("memory_format"))
    local = tensor._local
    full = tensor._spec.empty(local)
    drawn = func(full, *args[1:], **kwargs)
    return FlatShardTensor(tensor._spec.slice(drawn).clone(), tensor._spec)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return func(args[0]._local, *args[1:], **kwargs)  # type: ignore[no-any-return]


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    tensor, *rest = args
    if func is not aten.view.default or tuple(rest[0]) != tensor._spec.shape:
        tensor._spec.refuse(f"{func._schema.name} to another shape or dtype")
    return FlatShardTensor(tensor._local, tensor._spec)


_HANDLERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "sum": _sum,
    "mean": _sum,
    "view": _view,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "_foreach_max": lambda func, args, kwargs: _first(args, kwargs)._spec.refuse(func),
    **dict.fromkeys(("max", "min", "amax", "amin", "any", "all"), _extreme),
    **dict.fromkeys(
        ("normal_", "uniform_", "bernoulli_", "random_", "log_normal_", "cauchy_", "exponential_"),
        _random_in_place,
    ),
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli"), _random_like),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
}


# ---------------------------------------------------------------- autograd


class _Sum(torch.autograd.Function):
    """The sum of all elements; see the note on gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: FlatShardTensor) -> Tensor:  # type: ignore[override]
        ctx.spec, ctx.like = tensor._spec, tensor._local.new_empty(0)
        total = tensor._local.sum()
        return ctx.spec.comm.reduce_scalars(total, "SUM", label=ctx.spec.name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> FlatShardTensor:  # type: ignore[override]
        spec = ctx.spec
        local = ctx.like.new_empty(spec.numel).copy_(spec.average(gradient))
        return FlatShardTensor(local, spec)


class _Norm(torch.autograd.Function):
    """The p-norm over all elements; zero has the subgradient zero, as in torch."""

    @staticmethod
    def forward(ctx: Any, tensor: FlatShardTensor, order: float) -> Tensor:  # type: ignore[override]
        norm = _norms([tensor], order, None)[0]
        ctx.spec, ctx.order = tensor._spec, order
        ctx.save_for_backward(tensor._local, norm)
        return norm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[FlatShardTensor, None]:  # type: ignore[override]
        spec, order = ctx.spec, ctx.order
        local, norm = ctx.saved_tensors
        upstream = spec.average(gradient)
        # x |x|^(p-2) / norm^(p-1), with 0 for 0/0.
        slope = local.sgn() * (local.abs() / norm).nan_to_num(0.0).pow(order - 1)
        return FlatShardTensor(slope * upstream, spec), None


def _differentiable_sum(input: Any, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs:
        input._spec.refuse("a sum along a dimension or in another dtype")
    return _Sum.apply(input)  # type: ignore[no-any-return]


def _differentiable_mean(input: FlatShardTensor, *args: Any, **kwargs: Any) -> Tensor:
    return _differentiable_sum(input, *args, **kwargs) / input.numel()


def _differentiable_norm(
    input: FlatShardTensor, p: float | str | None = 2, *args: Any, **kwargs: Any
) -> Tensor:
    order = kwargs.pop("ord", p)
    order = 2 if order in (None, "fro") else order
    if args or any(value is not None and value is not False for value in kwargs.values()):
        input._spec.refuse("a norm along a dimension or in another dtype")
    if not isinstance(order, int | float) or order in (0, float("inf"), float("-inf")):
        input._spec.refuse(f"the gradient of a norm of order {order}")
    return _Norm.apply(input, float(order))  # type: ignore[no-any-return]


_DIFFERENTIABLE: dict[Any, Callable[..., Tensor]] = {
    torch.sum: _differentiable_sum,
    torch.Tensor.sum: _differentiable_sum,
    torch.mean: _differentiable_mean,
    torch.Tensor.mean: _differentiable_mean,
    torch.norm: _differentiable_norm,
    torch.Tensor.norm: _differentiable_norm,
    torch.linalg.norm: _differentiable_norm,
    torch.linalg.vector_norm: _differentiable_norm,
}

_TAKES_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _refuse_gradients_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``grad(loss, parameters)`` would find no path to sharded parameters and return None."""
    for value in _tensors((*args[1:], *kwargs.values())):
        if isinstance(value, FlatShardTensor) and getattr(value, "_is_param", False):
            raise RuntimeError(
                f"parameter {value._spec.name!r} is sharded: gradients for chosen parameters "
                "cannot be asked of autograd. Call loss.backward() and read p.grad, or work "
                "under ShardedWrapper.summon_full_params(model)."
            )


_SETS_REQUIRES_GRAD = frozenset(
    {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
)


def _refuse_requires_grad(tensor: FlatShardTensor) -> NoReturn:
    spec = tensor._spec
    raise RuntimeError(
        f"parameter {spec.name!r} (unit {spec.unit!r}) is a part of a flat parameter and cannot "
        "be frozen or unfrozen alone. Wrap with use_orig_params=True, freeze it before wrapping, "
        "or call requires_grad_() on the unit's ShardedWrapper."
    )


def _register_with_torch() -> None:
    """Let torch's clipping and optimizers use their one-kernel-for-many paths with this type."""
    clipping = importlib.import_module("torch.utils._foreach_utils")
    optimizers = importlib.import_module("torch.optim.optimizer")
    for owner in (clipping, optimizers):
        supported = owner._foreach_supported_types
        if FlatShardTensor not in supported:
            supported.append(FlatShardTensor)


_register_with_torch()
