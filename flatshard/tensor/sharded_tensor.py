"""``FlatShardTensor``: a parameter that shows its full shape, but stores only this rank's elements.

The elements of a parameter, in memory order, are divided into consecutive ranges. Each rank stores
one range as a 1-D tensor. A parameter, gradient or state tensor in this form is a sharded tensor.

Every operation on a sharded tensor either returns the right result or raises. Element-wise
operations run on this rank's range. For a reduction over all elements, such as a norm, one
collective combines the ranks' results. If a program writes a full tensor to a sharded tensor, each
rank copies only its own range. Every other operation raises an error that names the parameter.
During forward and backward, modules contain plain parameters instead.
"""

import enum
import importlib
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partialmethod
from operator import add, attrgetter
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.utils import hooks as torch_hooks

from flatshard.precision import tensors_in
from flatshard.tensor import whole
from flatshard.tensor.shard_spec import NOBODY, NeedsFullTensor, ShardSpec
from flatshard.units.layout import Box, boxes_of
from flatshard.units.module_proxy import callers, refuse_foreign_wrapper

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Prevent Dynamo from tracing ``function`` and the functions that ``function`` calls.

    Unlike ``torch.compiler.disable``, ``untraced`` does not slow down calls, because it returns
    ``function`` itself and no wrapper.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)  # type: ignore[attr-defined]
    marked: Any = function
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    marked._torchdynamo_disable_msg = "flatshard communicates here"
    return function


# The functions that implement torch's operators for sharded tensors, keyed by operator name and
# called as ``handler(func, args, kwargs)``. ``flatshard.tensor.operators`` adds handlers.
HANDLERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
# Replacements of torch functions that autograd would differentiate wrongly, keyed by function.
# If a replacement returns NotImplemented, torch's function runs.
ABOVE_AUTOGRAD: dict[Any, Callable[..., Any]] = {}
_GRAD: Any = Tensor.grad
_DTYPE: Any = Tensor.dtype
_COMPARES_DTYPES = torch.distributed.distributed_c10d._ensure_all_tensors_same_dtype.__code__
GRADIENT = "gradient of"  # value of `FlatShardTensor.shard_role` for a parameter's gradient

# Names of the units of which ``.grad`` has ever contained unreduced gradients. While this is empty,
# there is no need to look for unreduced tensors.
UNREDUCED_UNITS: set[str] = set()
# The ``WriteThrough`` of each model of which the program may hold full tensors.
# `if WATCHING.data` is a faster test than `if WATCHING`.
WATCHING: Any = weakref.WeakSet()
# The ``ShardSpec`` of each sharded parameter whose ``.grad`` the program has set to a full tensor
# since the last backward. (Weak references to the parameters would prevent `model.to()`.)
ASSIGNED: MutableMapping[ShardSpec, None] = weakref.WeakKeyDictionary()
# Modules in which torch defines collectives. A collective is recognised by its module, because its
# schema does not mark written tensors, and because newer versions of torch may add collectives.
_COLLECTIVE_MODULES = (
    *("torch.distributed", "torch._ops.c10d", "torch._ops._c10d"),
    *("torch._ops.symm_mem", "torch._ops._dtensor"),
)


class Source(enum.IntEnum):
    """From which tensors a sharded tensor was computed. Each member includes the previous ones."""

    PARAMETERS = 0  # only parameters and Python numbers
    GRADIENTS = 1  # also averaged gradients
    # Also tensors that may differ between ranks. Then the ranges on the ranks may be parts of
    # different full tensors.
    OTHER = 2
    # Also values that ranks do not compare: random numbers of this rank's generator, and tensors
    # of one number on an accelerator (a comparison would wait for the accelerator).
    DRAWN = 3


class Caller(enum.Enum):
    """Who called an operator on a sharded tensor."""

    PROGRAM = enum.auto()
    # A ``torch.autograd.Function`` or a tensor hook of the program. As under
    # DistributedDataParallel, it computes this rank's gradient, which is not averaged yet.
    PROGRAM_FOR_GRADIENT = enum.auto()
    AUTOGRAD = enum.auto()  # a derivative formula of torch


@dataclass(eq=False, slots=True)
class Origin:
    """How the values of a sharded tensor were computed. Aliases of the tensor share this object.

    Attributes:
        source: which tensors the values were computed from.
        is_fixed: whether ``source`` stays the same if the tensor is written. True for parameters
            and their gradients, because all ranks must write the same full tensor.
        graph_task: autograd's number of the backward in which flatshard averaged this gradient.
        written: text with a checksum of all in-place operations on the tensor and their operands.
    """

    source: Source = Source.OTHER
    is_fixed: bool = False
    graph_task: int | None = None
    written: str = ""
    # Earlier results of `p.data` that the program still has, keyed by id. They share the memory of
    # `p`, but a later assignment to `p.data` must not change their values.
    aliases: "weakref.WeakValueDictionary[int, FlatShardTensor] | None" = None

    @property
    def may_change(self) -> bool:
        """Whether a write to the tensor changes ``source``."""
        return not self.is_fixed or self.is_arriving

    @property
    def is_arriving(self) -> bool:
        """Whether this is an averaged gradient on its way to a parameter, in a running backward."""
        return self.graph_task == torch._C._current_graph_task_id()


def origin_of(operands: Iterable[Any], caller: Caller = Caller.PROGRAM) -> Origin:
    """Return the ``Origin`` of an operation's result. ``operands``: the operation's arguments."""
    source, graph_task = Source.PARAMETERS, None
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    # In a derivative formula of torch, a Python number arrives as a tensor without dimensions.
    makes_numbers = caller is Caller.AUTOGRAD and any(tensor.dim() for tensor in tensors)
    for tensor in tensors:
        if not isinstance(tensor, FlatShardTensor):
            if not makes_numbers or tensor.dim():
                is_compared = tensor.dim() > 0 or tensor.is_cpu
                source = max(source, Source.OTHER if is_compared else Source.DRAWN)
            continue
        source = max(source, tensor.shard_origin.source)
        if tensor.shard_origin.is_arriving:
            graph_task = tensor.shard_origin.graph_task
            # A hook or `torch.autograd.Function` gets the average here, but this rank's gradient
            # under DistributedDataParallel. So its result (a square) may be different: use OTHER.
            source = source if caller is Caller.AUTOGRAD else max(source, Source.OTHER)
    return Origin(source, graph_task=graph_task)


# Functions that show, if they are on the call stack, who called an operator. Keys are `id`s of code
# objects, whose hash is slow. None: the engine of autograd, which calls formulas and hooks.
CALLERS: dict[int, Caller | None] = {id(torch.autograd.graph._engine_run_backward.__code__): None}


def caller_of_operator() -> Caller:
    """Return who called the operator that is now running on a sharded tensor."""
    # In the forward of a `torch.autograd.Function`, torch disables forward-mode gradients.
    in_function = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
    if not in_function and torch._C._current_graph_task_id() == -1:
        return Caller.PROGRAM
    caller = Caller.AUTOGRAD
    for frame in callers():
        key = id(frame.f_code)
        if key in CALLERS:
            found = CALLERS[key]
            if found is not Caller.PROGRAM_FOR_GRADIENT or in_function:
                return found or caller
            caller = found
    # No frame of the engine: on an accelerator, backward calls hooks and formulas in a C++ thread.
    return caller


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on a parameter, keyed by name."""
    return {k: value for k, value in tensor.__dict__.items() if k not in vars(FlatShardTensor)}


def copied_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return ``attributes_of(tensor)`` for a copy of the parameter: tensors are cloned."""
    found = attributes_of(tensor).items()
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in found}


def check_data(where: str, tensor: Tensor, value: Tensor) -> None:
    """Raise RuntimeError if ``tensor.data = value`` would change the shape, dtype or device."""
    expected, found = [(tuple(one.shape), one.dtype, one.device) for one in (tensor, value)]
    if found != expected:
        raise RuntimeError(
            f"{where}: expected data of shape {expected[0]}, {expected[1]} on {expected[2]}, got "
            f"{found[0]}, {found[1]} on {found[2]}. To convert all parameters, call model.to(...)."
        )


def _count_references() -> int:
    # Measure the count in the same way as the setter of `FlatShardTensor.grad`: the count for a
    # local variable depends on the version of Python.
    only = torch.empty(0)
    return sys.getrefcount(only)


_NUM_REFERENCES = _count_references()  # count for a tensor to which only a local variable refers


class LocalView(Tensor):
    """This rank's elements of a parameter or of its optimizer state, as a view for users.

    Operations on the view return plain tensors.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without autograd, as ``Tensor.data``. An assignment copies the new values."""
        # Return `detach()`, which shares the version counter. torch's `data` has a new counter, so
        # flatshard would not notice writes to the shard, and would use stale unsharded buffers.
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_data("this rank's part of a flat parameter", self, value)
        with torch.no_grad():
            self.copy_(value)

    # Copy only the view. torch would copy the whole storage, which is the shard of a whole unit.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # a pickle contains a plain tensor


# ``num_flag_writes`` counts calls of functions that may change ``requires_grad`` (``__set__`` is an
# assignment). A step reads this number instead of the flags of all sharded parameters.
_FLAG_WRITERS = ("__set__", "requires_grad_", "detach_")
num_flag_writes = 0

# Function that makes torch raise when the memory of a storage is accessed. None: the installed
# torch lacks this function (a build without CUDA may).
set_access_error: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_NO_MEMORY = (
    "a sharded tensor (flatshard.FlatShardTensor) was assigned to .data of a plain tensor, or C++ "
    "code asked for its address. A sharded tensor has no memory of the full shape. Copy values by "
    "tensor.copy_(), or call full_tensor() on all ranks."
)


class FlatShardTensor(torch.Tensor):
    """A parameter, gradient or state tensor of which each rank stores only a range of the elements.

    ``shape``, strides, dtype and device are those of the full parameter.

    Example:
        ```python
        for name, param in model.named_parameters():
            if isinstance(param, flatshard.FlatShardTensor):
                print(name, param.shape, param.local.numel())  # full shape; elements on this rank
                full = param.full_tensor()  # a plain tensor; collective: call it on all ranks
        ```

    Attributes:
        local: this rank's range of the elements in memory order, ``(spec.numel,)``. After writes
            to tensors of a ``state_dict()``, read ``to_local()``, which takes them over first.
        spec: describes the parameter, and the range of the parameter that is in ``local``.
        shard_flat: this rank's shard of the flat parameter or of its gradient. ``local`` is a view
            of ``shard_flat`` that begins at ``spec.start``. None: ``local`` has its own memory.
        is_unit_parameter: whether the tensor is a parameter of the model, not computed from one.
        shard_origin: how the values were computed.
        shard_role: the tensor's relation to the parameter, such as ``"gradient of"``. It is part of
            each collective's name. Ranks compare the names, so that a collective never combines
            ranges of different tensors.
    """

    # Users set attributes of parameters (``p.role = "bias"``). So attributes that flatshard sets
    # have unusual names. All are in `vars` of the class, where `attributes_of` finds the names.
    local: Tensor = property(attrgetter("shard_local"))  # type: ignore[assignment]
    spec: ShardSpec = property(attrgetter("shard_spec"))  # type: ignore[assignment]
    shard_spec: Any = None
    shard_flat: Tensor | None = None
    is_unit_parameter: bool = False
    # Set, in `__dict__`, while an `OriginalParam` refers to this object as `kept_grad`, for reuse.
    is_kept: bool
    shard_role: str = GRADIENT
    # With tensor parallelism: whether ``shape`` is the whole DTensor's shape (`StateShard`).
    shows_unsplit = False

    # The unit's name, for a gradient in ``.grad`` that is not reduced yet (under no_sync), and for
    # sharded tensors computed from this gradient. Norms and optimizer steps of them raise. With
    # NO_SHARD, the unreduced gradients are plain tensors, and get this attribute, too.
    unreduced_unit: str | None = None
    # Set for a gradient that `Gradients.show` has put into `.grad`: this rank's unreduced gradient
    # of the full parameter, and the version counter of `shard_local` just after its computation.
    shard_unreduced: Tensor | None = None
    shard_version = 0

    # `Gradients` fills the gradient objects of the last step again, instead of making new objects.
    # All of these objects share this origin, which no write changes (`is_fixed`). They compute
    # `shard_local` on demand, because programs rarely read it.
    shard_origin: Origin = Origin(Source.GRADIENTS, is_fixed=True)

    @cached_property
    def shard_local(self) -> Tensor:
        if self.shard_unreduced is None:
            return self.shard_flat.narrow(0, self.spec.start, self.spec.numel)  # type: ignore[union-attr]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Slice, then cast: a slice of the cast tensor would keep all of that tensor in memory.
            local = self.spec.slice(self.shard_unreduced)
            local = local.to(self.device, _DTYPE.__get__(self))
        self.shard_version = local._version
        return local

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        spec: ShardSpec,
        *,
        role: str = "tensor like",
        flat: Tensor | None = None,
        origin: Origin | None = None,
    ) -> Self:
        """Make a sharded tensor in the memory of ``local``, ``(spec.numel,)``.

        The other arguments are described at the attributes of the class.
        """
        shown = spec.whole if cls.shows_unsplit else spec
        self = torch.Tensor._make_wrapper_subclass(
            cls, shown.shape, strides=shown.strides, dtype=local.dtype, device=local.device
        )
        # Make torch raise if C++ code reads the tensor's memory, which would be address 0. This
        # happens in a collective with nested lists, and after `plain.data = sharded`.
        torch._C._set_throw_on_mutable_data_ptr(self)
        if set_access_error is not None:
            with torch._C.DisableTorchFunctionSubclass():
                set_access_error(self.untyped_storage()._cdata, _NO_MEMORY)
        self.shard_local, self.shard_spec, self.shard_flat = local, spec, flat
        self.shard_role, self.shard_origin = role, origin or Origin()
        return self  # type: ignore[no-any-return]

    @classmethod
    def parameter(cls, flat: Tensor, spec: ShardSpec, requires_grad: bool) -> "FlatShardTensor":
        origin = Origin(Source.PARAMETERS, is_fixed=True)
        self = cls(flat[spec.range], spec, role="parameter", flat=flat, origin=origin)
        self._is_param = self.is_unit_parameter = True
        self.requires_grad_(requires_grad)
        return self

    @property
    def is_alike(self) -> bool:
        """Whether the ranges of all ranks are certainly parts of the same full tensor.

        True for parameters, averaged gradients, and tensors computed only from these and from
        Python numbers.
        """
        return self.shard_origin.source < Source.OTHER and not is_unreduced(self)

    @property
    def described(self) -> str:
        """Text such as ``gradient of 'fc1.weight'``, which is part of the names of collectives."""
        return f"{self.shard_role}{self.shard_origin.written} {self.spec.name!r}"

    @property
    def text(self) -> str:
        """Short form of ``described``, for errors and warnings."""
        operation, _, operands = self.shard_role.partition(" of ")
        what = f"result of {operation}() with" if operands else self.shard_role
        return f"{what} {self.spec.name!r}"

    def refuse(self, operation: object, *_: Any, **__: Any) -> NoReturn:
        """Raise NeedsFullTensor, because ``operation`` needs more than this rank's range."""
        text = None if self.shard_origin.source is Source.PARAMETERS else self.text
        self.spec.refuse(operation, text)

    def to_local(self) -> Tensor:
        """Return this rank's elements in memory order, ``(spec.numel,)``, without a copy."""
        take_over_writes([self])
        return self.local.as_subclass(LocalView)

    def full_tensor(self) -> Tensor:
        """Return the full tensor as a plain tensor, with the parameter's shape and strides.

        A gradient that was accumulated under ``no_sync`` is not averaged: each rank contributes its
        own gradient for its range.

        Like ``DTensor.full_tensor``, the call is differentiable. Its backward averages the gradient
        over the ranks. To save or print values, add ``.detach()``.

        Collective: all ranks of the shard group. A backward through the result is collective, too.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return ABOVE_AUTOGRAD[FlatShardTensor.full_tensor](self)  # type: ignore[no-any-return]
        take_over_writes([self])
        part, name = self.local.detach(), f"full tensor of {self.described}"
        return whole.start_gather([(self.spec, part, None)], name)()[0]  # type: ignore[return-value]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without autograd, as ``Tensor.data`` of a plain tensor.

        An assignment copies the new values into this rank's range. Later writes to the assigned
        tensor reach the parameter when the model or the parameter is used next. Steps do not change
        the assigned tensor. Tensors that users read from ``data`` before the assignment keep the
        old values.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_data(f"parameter {self.spec.name!r} is sharded", self, value)
        if isinstance(value, FlatShardTensor) and value.local is self.local:
            return  # for example, `model.module.cpu()` assigns each parameter to itself
        with torch.no_grad():
            # After `kept = p.data; p.data = other`, `kept` must still have the old values.
            for alias in list((self.shard_origin.aliases or {}).values()):
                if alias.local is self.local:  # gradients of other parameters share the origin
                    alias.shard_local = alias.local.clone()
                    alias.shard_origin = Origin(alias.shard_origin.source)
            self.spec.owner.assign(self, value)

    # Reading ``dtype`` raises in a collective with a list of tensors (``dist.scatter(x, [p, p])``).
    # ``__torch_function__`` and ``__torch_dispatch__`` do not see all such lists, but
    # torch.distributed first reads the dtypes of the listed tensors.
    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the elements, like ``Tensor.dtype`` of a plain tensor."""
        caller = sys._getframe(1)
        if caller.f_code is _COMPARES_DTYPES:
            name = caller.f_back.f_code.co_name  # type: ignore[union-attr]
            collective(getattr(torch.distributed, name), (self,), {})
        return self.local.dtype

    # Bypasses ``__torch_function__``, which is slow: each step reads ``grad`` of each parameter.
    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, like ``Tensor.grad`` of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            before: Any = _GRAD.__get__(self)
            _GRAD.__set__(self, value)
            is_kept = before is not None and before is not value and "is_kept" in before.__dict__
            # If the program has no reference to the old gradient, free the gradient's memory, but
            # keep the object in `kept_grad`, for reuse. Otherwise set `kept_grad` to None. The
            # references of flatshard are this local variable (`_NUM_REFERENCES`) and `kept_grad`.
            if (
                is_kept
                and sys.getrefcount(before) == _NUM_REFERENCES + 1
                and before._use_count() == 1
                and not weakref.getweakrefcount(before)
                and not before.requires_grad
            ):
                before.__dict__ = {}
            elif is_kept:
                del before.is_kept
                if (original := before.spec._original()) is not None:
                    original.kept_grad = None
        if type(value) is Tensor:
            ASSIGNED[self.spec] = None

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def data_ptr(self) -> int:
        """Return the memory address of this rank's elements, or another number that is unique."""
        # torch returns 0 for a tensor without elements. A program that compares addresses to find
        # tied parameters would treat all parameters without elements on this rank as tied.
        return self.local.data_ptr() or id(self.spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatShardTensor":
        if id(self) not in memo:
            spec, local = self.spec.detached(), self.local.detach()
            target = spec.state_target
            copied = local.clone() if target is None else target.copy(local)
            origin = None if self.is_unit_parameter else Origin(self.shard_origin.source)
            twin = type(self)(copied, spec, role=self.shard_role, origin=origin)
            twin.requires_grad_(self.requires_grad)
            twin.__dict__.update(copied_attributes(self))
            memo[id(self)] = twin
        return memo[id(self)]  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A pickle would contain only this rank's elements.
        raise RuntimeError(
            f"{self.text} is sharded and cannot be pickled. Call on all ranks, and pickle the "
            "result: flatshard.checkpoint.full_state_dict(model) for a model, "
            "full_optim_state_dict(model, optimizer) for an optimizer's state, full_tensor() for a "
            "tensor. A sharded state dict is for torch.distributed.checkpoint.save."
        )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register ``hook``, which gets this rank's full gradient before the reduction.

        On a sharded tensor that is not a parameter, such as a gradient, the hook works as in torch.
        """
        full = self._full()
        if full is None:
            return super().register_hook(hook)
        # torch refuses hooks on frozen tensors. If `self` was unfrozen, `full` may still be frozen.
        if self.requires_grad:
            full.requires_grad_(True)
        split = self.spec.tensor_parallel
        return full.register_hook(hook if split is None else split.hook_of_part(hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register ``hook``, which is called with this parameter once ``.grad`` is reduced."""
        if self._full() is None:
            return super().register_post_accumulate_grad_hook(hook)
        hooks = self.spec.original.post_accumulate_hooks
        handle = torch_hooks.RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _full(self) -> nn.Parameter | None:
        # None for a gradient, which has the spec of its parameter: a hook on the gradient must not
        # be registered on the parameter.
        original = self.spec.original if getattr(self, "_is_param", False) else None
        return None if original is None else original.full

    # -------------------------------------------------- torch.distributed.checkpoint (DCP)
    # DCP saves and loads a tensor through these methods (planner_helpers, in torch 2.11 to 2.15).
    # Each rank lists the boxes (rectangular blocks) of the full tensor that its range consists of.
    # DCP gets the boxes as views of the range, so that loading writes in place.

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        # Import these modules only here, because the import is slow.
        from torch.distributed.checkpoint import metadata, planner

        # List no empty chunk (DCP's word for a box): an empty chunk may have the same offsets as a
        # chunk of another rank, and DCP keeps only the first of the two.
        chunks = self._chunks()
        _check_writer(fqn, len(chunks))
        data = metadata.TensorProperties(dtype=self.local.dtype)
        index, kind = metadata.MetadataIndex, planner.WriteItemType.SHARD
        parts = [planner.TensorWriteData(chunk, data, self.shape) for chunk in chunks]
        return [planner.WriteItem(index(fqn, p.chunk.offsets), kind, tensor_data=p) for p in parts]

    def __create_chunk_list__(self) -> list[Any]:
        # After a load, the next unshard must all-gather again, on all ranks. A changed version
        # counter causes this. But on a rank without elements, the load writes nothing, so increase
        # the counter here: DCP calls this method on all ranks before it loads.
        torch.autograd.graph.increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        size = torch.Size
        return [ChunkStorageMetadata(size(b.offsets), size(b.sizes)) for b in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        box = next(box for box in self._boxes() if box.offsets == tuple(index.offset or ()))
        part = self.local.detach()[box.position : box.position + box.numel]
        # The dimensions may have another order in memory (channels_last, for example).
        order = self.spec.order
        in_shape = [order.index(d) for d in range(len(order))]
        return part.view([box.sizes[d] for d in order]).permute(in_shape)

    def _boxes(self) -> Iterator[Box]:
        spec = self.spec
        boxes = boxes_of(spec.shape, spec.offset, spec.offset + spec.numel, spec.order)
        if spec.tensor_parallel is None:
            return boxes
        first = spec.tensor_parallel.offsets()
        return (box._replace(offsets=tuple(map(add, box.offsets, first))) for box in boxes)

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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _FLAG_WRITERS:
            global num_flag_writes
            num_flag_writes += 1
        if is_collective(func):
            return collective(func, args, kwargs)
        try:
            if (WATCHING.data or torch.is_grad_enabled()) and func.__name__ not in ATTRIBUTES:
                prepare(func, args, kwargs)
            if func in ABOVE_AUTOGRAD:
                if (result := ABOVE_AUTOGRAD[func](*args, **kwargs)) is not NotImplemented:
                    return result
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except NeedsFullTensor as error:
            # Remove the traceback: traceback and frame refer to each other, so the frame's tensors
            # would stay in memory until Python's garbage collector runs.
            refused = error.with_traceback(None)
        owner = None if refused.spec is None else refused.spec.owner
        result = NotImplemented if owner is None else owner.run_full(func, args, kwargs)
        if result is NotImplemented:
            raise refused
        return result

    @classmethod
    @untraced
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        handler = HANDLERS.get(name)
        # Do not list foreach and fused operators by name: newer versions of torch add more.
        if handler is None and name.startswith(("_foreach_", "_fused_")):
            handler = HANDLERS["_foreach"]
        if handler is None and is_collective(func):
            handler = collective
        if handler is None or (kwargs and func._schema.is_mutable and _has_out(kwargs)):
            # Handlers write only to the first argument. So in `torch.nan_to_num(g, out=g)`, compute
            # the result without `out`, then copy it.
            out, is_elementwise = kwargs.get("out"), torch.Tag.pointwise in func.tags
            if handler is not None and is_elementwise and isinstance(out, FlatShardTensor):
                rest = {name: value for name, value in kwargs.items() if name != "out"}
                result = func.overloadpacket(*args, **rest)
                # Refuse other shapes and dtypes, for which torch would resize `out` or raise.
                if result.shape == out.shape and torch.can_cast(result.dtype, out.dtype):
                    return out.copy_(result)
            first_sharded(args, kwargs).refuse(func._schema.name)
        result = handler(func, args, kwargs)
        # A result computed from an unreduced gradient (its square or copy) is unreduced, too.
        if UNREDUCED_UNITS:
            units = [t.unreduced_unit for t in sharded_in(args) if is_unreduced(t)]
            for tensor in sharded_in((result,)) if units else ():
                tensor.unreduced_unit = units[0]
        return result


def _has_out(given: dict[str, Any]) -> bool:
    """Whether keyword arguments contain ``out`` or a sharded tensor."""
    # ``any(sharded_in(...))`` would fail: it evaluates the truth value of tensors.
    return "out" in given or next(sharded_in((*given.values(),)), None) is not None


def is_collective(func: Any) -> bool:
    """Whether the function or operator is a collective of torch.distributed."""
    return (getattr(func, "__module__", None) or "").startswith(_COLLECTIVE_MODULES)


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise RuntimeError, because the user's program calls a collective on a sharded tensor."""
    refuse_foreign_wrapper()
    tensor = first_sharded(args, kwargs)
    remedy = (
        "The gradient is already averaged over all ranks: leave the collective out."
        if tensor.shard_role == GRADIENT
        else "All ranks hold the same parameters: to average them, leave the collective out. To "
        "write other values, communicate under ShardedWrapper.summon_full_params(model), or use "
        "model.load_state_dict()."
    )
    name = func.__name__.removesuffix(".default")
    raise RuntimeError(
        f"{tensor.spec.where(tensor.text)} is sharded: {name}() would send only this rank's "
        f"range, or write to a temporary copy. {remedy} To read values, call full_tensor() on all "
        "ranks and communicate the result. [FS-COLLECTIVE]"
    )


def not_reduced(where: str, caller: str) -> str:
    """Return the text of an error. ``caller``: the function that got unreduced gradients."""
    return (
        f"{where}: {caller} got gradients that were accumulated under no_sync and not reduced. Run "
        f"the last backward before {caller} outside of no_sync."
    )


def wrote(values: Sequence[Any]) -> None:
    """Record a write to the sharded tensors among ``values``."""
    # Operations under ``__torch_dispatch__`` do not increase the shard's version counter, by which
    # the next unshard sees that the shard has changed. So increase the counter here.
    torch.autograd.graph.increment_version([tensor.local for tensor in sharded_in(values)])


def is_unreduced(grad: Tensor) -> bool:
    """Whether a tensor is or contains a gradient that is not reduced over all ranks yet."""
    return getattr(grad, "unreduced_unit", None) is not None


def local_range(tensor: Tensor) -> Tensor:
    """Return this rank's range of a sharded tensor. A plain tensor is returned unchanged."""
    return tensor.local if isinstance(tensor, FlatShardTensor) else tensor


def version_of(grad: Tensor) -> int:
    """Return a number that changes when the program writes to a gradient."""
    if isinstance(grad, FlatShardTensor) and grad.shard_unreduced is not None:
        local = grad.__dict__.get("shard_local")  # missing if the program never read the values
        return 0 if local is None else local._version - grad.shard_version
    return local_range(grad)._version


def local_grad(grad: Tensor | None, spec: ShardSpec) -> Tensor:
    """Return this rank's elements, 1-D, of a gradient, which may be a full tensor."""
    assert grad is not None, "the caller has checked it"
    return (grad.local if isinstance(grad, FlatShardTensor) else spec.slice(grad)).detach()


def sharded_in(values: Sequence[Any]) -> Iterator[FlatShardTensor]:
    """Yield the sharded tensors in ``values``, and in lists that ``values`` contains."""
    return (t for t in tensors_in(values, depth=0) if isinstance(t, FlatShardTensor))


def first_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShardTensor:
    """Return the first sharded tensor among the arguments, which an error can name."""
    return next(sharded_in((*args, *kwargs.values())))


CALLERS[id(FlatShardTensor.__torch_function__.__func__.__code__)] = (  # type: ignore[attr-defined]
    Caller.PROGRAM_FOR_GRADIENT
)

# These methods bypass ``__torch_dispatch__``, and read the tensor's memory, which does not exist:
# ``apply_`` would crash the process. So they raise.
for _name in ("numpy", "__array__", "__dlpack__", "tolist", "apply_", "map_", "share_memory_"):
    setattr(FlatShardTensor, _name, partialmethod(FlatShardTensor.refuse, f"{_name}()"))

# torch's gradient clipping and optimizers use foreach kernels only for the types in these lists.
for _module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
    importlib.import_module(_module)._foreach_supported_types.append(FlatShardTensor)


# Names of the functions that torch passes to ``__torch_function__`` for an attribute (``p.grad``).
ATTRIBUTES = frozenset({"__get__", "__set__"})


def is_counted() -> bool:
    """Whether this code runs inside ``torch.utils.checkpoint`` with ``use_reentrant=False``.

    The checkpoint raises if the recomputation saves more or fewer tensors than the forward. But a
    parameter may be sharded in the forward and unsharded in the recomputation. So operations on
    the sharded parameter must save as many tensors as operations on the unsharded parameter.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def prepare(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Prepare a call of torch's ``func``: copy the program's writes to the shards.

    Raises NeedsFullTensor if activation checkpointing counts saved tensors (``is_counted``), the
    model still exists, and ``func`` does not write to a tensor. The caller then runs ``func`` with
    full tensors. The reason: on the shard, ``func`` might save tensors for backward and then fail,
    and ``torch.utils.checkpoint`` would count these tensors, too.
    """
    if WATCHING.data:
        take_over_writes(sharded_in((*args, *kwargs.values())))
    name = func.__name__
    changes = name == "__setitem__" or (name[-1] == "_" != name[-2])
    if not changes and torch.is_grad_enabled() and is_counted():
        spec = first_sharded(args, kwargs).spec
        if spec.owner is not NOBODY:
            spec.refuse(name)


def take_over_writes(tensors: Iterable[FlatShardTensor]) -> None:
    """Copy to the shards the values that the program wrote to tensors of ``state_dict()``."""
    params = {t.spec.original for t in tensors if t.shard_role != GRADIENT}
    for writes in [*WATCHING] if params else ():
        writes.check(params)


def _check_writer(fqn: str, num_boxes: int) -> None:
    """Raise RuntimeError if DCP's ``HuggingFaceStorageWriter`` would silently lose values."""
    # DCP does not pass the writer to this method. Find it in the callers' local variables.
    local = (frame.f_locals for frame in callers())
    writer: Any = next((one["storage_writer"] for one in local if "storage_writer" in one), None)
    if "HuggingFaceStorageWriter" not in (base.__name__ for base in type(writer).__mro__):
        return
    # The writer writes one box of a tensor per rank, or without `save_distributed` one in total.
    if num_boxes > 1 or not writer.save_distributed:
        raise RuntimeError(
            f"{fqn!r}: HuggingFaceStorageWriter would lose a part of this tensor. This rank holds "
            f"{num_boxes} blocks of the tensor, but the writer writes at most one block per rank "
            "(one in total without save_distributed=True). Call "
            "flatshard.checkpoint.save_safetensors(model, path) instead."
        )


class StateShard(FlatShardTensor):
    """A sharded entry of a state dict, which ``async_save`` of DCP can copy to host memory.

    ``async_save`` makes the copy by ``new_empty``, and then copies the attributes. So ``new_empty``
    of this class returns a sharded tensor.
    """

    shows_unsplit = True

    def of_local_shape(self) -> FlatShardTensor:
        """Return this entry in the shape of this rank's part of a DTensor."""
        return FlatShardTensor(self.local, self.spec, role=self.shard_role)

    def data_ptr(self) -> int:
        return 0  # the values are in ``local``

    def new_empty(self, size: Sequence[int], **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return an uninitialised tensor, sharded if ``size`` is the tensor's shape."""
        if tuple(size) != tuple(self.shape):
            return self.local.new_empty(size, **kwargs)
        local = self.local.new_empty(self.local.shape, **kwargs)
        return type(self)(local, self.spec, role=self.shard_role)


def state_shard(local: Tensor, spec: ShardSpec, role: str) -> Tensor:
    """Return an entry of a sharded state dict in the memory of ``local``, ``(spec.numel,)``."""
    # For a parameter without elements, return a plain tensor: DCP saves no sharded entry that has
    # no elements on any rank.
    if not math.prod(spec.shape):
        return local.new_empty(spec.shape)
    return StateShard(local.detach(), spec.detached(), role=role)
