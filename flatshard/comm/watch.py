"""What this rank has begun and what it waits for, in books that a ``CollectiveWatch`` reads.

Each group has a ``History`` of the collectives that this rank has begun. Each thread lists the
blocks in which it waits for other ranks (``watched``). The extra ``deadlock`` reads both in a
thread of its own, so a step calls nothing of the extra. Without the extra, nobody reads the waits.
Ranks still compare histories where a backend matches collectives by order only, because their
results would otherwise be mixed up (``flatshard/engine/agreement.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from flatshard.comm.process_groups import ranks_text
from flatshard.options.extras import default_extra

REMEDY = (
    "All ranks must call what is collective, in the same order: forward (in evaluation too), "
    "backward, state_dict(), optim_state_dict(), summon_full_params(), clip_grad_norm_(), and "
    "norms and sums of parameters and gradients. Units that some ranks skip, or run in another "
    "order, such as experts and dropped layers, need allow_divergence (docs/recipes.md)."
)

_KEPT = 64  # collectives that can be named

Begun = tuple[int, str]  # the number of a collective in its group, and which one it is, in words


class CollectiveWatch:
    """The seam of the extra ``deadlock``; this class, used without the extra, does nothing."""

    def add_group(self, history: History) -> None:
        """Watch one more group, of which other ranks wait for this rank from now on."""

    def explain(self, wait: watched) -> str | None:
        """Why a wait that failed could not end; None if the reason is not known.

        Called inside the block of the wait.
        """
        return None

    def program_line(self) -> str:
        """The line of the user's program in which this thread is; "" if the line is not known."""
        return ""


@cache
def watch() -> CollectiveWatch:
    """The watch of this process."""
    found = default_extra("deadlock")
    return CollectiveWatch() if found is None else found.WATCH  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what this rank has begun


class WaitCondition(NamedTuple):
    """What ends a wait: ``ranks`` (global) begin their ``number``th collective of a kind."""

    group: str  # `History.name`, or the name of a process group
    kind: Hashable
    number: int
    ranks: Sequence[int]
    abort: Callable[[], None] | None = None  # makes the wait fail


class History:
    """The collectives of one group that this rank has begun, counted by kind.

    Collectives that match those of other ranks by their order only are described, too: the last
    ones in words, all of them in a digest.
    """

    def __init__(self, name: str, ranks: Iterable[int], rank: int) -> None:
        """Begin with none. ``name`` is equal on all ranks; ``ranks`` and ``rank`` are global."""
        self.name = name
        self.others = tuple(other for other in ranks if other != rank)
        self.begun: dict[Hashable, int] = {}
        self.problem = ""  # why nothing more may begin
        self.announces = True  # whether ranks meet before a collective that gloo matches blindly
        self.described: Hashable = None  # the kind of the collectives below
        self.digest = 0
        self.unchecked_since = 0.0  # when the first was added that nobody compared; 0: none
        self._recent: deque[Begun] = deque(maxlen=_KEPT)
        self._last_two = "", ""
        self._next: dict[tuple[str, str], str] = {}  # what has always followed two; "": several
        watch().add_group(self)

    def begin(
        self, kind: Hashable, what: str = "", abort: Callable[[], None] | None = None
    ) -> WaitCondition:
        """Count one more collective; returns the condition of its end: all other ranks begin it.

        Args:
            kind: collectives match in order within their kind.
            what: describes the collective, equal on all ranks; "" if ranks need not compare it.
            abort: makes a wait for the collective fail.

        Raises:
            RuntimeError: earlier collectives were mixed up.
        """
        if self.problem:
            raise RuntimeError(self.problem)
        number = self.begun[kind] = self.begun.get(kind, 0) + 1
        if what:
            self.described = kind
            self.digest = zlib.crc32(what.encode(), self.digest)
            self._last_two = self._last_two[1], what
            self._recent.append((number, what))
            self.unchecked_since = self.unchecked_since or time.monotonic()
        return WaitCondition(self.name, kind, number, self.others, abort)

    def reach(self, kind: Hashable, number: int) -> None:
        """Record that this rank has begun ``number`` of a kind."""
        self.begun[kind] = number

    def needs(
        self, kind: Hashable, number: int, abort: Callable[[], None] | None = None
    ) -> WaitCondition:
        """The condition that all other ranks have begun ``number`` of a kind."""
        return WaitCondition(self.name, kind, number, self.others, abort)

    def is_usual(self, what: str) -> bool:
        """Whether every other rank, too, begins this next or asks whether all begin something else.

        Nothing else has ever followed the last two, on no rank: ``learn`` is called on all.
        """
        return self._next.get(self._last_two) == what

    def learn(self, what: str) -> None:
        """Note what follows the last two, on all ranks."""
        first = self._next.setdefault(self._last_two, what)
        self._next[self._last_two] = what if what == first else ""

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


# ---------------------------------------------------------------- what this rank waits for


class ThreadWaits(list["watched"]):
    """The waits of one thread, the innermost last."""

    thread: int  # the thread's identifier


class _Own(threading.local):
    """The waits of the thread that asks."""

    def __init__(self) -> None:  # once per thread
        self.waits = ThreadWaits()
        self.waits.thread = threading.get_ident()
        _by_thread[self.waits.thread] = self.waits


# Weak: the waits of a thread go with the thread.
_by_thread: weakref.WeakValueDictionary[int, ThreadWaits] = weakref.WeakValueDictionary()
_own = _Own()


def waits_by_thread() -> list[ThreadWaits]:
    """The waits of each thread that has ever waited for other ranks and still runs."""
    threads = [known() for known in _by_thread.valuerefs()]  # more may come meanwhile
    return [waits for waits in threads if waits is not None]


class watched:
    """A block in which this thread waits for other ranks."""

    __slots__ = ("_op", "condition")

    def __init__(self, op: str | Callable[[], str], condition: WaitCondition | None = None) -> None:
        """``op`` says what is waited for; ``condition``: what ends the wait, None if unknown."""
        self._op, self.condition = op, condition

    def describe(self) -> str:
        return self._op if isinstance(self._op, str) else self._op()

    def __enter__(self) -> None:
        _own.waits.append(self)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self.failed(error)
        finally:
            _own.waits.pop()

    def failed(self, error: BaseException) -> None:
        """Called inside the block when an error leaves the block; may raise another error."""
