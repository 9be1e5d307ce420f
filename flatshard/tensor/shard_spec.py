"""``ShardSpec``: a parameter, the range that this rank holds, and the ranks that hold the rest."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from types import CodeType
from typing import Any, NoReturn, Protocol

from torch import Tensor

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.memory.offload_target import OffloadTarget
from flatshard.plan.layout import LocalSpan, ParamSpan
from flatshard.plan.module_tree import unit_text


class ParamSplit(Protocol):
    """Describes a parameter that is one part of a larger parameter; other ranks hold the rest."""

    comms: tuple[Communicator, ...]  # the groups that hold the other parts
    shape: tuple[int, ...]  # of the larger parameter
    stride: tuple[int, ...]  # strides of the larger parameter, in elements

    def as_dtensor(self, local: Tensor) -> Tensor:
        """The tensor that modules hold for ``local``, this group's part."""

    def hook_of_part(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
        """Convert a user's hook on the larger gradient to a hook on this group's part."""

    def full(self, local: Tensor) -> Tensor:
        """The larger tensor. Collective: the ranks of ``comms``."""

    def part_of(self, full: Tensor) -> Tensor:
        """This group's part of a larger tensor. No communication."""

    def offsets(self) -> tuple[int, ...]:
        """Where this group's part begins, by dimension."""


class ParamOwner:
    """Interface to the run of a model, for operations on parameters outside of their units.

    This base class does nothing. It stands for the run of a copied parameter, and of a deleted
    model.
    """

    is_in_forward = False  # whether a forward of the model is under way

    def run_full(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with full tensors for sharded ones, or return NotImplemented."""
        return NotImplemented

    def start_backward(self) -> None:
        """Called just before autograd adds a gradient from a use outside of forward."""

    def bring_back(self, spec: ShardSpec) -> bool:
        """Called when a freed full parameter is read; returns whether it has memory again."""
        return False


_NOBODY = ParamOwner()


class NeedsFullTensor(RuntimeError):
    """An operation for which a rank's part is not enough; ``spec`` describes the part."""

    def __init__(self, message: str, spec: ShardSpec) -> None:
        super().__init__(message)
        self.spec = spec


@dataclass(eq=False)
class ShardSpec:
    """Where a parameter lies, and this rank's range; gradients and state share the object."""

    name: str  # name of the parameter in the unwrapped model
    unit: str
    span: ParamSpan  # the parameter's elements in the flat parameter, the same on all ranks
    local: LocalSpan  # which of the elements are in this rank's chunk
    _: KW_ONLY
    comm: Communicator  # the ranks that hold the other ranges
    replicas: Communicator = ALONE  # the ranks that hold the same range
    tensor_parallel: ParamSplit | None = None  # set if the parameter is the local part of a DTensor
    state_target: OffloadTarget | None = None  # where optimizers keep state of this shape
    # Weak references: gradients and optimizer state may outlive the model, and must not keep the
    # model alive.
    _owner: Callable[[], ParamOwner | None] = lambda: None
    _original: Callable[[], Any] = lambda: None
    # Plain attributes, not properties, because each operation on a sharded tensor reads them.
    shape: tuple[int, ...] = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    order: tuple[int, ...] = field(init=False)  # dimensions in memory order, outermost first
    # This rank holds the elements [offset, offset + numel) of the parameter, in memory order. The
    # elements lie at [start, start + numel) of this rank's chunk.
    offset: int = field(init=False)
    numel: int = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        span, local = self.span, self.local
        self.shape, self.strides, self.order = span.shape, span.strides, span.order
        self.offset, self.numel, self.start = local.offset, local.numel, local.start

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Two tensors can be operands of one element-wise operation if their places are equal."""
        return self.shape, self.strides, self.offset, self.numel

    def slice(self, tensor: Tensor) -> Tensor:
        """This rank's range of a full tensor of any strides, 1-D; smaller shapes broadcast."""
        if tuple(tensor.shape) != self.shape:
            try:
                tensor = tensor.expand(self.shape)
            except RuntimeError:
                raise NeedsFullTensor(
                    f"parameter {self.name!r}: expected a tensor of shape {self.shape} or one "
                    f"that broadcasts to it, got {tuple(tensor.shape)}",
                    self,
                ) from None
        # A view if the tensor lies in the parameter's memory order; a copy otherwise.
        return tensor.permute(self.order).reshape(-1)[self.offset : self.offset + self.numel]

    @property
    def owner(self) -> ParamOwner:
        """The run of the model that trains the parameter."""
        return self._owner() or _NOBODY

    @owner.setter
    def owner(self, owner: ParamOwner) -> None:
        self._owner = weakref.ref(owner)

    @property
    def original(self) -> Any:
        """The ``OriginalParam``; None for a copy, and when the model is gone."""
        return self._original()

    @original.setter
    def original(self, original: Any) -> None:
        self._original = weakref.ref(original)

    @property
    def comms(self) -> tuple[Communicator, ...]:
        """The groups whose ranks hold other parts: the shard group and tensor-parallel groups."""
        beyond = self.tensor_parallel.comms if self.tensor_parallel is not None else ()
        return (self.comm, *beyond)

    @property
    def unsharded_numel(self) -> int:
        """Number of elements of the parameter without any parallelism."""
        split = self.tensor_parallel
        return math.prod(self.shape if split is None else split.shape)

    def unsplit(self, local: Tensor) -> Tensor:
        """The tensor that the tensor-parallel ranks hold together; ``local`` is this rank's part.

        ``local`` has this spec's ``shape``. Without tensor parallelism the result is ``local``.

        Collective: the tensor-parallel ranks, if there are any.
        """
        return local if self.tensor_parallel is None else self.tensor_parallel.full(local)

    def split(self, full: Any) -> Any:
        """This rank's part of a result of ``unsplit``; any other value is returned unchanged."""
        split = self.tensor_parallel
        if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.shape:
            return full
        return full.of_local_shape() if hasattr(full, "of_local_shape") else split.part_of(full)

    def empty(self, like: Tensor) -> Tensor:
        """A plain tensor of the parameter's shape and strides, dtype and device of ``like``."""
        return like.new_empty_strided(self.shape, self.strides)

    def detached(self) -> ShardSpec:
        """The spec for a copy of the parameter. No model owns the copy until a copied unit does."""
        return replace(self, _owner=lambda: None, _original=lambda: None)

    def __deepcopy__(self, _: object) -> ShardSpec:
        return self.detached()

    def refuse_part(self, operation: str) -> None:
        """Raise, before any communication, if tensor-parallel ranks hold other parts."""
        if len(self.comms) > 1:
            full = None if self.tensor_parallel is None else self.tensor_parallel.shape
            raise NotImplementedError(
                f"parameter {self.name!r} ({unit_text(self.unit)}, rank {self.comm.global_rank}): "
                f"{operation} would see this group's part {self.shape} of a DTensor {full} alone. "
                "Initialize before ShardedWrapper(model), read model.state_dict(), and edit with "
                "p.copy_(...)."
            )

    def where(self, described: str | None = None) -> str:
        """A tensor of this spec, by default the parameter, in words with its unit and this rank."""
        what = described or f"parameter {self.name!r}"
        return f"{what} ({unit_text(self.unit)}, rank {self.comm.global_rank})"

    def refuse(self, operation: object, described: str | None = None) -> NoReturn:
        """Raise for an operation for which this rank's part is not enough.

        ``described``: the tensor in words, if the tensor is no parameter.
        """
        refuse_foreign_wrapper()
        remedy = (
            "Use it inside the forward of the module that owns it, under "
            "ShardedWrapper.summon_full_params(model), or on p.full_tensor()."
            if described is None
            else "Norms, sums and element-wise operations work on the sharded tensor; its "
            "full_tensor(), called on all ranks, gives the full one."
        )
        message = f"{self.where(described)} is sharded: {operation} needs the full tensor. {remedy}"
        raise NeedsFullTensor(message, self)


def first_of_dtensor(specs: Iterable[ShardSpec]) -> str | None:
    """The name of the first parameter that was a DTensor, or None."""
    return next((spec.name for spec in specs if spec.tensor_parallel is not None), None)


# Torch's wrappers, keyed by the module and the function that make or run the wrapper.
_MAKERS = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "forward"): "DataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    ("torch.distributed._composable.contract", "wrapper"): "",  # the decorated function is the name
    ("torch.distributed.tensor._api", "distribute_tensor"): "distribute_tensor",
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): "parallelize_module",
}
_NAMES = {name for _, name in _MAKERS}


def refuse_foreign_wrapper(end: CodeType | None = None) -> None:
    """Raise ValueError if the caller runs inside the construction of one of torch's wrappers.

    Raises also if the caller runs inside a conversion of the parameters to DTensors. Stack frames
    outside of ``end`` are not checked.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        if frame.f_code.co_name in _NAMES:
            place = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            made = _MAKERS.get(place) or getattr(frame.f_locals.get("func"), "__name__", "")
            if place in _MAKERS and made in ("distribute_tensor", "parallelize_module"):
                raise ValueError(
                    f"{made}() after ShardedWrapper: a rank holds its range of sharded parameters "
                    "alone. First parallelize_module(model, mesh['tp'], plan) or "
                    "distribute_module(), then ShardedWrapper(model, device_mesh=mesh['dp'])."
                )
            if place in _MAKERS and made in (*_MAKERS.values(), "fully_shard", "replicate"):
                raise ValueError(
                    f"{made} around a ShardedWrapper: both would shard or average the same "
                    f"gradients. ShardedWrapper does it alone: leave {made} out, or wrap the "
                    "model in it instead." + _HINT * ("accelerate" in sys.modules)
                )
        frame = frame.f_back  # type: ignore[assignment]


_HINT = (
    " Accelerate, Trainer and Lightning put it there: use theirs of flatshard.integrations instead."
)
