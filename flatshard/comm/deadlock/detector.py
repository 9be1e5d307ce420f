"""``Deadlock``: finds out that ranks wait for one another in different collectives.

A rank that waits says in what, and how far it got, in the process group's store, where the others
look once they have waited for some seconds themselves. Nothing is said or read before.

[Note: proof]
A collective needs every rank to begin it. Ranks of which each waits for one of the others that has
not begun what it waits for will wait for ever, if they all wait at the same time. That is certain
where a rank sees each of them say the same wait before and after one moment: what a rank said is
said again, with a higher number, as long as the wait lasts, and what waits begins nothing. A rank
that computes, loads or evaluates says nothing, and nobody who waits for it alone stands still.

A process of which several threads wait is taken to be never waiting: one may begin what others
wait for.

[Note: the program's own]
A rank may wait as well in a barrier or another collective that the program calls itself. Where it
has called ours before by the same thread, that is said likewise: it needs all ranks of its group
to begin as many collectives of the group as this one has. A rank of which that is not known is
taken to have begun them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from flatshard.comm.deadlock import program_collectives
from flatshard.comm.deadlock.program_collectives import ProgramCollective

FIRST_LOOK_SECONDS = 3.0
"""How long a rank has waited before it says so."""

LOOK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 8.0
_OF_PROGRAM = "the program's"
"""The kind of collectives that the program calls itself."""

_ASKED = 16  # of the ranks that are waited for, so many are asked: one that stands still is enough


class CollectiveCounter:
    """Which collectives of one group this rank has begun: how many of each kind."""

    def __init__(self, name: str, ranks: Iterable[int], rank: int) -> None:
        """Nothing yet.

        Args:
            name: the group's, the same on all ranks.
            ranks: by their numbers in the default group.
            rank: this one's, likewise.
        """
        self.name = name
        self.others = tuple(other for other in ranks if other != rank)
        self.begun: dict[Hashable, int] = {}
        _progress[name] = self

    def begin(self, kind: Hashable, *, abort: Callable[[], None] | None = None) -> WaitCondition:
        """Count one more; returns what its end needs: that all other ranks begin it."""
        number = self.begun[kind] = self.begun.get(kind, 0) + 1
        return WaitCondition(self.name, kind, number, self.others, abort)

    def reach(self, kind: Hashable, number: int) -> None:
        """Say that this rank has begun the ``number``-th."""
        self.begun[kind] = number

    def needs(self, kind: Hashable, number: int) -> WaitCondition:
        """What a wait for the others' ``number``-th needs."""
        return WaitCondition(self.name, kind, number, self.others)


_progress: weakref.WeakValueDictionary[str, CollectiveCounter] = weakref.WeakValueDictionary()


class WaitCondition(NamedTuple):
    """What a wait needs: that other ranks begin something.

    Attributes:
        group: the name of a ``CollectiveCounter``.
        kind: of what they begin.
        number: the how manieth.
        ranks: who has to; by their numbers in the default group.
        abort: makes the wait fail, where it does not ask for ``verdict`` itself.
    """

    group: str
    kind: Hashable
    number: int
    ranks: tuple[int, ...]
    abort: Callable[[], None] | None = None

    def as_said(self) -> _SaidNeed:
        """For other ranks."""
        return self.group, self.kind, self.number, self.ranks


_SaidNeed = tuple[str, Hashable, int, tuple[int, ...]]
"""A need without ``abort``, which other processes cannot call."""


class BlockedWait:
    """A wait of this process.

    Attributes:
        began: when, as ``time.monotonic`` says.
        describe: says what is waited for.
        need: what would end it; None: nobody can tell.
        number: what this rank calls it; 0: it was not said yet.
        verdict: why it will not end; None: it may.
    """

    def __init__(self, describe: Callable[[], str], need: WaitCondition | None) -> None:
        """It begins now."""
        self.began = time.monotonic()
        self.describe, self.need = describe, need
        self.number = 0
        self.verdict: str | None = None


class _Verdict(NamedTuple):
    """That waits will not end.

    Attributes:
        text: why.
        waits: their numbers, by rank.
    """

    text: str
    waits: dict[int, int]


class _Said(NamedTuple):
    """What a rank says while it waits."""

    wait: int
    time: int
    """The how manieth time it says that."""
    text: str
    need: _SaidNeed
    begun: dict[str, dict[Hashable, int]]
    verdict: _Verdict | None
    """What it found out before it gave up waiting."""

    def lacks(self, need: _SaidNeed) -> bool:
        """Whether it has not begun what another rank needs."""
        group, kind, number, _ = need
        unknown = number if kind == _OF_PROGRAM else 0
        return self.begun.get(group, {}).get(kind, unknown) < number

    def was_to_begin(self, need: _SaidNeed) -> bool:
        """Whether what another rank needs is the next of its kind that this one would begin."""
        group, kind, number, _ = need
        return self.begun.get(group, {}).get(kind, 0) == number - 1


class ProgramWaits:
    """Waits of a thread in collectives of the program's own, one after another."""

    def __init__(self) -> None:
        """None was seen."""
        self._collective: ProgramCollective | None = None
        self._wait: BlockedWait | None = None

    def of(self, thread: int) -> BlockedWait | None:
        """The one that a thread is in now; the same as before while it lasts."""
        found = program_collectives.waited_for_in(thread)
        if found != self._collective:
            self._collective, self._wait = found, None
            if found is not None:
                others = tuple(rank for rank in found.ranks if rank != dist.get_rank())
                need = WaitCondition(found.group, _OF_PROGRAM, found.number, others)
                self._wait = BlockedWait(found.describe, need)
        return self._wait


class Deadlock:
    """Looks whether a wait of this rank can ever end. Used by one thread."""

    def __init__(self) -> None:
        """Nothing was looked at."""
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "big") << 10)
        self._wait: BlockedWait | None = None
        self._times = 0
        self._pause = self._next = 0.0
        self._before: dict[int, _Said] = {}

    def look(self, wait: BlockedWait) -> None:
        """Say that ``wait`` goes on, and set its ``verdict`` if it will for ever."""
        if wait.need is None or wait.verdict or not dist.is_initialized():
            return
        if wait is not self._wait:
            self._wait, self._times, self._before = wait, 0, {}
            self._pause, self._next = LOOK_SECONDS, wait.began + FIRST_LOOK_SECONDS
            wait.number = next(self._numbers)
        now = time.monotonic()
        if now < self._next:
            return
        self._say(wait, None)
        stuck = self._stuck(dist.get_rank())
        verdict = verdict_of_others(wait)
        if verdict is None and stuck and self._is_certain(stuck):
            verdict = _Verdict(_in_words(stuck), _waits(stuck))
        if verdict is not None:
            self._say(wait, verdict)  # before the others hear of it by their connections
            wait.verdict = verdict.text
            if wait.need.abort is not None:
                wait.need.abort()
            return
        if _waits(stuck) != _waits(self._before):
            self._before = stuck
        self._pause = LOOK_SECONDS if stuck else min(2 * self._pause, _LONGEST_LOOK_SECONDS)
        self._next = now + self._pause

    def _say(self, wait: BlockedWait, verdict: _Verdict | None) -> None:
        assert wait.need is not None, "what nobody can tell is not said"
        self._times += 1
        begun: dict[str, dict[Hashable, int]] = {}
        for progress in [known() for known in _progress.valuerefs()]:  # more may come meanwhile
            if progress is not None:
                begun[progress.name] = dict(progress.begun)
        for name, number in program_collectives.begun().items():
            begun.setdefault(name, {})[_OF_PROGRAM] = number
        need, text = wait.need.as_said(), wait.describe()
        said = _Said(wait.number, self._times, text, need, begun, verdict)
        _store().set(_key(dist.get_rank()), pickle.dumps(said))

    def _stuck(self, rank: int) -> dict[int, _Said]:
        """What the ranks say of which each waits for another one of them, if ``rank`` is one."""
        said: dict[int, _Said] = {}
        to_ask = [rank]
        while to_ask:
            asked = to_ask.pop()
            told = None if asked in said else _heard(asked)
            if told is not None and told.verdict is None:
                said[asked] = told
                to_ask += told.need[3][:_ASKED]
        while True:
            stuck = {
                one: told
                for one, told in said.items()
                if any(peer in said and said[peer].lacks(told.need) for peer in told.need[3])
            }
            if len(stuck) == len(said):
                return stuck if rank in stuck else {}
            said = stuck

    def _is_certain(self, stuck: dict[int, _Said]) -> bool:
        """Whether all have said the same before, and again since; see the note."""
        return _waits(stuck) == _waits(self._before) and all(
            told.time > self._before[rank].time for rank, told in stuck.items()
        )


def verdict_of_others(wait: BlockedWait) -> _Verdict | None:
    """Why the wait does not end, if ranks that it is for have found that out."""
    verdicts = (told.verdict for told in _heard_for(wait).values())
    return next((one for one in verdicts if one is not None and _is_about(wait, one)), None)


def explain(wait: BlockedWait) -> str | None:
    """Why the wait, which failed, could not end; None if that is not known.

    Ranks that it is for may have given up another wait before this one was said, and have left.
    """
    if wait.verdict is not None or wait.need is None:
        return wait.verdict
    heard, need = _heard_for(wait), wait.need.as_said()
    for told in heard.values():
        verdict = told.verdict
        if verdict is not None and (
            _is_about(wait, verdict)
            or any(
                rank in heard and heard[rank].wait == number and heard[rank].was_to_begin(need)
                for rank, number in verdict.waits.items()
            )
        ):
            return verdict.text
    return None


def _heard_for(wait: BlockedWait) -> dict[int, _Said]:
    """What the ranks that the wait is for said last."""
    if wait.need is None:
        return {}
    with contextlib.suppress(Exception):  # a store that is gone
        heard = {rank: _heard(rank) for rank in wait.need.ranks[:_ASKED]}
        return {rank: told for rank, told in heard.items() if told is not None}
    return {}


def _is_about(wait: BlockedWait, verdict: _Verdict) -> bool:
    return wait.number > 0 and verdict.waits.get(dist.get_rank()) == wait.number


def _waits(stuck: dict[int, _Said]) -> dict[int, int]:
    return {rank: told.wait for rank, told in stuck.items()}


def _in_words(stuck: dict[int, _Said]) -> str:
    waits = "; ".join(f"rank {rank} in [{stuck[rank].text}]" for rank in sorted(stuck))
    return (
        f"the ranks wait for one another in different collectives, for ever: {waits}. All ranks "
        "must call what is collective, in the same order: forward (in evaluation too), backward, "
        "state_dict(), optim_state_dict(), summon_full_params(), clip_grad_norm_(), and norms and "
        "sums of parameters and gradients. To save, call state_dict() on every rank, and "
        "torch.save() on rank 0 alone."
    )


def _store() -> Any:
    """The process group's."""
    assert dist.group.WORLD is not None, "there is a default group"
    return dist.group.WORLD.get_group_store()  # type: ignore[attr-defined]


def _key(rank: int) -> str:
    return f"flatshard/waits/{rank}"


def _heard(rank: int) -> _Said | None:
    """What a rank says, or said last."""
    key, store = _key(rank), _store()
    return pickle.loads(store.get(key)) if store.check([key]) else None  # type: ignore[no-any-return]
