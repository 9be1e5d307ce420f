"""``ShardSpec``: which range of which parameter a rank holds, and who holds the rest."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.memory.disk import DiskMemory
from flatshard.plan.layout import strides_of
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.foreign_wrappers import refuse_foreign_wrapper
from flatshard.tensor.tensor_parallel import TensorParallel


def _no() -> bool:
    return False


def _not_implemented(*_: Any) -> Any:
    return NotImplemented


class NeedsFullTensor(RuntimeError):
    """An operation that a rank's part alone cannot do; ``spec`` is the part's."""

    def __init__(self, message: str, spec: ShardSpec) -> None:
        super().__init__(message)
        self.spec = spec


@dataclass(eq=False)
class ShardSpec:
    """Describes the range that a ``FlatShardTensor`` holds; shared with the gradients."""

    name: str  # the parameter's, in the unwrapped model
    unit: str
    shape: tuple[int, ...]
    _: KW_ONLY
    # Of the elements in memory order, this rank holds [offset, offset + numel), and they are
    # [start, start + numel) of its shard of the flat parameter.
    offset: int
    numel: int
    start: int = 0
    comm: Communicator  # the ranks that hold the rest
    replicas: Communicator = ALONE  # the ranks that hold the same
    tensor_parallel: TensorParallel | None = None  # of a part of what a DTensor held
    order: tuple[int, ...] = ()  # dimensions as they lie in memory, outermost first
    # Before autograd adds to the parameter's gradient what came of its use outside of forward.
    on_outside_grad: Callable[[], object] = _no
    # When ``full`` is read while it has no memory; returns whether it has memory again.
    bring_back: Callable[[], bool] = _no
    # Runs an operation that needs the full tensor, with that; or returns NotImplemented.
    run_full: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = _not_implemented
    in_forward: Callable[[], bool] = _no  # whether a forward of the model is under way
    state_disk: DiskMemory | None = None  # where optimizers keep state of this shape
    full: nn.Parameter | None = None  # computes while the unit is unsharded; has the tensor hooks
    # Run with the sharded parameter once its gradient is published.
    post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = field(
        default_factory=OrderedDict
    )
    # By id, ``FlatShardTensor``s over the same memory that users may hold.
    aliases: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )
    strides: tuple[int, ...] = field(init=False)
    name_crc: int = field(init=False)  # a number for the name, the same on all ranks

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        self.order = tuple(self.order or range(len(self.shape)))
        self.strides = strides_of(self.shape, self.order)
        self.name_crc = zlib.crc32(self.name.encode())

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
        """Two tensors can meet in an element-wise operation when this is equal."""
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
    def comms(self) -> tuple[Communicator, ...]:
        """Each of the groups whose ranks hold other parts."""
        beyond = self.tensor_parallel.comms if self.tensor_parallel is not None else ()
        return (self.comm, *beyond)

    @property
    def unsharded_numel(self) -> int:
        """Elements of the parameter without any parallelism."""
        split = self.tensor_parallel
        return math.prod(self.shape if split is None else split.shape)

    def unsplit(self, local: Tensor) -> Tensor:
        """What tensor-parallel ranks hold together, if ``local`` is a part of it, of ``shape``.

        Collective: these ranks, if there are any.
        """
        return local if self.tensor_parallel is None else self.tensor_parallel.full(local)

    def split(self, full: Any) -> Any:
        """The part of ``unsplit``'s result on this rank; anything else as it is."""
        split = self.tensor_parallel
        if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.shape:
            return full
        return full.of_local_shape() if hasattr(full, "of_local_shape") else split.part_of(full)

    def empty(self, like: Tensor) -> Tensor:
        """A plain tensor of the parameter's shape and strides, dtype and device of ``like``."""
        return like.new_empty_strided(self.shape, self.strides)

    def detached(self) -> ShardSpec:
        """The same for a copy, which takes part in no forward until a copied unit owns it."""
        return replace(
            self,
            # Callbacks and hooks reach the original's unit, which knows nothing of the copy.
            full=None,
            on_outside_grad=_no,
            bring_back=_no,
            run_full=_not_implemented,
            in_forward=_no,
            post_accumulate_hooks=OrderedDict(),
            aliases=weakref.WeakValueDictionary(),
        )

    def __deepcopy__(self, _: object) -> ShardSpec:
        return self.detached()

    def refuse_part(self, operation: str) -> None:
        """Raise, before any communication, where tensor-parallel ranks hold other parts."""
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
    """The name of the first parameter that was a DTensor, if there is one."""
    return next((spec.name for spec in specs if spec.tensor_parallel is not None), None)
