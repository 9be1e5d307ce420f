"""``ShardSpec``: this rank's elements of a parameter, and the ranks that store other elements."""

import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NoReturn

from torch import Tensor

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.units.layout import LocalSpan, ParamSpan
from flatshard.units.module_proxy import refuse_foreign_wrapper
from flatshard.units.module_tree import unit_text


class ParamOwner:
    """Methods of a model, which are called by operations on the model's sharded parameters.

    This base class does nothing. It is used for copies, and for parameters of a deleted model.
    """

    is_in_forward = False  # whether a forward of the model is running

    def run_full(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with full tensors in place of sharded tensors, and return the result.

        Returns NotImplemented if ``func`` writes to its arguments, or if a sharded tensor was not
        computed from parameters of the model.
        """
        return NotImplemented

    def assign(self, tensor: Any, value: Tensor) -> None:
        """Copy ``value``, which was assigned to ``tensor.data``, into a sharded tensor."""
        tensor.copy_(value)

    def start_backward(self) -> None:
        """Notify the model that a backward reaches an operation that used a parameter.

        The operation ran outside of forward. Called before the operation's gradient is averaged.
        """

    def bring_back(self, spec: "ShardSpec") -> bool:
        """Unshard a parameter's unit again for a read in backward. Returns False if impossible."""
        return False


NOBODY = ParamOwner()


class NeedsFullTensor(RuntimeError):
    """An operation needs the full tensor, but this rank stores only the range of ``spec``.

    If possible, flatshard catches the error and runs the operation with full tensors.
    """

    def __init__(self, message: str, spec: "ShardSpec | None" = None) -> None:
        super().__init__(message)
        self.spec = spec  # None on ranks that raise the error of another rank

    def __reduce__(self) -> tuple[type["NeedsFullTensor"], tuple[str]]:
        # Pickle only the message, because the spec refers to process groups.
        return NeedsFullTensor, (str(self),)


@dataclass(eq=False)
class ShardSpec:
    """The position of a parameter in a flat parameter, and the range that this rank stores.

    The parameter's gradients and optimizer state share this object.
    """

    name: str  # name of the parameter in the unwrapped model
    unit: str  # name of the parameter's unit
    span: ParamSpan  # the parameter's elements in the flat parameter, the same on all ranks
    local: LocalSpan  # the part of ``span`` in this rank's shard
    _: KW_ONLY
    comm: Communicator  # the shard group: the ranks that store the other elements
    replicas: Communicator = ALONE  # the replicate group: the ranks that store the same elements

    # If the parameter is the local part of a DTensor: how the DTensor is split
    # (`extras/tensor_parallel`). Otherwise None.
    tensor_parallel: Any = None
    # Disk for optimizer state with one value per element (`OffloadTargets.state`). None: the state
    # is stored beside the shard.
    state_target: Any = None
    # Function that returns pairs: a rank of `comm`, and the range of the parameter (a slice) that
    # this rank of `comm` stores. None: only the current rank stores elements.
    holders: Any = None
    # How the parameter is divided. If two parameters of equal shape and strides have equal values,
    # each rank stores the same elements of both. The value is the same on all ranks, so all ranks
    # get the same result from a comparison.
    division: tuple[Any, ...] = ()
    # Weak references to the model: gradients and optimizer state refer to this object, and must not
    # keep a deleted model in memory.
    _owner: Callable[[], ParamOwner | None] = lambda: None
    _original: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        # Store values of `span` and `local` as attributes, because each operation on a tensor reads
        # the values. `order`: dimensions in memory order, outermost first.
        span, local = self.span, self.local
        self.shape, self.strides, self.order = span.shape, span.strides, span.order
        # This rank stores the elements [offset, offset + numel) of the parameter, in memory order.
        # In this rank's shard of the flat parameter, these elements are at `range`.
        self.start, self.numel, self.offset = local
        self.range = slice(self.start, self.start + self.numel)
        # Element-wise operations can combine two sharded tensors if these values are equal.
        self.place = self.shape, self.strides, self.division
        self.holders = self.holders or (lambda: [(self.comm.rank, slice(0, self.numel))])
        # The groups of ranks that together store all elements: the shard group, and with tensor
        # parallelism also the tensor-parallel groups.
        split = self.tensor_parallel
        self.comms: tuple[Communicator, ...] = (self.comm, *(() if split is None else split.comms))

    def slice(self, tensor: Tensor) -> Tensor:
        """Return this rank's range of a full tensor, as a 1-D tensor.

        ``tensor`` may have any strides, and any shape that broadcasts to the parameter's shape.
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
        # ``reshape`` copies only if the elements are not in the parameter's memory order.
        return tensor.permute(self.order).reshape(-1)[self.offset : self.offset + self.numel]

    @property
    def owner(self) -> ParamOwner:
        """The model that trains the parameter. If none does, a ``ParamOwner`` that does nothing."""
        return self._owner() or NOBODY

    @owner.setter
    def owner(self, owner: ParamOwner) -> None:
        self._owner = weakref.ref(owner)

    @property
    def original(self) -> Any:
        """The parameter's ``OriginalParam``. None for a copy, and after the model was deleted."""
        return self._original()

    @property
    def whole(self) -> Any:
        """Object with the whole DTensor's ``shape`` and ``strides``. Without DTensor: this spec."""
        return self.tensor_parallel or self

    def unsplit(self, local: Tensor) -> Tensor:
        """Return the whole DTensor of which ``local`` is this rank's part, as a plain tensor.

        Collective: all ranks of the tensor-parallel groups. Without such groups, returns ``local``.
        """
        return local if self.tensor_parallel is None else self.tensor_parallel.full(local)

    def split(self, full: Any) -> Any:
        """Undo ``unsplit``: return this rank's part of a tensor with the shape of the DTensor."""
        split = self.tensor_parallel
        if split is None or not isinstance(full, Tensor) or tuple(full.shape) != split.shape:
            return full
        return full.of_local_shape() if hasattr(full, "of_local_shape") else split.part_of(full)

    def empty(self, like: Tensor) -> Tensor:
        """Return an uninitialised plain tensor with the parameter's full shape and strides."""
        return like.new_empty_strided(self.shape, self.strides)

    def detached(self, _: object = None) -> "ShardSpec":
        """Return a copy of this spec that refers to no model, for a copy of the parameter."""
        return replace(self, _owner=lambda: None, _original=lambda: None)

    __deepcopy__ = detached

    def refuse_part(self, operation: str) -> None:
        """Raise NotImplementedError if the parameter is part of a DTensor.

        Call this before any communication. Then all ranks raise, and no rank waits for another.
        """
        if len(self.comms) > 1:
            raise NotImplementedError(
                f"{self.where()}: {operation} would see only this rank's part {self.shape} of a "
                f"DTensor of shape {self.tensor_parallel.shape}. Initialize before wrapping, read "
                "values from model.state_dict(), and edit with p.copy_(...)."
            )

    def where(self, described: str | None = None) -> str:
        """Return a text that names the tensor (default: the parameter), the unit and the rank."""
        what = described or f"parameter {self.name!r}"
        return f"{what} ({unit_text(self.unit)}, rank {self.comm.global_rank})"

    def refuse(self, operation: object, described: str | None = None) -> NoReturn:
        """Raise NeedsFullTensor, because ``operation`` needs more than this rank's elements.

        ``described``: the tensor, such as ``gradient of 'fc1.weight'``. None: the parameter.
        """
        refuse_foreign_wrapper()
        remedy = (
            "Use the parameter inside the forward of its module. Elsewhere, also in a loss, "
            "compute with p.full_tensor(), called on all ranks. To write, use "
            "ShardedWrapper.summon_full_params(model)."
            if described is None
            else "Norms, sums and element-wise operations work on the sharded tensor; "
            "full_tensor(), called on all ranks, returns the full tensor."
        )
        message = f"{self.where(described)} is sharded: {operation} needs the full tensor. {remedy}"
        raise NeedsFullTensor(message, self)
