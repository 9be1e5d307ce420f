"""``ShardSpec``: which range of a parameter this rank holds, and which ranks hold the rest."""

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
    """Tensor parallelism of a parameter: the parameter is this group's part of a larger tensor."""

    comms: tuple[Communicator, ...]  # groups of the ranks that hold the other parts
    shape: tuple[int, ...]  # shape of the larger parameter
    stride: tuple[int, ...]  # strides of the larger parameter, in elements

    def as_dtensor(self, local: Tensor) -> Tensor:
        """Return a DTensor over ``local``, this group's part. Modules hold the DTensor."""

    def hook_of_part(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
        """Convert a hook on the larger tensor's gradient to a hook on the gradient of this part."""

    def full(self, local: Tensor) -> Tensor:
        """Return the larger tensor. Collective: the ranks of ``comms``."""

    def part_of(self, full: Tensor) -> Tensor:
        """Return this group's part of a larger tensor. No communication."""

    def offsets(self) -> tuple[int, ...]:
        """Return the first index of this group's part, in each dimension."""


class ParamOwner:
    """Interface by which an operation on a parameter calls the model that trains the parameter.

    This base class does nothing. It is the owner of a copied parameter, and of a parameter whose
    model was deleted.
    """

    is_in_forward = False  # whether a forward of the model is under way

    def run_full(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with full tensors instead of sharded tensors, or return NotImplemented."""
        return NotImplemented

    def start_backward(self) -> None:
        """Called in backward, before the gradient of a use outside of forward is averaged."""

    def bring_back(self, spec: ShardSpec) -> bool:
        """Called when a freed full parameter is read. Returns True if the unit was unsharded."""
        return False


_NOBODY = ParamOwner()


class NeedsFullTensor(RuntimeError):
    """An operation needs the full tensor, but this rank holds only the range of ``spec``."""

    def __init__(self, message: str, spec: ShardSpec) -> None:
        super().__init__(message)
        self.spec = spec


@dataclass(eq=False)
class ShardSpec:
    """A parameter's place in its flat parameter, and the range that this rank holds.

    The parameter's gradients and optimizer state share this object.
    """

    name: str  # name of the parameter in the unwrapped model
    unit: str
    span: ParamSpan  # the parameter's elements in the flat parameter, the same on all ranks
    local: LocalSpan  # the part of ``span`` in this rank's chunk
    _: KW_ONLY
    comm: Communicator  # the ranks that hold the other ranges
    replicas: Communicator = ALONE  # the ranks that hold the same range
    tensor_parallel: ParamSplit | None = None  # set if the parameter is the local part of a DTensor
    # Offload target of optimizer state with one value per element. None: memory.
    state_target: OffloadTarget | None = None
    # Weak references: gradients and optimizer state may outlive the model, and must not keep the
    # model alive.
    _owner: Callable[[], ParamOwner | None] = lambda: None
    _original: Callable[[], Any] = lambda: None
    # Plain attributes, not properties, because each operation on a sharded tensor reads them.
    shape: tuple[int, ...] = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    order: tuple[int, ...] = field(init=False)  # dimensions in memory order, outermost first
    # This rank holds the elements [offset, offset + numel) of the parameter, in memory order. These
    # elements are at [start, start + numel) of this rank's chunk.
    offset: int = field(init=False)
    numel: int = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        span, local = self.span, self.local
        self.shape, self.strides, self.order = span.shape, span.strides, span.order
        self.offset, self.numel, self.start = local.offset, local.numel, local.start

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Key that is equal for two tensors if an element-wise operation can combine them."""
        return self.shape, self.strides, self.offset, self.numel

    def slice(self, tensor: Tensor) -> Tensor:
        """Return this rank's range of a full tensor, as a 1-D tensor.

        ``tensor`` may have any strides. Smaller shapes broadcast to the parameter's shape.
        """
        if tuple(tensor.shape) != self.shape:
            try:
                tensor = tensor.expand(self.shape)
            except RuntimeError:
                raise NeedsFullTensor(
                    f"parameter {self.name!r} is sharded: expected a tensor of a shape that "
                    f"broadcasts to {self.shape}, got {tuple(tensor.shape)}. Use p.full_tensor().",
                    self,
                ) from None
        # ``reshape`` returns a view if the tensor is in the parameter's memory order. Otherwise it
        # returns a copy.
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
        """The ``OriginalParam``. None for a copy, and after the model was deleted."""
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
        """Return the tensor that the tensor-parallel ranks hold together.

        ``local`` is this rank's part and has this spec's ``shape``. Without tensor parallelism the
        result is ``local``.

        Collective: the tensor-parallel ranks, if there are any.
        """
        return local if self.tensor_parallel is None else self.tensor_parallel.full(local)

    def split(self, full: Any) -> Any:
        """Return this rank's part of a result of ``unsplit``; return any other value unchanged."""
        split = self.tensor_parallel
        if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.shape:
            return full
        return full.of_local_shape() if hasattr(full, "of_local_shape") else split.part_of(full)

    def empty(self, like: Tensor) -> Tensor:
        """Return an uninitialised plain tensor with the parameter's shape and strides.

        The dtype and device are those of ``like``.
        """
        return like.new_empty_strided(self.shape, self.strides)

    def detached(self) -> ShardSpec:
        """Return a spec without an owner, for a copy of the parameter."""
        return replace(self, _owner=lambda: None, _original=lambda: None)

    def __deepcopy__(self, _: object) -> ShardSpec:
        return self.detached()

    def refuse_part(self, operation: str) -> None:
        """Raise, before any communication, if the parameter is only a tensor-parallel part."""
        if len(self.comms) > 1:
            full = None if self.tensor_parallel is None else self.tensor_parallel.shape
            raise NotImplementedError(
                f"parameter {self.name!r} ({unit_text(self.unit)}, rank {self.comm.global_rank}): "
                f"{operation} would see only this group's part {self.shape} of a DTensor {full}. "
                "Initialize before ShardedWrapper(model), read values from model.state_dict(), and "
                "edit with p.copy_(...)."
            )

    def where(self, described: str | None = None) -> str:
        """Return a text that names a tensor, its unit and this rank.

        ``described``: description of the tensor. None: the tensor is the parameter.
        """
        what = described or f"parameter {self.name!r}"
        return f"{what} ({unit_text(self.unit)}, rank {self.comm.global_rank})"

    def refuse(self, operation: object, described: str | None = None) -> NoReturn:
        """Raise NeedsFullTensor for an operation that needs more than this rank's range.

        ``described``: description of the tensor. None: the tensor is the parameter.
        """
        refuse_foreign_wrapper()
        remedy = (
            "Use the parameter inside the forward of its module, or under "
            "ShardedWrapper.summon_full_params(model), or use p.full_tensor()."
            if described is None
            else "Norms, sums and element-wise operations work on the sharded tensor; "
            "full_tensor(), called on all ranks, returns the full tensor."
        )
        message = f"{self.where(described)} is sharded: {operation} needs the full tensor. {remedy}"
        raise NeedsFullTensor(message, self)


def first_of_dtensor(specs: Iterable[ShardSpec]) -> str | None:
    """Return the name of the first parameter that is part of a DTensor, or None."""
    return next((spec.name for spec in specs if spec.tensor_parallel is not None), None)


# Torch's wrappers that must not be applied to sharded parameters. Keys: the module and the name of
# the function that makes or runs the wrapper, to find on the call stack. Values: the wrapper's
# name, for the error.
_MAKERS = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "forward"): "DataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    # "": the wrapper's name is the name of the function that `contract` decorates.
    ("torch.distributed._composable.contract", "wrapper"): "",
    ("torch.distributed.tensor._api", "distribute_tensor"): "distribute_tensor",
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): "parallelize_module",
}
_NAMES = {name for _, name in _MAKERS}


def refuse_foreign_wrapper(end: CodeType | None = None) -> None:
    """Raise ValueError if one of torch's wrappers is on the call stack.

    Also raise if a function that converts parameters to DTensors is on the call stack. The search
    begins at the caller, and ends at the frame that runs ``end``.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        if frame.f_code.co_name in _NAMES:
            place = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            made = _MAKERS.get(place) or getattr(frame.f_locals.get("func"), "__name__", "")
            if place in _MAKERS and made in ("distribute_tensor", "parallelize_module"):
                raise ValueError(
                    f"{made}() cannot follow ShardedWrapper: each rank holds only its range of the "
                    "parameters. First call parallelize_module(model, mesh['tp'], plan) or "
                    "distribute_module(), then ShardedWrapper(model, device_mesh=mesh['dp'])."
                )
            if place in _MAKERS and made in (*_MAKERS.values(), "fully_shard", "replicate"):
                raise ValueError(
                    f"{made} cannot wrap a ShardedWrapper: both would shard or average the same "
                    f"gradients. Either leave {made} out, or use {made} without ShardedWrapper."
                    + _HINT
                    * ("accelerate" in sys.modules)
                )
        frame = frame.f_back  # type: ignore[assignment]


_HINT = (
    " Accelerate, Trainer and Lightning add this wrapper themselves: use the classes of "
    "flatshard.integrations instead."
)
