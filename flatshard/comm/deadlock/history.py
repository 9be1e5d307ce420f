"""``History``: what this rank has begun on one group, whose ranks match it by order alone."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping

from flatshard.comm.process_groups import ranks_text

REMEDY = (
    "All ranks must call what is collective, in the same order: forward (in evaluation too), "
    "backward, state_dict(), optim_state_dict(), summon_full_params(), clip_grad_norm_(), and "
    "norms and sums of parameters and gradients. Units that some ranks skip, or run in another "
    "order, such as experts and dropped layers, need allow_divergence (docs/recipes.md)."
)

_KEPT = 64  # collectives that can be named

Begun = tuple[int, str]  # the number of a collective in its group, and which one it is, in words


class History:
    """The last collectives, and a digest of all."""

    def __init__(self) -> None:
        self.digest = 0
        self.unchecked_since = 0.0  # when the first was added that nobody compared; 0: none
        self._recent: deque[Begun] = deque(maxlen=_KEPT)
        self._last_two = "", ""
        self._next: dict[tuple[str, str], str] = {}  # what has always followed two; "": several

    def is_usual(self, what: str) -> bool:
        """Whether every other rank, too, begins this next or asks whether all begin something else.

        Nothing else has ever followed the last two, on no rank: ``learn`` is called on all.
        """
        return self._next.get(self._last_two) == what

    def learn(self, what: str) -> None:
        """Note what follows the last two, on all ranks."""
        first = self._next.setdefault(self._last_two, what)
        self._next[self._last_two] = what if what == first else ""

    def add(self, number: int, what: str) -> None:
        self.digest = zlib.crc32(what.encode(), self.digest)
        self._last_two = self._last_two[1], what
        self._recent.append((number, what))
        self.unchecked_since = self.unchecked_since or time.monotonic()

    def to_compare(self) -> bytes:
        """The digest; the caller compares it with the other ranks'."""
        self.unchecked_since = 0.0
        return self.digest.to_bytes(4, "big")

    def recent(self) -> list[Begun]:
        return list(self._recent.copy())  # another thread may add meanwhile


def first_difference(recent: Mapping[int, Iterable[Begun]]) -> str | None:
    """Where ranks first began different collectives, in words; None: nowhere that is known."""
    begun = {rank: dict(recent[rank]) for rank in sorted(recent)}
    for number in sorted(set.intersection(*map(set, begun.values()))):
        ranks_of: dict[str, list[int]] = {}
        for rank, mine in begun.items():
            ranks_of.setdefault(mine[number], []).append(rank)
        if len(ranks_of) > 1:
            alike = [f"rank {ranks_text(some)} began [{what}]" for what, some in ranks_of.items()]
            return f"the first difference: {'; '.join(alike)}"
    return None


def describe_difference(names: Mapping[int, str]) -> str:
    """Text of an error: the ranks in each collective, and the remedy."""
    differ = first_difference({rank: [(0, name)] for rank, name in names.items()})
    return f"the ranks are in different collectives, {differ}. {REMEDY} [FS-DEADLOCK]"
