"""``Prefetch``: starts all-gathers of units early, in the order of the last forward."""

from collections.abc import Sequence

from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.options import BackwardPrefetch


class Prefetch:
    """Starts all-gathers of one model early, so that communication overlaps with computation.

    Expects that forward runs the units in the same order as the last forward, and that backward
    runs them in the reverse order. A wrong prediction costs only time: a unit that was not
    predicted is unsharded when it runs.
    """

    def __init__(self, state: RunState, forward: bool, backward: BackwardPrefetch | None) -> None:
        """Prepare to prefetch the units of one model.

        Args:
            state: the state of the model's steps.
            forward: whether a unit's forward starts the all-gather of the next unit.
            backward: when to start all-gathers for backward. None: never early.
        """
        self.last_order: list[int] = []  # indices of units, in the order of the last forward
        self.order: list[int] = []  # indices of the units that the present forward has run
        self._state, self._units = state, state.units
        self._forward, self._asked = forward, backward
        # Units whose all-gather was started by a prefetch, on a transport that sends in the
        # background. `_under_way` leaves out the units that have run since.
        self._prefetched: list[Unit] = []

    def refresh(self) -> None:
        """Decide how much to prefetch. Called again after unsharded buffers were reallocated."""
        self._budget = max((unit.buffer_bytes for unit in self._units), default=0)
        # If no unit is resharded after forward, backward needs no all-gather.
        reshards = any(unit.reshards_after_forward for unit in self._units)
        self._backward = self._asked if reshards else None
        # Units whose transport (sockets) sends while this rank computes.
        self._in_background = {
            unit
            for unit in self._units
            if unit.topology.intra_group.transport_for().gathers_in_background
        }
        # All-gathers over sockets are slow, unless backward uses a smaller group (`regather_size`).
        backward_is_slow = any(unit.placement.regather_size is None for unit in self._in_background)
        # Whether forward, at its end, keeps the first unit of backward unsharded, and starts the
        # all-gathers of the next units.
        self._begins_in_forward = self._backward is BackwardPrefetch.END_OF_FORWARD or (
            self._backward is BackwardPrefetch.AUTO and backward_is_slow
        )

    def begin_forward(self) -> None:
        """Begin to record the order of a new forward, expected to be that of the last forward."""
        self.last_order, self.order = self.order or self.last_order, []

    def in_forward(self) -> None:
        """At the beginning of a unit's forward, start all-gathers of the units expected next."""
        num = len(self.order)
        # Predict nothing if another unit was at this position in the last forward.
        if self._forward and num and self.last_order[num - 1 : num] == self.order[-1:]:
            self._start_expected(self.last_order[num:], "forward")

    @property
    def is_complete(self) -> bool:
        """Whether this forward has run all units of the last forward, in the same order."""
        return bool(self.order) and self.order == self.last_order

    def needs_soon(self, unit: Unit) -> bool:
        """Whether the rest of the forward, or the beginning of backward, uses the unit."""
        if unit is self._state.root:
            return True
        begins_backward = self._state.expects_backward and self._begins_in_forward
        return begins_backward and self.is_complete and self.order[-1] == unit.index

    def after_forward(self) -> None:
        """At the end of a forward, start the all-gathers of the units that backward uses first."""
        if self._begins_in_forward and self.is_complete:
            # Skip the first unit, which is still unsharded, because of `needs_soon`.
            self._start_expected(self.order[-2::-1], "backward")

    def in_backward(self, unit: Unit, *, is_over: bool) -> None:
        """Start all-gathers of units whose backward is expected after the backward of ``unit``.

        Called at the beginning (``is_over=False``) and at the end of the unit's backward. With
        ``BACKWARD_POST``, the next unit's all-gather starts at the end. With other settings,
        all-gathers start at the beginning.
        """
        is_post = self._backward is BackwardPrefetch.BACKWARD_POST
        if self._backward is not None and is_post is is_over:
            order, index = (self.order or self.last_order)[::-1], unit.index
            after = order[order.index(index) + 1 :] if index in order else []
            # If the unit ran twice, stop where `after` reaches the unit again: its second backward
            # calls this method, too.
            expected = after[: after.index(index)] if index in after else after
            self._start_expected(expected[:1] if is_post else expected, "backward")

    def _start_expected(self, expected: Sequence[int], purpose: str) -> None:
        """Start the all-gather of the first unit in ``expected``, and perhaps of further units."""
        # Prefetch more than one unit if the transport sends in the background: otherwise the
        # network would be idle between the end of one all-gather and the next unit's forward. All
        # prefetched units together may take as much memory as the largest unit.
        first = None
        for unit in map(self._units.__getitem__, expected):
            if purpose == "backward" and not unit.for_backward:
                continue
            first = first or unit
            if unit is not first and not (unit in self._in_background and self._fits(unit)):
                return
            # In backward, skip a unit if the backwards of all calls of the unit have begun already.
            # Some ranks may still have the unit unsharded, and would not take part in the
            # all-gather. Also, an optimizer that steps in backward may have updated the unit.
            if purpose == "forward" or unit.outstanding_backwards > 0:
                self._state.start_unshard(unit, purpose)
                if unit in self._in_background:
                    self._prefetched = [*self._under_way(), unit]

    def _fits(self, unit: Unit) -> bool:
        """Whether ``unit`` and the prefetched units take at most the memory of the largest unit."""
        return sum(one.buffer_bytes for one in {*self._under_way(), unit}) <= self._budget

    def _under_way(self) -> list[Unit]:
        return [one for one in self._prefetched if one.is_prefetched]
