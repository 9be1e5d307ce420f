"""The execution order: which unit ran after which, and what to gather next. Integers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


class ExecutionOrder:
    """Records the order of units in a forward and predicts from it.

    Prediction is a hint: a unit that comes out of order is gathered on demand, and the order is
    recorded afresh in every forward.
    """

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._current: list[int] = []

    def begin_forward(self) -> None:
        """Start a new recording; what was recorded before becomes the prediction."""
        if self._current:
            self._previous = self._current
        self._current = []

    def record(self, unit: int) -> None:
        """Note that ``unit`` runs now."""
        self._current.append(unit)

    def next_forward(self) -> list[int]:
        """The units expected after the one recorded last, in order; none without a prediction."""
        position = len(self._current)
        previous = self._previous
        # A forward that left the recorded order gets no guesses until it is recorded whole.
        if position == 0 or previous[position - 1 : position] != self._current[-1:]:
            return []
        return previous[position:]

    def next_backward(self, unit: int) -> list[int]:
        """The units whose backward is expected after that of ``unit``, in order."""
        order = (self._current or self._previous)[::-1]
        return _until(unit, order[order.index(unit) + 1 :]) if unit in order else []

    def next_recomputed(self, unit: int) -> list[int]:
        """The units expected after ``unit`` where this forward is computed again, in order."""
        order = self._current
        return order[order.index(unit) + 1 :] if unit in order else []

    @property
    def is_complete(self) -> bool:
        """Whether this forward ran all the units of the one before, in the same order."""
        return bool(self._current) and self._current == self._previous

    def first_backward(self) -> list[int]:
        """The units whose backward comes first, in order; none while more may come in forward."""
        return self._current[::-1] if self.is_complete else []


def _until(unit: int, units: list[int]) -> list[int]:
    return units[: units.index(unit)] if unit in units else units


class ReduceOrder:
    """The one order in which all ranks start the reductions of a backward.

    Collectives match by order, and ranks may finish units at different moments, or not at all: a
    later unit therefore waits for an earlier incomplete one.
    """

    def __init__(self, num_units: int) -> None:
        # A first guess, which the first backward corrects: registration order reversed. But the
        # outermost unit, numbered last, holds what forward begins with: embeddings, say.
        self.sequence: list[int] = [*range(num_units - 1)[::-1], num_units - 1]
        self._ready: set[int] = set()
        self._position = 0
        self.observed: list[int] = []

    def adopt(self, sequence: list[int]) -> None:
        """Use another order from the next backward on; the caller sees that all ranks agree."""
        assert sorted(sequence) == sorted(self.sequence), "not a permutation of the units"
        self.sequence = list(sequence)

    def begin_backward(self) -> None:
        """Forget which units are ready."""
        self._ready.clear()
        self._position = 0
        self.observed = []

    def ready(self, unit: int) -> None:
        """Note that ``unit`` may be reduced."""
        self.observed.append(unit)
        self._ready.add(unit)

    def turns(self, allows: Callable[[int], bool] = lambda _: True) -> Iterator[int]:
        """The units whose turn has come, in order.

        Args:
            allows: asked about each, when those before have been started; False ends the turns.
        """
        while self._position < len(self.sequence):
            head = self.sequence[self._position]
            if head not in self._ready or not allows(head):
                return
            self._position += 1
            yield head

    @property
    def num_taken(self) -> int:
        """How many units have had their turn."""
        return self._position

    def num_ready(self) -> int:
        """How many units, from the first of the order on, could have had it."""
        rest = (n for n, unit in enumerate(self.sequence) if unit not in self._ready)
        return next(rest, len(self.sequence))

    def rest(self) -> list[int]:
        """The units that have not had their turn, in order."""
        return self.sequence[self._position :]

    def suggested(self) -> list[int]:
        """The order in which units became ready here, those that never did at the end."""
        seen = list(dict.fromkeys(self.observed))
        return seen + [unit for unit in self.sequence if unit not in set(seen)]


class UnevenUnits:
    """Units whose turn came in a backward on some ranks, and on others only at its end.

    A rank of the latter kind lacks a gradient that others have. To wait for its part before the
    end would be in vain; and as there is no other way to see that than by a clock, ranks go by
    what happened of late.
    """

    REMEMBERED = 100
    """Backwards after which a unit that was even in all of them is forgotten."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def __contains__(self, unit: int) -> bool:
        """Whether it was uneven of late."""
        return unit in self._left

    def note(self, uneven: Iterable[int]) -> None:
        """A backward is over in which these units were uneven."""
        self._left = {unit: left - 1 for unit, left in self._left.items() if left > 1}
        self._left.update(dict.fromkeys(uneven, self.REMEMBERED))
