"""``record``: lists the collectives that a rank starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from flatshard.comm.communicator import LISTENERS

__all__ = ["Event", "record"]


class Event(NamedTuple):
    """One started collective.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"all_to_all"``,
            ``"scalars"`` or ``"broadcast"``.
        unit_fqn: names the unit; where there is none, the purpose.
        nbytes: of an all-gather's result, or of every rank's input to a reduction; of an
            all-reduce in two stages the mean of both, whose dtypes may differ.
        ranks: the participants, by their ranks in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """List the collectives that this rank starts inside the context, in order.

    Example:
        ```python
        from flatshard import collectives

        with collectives.record() as events:
            model(inputs)
        print(sum(event.nbytes for event in events if event.kind == "gather"))
        ```
    """
    events: list[Event] = []

    def listen(*facts: Any) -> None:
        events.append(Event(*facts))

    LISTENERS.append(listen)
    try:
        yield events
    finally:
        LISTENERS.remove(listen)
