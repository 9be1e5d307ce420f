"""``Portion``: flat parameters of a unit whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from flatshard.handle import FlatParamHandle

U = TypeVar("U")


class Portion(Generic[U]):
    """The flat parameters of a unit whose gradients are reduced together: mostly all.

    Attributes:
        unit: the unit.
        handles: the flat parameters.
        index: its number in the run.
    """

    __slots__ = ("_num_trainable", "handles", "index", "unit")

    def __init__(
        self,
        unit: U,
        handles: Sequence[FlatParamHandle],
        num_trainable: Mapping[FlatParamHandle, int],
    ) -> None:
        """Take a part of a unit.

        Args:
            unit: the unit.
            handles: the flat parameters.
            num_trainable: of each, how many gradients a whole backward brings; the unit keeps it
                up to date.
        """
        self.unit, self.handles = unit, list(handles)
        self.index = -1
        self._num_trainable = num_trainable

    def trainable_handles(self) -> list[FlatParamHandle]:
        """Flat parameters with something to reduce."""
        return [handle for handle in self.handles if self._num_trainable[handle]]

    def is_complete(self) -> bool:
        """Whether all gradients have come."""
        for handle in self.handles:  # a loop: asked for every gradient
            if len(handle.gradients.seen) < self._num_trainable[handle]:
                return False
        return True


def split(
    unit: U, handles: Sequence[FlatParamHandle], num_trainable: Mapping[FlatParamHandle, int]
) -> list[Portion[U]]:
    """The portions of a unit: what ``reduces_alone``, and the rest; one or more."""
    together = [handle for handle in handles if not handle.reduces_alone]
    alone = [[handle] for handle in handles if handle.reduces_alone]
    return [Portion(unit, one, num_trainable) for one in (together, *alone) if one or not alone]
