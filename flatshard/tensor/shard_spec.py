"""``ShardSpec``: which range of which parameter a rank holds, and who holds the rest."""

from __future__ import annotations

import copy
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.memory.disk import DiskMemory
from flatshard.plan.layout import LocalSpan, strides_of


def _nothing() -> None: ...


def _cannot() -> bool:
    return False


@dataclass(eq=False)
class ShardSpec:
    """Describes the range that a ``FlatShardTensor`` holds; shared with the gradients.

    Attributes:
        name: the parameter's name in the unwrapped model.
        unit: the unit's name.
        shape: the parameter's shape.
        offset: index, among the parameter's elements in memory order, of this rank's first one.
        numel: elements that this rank holds.
        start: where they begin in this rank's shard of the flat parameter.
        comm: the ranks that hold the rest.
        replicas: the ranks that hold the same.
        order: its dimensions as they lie in memory, outermost first; without: contiguous.
        originals: for a flat parameter, whose shape is that of one shard: which ranges of the
            shard are not padding. None for an original parameter.
        number: for a flat parameter: which of the shards this rank's is, in their concatenation.
        total_numel: elements that all ranks hold together, without padding; without: ``shape``'s.
        on_outside_grad: called before autograd adds to the parameter's gradient what came of its
            use outside of forward.
        bring_back: called when the values of ``full`` are read while it has no memory; returns
            whether it has memory again.
        state_disk: where optimizers keep state of this shape; None: in memory.
        full: the parameter that computes while the unit is unsharded; hooks for it go there.
        post_accumulate_hooks: run with the sharded parameter once its gradient is published.
        aliases: by id, tensors over the same memory; see ``FlatShardTensor.detach_aliases``.
        strides: the parameter's strides, in elements.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    _: KW_ONLY
    offset: int
    numel: int
    start: int = 0
    comm: Communicator
    replicas: Communicator = ALONE
    order: tuple[int, ...] = ()
    originals: Sequence[LocalSpan] | None = None
    number: int = 0
    total_numel: int = -1
    on_outside_grad: Callable[[], object] = _nothing
    bring_back: Callable[[], bool] = _cannot
    state_disk: DiskMemory | None = None
    full: nn.Parameter | None = None
    post_accumulate_hooks: OrderedDict[int, Callable[[Any], None]] = field(
        default_factory=OrderedDict
    )
    aliases: weakref.WeakValueDictionary[int, Tensor] = field(
        default_factory=weakref.WeakValueDictionary
    )
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Fill in what follows from the shape."""
        self.shape = tuple(self.shape)
        self.order = tuple(self.order or range(len(self.shape)))
        self.strides = strides_of(self.shape, self.order)
        if self.total_numel < 0:
            self.total_numel = math.prod(self.shape)

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
        # A view if the tensor lies in the parameter's memory order; a copy otherwise.
        in_memory_order = tensor.permute(self.order).reshape(-1)
        return in_memory_order[self.offset : self.offset + self.numel]

    def empty(self, like: Tensor) -> Tensor:
        """A plain tensor of the parameter's shape and strides, dtype and device of ``like``."""
        return like.new_empty_strided(self.shape, self.strides)

    def detached(self) -> ShardSpec:
        """The same for a copy, which takes part in no forward until a copied unit owns it."""
        twin = copy.copy(self)
        # Callbacks and hooks reach the original's unit, which knows nothing of the copy.
        twin.full, twin.on_outside_grad, twin.bring_back = None, _nothing, _cannot
        twin.post_accumulate_hooks = OrderedDict()
        twin.aliases = weakref.WeakValueDictionary()
        return twin

    def refuse(self, operation: object) -> NoReturn:
        """Raise for an operation that this rank's part cannot do alone."""
        raise RuntimeError(
            f"parameter {self.name!r} (unit {self.unit!r}, rank {self.comm.global_rank}) is "
            f"sharded: {operation} needs the full tensor. Use it inside the forward of the module "
            "that owns it, under ShardedWrapper.summon_full_params(model), or on p.full_tensor(). "
            "(For an optimizer that treats every element alike: flatshard.declare_elementwise.)"
        )
