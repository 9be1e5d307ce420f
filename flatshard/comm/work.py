"""Unfinished collectives (``AsyncWork``), and records that explain a deadlock.

Each process group has a ``History`` of the collectives that this rank has begun. Each thread has a
list of its present waits for other ranks (``watched``). ``flatshard.extras.deadlock`` reads both.
If a backend matches collectives only by order, ranks also compare histories at the end of backward:
if histories differ, a rank may have received the data of the wrong collective.
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
import torch.distributed as dist

from flatshard.comm.process_groups import abort, ranks_text
from flatshard.options.extras import default_extra

REMEDY = (
    "All ranks must make the same collective calls in the same order: forward (in evaluation too), "
    "backward, state_dict(), optim_state_dict(), summon_full_params(), full_tensors(), "
    "clip_grad_norm_(), and norms and sums of parameters and gradients. Units that some ranks "
    "skip, or run in another order, such as experts and dropped layers, need allow_divergence."
)

_KEPT = 64  # maximum number of collectives whose descriptions a `History` keeps
_KNOWN = 1 << 14  # maximum size of `History._next`

# A collective begun by this rank: number in the process group, and description.
Begun = tuple[int, str]


class CollectiveWatch:
    """Interface of the extra ``deadlock``. This base class is used without the extra."""

    def add_group(self, history: History) -> None:
        """Watch the process group of ``history`` for deadlocks from now on."""

    def explain(self, wait: watched) -> str | None:
        """Return why ``wait`` failed, or None if unknown. Call inside the ``with`` block."""
        return None

    def program_line(self) -> str:
        """Return the file and line of the user's program that this thread runs."""
        return ""

    def take_turn(self, previous: int) -> int:
        """Let this thread use a model after thread ``previous``; return whose turn it is now.

        With the extra, raises CollectiveError if thread ``previous`` is still in a forward,
        backward or collective. Threads of autograd and of flatshard take no turn: for them, the
        result is ``previous``.
        """
        return threading.get_ident()


@cache
def watch() -> CollectiveWatch:
    found = default_extra("deadlock")
    return CollectiveWatch() if found is None else found.WATCH  # type: ignore[no-any-return]


# ---------------------------------------------------------------- collectives that have begun


class WaitCondition(NamedTuple):
    """A wait ends once each of ``ranks`` has begun ``number`` collectives of ``kind``."""

    group: str  # name of the `History`, or of the process group
    kind: Hashable  # key of the collectives, see `History.begin`
    number: int
    ranks: Sequence[int]  # as ranks in the default group
    abort: Callable[[], None] | None = None  # function that makes the wait fail


class History:
    """Record of the collectives that this rank has begun in one process group.

    The n-th collective of a kind on one rank matches the n-th on every other rank. If the backend
    matches collectives only by order, the record also has descriptions, which ranks compare.
    """

    def __init__(self, name: str, ranks: Iterable[int], rank: int, meeting: Hashable) -> None:
        """Make an empty history. ``ranks`` and ``rank`` are ranks in the default group.

        ``meeting``: kind of collectives in which all ranks wait for each other.
        """
        self.name, self._meeting = name, meeting
        self.others = tuple(other for other in ranks if other != rank)
        self.begun: dict[Hashable, int] = {}  # how many collectives of each kind have begun
        # Kinds to drop from `begun`, with the number of meetings that had begun before `forget`.
        self._forgotten: deque[tuple[int, Hashable]] = deque()

        # Set if ranks began different collectives: returns the error that later collectives raise.
        self.make_error: Callable[[], CollectiveError] | None = None
        # Whether ranks compare descriptions before collectives. False inside of `join()`: a rank
        # without input begins a collective only after another rank has begun it.
        self.announces = True
        self._thread = 0  # id of the thread that began the latest collective
        self.described: Hashable = None  # the kind (see `begin`) of collectives with descriptions
        self.digest = 0  # checksum of all descriptions so far

        # When this rank began the first collective that ranks have not compared yet, or 0.
        self.unchecked_since = 0.0
        self._recent: deque[Begun] = deque(maxlen=_KEPT)
        self._last_two = "", ""  # descriptions of the last two collectives
        # For two consecutive descriptions, the description that has always followed, or "".
        self._next: dict[tuple[str, str], str] = {}
        watch().add_group(self)

    def begin(
        self, group: dist.ProcessGroup, kind: Hashable = None, *, what: str = ""
    ) -> WaitCondition:
        """Record that this rank begins a collective of a ``kind``, such as ``("gather", tag)``.

        ``kind``: None if the backend matches all collectives of ``group`` only by order. ``what``:
        description, for comparisons between ranks. Returns a condition that holds once all other
        ranks have begun this collective. Raises if ranks began different collectives earlier.
        """
        if self.make_error is not None or threading.get_ident() != self._thread:
            self._check()
        kind = group.group_name if kind is None else kind
        number = self.begun[kind] = self.begun.get(kind, 0) + 1
        if what:
            self.described, self.digest = kind, zlib.crc32(what.encode(), self.digest)
            self._last_two = self._last_two[1], what
            self._recent.append((number, what))
            self.unchecked_since = self.unchecked_since or time.monotonic()
        return WaitCondition(self.name, kind, number, self.others, partial(abort, group))

    def _check(self) -> None:
        if self.make_error is not None:
            raise self.make_error()
        self._thread = watch().take_turn(self._thread)

    def forget(self, *kinds: Hashable) -> None:
        """Drop the counts of a freed flat parameter's ``kinds``, as soon as no rank needs them."""
        # Until the next meeting, another rank may still wait in a collective of the flat parameter.
        # When this rank begins the second meeting from now, all ranks have completed the first.
        now = self.begun.get(self._meeting, 0)
        while self._forgotten and self._forgotten[0][0] + 2 <= now:
            self.begun.pop(self._forgotten.popleft()[1], None)
        self._forgotten += [(now, kind) for kind in kinds if kind in self.begun]

    def is_usual(self, what: str) -> bool:
        """Whether ``what`` has always followed the last two collectives.

        If so, this rank need not compare ``what``, because all ranks have learned the same order:
        on a rank that is about to begin a different collective, the result is False.
        """
        return not self.announces or self._next.get(self._last_two) == what

    def learn(self, what: str) -> None:
        """Record that ``what``, which all ranks have compared, follows the last two collectives."""
        first = self._next.setdefault(self._last_two, what)
        self._next[self._last_two] = what if what == first else ""
        # Limit the size: each new model adds entries. All ranks drop the same entry, the oldest.
        if len(self._next) > _KNOWN:
            del self._next[next(iter(self._next))]

    def to_compare(self) -> bytes:
        """Return a digest of the collectives that this rank has begun, for ranks to compare."""
        self.unchecked_since = 0.0
        return self.digest.to_bytes(4, "big")

    def recent(self) -> list[Begun]:
        # `list(self._recent)` would raise if another thread appended to the deque meanwhile.
        return list(self._recent.copy())


def first_difference(recent: Mapping[int, Iterable[Begun]]) -> str | None:
    """Return a sentence about the first collective that differs between ranks, or None.

    ``recent``: the latest collectives of each rank.
    """
    begun = {rank: dict(recent[rank]) for rank in sorted(recent)}
    for number in sorted(set.intersection(*map(set, begun.values()))):
        ranks_of: dict[str, list[int]] = {}
        for rank, mine in begun.items():
            ranks_of.setdefault(mine[number], []).append(rank)
        if len(ranks_of) > 1:
            alike = [f"rank {ranks_text(some)} began [{what}]" for what, some in ranks_of.items()]
            return f"The first difference: {'; '.join(alike)}"
    return None


# ---------------------------------------------------------------- waits for other ranks


class ThreadWaits(list["watched"]):
    """The ``watched`` blocks in which one thread is now, the innermost last."""

    thread: int  # the thread's identifier, as ``threading.get_ident`` returns it


class _Own(threading.local):
    """Thread-local storage of the current thread's ``ThreadWaits``."""

    def __init__(self) -> None:  # `threading.local` calls this once in each thread
        self.waits = ThreadWaits()
        self.waits.thread = threading.get_ident()
        _by_thread[self.waits.thread] = self.waits


# The `ThreadWaits` of each running thread, by the thread's identifier.
_by_thread: weakref.WeakValueDictionary[int, ThreadWaits] = weakref.WeakValueDictionary()
_own = _Own()


def waits_by_thread() -> list[ThreadWaits]:
    """Return the ``ThreadWaits`` of each running thread that has ever waited for other ranks."""
    # `valuerefs` returns a list: other threads may add entries during the loop.
    return [waits for known in _by_thread.valuerefs() if (waits := known()) is not None]


class watched:
    """Context around code in which this thread waits for other ranks, for deadlock detection."""

    def __init__(self, op_name: str, condition: WaitCondition | None = None) -> None:
        self.op_name, self.condition = op_name, condition

    def describe(self) -> str:
        return self.op_name

    def __enter__(self) -> str:
        _own.waits.append(self)
        return self.op_name

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None and (failure := self.failure(error)) is not None:
                raise failure from error
        finally:
            _own.waits.pop()

    def failure(self, error: BaseException) -> CollectiveError | None:
        """Return the error to raise in place of ``error`` from the block. None: raise ``error``."""
        return None


class CollectiveError(RuntimeError):
    """A collective failed because another rank died, ran different units, or missed the timeout.

    Example:
        ```python
        try:
            loss_fn(model(inputs), labels).backward()
        except flatshard.CollectiveError:
            raise SystemExit("another rank ended: start again from the latest checkpoint") from None
        ```
    """


class named(watched):
    """Like ``watched``, but replaces a backend's error by a CollectiveError with ``op_name``."""

    def failure(self, error: BaseException) -> CollectiveError | None:
        # Do not replace an OutOfMemoryError: callers may catch it, and other ranks did not cause
        # it. Do not replace a CollectiveError: a nested block has already named the collective.
        is_named = isinstance(error, torch.OutOfMemoryError | CollectiveError)
        if not isinstance(error, RuntimeError) or is_named:
            return None
        # Ask for the real reason: after a deadlock that another rank has found and ended, this
        # rank's backend only reports a closed connection.
        failed, reason = f"{self.describe()} failed", watch().explain(self)
        if reason is not None:
            return CollectiveError(f"{failed}: {reason}")
        remedy = (
            "Another rank died, ran other units, or did not arrive within the process group's "
            "timeout. Look for the first error on the other ranks."
        )
        if "Duplicate GPU" in str(error):  # NCCL's error if ranks share a GPU
            remedy = (
                "Several ranks use the same GPU. Call torch.cuda.set_device(local_rank) before "
                "the model is made, or pass device_id=local_rank."
            )
        return CollectiveError(f"{failed}. {remedy} Reported by the backend: {error}")


# ---------------------------------------------------------------- unfinished collectives


@dataclass(eq=False)
class AsyncWork(named):
    """A collective that this rank has begun, with its tensors."""

    works: Sequence[Any]  # objects like ``dist.Work``, for which ``wait`` waits
    op_name: str  # text for errors that names the unit, the rank and the collective
    kept: Sequence[object] = ()  # objects to keep alive until all ranks have received everything
    _: KW_ONLY
    peers: Sequence[int] = ()  # for errors: rank ``peers[i]`` sends the data of ``works[i]``
    then: Callable[[], None] | None = None  # computes the result, after the wait for ``works``
    # Objects like ``dist.Work`` that complete when all ranks have received this rank's data.
    sends: Sequence[Any] = ()
    reports_end: bool = True  # whether `done` can become true before `wait` is called
    # Whether ``sends`` can complete before `wait_sends` is called. Gloo's sends complete only while
    # a thread waits for them.
    reports_sent: bool = True
    condition: WaitCondition | None = None  # when a wait for ``works`` ends
    sends_need: WaitCondition | None = None  # when a wait for ``sends`` ends
    _awaited: Sequence[Any] = field(init=False, default=())  # works for which `wait` waits now

    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for other ranks."""
        return all(work.is_completed() for work in self.works)

    def wait(self, pending_sends: PendingSends | None = None) -> None:
        """Wait for the result. With NCCL, the current stream waits instead of the host.

        Other ranks may still read the tensor that this rank sends. So unfinished sends are added to
        ``pending_sends``, and the caller must not write to the tensor before
        ``pending_sends.wait_sends()`` has returned. With None, wait for the sends, too.

        Raises:
            CollectiveError: another rank failed or did not arrive within the group's timeout.
        """
        # Clear `works` and `then` before waiting. After a failure, a second wait would hang or hide
        # the error. After success, a second `then` would average or cast twice.
        self._awaited, then, self.works, self.then = self.works, self.then, (), None
        # Do not write `with self`, which would cost two Python calls for each collective of a step.
        _own.waits.append(self)
        try:
            for work in self._awaited:
                work.wait()
            if then is not None:
                then()
        except KeyboardInterrupt:
            # Keep unfinished works for the next call: they may still write to the tensors.
            self.works = [work for work in self._awaited if not work.is_completed()]
            raise
        except RuntimeError as error:
            failure = self.failure(error)
            if failure is None:
                raise
            self.sends = ()  # do not wait for the sends later: the sends would not end either
            raise failure from error
        finally:
            _own.waits.pop()
            self._awaited = ()
        if pending_sends is None:
            self.wait_sends()
        elif self.sends:
            pending_sends.pending.append(self)
        else:
            self.kept = ()

    def describe(self) -> str:
        for work, peer in zip(self._awaited, self.peers, strict=False):
            if not work.is_completed():
                return f"{self.op_name} (rank {peer} has not arrived)"
        return self.op_name

    def wait_sends(self) -> None:
        """Wait until the other ranks have received all data of this rank."""
        sends, self.sends = self.sends, ()
        if sends:
            with named(self.op_name, self.sends_need):
                for work in sends:
                    work.wait()
        self.kept = ()


class PendingSends:
    """Collectives that are complete on this rank, but whose sends to other ranks are unfinished."""

    # Waiting after the sends of every unit would slow down the fastest rank. So the engine waits
    # only at the end of a forward or backward, because an optimizer may write the shards next.

    def __init__(self) -> None:
        self.pending: list[AsyncWork] = []

    def wait_sends(self) -> None:
        """Wait until other ranks have received all sent tensors, which may then be written."""
        # Remove a collective before waiting: if the wait raises, a later call must not wait again.
        while self.pending:
            self.pending.pop(0).wait_sends()

    def drop_sent(self) -> None:
        """Release the tensors of all collectives whose data the other ranks have received."""
        for one in [*self.pending]:
            if one.reports_sent and all(work.is_completed() for work in one.sends):
                one.wait_sends()
                self.pending.remove(one)
