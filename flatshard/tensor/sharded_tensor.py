"""``FlatShardTensor``: an original parameter's true shape outside, this rank's 1-D range inside.

Every operation on it is right or raises. Element-wise operations run on the local ranges, full
reductions add the one collective that makes them right, writing a full tensor keeps this rank's
range of it, and everything else raises and names the parameter. Inside a unit's forward and
backward none of this is in the way: modules hold plain parameters there.

[Note: versions]
A gathered buffer is stale when its shard was written since. That is seen by the shard's version
counter, which views share; in-place operations under ``__torch_dispatch__`` do not move it, so
they do it here.
"""

from __future__ import annotations

import copy
import importlib
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import hooks as torch_hooks

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.memory.disk import DiskMemory, is_on_disk
from flatshard.plan.layout import LocalSpan, strides_of

HANDLERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
"""What runs an operation, by its name; ``_foreach`` is for all on lists that are not named.

Called with the operation, its arguments and its keywords. ``elementwise`` enters what each rank
can do alone, ``reductions`` what takes a collective.
"""

DIFFERENTIABLE: dict[Any, Callable[..., Tensor]] = {}
"""What stands in for torch's functions above autograd; ``reductions`` enters it."""


class ShardSpec:
    """What a ``FlatShardTensor`` knows about its place; shared by a parameter and its gradients.

    Attributes:
        name: the parameter's name in the unwrapped model.
        unit: the unit's name.
        shape: the parameter's shape.
        offset: index, among the parameter's elements in memory order, of this rank's first one.
        numel: elements that this rank holds.
        start: where they begin in this rank's shard of the flat parameter.
        comm: the ranks that hold the rest.
        replicas: the ranks that hold the same.
        order: the order of the parameter's dimensions in memory, outermost first.
        strides: the parameter's strides, in elements.
        originals: for a flat parameter, whose shape is that of one shard: which ranges of the
            shard are not padding. None for an original parameter.
        number: for a flat parameter: which of the shards this rank's is, in their concatenation.
        total_numel: elements that all ranks hold together, without padding.
        on_outside_grad: called before autograd adds to the parameter's gradient what came of its
            use outside of forward.
        bring_back: called where the values of ``full`` are asked for while it has no memory;
            whether it has some then.
        state_home: where optimizers keep what has this shape; None: in memory.
        full: the parameter that computes while the unit is gathered; hooks for it go there.
        post_accumulate_hooks: run with the sharded parameter once its gradient is published.
        aliases: by id, tensors that share the memory of one with this place; see ``let_go``.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        shape: Sequence[int],
        *,
        offset: int,
        numel: int,
        start: int = 0,
        comm: Communicator,
        replicas: Communicator = ALONE,
        order: Sequence[int] | None = None,
        originals: Sequence[LocalSpan] | None = None,
        number: int = 0,
        total_numel: int | None = None,
        on_outside_grad: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.unit = unit
        self.shape = tuple(shape)
        self.offset = offset
        self.numel = numel
        self.start = start
        self.comm = comm
        self.replicas = replicas
        self.order = tuple(range(len(self.shape)) if order is None else order)
        self.strides = strides_of(self.shape, self.order)
        self.originals = originals
        self.number = number
        self.total_numel = math.prod(shape) if total_numel is None else total_numel
        self.on_outside_grad = on_outside_grad
        self.bring_back: Callable[[], bool] = _stay_away
        self.state_home: DiskMemory | None = None
        self.full: nn.Parameter | None = None
        self.post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        self.aliases: weakref.WeakValueDictionary[int, FlatShardTensor] = (
            weakref.WeakValueDictionary()
        )

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Two tensors can meet in an element-wise operation when this is equal."""
        return self.shape, self.strides, self.offset, self.numel

    def average(self, value: Tensor) -> Tensor:
        """The mean of a small tensor over all ranks, as a new one. Collective: both groups."""
        total = self.comm.reduce_scalars(value.clone(), "SUM", op_name=self.name)
        total = self.replicas.reduce_scalars(total, "SUM", op_name=self.name)
        return total / (self.comm.size * self.replicas.size)

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

    def refuse(self, operation: object) -> NoReturn:
        """Raise for an operation that this rank's part cannot do alone."""
        raise RuntimeError(
            f"parameter {self.name!r} (unit {self.unit!r}, rank {self.comm.global_rank}) is "
            f"sharded: {operation} needs the whole tensor. Use it inside the forward of the module "
            "that owns it, under ShardedWrapper.summon_full_params(model), or on p.full_tensor(). "
            "(For an optimizer that treats every element alike: flatshard.declare_elementwise.)"
        )


def _stay_away() -> bool:
    return False


OWN_ATTRIBUTES = frozenset({"local", "spec", "flat"})
"""The attributes of a ``FlatShardTensor`` that are no user's."""


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users gave a parameter."""
    return {name: value for name, value in tensor.__dict__.items() if name not in OWN_ATTRIBUTES}


class FlatShardTensor(torch.Tensor):
    """A parameter, or its gradient, of which this rank holds a 1-D range.

    Shape, strides, dtype and device are those of the whole parameter, the range is one of its
    elements in memory order.

    Attributes:
        local: this rank's range, ``(spec.numel,)``.
        spec: which range of which parameter that is.
        flat: the shard, or its gradient, of which ``local`` is the range from ``spec.start`` on;
            None: ``local`` has memory of its own.
    """

    # Attributes of the object, not properties: reading them costs no dispatch.
    local: Tensor
    spec: ShardSpec
    flat: Tensor | None
    _is_placeholder: bool = False

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: ShardSpec,
        requires_grad: bool = False,
        flat: Tensor | None = None,
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
        self.local = local
        self.spec = spec
        self.flat = flat
        return self  # type: ignore[no-any-return]

    @classmethod
    def in_flat(cls, flat: Tensor, spec: ShardSpec, requires_grad: bool = False) -> FlatShardTensor:
        """Wrap the range of ``flat``, ``(shard_numel,)``, that ``spec`` names, without copying."""
        return cls(flat[spec.start : spec.start + spec.numel], spec, requires_grad, flat)

    @classmethod
    def parameter(cls, flat: Tensor, spec: ShardSpec, requires_grad: bool) -> FlatShardTensor:
        """The same, counted as an ``nn.Parameter``."""
        self = cls.in_flat(flat, spec, requires_grad)
        self._is_param = True
        return self

    @classmethod
    def placeholder(cls, local: Tensor, spec: ShardSpec, requires_grad: bool) -> FlatShardTensor:
        """The same, where a part of a ``FlatParameter`` was; it is frozen or trained with that."""
        differentiable = local.is_floating_point() or local.is_complex()
        self = cls(local, spec, differentiable)
        self._is_placeholder = True
        if differentiable:  # a frozen tensor refuses hooks; it may be unfrozen later
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.register_hook(self, partial(_refuse_gradient, spec))
                self.requires_grad_(requires_grad)
        return self

    def to_local(self) -> Tensor:
        """This rank's range in memory order, ``(numel held here,)``; shares memory.

        No communication.
        """
        return self.local

    def alias(self) -> FlatShardTensor:
        """The same tensor without autograd, sharing memory and version counter."""
        # Not a view made here: its version counter would be another.
        twin = FlatShardTensor(self.local, self.spec)
        self.spec.aliases[id(twin)] = twin
        return twin

    def let_go(self) -> None:
        """Give this tensor's aliases memory of their own, with the values of now.

        In a plain model ``kept = p.data; p.data = other`` puts the old values away. Here a new
        value is copied in, and would reach what was kept.
        """
        storage = self.local.untyped_storage()._cdata
        for alias in list(self.spec.aliases.values()):
            if alias.local.untyped_storage()._cdata == storage:
                alias.local = alias.local.clone()

    def full_tensor(self) -> Tensor:
        """A plain copy of the whole tensor, with its shape and strides.

        Of a flat parameter's gradient: all shards one after the other, ``(padded_numel,)``. Of a
        gradient that was accumulated under ``no_sync``: from every rank what it has there.

        Collective: all ranks of the shard group.
        """
        spec, local = self.spec, self.local.detach()
        is_flat = spec.originals is not None
        start = spec.number * spec.numel if is_flat else spec.offset
        flat = local.new_zeros(spec.comm.size * spec.numel if is_flat else self.numel())
        # Bytes of zero add nothing, so this sum only puts the ranges beside one another.
        full_bytes = _bytes(flat)
        size = local.element_size()
        full_bytes[start * size : (start + spec.numel) * size] = _bytes(local.contiguous())
        spec.comm.reduce_scalars(full_bytes, "SUM", op_name=spec.name)
        return flat if is_flat else flat.as_strided(spec.shape, spec.strides)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values without autograd. Assigning copies into the shard, see ``let_go``."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        spec = self.spec
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
            self.let_go()
            self.copy_(value)

    def data_ptr(self) -> int:
        """The address of this rank's range."""
        return self.local.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShardTensor:
        """A copy of this rank's range, with memory of its own; no communication."""
        if id(self) not in memo:
            place = copy.copy(self.spec)
            # The copy takes part in no forward until a copied unit takes it over.
            place.full, place.on_outside_grad = None, lambda: None
            place.bring_back = _stay_away
            place.post_accumulate_hooks = OrderedDict()
            place.aliases = weakref.WeakValueDictionary()
            held, home = self.local.detach(), place.state_home
            copied = home.copy(held) if home and is_on_disk(held) else held.clone()
            twin = type(self)(copied, place, self.requires_grad)
            twin.__dict__.update(attributes_of(self))
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not available: one rank's range means nothing elsewhere.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"parameter {self.spec.name!r} is sharded and cannot be pickled. Save "
            "model.state_dict(), which holds full tensors, or p.full_tensor()."
        )

    def share_memory_(self) -> NoReturn:  # type: ignore[override]
        """Not available: the storage is part of a flat one."""
        self.spec.refuse("share_memory_()")

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with this rank's full gradient, before it is reduced."""
        if self._is_placeholder:
            _refuse_gradient(self.spec)
        if self._is_computing_elsewhere():
            assert self.spec.full is not None
            if self.requires_grad:  # unfrozen since the unit was last gathered
                self.spec.full.requires_grad_(True)
            return self.spec.full.register_hook(hook)
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter once its reduced gradient is in ``.grad``."""
        if self._is_placeholder:
            _refuse_gradient(self.spec)
        if not self._is_computing_elsewhere():
            return super().register_post_accumulate_grad_hook(hook)
        handle = torch_hooks.RemovableHandle(self.spec.post_accumulate_hooks)
        self.spec.post_accumulate_hooks[handle.id] = hook
        return handle

    def _is_computing_elsewhere(self) -> bool:
        return getattr(self, "_is_param", False) and self.spec.full is not None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Shapes and range; never communicates."""
        spec = self.spec
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
        if func not in DIFFERENTIABLE and func not in _WATCHED:  # `.grad`, say, of each parameter
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if torch.is_grad_enabled():
            if func in DIFFERENTIABLE:
                source = args[0] if args else kwargs.get("input", kwargs.get("x"))
                if isinstance(source, cls) and source.requires_grad:
                    return DIFFERENTIABLE[func](*args, **kwargs)
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
        handler = HANDLERS.get(name)
        if handler is None and name.startswith(("_foreach_", "_fused_")):
            handler = HANDLERS["_foreach"]
        if handler is None:
            first_sharded(args, kwargs).spec.refuse(func._schema.name)
        return handler(func, args, kwargs)


def local_range(tensor: Tensor) -> Tensor:
    """This rank's range of a sharded tensor; a plain tensor is its own."""
    return tensor.local if isinstance(tensor, FlatShardTensor) else tensor


def _bytes(tensor: Tensor) -> Tensor:
    return (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1).view(torch.uint8)
    )


def tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors among an operation's arguments and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def first_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    """The sharded tensor for which an operation came here; it names the operation's errors."""
    everything = (*args, *kwargs.values())
    return next(t for t in tensors_in(everything) if isinstance(t, FlatShardTensor))


# ---------------------------------------------------------------- autograd

_TAKES_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _refuse_gradients_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``grad(loss, parameters)`` would find no path to sharded parameters and return None."""
    for value in tensors_in((*args[1:], *kwargs.values())):
        if isinstance(value, FlatShardTensor) and getattr(value, "_is_param", False):
            raise RuntimeError(
                f"parameter {value.spec.name!r} is sharded: gradients for chosen parameters "
                "cannot be asked of autograd. Call loss.backward() and read p.grad, or work "
                "under ShardedWrapper.summon_full_params(model)."
            )


_SETS_REQUIRES_GRAD = frozenset(
    {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
)


_WATCHED = _TAKES_GRADIENTS | _SETS_REQUIRES_GRAD


def _refuse_requires_grad(tensor: FlatShardTensor) -> NoReturn:
    spec = tensor.spec
    raise RuntimeError(
        f"parameter {spec.name!r} (unit {spec.unit!r}) is a part of a flat parameter and cannot "
        "be frozen or unfrozen alone. Wrap with use_orig_params=True, freeze it before wrapping, "
        "or call requires_grad_() on the unit's ShardedWrapper."
    )


def _refuse_gradient(spec: ShardSpec, *_: Tensor) -> NoReturn:
    raise RuntimeError(
        f"parameter {spec.name!r} (unit {spec.unit!r}) is a part of a flat parameter, and gets "
        "gradients from the forward of its unit alone: those of a penalty outside of it, and "
        "hooks, would be lost. Wrap with use_orig_params=True, or compute it in forward."
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
