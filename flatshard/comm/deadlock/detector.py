"""``Deadlock``: finds out that ranks wait for one another in different collectives.

A rank that waits publishes in what, and how far it got, in the process group's store, where the
others look once they have waited for some seconds themselves. Before that nothing is published or
read.

[Note: proof]
A collective needs every rank to begin it. Ranks of which each waits for one of the others that has
not begun what it waits for will wait for ever, if they all wait at the same time. That is certain
where a rank sees each of them publish the same wait before and after one moment: a rank publishes
its wait again, with a later time, as long as the wait lasts, and what waits begins nothing. A rank
that computes, or waits in a barrier of the program itself, publishes nothing, and ranks that wait
for it alone are in no deadlock. Nor does a process of which several threads communicate.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch.distributed as dist

from flatshard.comm.deadlock.history import REMEDY, Begun, History, first_difference

_logger = logging.getLogger("flatshard")

_ENDED = -1  # the number of a wait that is the end of a program

# How long a rank has waited before it publishes that.
FIRST_LOOK_SECONDS = 3.0

LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 8.0
_ASKED = 16  # peers asked per wait, at most: one in a deadlock is enough

# How many collectives a rank has begun, by group and kind, and the last of those in order.
AllBegun = dict[str, dict[str, tuple[int, list[Begun]]]]


class WaitCondition(NamedTuple):
    """What ends a wait: ``ranks`` (global) begin their ``number``th collective of a kind."""

    group: str  # the name of a `CollectiveCounter`
    kind: Hashable
    number: int
    ranks: Sequence[int]
    # Makes the wait fail, where it does not call `watchdog.check` itself.
    abort: Callable[[], None] | None = None

    def missing(self, begun: AllBegun) -> int:
        """How many more of its kind a rank has to begin that has begun these."""
        return self.number - begun.get(self.group, {}).get(str(self.kind), (0,))[0]


# Of a wait whose end nobody looks for.
UNKNOWN = WaitCondition("", "", 0, ())


class CollectiveCounter:
    """Counts the collectives of one group that this rank has begun, by kind."""

    def __init__(self, name: str, ranks: Iterable[int], rank: int) -> None:
        """``name`` is the same on all ranks, which are global, as ``rank``, this one."""
        self.name = name
        self.others = tuple(other for other in ranks if other != rank)
        self.begun: dict[Hashable, int] = {}
        self.histories: defaultdict[Hashable, History] = defaultdict(History)
        self.announces = True  # whether ranks meet before what gloo would match blindly
        self.problem = ""  # why nothing more may begin
        _counters[name] = self

    def begin(self, kind: Hashable, what: str, abort: Callable[[], None] | None) -> WaitCondition:
        """Count one more; returns the condition of its end: that all other ranks begin it.

        ``what`` says which one, alike on all ranks; "": not compared. Raises RuntimeError where
        earlier ones were mixed up.
        """
        if self.problem:
            raise RuntimeError(self.problem)
        number = self.begun[kind] = self.begun.get(kind, 0) + 1
        if what:
            self.histories[kind].add(number, what)
        return WaitCondition(self.name, kind, number, self.others, abort)

    def all_begun(self) -> dict[str, tuple[int, list[Begun]]]:
        begun, known = self.begun.copy(), self.histories.copy()  # more may come meanwhile
        return {str(kind): (begun[kind], known[kind].recent()) for kind in begun}

    def reach(self, kind: Hashable, number: int) -> None:
        """Record that this rank has begun ``number`` of a kind."""
        self.begun[kind] = number

    def needs(self, kind: Hashable, number: int) -> WaitCondition:
        """The condition that all other ranks have begun ``number`` of a kind."""
        return WaitCondition(self.name, kind, number, self.others)


_counters: weakref.WeakValueDictionary[str, CollectiveCounter] = weakref.WeakValueDictionary()


def _known_counters() -> list[CollectiveCounter]:
    counters = [known() for known in _counters.valuerefs()]  # more may come meanwhile
    return [counter for counter in counters if counter is not None]


@dataclass(eq=False)
class BlockedWait:
    """A wait of this process."""

    describe: Callable[[], str]  # says what is waited for
    need: WaitCondition
    number: int = 0  # identifies it to other ranks; 0: not published yet
    thread: int = 0  # that waits
    verdict: str | None = None  # why it will not end; None: it may
    was_logged: bool = False
    began: float = field(default_factory=time.monotonic)


class _Verdict(NamedTuple):
    """The finding that waits will not end."""

    text: str
    waits: dict[int, int]  # their numbers, by rank


class _Report(NamedTuple):
    """What a rank publishes while it waits."""

    wait: int  # identifies the wait; 0: it is over
    time: float  # of the publication, by `time.monotonic`
    text: str  # what is waited for, in words
    need: WaitCondition
    begun: AllBegun
    verdict: _Verdict | None  # what the rank found out before it gave up waiting, or ended

    def to_json(self) -> str:
        need = self.need._replace(kind=str(self.need.kind), abort=None)
        return json.dumps(self._replace(need=need))

    @classmethod
    def from_json(cls, text: bytes) -> _Report:
        # Not pickled: whoever reaches the store could run code in every rank.
        wait, count, words, need, begun, verdict = json.loads(text)
        if verdict is not None:
            verdict = _Verdict(verdict[0], {int(rank): one for rank, one in verdict[1].items()})
        return cls(wait, count, words, WaitCondition(*need), begun, verdict)


_Reports = dict[int, _Report]  # by rank


class Deadlock:
    """Looks whether a wait of this rank can ever end. Used by one thread."""

    def __init__(self) -> None:
        self._wait: BlockedWait | None = None
        self._pause = self._next = 0.0
        self._before: _Reports = {}
        self._store: Any = None
        self._world: Any = None  # whose store that is

    def look(self, wait: BlockedWait | None) -> None:
        """Publish that ``wait``, this rank's, goes on; set its ``verdict`` if it never ends."""
        if not dist.is_initialized():
            return
        if wait is not self._wait:
            self._withdraw()
            if wait is not None:
                self._wait = wait
                self._pause, self._next = LOOK_SECONDS, wait.began + FIRST_LOOK_SECONDS
        now = time.monotonic()
        if wait is None:
            self._compare(now)
        if wait is None or wait.need is UNKNOWN or wait.verdict or now < self._next:
            return
        self._next = now + LONGEST_LOOK_SECONDS  # if the store fails
        if not wait.number:
            # A connection of its own: another thread may hold up the default group's.
            self._store, self._world = _own_store(), weakref.ref(dist.group.WORLD)
            wait.number = int.from_bytes(os.urandom(6), "big") + 1
        self._publish(wait)
        stuck = self._stuck(dist.get_rank())
        verdict = self._verdict(wait, stuck)
        if verdict is not None:
            # Before the others notice that this rank leaves.
            self._publish(wait, verdict)
            wait.verdict = verdict.text
            if wait.need.abort is not None:
                wait.need.abort()
            return
        # The older reports stay, so that all ranks have time to publish again.
        if _waits(stuck) != _waits(self._before):
            self._before = stuck
        self._pause = LOOK_SECONDS if stuck else min(2 * self._pause, LONGEST_LOOK_SECONDS)
        self._next = now + self._pause

    @staticmethod
    def _compare(now: float) -> None:
        """Compare what no backward does: in evaluation ranks may wait for nothing."""
        for counter in _known_counters():
            for kind, history in counter.histories.copy().items():
                if now - (history.unchecked_since or now) <= FIRST_LOOK_SECONDS:
                    continue
                history.unchecked_since = 0.0
                store, need = _own_store(), counter.needs(kind, counter.begun[kind])
                _publish(store, _Report(0, now, "", UNKNOWN, _all_begun(), None))
                counter.problem = _reason(need, _reports_for(need, store)) or ""
                if counter.problem:
                    _logger.error("%s", counter.problem)

    def ranks_elsewhere(self, wait: BlockedWait) -> list[int]:
        """Ranks that a published wait is for and that publish none of their own."""
        with contextlib.suppress(Exception):  # the store may be gone; the log says the rest
            if wait is self._wait and wait.number:
                reports = _reports_for(wait.need, self._store)
                waiting = [rank for rank, report in reports.items() if report.wait]
                return [rank for rank in wait.need.ranks[:_ASKED] if rank not in waiting]
        return []

    def _withdraw(self) -> None:
        """Publish that the last wait is over. A verdict stays, for ranks that come later."""
        wait, self._wait, self._before = self._wait, None, {}
        if wait is None or not wait.number or wait.verdict:
            return
        if self._world() is dist.group.WORLD:  # the store of an older one is not there any more
            with contextlib.suppress(Exception):  # the store may end before this process
                _publish(self._store, _Report(0, 0, "", UNKNOWN, {}, None))

    def _publish(self, wait: BlockedWait, verdict: _Verdict | None = None) -> None:
        now = time.monotonic()
        report = _Report(wait.number, now, wait.describe(), wait.need, _all_begun(), verdict)
        _publish(self._store, report)

    def _stuck(self, rank: int) -> _Reports:
        """Reports of ranks that each wait for another of them; {} if ``rank`` is none of them."""
        reports: _Reports = {}
        to_ask = [rank]
        while to_ask:
            asked = to_ask.pop()
            report = None if asked in reports else _read(self._store, asked)
            if report is not None and report.wait and report.verdict is None:
                reports[asked] = report
                to_ask += report.need.ranks[:_ASKED]
        # Drop, until none is left to drop, each rank that waits for nobody in the set.
        while True:
            stuck = {
                one: report for one, report in reports.items() if _waits_for(report.need, reports)
            }
            if len(stuck) == len(reports):
                return stuck if rank in stuck else {}
            reports = stuck

    def _verdict(self, wait: BlockedWait, stuck: _Reports) -> _Verdict | None:
        """Why the wait does not end, if this rank or one that it is for has found that out."""
        reports = _reports_for(wait.need, self._store)
        for report in reports.values():
            if report.verdict is not None and _is_about(wait, report.verdict):
                return report.verdict
        if reason := _reason(wait.need, reports):
            return _Verdict(reason, {dist.get_rank(): wait.number})
        # All have published the same before, and again since; see the note.
        is_certain = _waits(stuck) == _waits(self._before) and all(
            report.time > self._before[rank].time for rank, report in stuck.items()
        )
        return _Verdict(_in_words(stuck), _waits(stuck)) if stuck and is_certain else None


def explain(wait: BlockedWait) -> str | None:
    """Why the wait, which failed, could not end; None if that is not known.

    Ranks that it is for may have given up another wait before this one was published, and left.
    """
    if wait.verdict is not None or wait.need is UNKNOWN or not dist.is_initialized():
        return wait.verdict
    with contextlib.suppress(Exception):  # the store may be gone; the backend's error is not lost
        reports = _reports_for(wait.need, _default_store())
        if reason := _reason(wait.need, reports):
            return reason
        for verdict in [report.verdict for report in reports.values() if report.verdict]:
            if _is_about(wait, verdict) or any(
                rank in reports
                and reports[rank].wait == number
                and wait.need.missing(reports[rank].begun) == 1  # it would have begun it next
                for rank, number in verdict.waits.items()
            ):
                return verdict.text
    return None


def _waits_for(need: WaitCondition, reports: _Reports) -> bool:
    return any(rank in reports and need.missing(reports[rank].begun) > 0 for rank in need.ranks)


def _reports_for(need: WaitCondition, store: Any) -> _Reports:
    """What the ranks that a wait is for have published last."""
    reports = {rank: _read(store, rank) for rank in need.ranks[:_ASKED]}
    return {rank: one for rank, one in reports.items() if one is not None}


def _reason(need: WaitCondition, reports: _Reports) -> str | None:
    """Why a wait never ends, whatever the other ranks do next; None if that is not known."""
    for report in reports.values():
        if report.wait == _ENDED and report.verdict and need.missing(report.begun) > 0:
            return report.verdict.text
    mine = _all_begun().get(need.group, {})
    for kind, rank in product(mine, reports):
        _, theirs = reports[rank].begun.get(need.group, {}).get(kind, (0, []))
        differ = first_difference({dist.get_rank(): mine[kind][1], rank: theirs})
        if differ is not None:
            return f"ranks began different collectives, {differ}. {REMEDY}"
    return None


def _all_begun() -> AllBegun:
    """What this rank has begun."""
    return {one.name: one.all_begun() for one in _known_counters()}


def tell_end(how: str) -> None:
    """Publish that this rank's program ends, and ``how``: who waits for it raises at once."""
    store, rank = _default_store(), dist.get_rank()
    last = _read(store, rank)
    if last is None or last.verdict is None:  # which says why, too
        verdict = _Verdict(f"rank {rank} ended by {how}", {})
        _publish(store, _Report(_ENDED, 0, "", UNKNOWN, _all_begun(), verdict))


def _is_about(wait: BlockedWait, verdict: _Verdict) -> bool:
    return wait.number > 0 and verdict.waits.get(dist.get_rank()) == wait.number


def _waits(stuck: _Reports) -> dict[int, int]:
    return {rank: report.wait for rank, report in stuck.items()}


def _in_words(stuck: _Reports) -> str:
    waits = "; ".join(f"rank {rank} in [{stuck[rank].text}]" for rank in sorted(stuck))
    return (
        f"the ranks wait for one another in different collectives, for ever: {waits}. {REMEDY} To "
        "save, call state_dict() on every rank, and torch.save() on rank 0 alone. [FS-DEADLOCK]"
    )


def _default_store() -> Any:
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr, attr-defined]


def _own_store() -> Any:
    store = _default_store()
    with contextlib.suppress(AttributeError, RuntimeError):  # not every kind can be cloned
        return store.clone()
    return store


def _publish(store: Any, report: _Report) -> None:
    store.set(_key(dist.get_rank()), report.to_json())


def _key(rank: int) -> str:
    return f"flatshard/waits/{rank}"


def _read(store: Any, rank: int) -> _Report | None:
    """What a rank published last; None if it never did."""
    key = _key(rank)
    return _Report.from_json(store.get(key)) if store.check([key]) else None
