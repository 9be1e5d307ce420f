"""``FlatShardTensor``: a tensor with the parameter's true shape that stores only a 1-D range.

Every operation on a sharded tensor either returns the right result or raises. Element-wise
operations run on this rank's range. A reduction over all elements reduces the range, and combines
the ranks' results by one collective. Writing a full tensor into a sharded tensor stores this rank's
range of the full tensor. Every other operation raises an error that names the parameter. Modules
are not affected, because they hold plain parameters during forward and backward.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils import hooks as torch_hooks
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.comm.process_groups import as_bytes
from flatshard.plan.layout import Box, boxes_of
from flatshard.precision import tensors_in
from flatshard.tensor.shard_spec import NeedsFullTensor, ShardSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def untraced(function: Callable[..., Any]) -> Any:
    """Apply ``torch.compiler.disable`` at the first call: importing Dynamo takes a second."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)
            # Every wrapped function shares the code of ``call``. Without this line Dynamo would
            # compile ``call`` once per wrapped function, up to Dynamo's recompile limit.
            torch._dynamo.decorators.skip(call)
        return disabled(*args, **kwargs)

    return call


# Handlers, keyed by operator name. A handler is called as ``handler(func, args, kwargs)``.
# ``elementwise_ops`` adds handlers of operations without communication. ``reduction_ops`` adds
# handlers of operations with a collective. The key "collective" stands for all collectives that the
# user's program calls on a sharded tensor.
HANDLERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
# Replacements, keyed by torch function, for functions that autograd would differentiate wrongly. A
# replacement that returns NotImplemented leaves the call to torch. ``reduction_ops`` and
# ``elementwise_ops`` add the entries.
ABOVE_AUTOGRAD: dict[Any, Callable[..., Any]] = {}
# Attributes that flatshard sets on a ``FlatShardTensor``. Users have set all other attributes.
OWN_ATTRIBUTES = frozenset({"local", "spec", "flat", "is_parameter", "origin", "role"})
_GRAD: Any = Tensor.grad
GRADIENT = "gradient of"  # the role of a parameter's gradient
# Gradients that are not reduced yet, or only in part, mapped to the name of the unit. The keys may
# be sharded or plain tensors.
UNREDUCED: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
# Modules in which torch defines collectives. The list names modules instead of functions, because
# collectives that a newer torch adds must be found too. The operators' schemas cannot be used: the
# schemas of collectives do not mark the tensors that are written.
_COLLECTIVE_MODULES = (
    *("torch.distributed", "torch._ops.c10d", "torch._ops._c10d"),
    *("torch._ops.symm_mem", "torch._ops._dtensor"),
)


@dataclass(eq=False, slots=True)
class Origin:
    """History of a sharded tensor's values; aliases of the tensor share the object.

    Attributes:
        digest: checksum of the operations and numbers that computed the values from parameters.
            Ranks that run the same computation have equal digests. None if anything except
            parameters and numbers went into the values.
        is_parameter: whether the tensor is a parameter. All ranks write the same tensors into a
            parameter, so the ranks' ranges always form one tensor.
        is_drawn: whether random numbers from this rank's generator went into the values.
    """

    digest: int | None = None
    is_parameter: bool = False
    is_drawn: bool = False
    # Tensors with the same memory that users may hold (from `p.data`, for example), keyed by id.
    aliases: weakref.WeakValueDictionary[int, FlatShardTensor] | None = None

    def write(self, digest: int | None) -> None:
        """Record an in-place operation whose result has ``digest``."""
        if digest is not None or not self.is_parameter:
            self.digest = digest


def digest_of(name: str, operands: Iterable[Any]) -> int | None:
    """Return a digest of an operation's result; None if an operand may differ between ranks."""
    parts: list[Any] = [name]
    for operand in operands:
        if isinstance(operand, Tensor):
            if not isinstance(operand, FlatShardTensor) or operand.origin.digest is None:
                return None
            operand = operand.origin.digest
        # Add only numbers to the digest. Other arguments, such as devices, may differ between
        # ranks.
        if isinstance(operand, int | float | complex):
            parts.append(operand)
    return zlib.crc32(repr(parts).encode())


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that users set on a parameter."""
    return {name: value for name, value in tensor.__dict__.items() if name not in OWN_ATTRIBUTES}


def check_data(where: str, tensor: Tensor, value: Tensor) -> None:
    """Raise unless ``value`` can be assigned to ``tensor.data``."""
    expected, found = [(tuple(one.shape), one.dtype, one.device) for one in (tensor, value)]
    if found != expected:
        raise RuntimeError(
            f"{where}: expected data of shape {expected[0]}, {expected[1]} on {expected[2]}, got "
            f"{found[0]}, {found[1]} on {found[2]}. Convert the whole wrapper: model.to(...)."
        )


class FlatShardTensor(torch.Tensor):
    """A parameter or its gradient; this rank holds a 1-D range of the elements.

    Shape, strides, dtype and device are those of the full parameter.

    Example:
        ```python
        for name, param in model.named_parameters():
            if isinstance(param, flatshard.FlatShardTensor):
                print(name, param.shape, param.local.numel())  # full shape; elements on this rank
                full = param.full_tensor()  # a plain tensor; collective: call it on all ranks
        ```

    Attributes:
        local: this rank's range of the elements in memory order, ``(spec.numel,)``.
        spec: describes the parameter, and the range of the parameter that ``local`` holds.
        flat: the shard, or the gradient of the shard. ``local`` is a view of ``flat`` that begins
            at ``spec.start``. None: ``local`` has its own memory.
        is_parameter: whether the tensor is a parameter of a unit.
        origin: history of the values.
        role: text of the tensor's relation to the parameter, such as ``"gradient of"``. Equal on
            all ranks: a collective compares the roles, so that ranks never combine ranges of
            different tensors.
    """

    # Plain attributes, because reading a property would go through `__torch_function__`.
    local: Tensor
    spec: ShardSpec
    flat: Tensor | None
    is_parameter: bool = False
    origin: Origin
    role: str
    # Whether the tensor has the shape and strides that the parameter has without tensor
    # parallelism.
    shows_unsplit = False

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: ShardSpec,
        *,
        role: str = "tensor like",
        flat: Tensor | None = None,
        requires_grad: bool = False,
    ) -> Self:
        """Wrap ``local``, ``(spec.numel,)``, without copying."""
        split = spec.tensor_parallel if cls.shows_unsplit else None
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            spec.shape if split is None else split.shape,
            strides=spec.strides if split is None else split.stride,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        # Let torch raise when C++ code asks for the tensor's address, because the tensor itself has
        # no memory. Otherwise C++ code that bypasses dispatch (a collective whose tensors lie in
        # nested lists) would read address 0.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self.local, self.spec, self.flat, self.role = local, spec, flat, role
        self.origin = Origin()
        return self  # type: ignore[no-any-return]

    @classmethod
    def in_flat(
        cls, flat: Tensor, spec: ShardSpec, role: str, requires_grad: bool = False
    ) -> FlatShardTensor:
        """Wrap this rank's range of ``flat``, ``(shard_numel,)``, without copying."""
        local = flat[spec.start : spec.start + spec.numel]
        return cls(local, spec, role=role, flat=flat, requires_grad=requires_grad)

    @classmethod
    def parameter(cls, flat: Tensor, spec: ShardSpec, requires_grad: bool) -> FlatShardTensor:
        """Wrap this rank's range of ``flat`` as a parameter, without copying."""
        self = cls.in_flat(flat, spec, "parameter", requires_grad)
        self._is_param = self.is_parameter = True
        self.origin = Origin(0, is_parameter=True)
        return self

    @property
    def is_alike(self) -> bool:
        """Whether all ranks certainly hold ranges of the same full tensor.

        True for a parameter, and for a tensor that was computed from parameters and Python numbers
        only.
        """
        return self.origin.digest is not None

    @property
    def described(self) -> str:
        """Text such as ``gradient of 'fc1.weight'``, the same on all ranks."""
        return f"{self.role} {self.spec.name!r}"

    def refuse(self, operation: object, *_: Any, **__: Any) -> NoReturn:
        """Raise NeedsFullTensor for an operation that needs more than this rank's range."""
        self.spec.refuse(operation, None if self.is_alike else self.described)

    def to_local(self) -> Tensor:
        """Return this rank's range in memory order, ``(spec.numel,)``. Shares memory."""
        return self.local

    def full_tensor(self) -> Tensor:
        """Return the full tensor as a plain tensor, with the parameter's shape and strides.

        A gradient that was accumulated under ``no_sync`` is not averaged: each range of the result
        is the gradient of the rank that holds the range.

        Collective: all ranks of the shard group.
        """
        spec, local = self.spec, self.local.detach()
        flat = local.new_zeros(self.numel())
        flat[spec.offset : spec.offset + spec.numel] = local
        # Each rank fills only its own range and leaves zeros elsewhere, so that the sum over the
        # ranks is the full tensor. Add bytes, so that no value is changed by rounding.
        op_name = f"full tensor of {self.described}"
        spec.comm.reduce_scalars(as_bytes(flat), "SUM", op_name=op_name)
        return flat.as_strided(spec.shape, spec.strides)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The values without autograd.

        An assignment copies the new values into the shard. Tensors that users took from ``data``
        earlier keep the old values: they get their own memory before the copy.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_data(f"parameter {self.spec.name!r} is sharded", self, value)
        with torch.no_grad():
            # In an unwrapped model, after `kept = p.data; p.data = other`, `kept` has the old
            # values. Here the copy overwrites the shard, whose memory `kept` shares. So first give
            # `kept` its own memory.
            storage = self.local.untyped_storage()._cdata
            for alias in list((self.origin.aliases or {}).values()):
                if alias.local.untyped_storage()._cdata == storage:
                    alias.local, alias.origin = alias.local.clone(), Origin(alias.origin.digest)
            self.copy_(value)

    # Without these properties each access to ``grad`` would call ``__torch_function__``, which is
    # slow: clipping and zero_grad() access ``grad`` of each parameter in each step.
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    def data_ptr(self) -> int:
        """Return the memory address of this rank's range."""
        return self.local.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShardTensor:
        if id(self) not in memo:
            spec, local = self.spec.detached(), self.local.detach()
            target = spec.state_target
            copied = local.clone() if target is None else target.copy(local)
            twin = type(self)(copied, spec, role=self.role, requires_grad=self.requires_grad)
            twin.__dict__.update(attributes_of(self))
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Refuse to pickle, because the pickle would contain only this rank's range, and could not
        # be completed later.
        if self.is_parameter:
            raise RuntimeError(
                f"parameter {self.spec.name!r} is sharded and cannot be pickled. Pass "
                "flatshard.checkpoint.full_state_dict(model) to torch.save, or pass the sharded "
                "state to torch.distributed.checkpoint.save."
            )
        raise RuntimeError(
            f"a tensor of parameter {self.spec.name!r} (optimizer state, a gradient or an entry of "
            "sharded_state_dict()) is sharded and cannot be pickled. Pass to torch.save "
            "flatshard.checkpoint.full_optim_state_dict(model, optimizer) for an optimizer's "
            "state, full_state_dict(model) for a model, and full_tensor() for other tensors."
        )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with this rank's full gradient, before the gradient is reduced."""
        full = self._full()
        if full is None:
            return super().register_hook(hook)
        if self.requires_grad:  # users may have unfrozen the parameter after the last unshard
            full.requires_grad_(True)
        split = self.spec.tensor_parallel
        return full.register_hook(hook if split is None else split.hook_of_part(hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this parameter once its reduced gradient is in ``.grad``."""
        if self._full() is None:
            return super().register_post_accumulate_grad_hook(hook)
        hooks = self.spec.original.post_accumulate_hooks
        handle = torch_hooks.RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _full(self) -> nn.Parameter | None:
        # A gradient shares the parameter's spec, but hooks on the gradient must not go to the
        # parameter.
        original = self.spec.original if getattr(self, "_is_param", False) else None
        return None if original is None else original.full

    # -------------------------------------------------- torch.distributed.checkpoint (DCP)
    # DCP calls these methods, which DTensor also has (torch.distributed.checkpoint.planner_helpers,
    # in torch 2.11 to 2.15). They need no collective: each rank lists the boxes (rectangular
    # blocks) of the full tensor that it holds. Each box is a view of the rank's range, so that
    # loading writes in place.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        # Import here and below instead of at the top, because the package is slow to load.
        from torch.distributed.checkpoint import metadata, planner

        # A rank without elements lists no chunk. An empty chunk could have the same name and offset
        # as another rank's chunk, and DCP keeps only the first of such chunks.
        chunks = self._chunks()
        _check_writer(fqn, len(chunks))
        data = metadata.TensorProperties(dtype=self.local.dtype)
        size = self.shape
        return [
            planner.WriteItem(
                metadata.MetadataIndex(fqn, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, data, size),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # DCP calls this method on all ranks before loading. Raise the version counter now, so that
        # this rank all-gathers again like the other ranks, even if it holds no element of the
        # parameter and DCP writes nothing here.
        torch.autograd.graph.increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self._boxes() if box.offsets == tuple(index.offset or ()))
        part = self.local.detach()[box.position : box.position + box.numel]
        # The dimensions may lie in a different order in memory than in the shape.
        order = self.spec.order
        return part.view([box.sizes[d] for d in order]).permute(
            [order.index(d) for d in range(len(order))]
        )

    def _boxes(self) -> Iterator[Box]:
        spec = self.spec
        boxes = boxes_of(spec.shape, spec.offset, spec.offset + spec.numel, spec.order)
        if spec.tensor_parallel is None:
            return boxes
        first = spec.tensor_parallel.offsets()
        return (
            replace(box, offsets=tuple(map(sum, zip(box.offsets, first, strict=True))))
            for box in boxes
        )

    # -------------------------------------------------- operations

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        spec = self.spec
        kind = "Parameter " if getattr(self, "_is_param", False) else ""
        return (
            f"{kind}FlatShardTensor({spec.name!r}, shape={spec.shape}, dtype={self.dtype}, "
            f"device={self.device}, here=[{spec.offset}, {spec.offset + spec.numel}))"
        )

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_collective(func):
            return HANDLERS["collective"](func, args, kwargs)
        try:
            if func.__name__ not in ATTRIBUTES and torch.is_grad_enabled() and is_counted():
                refuse_counted(func, first_sharded(args, kwargs).spec)
            if func in ABOVE_AUTOGRAD and torch.is_grad_enabled():
                result = ABOVE_AUTOGRAD[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except NeedsFullTensor as error:
            # Drop the traceback: it refers to this frame, and this frame to the error, so both
            # would live until Python's garbage collector runs.
            refused = error.with_traceback(None)
        result = refused.spec.owner.run_full(func, args, kwargs)
        if result is NotImplemented:
            raise refused
        return result

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        handler = HANDLERS.get(name)
        # All fused and foreach operations share one handler: there are too many to list by name,
        # and newer torch adds more.
        if handler is None and name.startswith(("_foreach_", "_fused_")):
            handler = HANDLERS["_foreach"]
        if handler is None and is_collective(func):
            handler = HANDLERS["collective"]
        if handler is None or (kwargs and func._schema.is_mutable and _has_out(kwargs)):
            first_sharded(args, kwargs).refuse(func._schema.name)
        return handler(func, args, kwargs)


def _has_out(given: dict[str, Any]) -> bool:
    """Whether the keywords of a mutable operator contain a tensor to write the result to."""
    # Do not use ``any(sharded_in(...))``, which would evaluate the truth value of the tensors.
    return "out" in given or next(sharded_in((*given.values(),)), None) is not None


def is_collective(func: Any) -> bool:
    """Whether a function or an operator is defined in torch.distributed."""
    return (getattr(func, "__module__", None) or "").startswith(_COLLECTIVE_MODULES)


def wrote(values: Sequence[Any]) -> None:
    """Record that the sharded tensors among ``values`` were written."""
    # The version counter of a shard, which all views of the shard share, tells whether the shard
    # was written after the last all-gather. Operations under ``__torch_dispatch__`` do not raise
    # the counter, so raise it here.
    torch.autograd.graph.increment_version([tensor.local for tensor in sharded_in(values)])


def local_range(tensor: Tensor) -> Tensor:
    """Return this rank's range of a sharded tensor. A plain tensor is returned unchanged."""
    return tensor.local if isinstance(tensor, FlatShardTensor) else tensor


def sharded_in(values: Sequence[Any]) -> Iterator[FlatShardTensor]:
    """Yield the sharded tensors among the arguments of an operation, and in lists of arguments."""
    return (t for t in tensors_in(values, depth=0) if isinstance(t, FlatShardTensor))


def first_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    """Return the first sharded tensor among the arguments, which errors of the operation name."""
    return next(sharded_in((*args, *kwargs.values())))


# Torch runs these methods without dispatch, and they read the tensor's memory. They must raise
# here, because a sharded tensor has no memory of its own: ``apply_``, for example, would crash.
for _name in ("numpy", "__array__", "__dlpack__", "tolist", "apply_", "map_", "share_memory_"):
    setattr(FlatShardTensor, _name, partialmethod(FlatShardTensor.refuse, f"{_name}()"))

# Register the class: torch's clipping and optimizers use foreach kernels, which handle many tensors
# at once, only if the types of all tensors are in these lists.
for _module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
    importlib.import_module(_module)._foreach_supported_types.append(FlatShardTensor)


# Names of the functions with which torch reads and writes attributes such as ``p.grad``. These
# functions compute nothing, so ``refuse_counted`` allows them.
ATTRIBUTES = frozenset({"__get__", "__set__"})


def is_counted() -> bool:
    """Whether this code runs inside ``torch.utils.checkpoint`` with ``use_reentrant=False``.

    The checkpoint counts the tensors that autograd saves in the first pass and in the
    recomputation, and requires the same number of tensors with the same shapes. A parameter may be
    sharded in the first pass and unsharded in the recomputation, so neither pass may save an extra
    tensor.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def refuse_counted(func: Callable[..., Any], spec: ShardSpec) -> None:
    """Raise NeedsFullTensor if an operation that may need the full tensor runs in a forward.

    Raise before the operation is tried on the shard: the attempt would save tensors for autograd
    and then fail, and ``torch.utils.checkpoint`` would count these tensors.
    """
    name = func.__name__
    changes = name == "__setitem__" or (name[-1] == "_" != name[-2])
    if not changes and spec.owner.is_in_forward:
        spec.refuse(name)


def _check_writer(fqn: str, num_boxes: int) -> None:
    """Raise if the caller is torch's safetensors writer and would silently lose values."""
    frame = sys._getframe(2)
    while frame is not None and "storage_writer" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    writer = None if frame is None else frame.f_locals["storage_writer"]
    if "HuggingFaceStorageWriter" not in (base.__name__ for base in type(writer).__mro__):
        return
    # The writer writes only one box of a tensor per rank, and without `save_distributed` only one
    # box in total.
    if num_boxes > 1 or not writer.save_distributed:  # type: ignore[union-attr]
        raise RuntimeError(
            f"{fqn!r}: this rank holds {num_boxes} separate blocks of the tensor. "
            "HuggingFaceStorageWriter would write only one block from each rank with "
            "save_distributed=True, and only one block in total without. Call "
            "flatshard.checkpoint.save_safetensors(model, path) instead."
        )


class StateShard(FlatShardTensor):
    """A sharded tensor that ``torch.distributed.checkpoint.async_save`` can copy to host memory.

    ``async_save`` copies a tensor without storage in two steps: ``new_empty`` makes a new tensor,
    and then the attributes are copied. So ``new_empty`` of this class returns a sharded tensor.
    """

    shows_unsplit = True

    def of_local_shape(self) -> FlatShardTensor:
        """Return the same range as a tensor with the shape of the tensor-parallel part."""
        return FlatShardTensor(self.local, self.spec, role=self.role)

    def data_ptr(self) -> int:
        """Return zero, because the tensor itself has no memory; ``local`` has the values."""
        return 0

    def new_empty(self, size: Sequence[int], **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return an uninitialised tensor, which is sharded if ``size`` is this tensor's shape."""
        if tuple(size) != tuple(self.shape):
            return self.local.new_empty(size, **kwargs)
        local = self.local.new_empty(self.local.shape, **kwargs)
        return type(self)(local, self.spec, role=self.role)


def state_shard(local: Tensor, spec: ShardSpec, role: str) -> Tensor:
    """Make an entry of a sharded state dict that shares the memory of ``local``.

    Args:
        local: this rank's range, ``(spec.numel,)``.
        spec: describes the parameter and the range.
        role: relation of ``local`` to the parameter, as in ``FlatShardTensor``.
    """
    if not math.prod(spec.shape):  # the parameter has no elements, so no rank has a chunk to write
        return local.new_empty(spec.shape)
    return StateShard(local.detach(), spec.detached(), role=role)
