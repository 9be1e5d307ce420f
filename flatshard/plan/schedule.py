"""The execution order: which unit ran after which, and what to unshard next. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


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


class ReduceOrder:
    """The one order in which all ranks start the reduce-scatters of a backward.

    Collectives match by order, and ranks may finish units at different moments, or not at all: a
    later unit therefore waits for an earlier incomplete one.
    """

    def __init__(self, num_units: int) -> None:
        # A first guess, which the first backward corrects: registration order reversed. But the
        # outermost unit, numbered last, holds what forward begins with: embeddings, say.
        self.sequence: list[int] = [*range(num_units - 1)[::-1], num_units - 1]
        self.num_taken = 0  # units that have had their turn
        self._ready: dict[int, None] = {}  # in the order in which they became so

    def adopt(self, sequence: list[int]) -> None:
        """Use another order from the next backward on; the caller sees that all ranks agree."""
        assert sorted(sequence) == sorted(self.sequence), "not a permutation of the units"
        self.sequence = list(sequence)

    def begin_backward(self) -> None:
        self._ready.clear()
        self.num_taken = 0

    def ready(self, unit: int) -> None:
        self._ready[unit] = None

    def turns(self, allows: Callable[[int], bool] = lambda _: True) -> Iterator[int]:
        """The units whose turn has come, in order, until ``allows`` is False of one.

        It is asked about each when those before have been started.
        """
        while self.num_taken < len(self.sequence):
            head = self.sequence[self.num_taken]
            if head not in self._ready or not allows(head):
                return
            self.num_taken += 1
            yield head

    def num_ready(self) -> int:
        """Number of units, from the first of the order on, that are ready without a gap."""
        rest = (n for n, unit in enumerate(self.sequence) if unit not in self._ready)
        return next(rest, len(self.sequence))

    def rest(self) -> list[int]:
        """The units that have not had their turn, in order."""
        return self.sequence[self.num_taken :]

    def suggested(self) -> list[int]:
        """The order in which units became ready here, those that never did at the end."""
        return [*self._ready, *(unit for unit in self.sequence if unit not in self._ready)]


class UnevenUnits:
    """Units that, in a recent backward, some ranks reduced during it and others only at its end.

    A rank of the latter kind lacks a gradient that others have, so waiting for it before the end
    never succeeds. Only a clock could tell sooner; so ranks go by the last backwards.
    """

    REMEMBERED = 100  # backwards after which a unit that was even in all of them is forgotten

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def __contains__(self, unit: int) -> bool:
        return unit in self._left

    def note(self, uneven: Iterable[int]) -> None:
        """Note the uneven units of a backward that is over; the same on all ranks."""
        self._left = {unit: left - 1 for unit, left in self._left.items() if left > 1}
        self._left.update(dict.fromkeys(uneven, self.REMEMBERED))
