"""``AsyncWork``: a collective under way; its number in ``History``, and the waits for its end.

Each group has a ``History`` of the collectives that this rank has begun. Each thread lists the
blocks in which it waits for other ranks (``watched``). The extra ``deadlock`` reads both in a
thread of its own (``CollectiveWatch``), so a step calls nothing of the extra. Without the extra,
nobody reads the waits. Ranks still compare histories where a backend matches collectives by order
only, because their results would otherwise be mixed up (``flatshard/engine/agreement.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, ran other units, or did not come within the timeout."""


class named(watched):
    """Name the operation where a backend raises, or where it is slow.

    Raises:
        CollectiveError: the backend raised.
    """

    __slots__ = ()

    def failed(self, error: BaseException) -> None:
        # An OutOfMemoryError keeps its class for callers, and concerns no other rank. The error of
        # a collective inside the block names that collective already.
        is_named = isinstance(error, torch.OutOfMemoryError | CollectiveError)
        if not isinstance(error, RuntimeError) or is_named:
            return
        # Of a rank that found a deadlock and left, the backend sees a closed connection only.
        failed, reason = f"{self.describe()} failed", watch().explain(self)
        if reason is not None:
            raise CollectiveError(f"{failed}: {reason}") from error
        remedy = (
            "A peer died, ran other units than this rank, or did not come within the group's "
            "timeout. Look for the first error on the other ranks."
        )
        if "Duplicate GPU" in str(error):  # NCCL's words
            remedy = (
                "Ranks have the same GPU: call torch.cuda.set_device(local_rank) before the "
                "model is made, or pass device_id=local_rank."
            )
        raise CollectiveError(f"{failed}. {remedy} Reported by the backend: {error}") from error


# ---------------------------------------------------------------- collectives under way


@dataclass(eq=False)
class AsyncWork:
    """A collective under way. Keeps its tensors alive until nobody needs them."""

    works: Sequence[Any]  # the backend's handles that the result needs
    op_name: str  # names the unit, the rank and the collective
    kept: Sequence[object] = ()  # alive until the other ranks have taken everything
    _: KW_ONLY
    peers: Sequence[int] = ()  # the ranks that the first works receive from, where each has its own
    then: Callable[[], None] | None = None  # called once after the wait
    sends: Sequence[Any] = ()  # complete when the other ranks have taken what this one gave
    reports_end: bool = True  # whether `done` can become true before the wait
    need: WaitCondition | None = None  # what works wait for
    sends_need: WaitCondition | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for other ranks."""
        return all(work.is_completed() for work in self.works)

    def wait(self, pending_sends: PendingSends) -> None:
        """Have the result; on an accelerator the current stream waits, not the host.

        The source must not be written before ``pending_sends.wait_sends()``.

        Raises:
            CollectiveError: a peer failed or did not come within the group's timeout.
        """
        self._have()
        if self.sends:
            pending_sends.add(self)
        else:
            self.kept = ()

    def finish(self) -> None:
        """Have the result, and see that the others have theirs; raises as ``wait``."""
        self._have()
        self.wait_sends()

    def _have(self) -> None:
        # Taken off first: a second wait for what failed would hang, or hide the first error, and
        # one for what is there must not average or widen again.
        works, then = self.works, self.then
        self.works, self.then = (), None
        try:
            if works:
                with named(partial(self._describe, works), self.need):
                    for work in works:
                        work.wait()
            if then is not None:
                with named(self.op_name):
                    then()
        except CollectiveError:
            self.sends = ()  # they would not end either
            raise

    def _describe(self, works: Sequence[Any]) -> str:
        for work, peer in zip(works, self.peers, strict=False):
            if not work.is_completed():
                return f"{self.op_name}, not heard of rank {peer}"
        return self.op_name

    @property
    def reports_sent(self) -> bool:
        """Whether ``is_sent`` can become true before ``wait_sends``."""
        return all(getattr(work, "reports_end", True) for work in self.sends)

    def is_sent(self) -> bool:
        """Whether the others have taken everything; nothing is kept then."""
        if not all(work.is_completed() for work in self.sends):
            return False
        self.wait_sends()
        return True

    def wait_sends(self) -> None:
        """Wait until the others have taken everything; raises as ``wait``."""
        sends, self.sends = self.sends, ()
        if sends:
            with named(self.op_name, self.sends_need):
                for work in sends:
                    work.wait()
        self.kept = ()

    def keeps(self, tensor: Tensor) -> bool:
        """Whether it keeps the memory of ``tensor`` alive."""
        # By storage, not by object: views of a shard share its memory.
        storage = tensor.untyped_storage()._cdata
        return any(
            isinstance(one, Tensor) and one.untyped_storage()._cdata == storage for one in self.kept
        )


class PendingSends:
    """Collectives of which this rank has the result, and other ranks perhaps not yet."""

    # A rank has what it asked for as soon as all others have sent theirs; that the others have
    # taken what this one sent is a matter of its own. Until then it must not be overwritten, but
    # nothing else need wait for it: a rank that is ahead would otherwise wait at every unit. It is
    # kept here until the end of a forward or backward, before anybody may write.

    def __init__(self) -> None:
        self._pending: list[AsyncWork] = []
        # Not polled: they never report their end, and there may be two for each unit of a model.
        self._silent: list[AsyncWork] = []

    def add(self, pending: AsyncWork) -> None:
        (self._pending if pending.reports_sent else self._silent).append(pending)

    def wait_sends(self) -> None:
        """Wait until other ranks have taken all that this one gave: it may be written then.

        Raises:
            CollectiveError: as ``AsyncWork.wait``.
        """
        for kept in (self._silent, self._pending):
            # Popped one by one: after an error the others can still be waited for.
            while kept:
                kept.pop(0).wait_sends()

    def is_sending(self, tensor: Tensor) -> bool:
        """Whether other ranks may still be reading the memory of ``tensor``."""
        self.drop_sent()
        return any(pending.keeps(tensor) for pending in (*self._silent, *self._pending))

    def drop_sent(self) -> None:
        """Give back what other ranks have taken meanwhile."""
        self._pending = [pending for pending in self._pending if not pending.is_sent()]


@dataclass(eq=False)
class RunLink:
    """The unit's name and the unfinished sends, for the collectives of one flat parameter.

    All parts of the flat parameter share this object: both fields change when a module around the
    unit is wrapped.
    """

    unit_name: str  # for errors
    # What other ranks may still be reading; one list for all flat parameters of a run.
    pending_sends: PendingSends = field(default_factory=PendingSends)
