"""``HookTurns``: when, in a backward, users' hooks reduce units.

A hook waits inside for the other ranks' hooks, and backward waits with it. So all ranks call a hook
at the same place of the program, or a rank that lacks a gradient of the unit, and does not call it
there, waits for others in turn. Such places are those where a unit is unsharded for backward,
for which all ranks are needed anyway: there they tell one another how many units each could reduce
by now, and call the hooks that all can. Where a rank has come to the end of its backward, what is
left is left to the end by all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.engine.reduce_buckets import ReduceBucket
from flatshard.engine.unit import Unit
from flatshard.plan.schedule import ReduceOrder


class HookTurns:
    """The hooks of one model in one backward."""

    def __init__(self, buckets: Sequence[ReduceBucket], order: ReduceOrder) -> None:
        """What is reduced by turns, and the order of that."""
        self._buckets, self._order = buckets, order
        self._hooked: list[Unit] = []
        self._num_agreed = 0

    def begin_backward(self) -> None:
        """Look for units with hooks; nothing is agreed on."""
        self._hooked = [one.unit for one in self._buckets if one.unit.calls_hook]
        self._num_agreed = 0

    def allows(self, index: int) -> bool:
        """Whether what has its turn may be reduced before the end of backward."""
        unit = self._buckets[index].unit
        return self._order.num_taken < self._num_agreed or not unit.calls_hook

    def agree(self, *, at_end: bool = False) -> None:
        """Tell the other ranks how far this one is, or that its backward is over.

        Collective while there are hooks to call and no rank is known to be at the end.
        """
        if not self._hooked:
            return
        world = self._hooked[0].topology.world.apart
        said = [self._order.num_ready(), int(not at_end)]
        values = torch.tensor(said, device=world.control_device)
        op_name = "communication hooks that can be called in backward"
        world.reduce_scalars(values, "MIN", op_name=op_name)
        num_ready, go_on = values.tolist()
        if go_on:
            # The smallest number: a hook that one rank cannot call yet would hold up the others.
            self._num_agreed = num_ready
        else:
            self._hooked.clear()
