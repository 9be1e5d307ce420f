"""``Prefetch``: starts the all-gathers of units early, in the order of the last forward."""

from __future__ import annotations

from collections.abc import Sequence

from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.options import BackwardPrefetch


class ExecutionOrder:
    """Records the order of units in a forward, and predicts the next forward and backward.

    A wrong prediction costs only time: a unit that was not predicted is unsharded when it runs.
    """

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._current: list[int] = []

    def begin_forward(self) -> None:
        """Start a new recording. The previous recording becomes the prediction."""
        self._previous = self._current or self._previous
        self._current = []

    def record(self, unit: int) -> None:
        self._current.append(unit)

    def next_forward(self) -> list[int]:
        """Return the units expected after the latest recorded unit, in order.

        Empty if nothing can be predicted: no unit is recorded yet, or this forward has departed
        from the order of the last forward.
        """
        position = len(self._current)
        # If this forward has departed from the order of the last forward, predict nothing. The next
        # forward will be predicted from the order of this forward.
        if position == 0 or self._previous[position - 1 : position] != self._current[-1:]:
            return []
        return self._previous[position:]

    def next_backward(self, unit: int) -> list[int]:
        """Return the units whose backward is expected after the backward of ``unit``, in order."""
        order = (self._current or self._previous)[::-1]
        after = order[order.index(unit) + 1 :] if unit in order else []
        # If the unit ran twice, return only the units before the unit's second backward. The second
        # backward calls this method again, to predict the later units.
        return after[: after.index(unit)] if unit in after else after

    @property
    def is_complete(self) -> bool:
        """Whether this forward has run all units of the last forward, in the same order."""
        return bool(self._current) and self._current == self._previous

    def first_backward(self) -> list[int]:
        """Return the units in the expected order of backward.

        Empty until the forward has run all units.
        """
        return self._current[::-1] if self.is_complete else []


class Prefetch:
    """Starts all-gathers of one model early, so that communication overlaps with computation."""

    def __init__(self, state: RunState, forward: bool, backward: BackwardPrefetch | None) -> None:
        """Prepare to prefetch the units of one model.

        Args:
            state: the state of the model's steps.
            forward: whether a unit's forward starts the all-gather of the next unit.
            backward: when to start all-gathers for backward. None: never early.
        """
        self.order = ExecutionOrder()
        self._state, self._units = state, state.units
        self._forward, self._backward = forward, backward
        # Units whose all-gather was started by a prefetch and runs in the background
        # (`_in_background`). Some of these units may have run since; `_under_way` leaves them out.
        self._prefetched: list[Unit] = []

    def refresh(self) -> None:
        """Choose again how much to prefetch, after the units' buffers were reallocated."""
        self._budget = max((unit.buffer_bytes for unit in self._units), default=0)
        # Units whose transport (sockets, for example) sends while this rank computes. With
        # `BackwardPrefetch.AUTO`, all-gathers of such a unit in backward count as slow, unless
        # backward all-gathers in a smaller group (`regather_size`).
        self._in_background = {
            unit
            for unit in self._units
            if unit.topology.intra_group.transport_for().gathers_in_background
        }
        backward_is_slow = any(unit.placement.regather_size is None for unit in self._in_background)
        # Whether the end of forward keeps the first unit of backward unsharded, and starts the
        # all-gathers of the next units.
        self._begins_in_forward = self._backward is BackwardPrefetch.END_OF_FORWARD or (
            self._backward is BackwardPrefetch.AUTO and backward_is_slow
        )

    def needs_soon(self, unit: Unit) -> bool:
        """Whether the rest of the forward, or the beginning of backward, uses the unit."""
        if unit is self._state.root:
            return True
        begins_backward = self._state.expects_backward and self._begins_in_forward
        return begins_backward and self.order.first_backward()[:1] == [unit.index]

    def in_forward(self) -> None:
        """Start all-gathers of the units expected after the unit whose forward begins."""
        if self._forward:
            self._start_expected(self.order.next_forward(), "forward")

    def after_forward(self) -> None:
        """At the end of a forward, start the all-gathers of the units that backward uses first."""
        if self._begins_in_forward:
            # Skip the first unit, which is still unsharded (see `needs_soon`).
            self._start_expected(self.order.first_backward()[1:], "backward")

    def in_backward(self, unit: Unit, *, is_over: bool) -> None:
        """Start all-gathers of units whose backward is expected after the backward of ``unit``.

        ``is_over``: whether the backward of ``unit`` is over. With ``BACKWARD_POST``, only the next
        unit's all-gather starts, after the backward of ``unit``. With other settings, all-gathers
        start before the backward of ``unit``.
        """
        is_post = self._backward is BackwardPrefetch.BACKWARD_POST
        if self._backward is not None and is_post is is_over:
            expected = self.order.next_backward(unit.index)
            self._start_expected(expected[:1] if is_post else expected, "backward")

    def _start_expected(self, expected: Sequence[int], purpose: str) -> None:
        """Start the all-gather of the first unit in ``expected``, and perhaps of further units."""
        # If the transport sends in the background, prefetch more than one unit: otherwise the
        # network would be idle from the end of one all-gather to the start of the next. All
        # prefetched units together may take at most as much memory as the largest unit.
        first = None
        for index in expected:
            unit = self._units[index]
            if purpose == "backward" and not unit.for_backward:
                continue
            if first is None:
                first = index
            elif index != first and not (unit in self._in_background and self._fits(unit)):
                return
            # In backward, skip a unit if backward has begun for all calls of the unit in the latest
            # forward. On some ranks, such a unit may still be unsharded, and these ranks would not
            # take part in an all-gather. An optimizer that steps in backward may also have updated
            # the unit already.
            if purpose == "forward" or unit.outstanding_backwards > 0:
                self._state.start_unshard(unit, purpose)
                if unit in self._in_background:
                    self._prefetched = [*self._under_way(), unit]

    def _fits(self, unit: Unit) -> bool:
        """Whether ``unit`` and the prefetched units take at most the memory of the largest unit."""
        return sum(one.buffer_bytes for one in {*self._under_way(), unit}) <= self._budget

    def _under_way(self) -> list[Unit]:
        return [one for one in self._prefetched if one.is_prefetched]
