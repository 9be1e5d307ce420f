"""``record``: records the collectives started by this rank, for tests and measurements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from flatshard.comm.communicator import LISTENERS

__all__ = ["Event", "record"]


class Event(NamedTuple):
    """One collective that this rank has started.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"all_to_all"``,
            ``"scalars"`` (a few numbers) or ``"broadcast"``.
        unit_fqn: name of the unit. For a collective without a unit, the purpose.
        nbytes: size in bytes of the result of an all-gather, or of each rank's input to a
            reduction. For an all-reduce that consists of a reduce-scatter and an all-gather, the
            mean of both sizes, because the dtypes may differ.
        ranks: the participating ranks, as ranks in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Record the collectives that this rank starts inside the context, in order.

    The context yields a list of ``Event``s, which grows with each collective.

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
