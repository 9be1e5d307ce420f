"""``Prefetch``: all-gathers that start before their unit runs, in the order that was recorded."""

from __future__ import annotations

from collections.abc import Sequence

from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.options.strategy import BackwardPrefetch


class ExecutionOrder:
    """Records the order of units in a forward and predicts from it.

    A prediction is a hint: a unit that comes out of order is unsharded on demand.
    """

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._current: list[int] = []

    def begin_forward(self) -> None:
        """Start a new recording; what was recorded before becomes the prediction."""
        self._previous = self._current or self._previous
        self._current = []

    def record(self, unit: int) -> None:
        self._current.append(unit)

    def next_forward(self) -> list[int]:
        """The units expected after the one recorded last, in order; none without a prediction."""
        position = len(self._current)
        # A forward that left the recorded order gets no guesses until it is all recorded.
        if position == 0 or self._previous[position - 1 : position] != self._current[-1:]:
            return []
        return self._previous[position:]

    def next_backward(self, unit: int) -> list[int]:
        """The units whose backward is expected after that of ``unit``, in order."""
        after = _after(unit, (self._current or self._previous)[::-1])
        # A unit that ran twice: what comes after its other backward is expected then.
        return after[: after.index(unit)] if unit in after else after

    def next_recomputed(self, unit: int) -> list[int]:
        """The units expected after ``unit`` where this forward is computed again, in order."""
        return _after(unit, self._current)

    @property
    def is_complete(self) -> bool:
        """Whether this forward ran the units of the one before, in the same order."""
        return bool(self._current) and self._current == self._previous

    def first_backward(self) -> list[int]:
        """The units whose backward comes first, in order; none while more may come in forward."""
        return self._current[::-1] if self.is_complete else []


def _after(unit: int, units: list[int]) -> list[int]:
    return units[units.index(unit) + 1 :] if unit in units else []


class Prefetch:
    def __init__(
        self, state: RunState, *, forward: bool, backward: BackwardPrefetch | None
    ) -> None:
        self.order = ExecutionOrder()
        # Whether the forward that runs is the full model's, computed again in backward.
        self.recomputes_whole = False
        self._state, self._units = state, state.units
        self._forward, self._backward = forward, backward
        self._ahead: list[Unit] = []  # what was begun here, and perhaps waited for since

    def refresh(self) -> None:
        """Look at the units again, after their buffers were made anew."""
        self._budget = max((unit.buffer_bytes for unit in self._units), default=0)
        # Where backward all-gathers within a smaller group, that is quick.
        backward_is_slow = any(
            unit.topology.intra_group.transport_for().gathers_in_background
            and unit.placement.regather_size is None
            for unit in self._units
        )
        # Whether to keep and all-gather in forward what backward begins with.
        self._begins_in_forward = self._backward is BackwardPrefetch.END_OF_FORWARD or (
            self._backward is BackwardPrefetch.AUTO and backward_is_slow
        )

    def needs_soon(self, unit: Unit) -> bool:
        """Whether the rest of the forward, or the beginning of backward, needs the unit."""
        if unit is self._state.root:
            return True
        begins_backward = self._state.expects_backward and self._begins_in_forward
        return begins_backward and self.order.first_backward()[:1] == [unit.index]

    def in_forward(self) -> None:
        if self._forward:
            self._begin(self.order.next_forward(), "forward")

    def after_forward(self) -> None:
        """Start those that backward will need first, once nothing more is to come in forward."""
        if self._begins_in_forward:
            self._begin(self.order.first_backward()[1:], "backward")  # the first one is kept

    def in_recomputation(self, unit: Unit) -> None:
        """Start those of the units expected after ``unit`` where all is computed again."""
        if self._forward and self.recomputes_whole:
            self._begin(self.order.next_recomputed(unit.index), "backward")

    def before_backward(self, unit: Unit) -> None:
        """Start those of the units whose backward is expected after this one's."""
        if self._backward is not None and self._backward is not BackwardPrefetch.BACKWARD_POST:
            self._begin(self.order.next_backward(unit.index), "backward")

    def after_backward(self, unit: Unit) -> None:
        if self._backward is BackwardPrefetch.BACKWARD_POST:
            self._begin(self.order.next_backward(unit.index)[:1], "backward")

    def _begin(self, coming: Sequence[int], purpose: str) -> None:
        """Start the all-gather of the unit that comes first."""
        # Where it is on its way while this rank computes, also of those after it, as many as fit
        # into the memory of the largest unit: else the wires would be idle whenever one has come.
        first = None
        for index in coming:
            unit = self._units[index]
            if purpose == "backward" and not unit.for_backward:
                continue
            if first is None:
                first = index
            elif index != first and not self._fits_ahead(unit):
                return
            # A unit whose backward has begun may be resharded here and not yet on other ranks, so
            # they would not take part; or its optimizer has stepped.
            if purpose == "forward" or self.recomputes_whole or unit.outstanding_backwards > 0:
                self._state.start_unshard(unit, purpose)
                self._ahead = [*self._under_way(), unit]

    def _fits_ahead(self, unit: Unit) -> bool:
        """Whether to start an all-gather for which no rank waits next."""
        if not unit.topology.intra_group.transport_for().gathers_in_background:
            return False
        return sum(one.buffer_bytes for one in {*self._under_way(), unit}) <= self._budget

    def _under_way(self) -> list[Unit]:
        return [one for one in self._ahead if one.is_prefetched]
