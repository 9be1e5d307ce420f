"""``record``: lists the collectives that this rank starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """One started collective.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"scalars"``,
            ``"broadcast"`` or ``"send"``.
        unit_fqn: names the unit; where there is none, the purpose.
        nbytes: of an all-gather's result, or of every rank's input to a reduction; of an
            all-reduce in two stages the mean of both, whose dtypes may differ.
        ranks: the participants, by their ranks in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


_recorders: list[list[Event]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """List the collectives that this rank starts inside the context, in order."""
    events: list[Event] = []
    _recorders.append(events)
    try:
        yield events
    finally:
        # By identity: nested ones may have listed the same.
        _recorders[:] = [one for one in _recorders if one is not events]


def note(kind: str, unit_fqn: str, nbytes: int, ranks: tuple[int, ...]) -> None:
    if len(ranks) > 1:  # one rank alone only copies
        for events in _recorders:
            events.append(Event(kind, unit_fqn, nbytes, ranks))
