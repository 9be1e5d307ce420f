"""``Deadlock``: finds ranks in different collectives that wait for each other forever.

If a rank waits for some seconds, it publishes a report in the process group's store: in which
collective it waits, and how many collectives it has begun. Then it reads the reports of some of the
ranks for which it waits. Shorter waits publish and read nothing.

[Note: proof]
A collective ends only after every rank has begun it. Take a set of ranks that all wait at the same
moment. If each waits for another rank of the set that has not begun the same collective, no rank of
the set ever continues, because a waiting rank begins nothing. All ranks wait at the same moment if
each has published the same wait before and after this moment. So a rank publishes a lasting wait
again and again.

The proof covers collectives of flatshard and of the user's program (see the notes in ``program.py``
and ``gpu.py``). A rank that computes publishes nothing, so a wait for a slow rank is never reported
as a deadlock. A process in which several threads communicate publishes nothing either.

The traffic of a rank does not grow with the number of ranks, see ``_ASKED`` and ``_READ``. A rank
that finds a deadlock publishes a finding under the name of each process group concerned, where all
waiting ranks read it.
"""

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from flatshard.comm.process_groups import is_fake
from flatshard.comm.work import REMEDY, Begun, History, WaitCondition, first_difference
from flatshard.extras.deadlock import gpu, program
from flatshard.extras.deadlock.gpu import ON_GPU
from flatshard.extras.deadlock.program import PROGRAM, UNKNOWN, BlockedWait

_logger = logging.getLogger("flatshard")

_ENDED = -1  # value of ``_Report.wait`` after the program has ended

# Minimum duration of a wait that a rank publishes.
FIRST_LOOK_SECONDS = 3.0
# Shortest and longest time between checks of a wait.
LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 3.0
# A rank may wait for many ranks, but reads the reports of at most this number of them. One report
# is enough to prove a deadlock.
_ASKED = 16
_READ = 4 * _ASKED  # maximum number of reports that a rank reads in a check
# After a finding about a collective of the user's program, a rank stays in its wait for this number
# of checks, so that the other ranks read and log the finding.
_LEAVE_LOOKS = 2
_WORDS = 400  # maximum number of characters of a wait's description that a rank publishes

# For each process group and kind of collective: how many collectives a rank has begun, and the
# latest of these collectives.
AllBegun = dict[str, dict[str, tuple[int, list[Begun]]]]
# Records of the collectives that this rank has begun, keyed by the process group's name.
histories: weakref.WeakValueDictionary[str, History] = weakref.WeakValueDictionary()
# For each default process group: the prefixed store for reports (see `default_store`).
_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def known_histories() -> list[History]:
    # Iterate over `valuerefs()`, a copy: threads may add histories in the meantime.
    return [history for known in histories.valuerefs() if (history := known()) is not None]


class _Finding(NamedTuple):
    """The reason why some waits never end, published by the rank that has found it."""

    text: str
    # The waits that never end, each as group, kind and number. None: every wait in the groups for
    # which `_tell` publishes the finding, except waits for collectives of the user's program.
    waits: list[list[Any]] | None


class _Report(NamedTuple):
    """A rank's report about its wait, or about the end of its program."""

    wait: int  # `BlockedWait.number`; 0 if the wait is over, `_ENDED` if the program has ended
    time: float  # time of the publication, by `time.monotonic`
    text: str  # describes the wait, or how the program ended
    need: WaitCondition
    begun: AllBegun

    def to_json(self) -> str:
        need = self.need
        # Shorten the list: a list of more than `_ASKED` ranks stands for all ranks of the group.
        need = WaitCondition(need.group, str(need.kind), need.number, need.ranks[: _ASKED + 1])
        return json.dumps(self._replace(need=need))

    def waits_for(self, rank: int, begun: AllBegun) -> bool:
        """Whether this wait ends only after ``rank`` has begun more collectives than ``begun``."""
        need = self.need
        for_all = len(need.ranks) > _ASKED and program.is_member(rank, need.group)
        return (for_all or rank in need.ranks) and _missing(need, begun) > 0

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        # Use JSON: unpickling would run the code of anybody who can write to the store.
        wait, now, words, need, begun = json.loads(text)
        return cls(wait, now, words, WaitCondition(*need), begun)


_NO_WAIT = _Report(0, 0, "", UNKNOWN, {})
_Reports = dict[int, _Report]  # keyed by rank


class Deadlock:
    """Checks whether a wait of this rank can ever end. Not thread-safe."""

    def __init__(self) -> None:
        self._wait: BlockedWait | None = None
        self._pause = self._next = 0.0  # seconds between checks, and the time of the next check
        self._heard: _Reports = {}  # reports of the ranks for which this rank waits
        self._before: _Reports = {}  # earlier reports of ranks that may be in a deadlock
        self._store: Any = None
        self._world: Any = None  # the default group that `_store` belongs to

    def look(self, wait: BlockedWait | None) -> None:
        """Check whether ``wait``, the present wait, can end. If not, make the wait raise."""
        if not dist.is_initialized():
            return
        if wait is not self._wait:
            self._withdraw()
            if wait is not None:
                self._wait = wait
                # The pauses between checks grow: 1, 2, 3, 3, ... seconds.
                self._pause, self._next = LOOK_SECONDS / 2, wait.began + FIRST_LOOK_SECONDS
        now = time.monotonic()
        if wait is None:
            _compare(now)
        if wait is None or wait.need is UNKNOWN or wait.is_given_up or now < self._next:
            return
        if wait.verdict is not None:
            _give_up(wait)
            return
        # Set the time of the next check before using the store. If the store raises an error, an
        # immediate next check would probably fail again.
        self._next = now + LONGEST_LOOK_SECONDS
        if not wait.number:
            # Use a separate connection to the store: another thread may block the default one.
            self._store, self._world = _own_store(), weakref.ref(dist.group.WORLD)
            wait.number = int.from_bytes(os.urandom(6), "big") + 1
        mine = self._publish(wait)
        self._heard = _read(self._store, wait.need.ranks[:_ASKED])
        stuck = self._stuck(mine)
        finding = self._finding(wait, stuck, mine)
        if finding is not None:
            # Publish the finding before this rank leaves the collective: when it leaves, the other
            # ranks fail, and need the reason.
            finding = _tell(self._store, finding, mine.begun)
            _note(wait, finding)
            # A launcher kills all ranks after the first error. But in a collective of the program,
            # a rank gets an error without the reason. Give such ranks time to log the reason.
            is_soon = all(kind != PROGRAM for _, kind, _ in finding.waits or ())
            self._next = now + (0 if is_soon else _LEAVE_LOOKS * LOOK_SECONDS)
            if is_soon:
                _give_up(wait)
            return
        # While the waits are the same, keep the first reports: the proof compares two reports.
        waits, before = ({r: one.wait for r, one in x.items()} for x in (stuck, self._before))
        if waits != before:
            self._before = stuck
        self._pause = LOOK_SECONDS if stuck else min(2 * self._pause, LONGEST_LOOK_SECONDS)
        self._next = now + self._pause

    def ranks_elsewhere(self, wait: BlockedWait) -> list[int]:
        """Return the ranks for which this rank waits, and which report no wait."""
        if wait is not self._wait or not wait.number:
            return []
        waiting = [rank for rank, report in self._heard.items() if report.wait]
        return [rank for rank in wait.need.ranks[:_ASKED] if rank not in waiting]

    def _withdraw(self) -> None:
        """Publish that the last wait published by this rank is over."""
        wait, self._wait, self._before = self._wait, None, {}
        if wait is None or not wait.number:
            return
        # If the program has made a new default group, the store of the old group is gone.
        if self._world() is not dist.group.WORLD:
            return
        with contextlib.suppress(Exception):  # the process that serves the store may have ended
            _publish(self._store, _NO_WAIT)
            is_open = wait.need.kind == PROGRAM and wait.verdict is None
            # If a collective of the user's program fails, its error lacks the reason. If another
            # rank has published the reason in the meantime, log the reason.
            if is_open and (finding := _told(self._store, wait.need)):
                _note(wait, finding)

    def _publish(self, wait: BlockedWait) -> _Report:
        begun = _everything_begun(wait.thread)
        wait.published = wait.text()[:_WORDS]
        report = _Report(wait.number, time.monotonic(), wait.published, wait.need, begun)
        _publish(self._store, report)
        return report

    def _stuck(self, mine: _Report) -> _Reports:
        """Return the reports of the ranks that may be in a deadlock with this rank, or {}."""
        me, asked = dist.get_rank(), set(self._heard)
        reports: _Reports = {}
        new = {**self._heard, me: mine}
        while new and len(reports) < _READ:
            waiting = {rank: report for rank, report in new.items() if report.wait > 0}
            reports |= waiting
            to_ask = {rank for report in waiting.values() for rank in report.need.ranks[:_ASKED]}
            new = _read(self._store, to_ask - asked - {me})
            asked |= to_ask
        return _circle(reports)

    def _finding(self, wait: BlockedWait, stuck: _Reports, mine: _Report) -> _Finding | None:
        told = _told(self._store, wait.need)
        known = told or _reason(wait.need, self._heard, mine.begun) or _mixed(mine, self._heard)
        if known:
            return known
        # Keep only ranks that published the same wait twice (see [Note: proof]).
        lasting = {
            rank: report
            for rank, report in stuck.items()
            if (before := self._before.get(rank)) is not None
            and before.wait == report.wait
            and before.time < report.time
        }
        if not (stuck := _circle(lasting)):
            return None
        needs = [report.need for report in stuck.values()]
        return _Finding(_in_words(stuck), [[n.group, str(n.kind), n.number] for n in needs])


def _note(wait: BlockedWait, finding: _Finding) -> None:
    wait.verdict = finding.text
    # The program's own call of a collective raises only the backend's error, without the reason. So
    # log the reason.
    if wait.need.kind == PROGRAM:
        _logger.error("rank %d, %s: %s", dist.get_rank(), wait.published, finding.text)


def _give_up(wait: BlockedWait) -> None:
    wait.is_given_up, wait.verdict = True, gpu.with_trace(wait.verdict or "")
    if wait.need.kind == ON_GPU:
        gpu.end_waits(wait.thread, f"{wait.text()} failed: {wait.verdict}", wait.began)
    elif wait.need.abort is not None:
        wait.need.abort()
    gpu.abort()


def _compare(now: float) -> None:
    """Compare which collectives the ranks have begun, if no backward has done so recently.

    Needed for evaluation, where ranks in different collectives might compute with wrong values
    without a deadlock. If ranks differ, logs an error and sets ``make_error``.
    """
    for history in known_histories():
        if now - (history.unchecked_since or now) <= FIRST_LOOK_SECONDS:
            continue
        history.unchecked_since = 0.0
        kind = history.described
        store, begun = _own_store(), history.begun[kind]
        need = WaitCondition(history.name, kind, begun, history.others)
        _publish(store, _Report(0, now, "", UNKNOWN, _all_begun()))
        reports = _read(store, need.ranks[:_ASKED])
        reason = _told(store, need) or _reason(need, reports, _all_begun())
        if reason is not None:
            problem = _tell(store, reason, _all_begun()).text
            _logger.error("%s", problem)
            # `make_error` makes the next collective raise. But the main thread may wait forever
            # for the GPU before this collective, so let the thread raise now. Set `make_error`
            # afterwards: otherwise the main thread could raise twice.
            gpu.end_waits(threading.main_thread().ident or 0, gpu.with_trace(problem), now)
            history.make_error = partial(gpu.own_error, problem)


def explain(wait: BlockedWait) -> str | None:
    """Return why ``wait`` has failed with an error, or None if unknown."""
    if wait.verdict is None and wait.need is not UNKNOWN and dist.is_initialized():
        return _why(wait.need)
    return wait.verdict


def _why(need: WaitCondition) -> str | None:
    store = default_store()
    # Also use findings about earlier waits: another rank may have ended in such a wait.
    found = _told(store, need, is_exact=False)
    found = found or _reason(need, _read(store, need.ranks[:_ASKED]), _all_begun())
    return found and found.text


def _missing(need: WaitCondition, begun: AllBegun) -> int:
    """Return how many collectives a rank must still begin to meet the condition ``need``."""
    # If several threads of the rank communicate, it is unknown how many collectives of the program
    # and of NCCL the rank has begun. Then assume that the rank has begun this collective, so that
    # no false deadlock is reported.
    unsaid = need.number if need.kind in (PROGRAM, ON_GPU) else 0
    return need.number - begun.get(need.group, {}).get(str(need.kind), (unsaid,))[0]


def _reason(need: WaitCondition, reports: _Reports, begun: AllBegun) -> _Finding | None:
    """Return a finding if another rank has ended, or ranks have begun different collectives.

    ``begun``: the collectives that this rank has begun.
    """
    for report in reports.values():
        if report.wait == _ENDED and _missing(need, report.begun) > 0:
            return _Finding(report.text, [])
    # Compare the collectives of all groups. NCCL does not block the host, so after a difference in
    # one group, a rank may wait in another group.
    mine = [(group, *one) for group, kinds in begun.items() for one in kinds.items()]
    for (group, kind, (_, ours)), rank in product(mine, reports):
        _, theirs = reports[rank].begun.get(group, {}).get(kind, (0, []))
        differ = first_difference({dist.get_rank(): ours, rank: theirs})
        if differ is not None:
            there = reports[rank]
            where = f" Now rank {rank} is in [{there.text}]." if there.wait > 0 else ""
            text = f"ranks began different collectives. {differ}.{where} {REMEDY} [FS-DEADLOCK]"
            waits = [[one.group, str(one.kind), one.number] for one in (need, there.need)]
            return _Finding(text, waits if kind == PROGRAM else None)
    return None


def _mixed(mine: _Report, reports: _Reports) -> _Finding | None:
    """Return a finding if NCCL matched a collective of the program with the model's collective.

    NCCL matches the n-th collective of a rank in a process group with the n-th of every other rank.
    """
    for rank, report in reports.items():
        for group in mine.begun.keys() & report.begun.keys():
            (ours, own), (theirs, their_own) = _own_on_gpu(mine, group), _own_on_gpu(report, group)
            # If rank A has begun at least as many collectives as rank B, but fewer outside of the
            # model, then at some position A's collective is the model's, and B's collective is not.
            is_mixed = own != their_own and (ours - theirs) * (own - their_own) <= 0
            if report.wait > 0 and is_mixed and min(own, their_own) >= 0:
                text = (
                    f"on NCCL's process group {group}, rank {dist.get_rank()} began {ours} "
                    f"collectives, {own} of them outside of the model, and rank {rank} began "
                    f"{theirs}, {their_own} of them outside of the model. So a collective of the "
                    f"program met a collective of the model. {REMEDY} [FS-DEADLOCK]"
                )
                return _Finding(text, None)
    return None


def _own_on_gpu(report: _Report, group: str) -> tuple[int, int]:
    """Return how many NCCL collectives a rank has begun in ``group``: all, and the program's own.

    Returns (0, 0) if the rank has begun no collective, or no collective of flatshard.
    """
    # Names under which flatshard's collectives are recorded.
    names = (group, f"{group} on cuda")
    of_model = [k[name][0] for k in report.begun.values() for name in names if name in k]
    total, _ = report.begun[group].get(ON_GPU, (0, []))
    return (total, total - sum(of_model)) if total and of_model else (0, 0)


def _all_begun() -> AllBegun:
    """Return the collectives of flatshard that this rank has begun, in all process groups."""
    found: AllBegun = {}
    for history in known_histories():
        # Work on copies, because other threads may add entries.
        begun, recent = history.begun.copy(), history.recent()
        found[history.name] = {
            str(kind): (number, recent if kind == history.described else [])
            for kind, number in begun.items()
        }
    return found


def _everything_begun(thread: int | None) -> AllBegun:
    """Return the collectives that this rank has begun: flatshard's, and if known the program's.

    ``thread``: the thread of the program that begins collectives. None: the program has ended.
    """
    begun, own = _all_begun(), program.begun(thread)
    for group, one in own.items():
        begun.setdefault(group, {})[PROGRAM] = one
    for group, number in gpu.begun().items() if own else ():
        begun.setdefault(group, {})[ON_GPU] = number, []
    return begun


def tell_end(how: str, thread: int | None) -> None:
    """Publish how this rank's program has ended."""
    text = f"rank {dist.get_rank()} ended by {how}"
    _publish(default_store(), _Report(_ENDED, 0, text, UNKNOWN, _everything_begun(thread)))


def log_failure(name: str, group: dist.ProcessGroup) -> None:
    """Log why a collective of the user's program failed. ``name``: name of the collective."""
    # The collective's number is not known here. So ask for a collective of the kind "", which no
    # rank has begun: then every rank that has ended counts as the reason.
    if reason := _why(WaitCondition(group.group_name, "", 1, program.others(group))):
        _logger.error("rank %d, %s: %s", dist.get_rank(), name, reason)


def _circle(reports: _Reports) -> _Reports:
    """Return the largest subset of ``reports`` in which each rank waits for a rank of the subset.

    Returns {} if this rank is not in the subset.
    """
    while True:
        stuck = {
            rank: report
            for rank, report in reports.items()
            if any(report.waits_for(other, needed.begun) for other, needed in reports.items())
        }
        if len(stuck) == len(reports):
            return stuck if dist.get_rank() in stuck else {}
        reports = stuck


def _in_words(stuck: _Reports) -> str:
    ranks_in: defaultdict[str, list[str]] = defaultdict(list)
    for rank in sorted(stuck):
        ranks_in[stuck[rank].text].append(str(rank))
    waits = (f"rank {', '.join(ranks)} in [{text}]" for text, ranks in ranks_in.items())
    return (
        f"the ranks wait for one another in different collectives, forever: {'; '.join(waits)}. "
        f"{REMEDY} To save, call state_dict() on every rank and torch.save() only on rank 0, or "
        "call flatshard.checkpoint.save() on every rank. [FS-DEADLOCK]"
    )


def default_store() -> Any:
    """Return the default group's store, with a prefix for this rank's present default group."""
    world: Any = dist.group.WORLD
    if world is not None and world not in _stores:
        store = world.get_group_store()
        if is_fake(world):  # no other ranks exist, and torch 2.11's FakeStore has no `add`
            store = dist.HashStore()  # type: ignore[attr-defined]
        # After an error, a program may destroy its process group, and make a new group with the
        # same store, which still has the old reports. So the prefix has the number of the group.
        number = store.add(f"flatshard/runs/{dist.get_rank()}", 1)
        prefix = f"flatshard/run/{number}"
        _stores[world] = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        # Publish a first report immediately. Other ranks check in one call whether several reports
        # exist, and the call returns True only if all of them exist.
        _publish(_stores[world], _NO_WAIT)
    return None if world is None else _stores[world]


def _own_store() -> Any:
    return default_store().clone()


def _publish(store: Any, report: _Report) -> None:
    store.set(_key(dist.get_rank()), report.to_json())


def _key(rank: int) -> str:
    return f"waits/{rank}"


def _tell(store: Any, finding: _Finding, groups: Iterable[str]) -> _Finding:
    """Publish ``finding`` for ranks that wait in one of ``groups``; return the finding to raise.

    If several ranks publish, all raise the finding that was first, and their errors are equal.
    """
    named = {*groups, *gpu.begun(), *(group for group, *_ in finding.waits or ())}
    for group in sorted(named):  # use the same order on all ranks
        key, before = f"deadlock/{group}", b""
        if store.check([key]):
            before = store.get(key)
        if not before or _Finding(*json.loads(before)).waits is not None:
            before = store.compare_set(key, before.decode(), json.dumps(finding))
        known = _Finding(*json.loads(before))
        if known.waits is None or (finding.waits and all(w in known.waits for w in finding.waits)):
            finding = known
    return finding


def _told(store: Any, need: WaitCondition, *, is_exact: bool = True) -> _Finding | None:
    """Return the latest finding published for the group of ``need``, or None.

    With ``is_exact``, return only a finding about the collective ``need``.
    """
    key = f"deadlock/{need.group}"
    if not store.check([key]):
        return None
    finding = _Finding(*json.loads(store.get(key)))
    waits, mine = finding.waits, [need.group, str(need.kind), need.number]
    is_about = need.kind != PROGRAM if waits is None else mine in waits
    return finding if is_about or not is_exact else None


def _read(store: Any, ranks: Iterable[int]) -> _Reports:
    """Read the latest reports of ``ranks``, and skip ranks that have never published a report."""
    known = sorted(ranks)
    if known and not store.check([_key(rank) for rank in known]):
        known = [rank for rank in known if store.check([_key(rank)])]
    texts = store.multi_get([_key(rank) for rank in known]) if known else []
    return {rank: _Report.from_json(text) for rank, text in zip(known, texts, strict=True)}
