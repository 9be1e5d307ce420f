"""Unfinished collectives (``AsyncWork``), and records that explain a deadlock.

Each group has a ``History`` of the collectives that this rank has begun. Each thread keeps a list
of the blocks in which the thread waits for other ranks (``watched``). The extra ``deadlock`` reads
histories and waits from its own thread (``CollectiveWatch``), so a training step never calls the
extra. Without the extra, nobody reads the waits. If a backend matches collectives only by order,
ranks compare their histories even without the extra (``flatshard/engine/agreement.py``): otherwise
one rank could receive data of a different collective.
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
    "All ranks must make the same collective calls in the same order: forward (in evaluation too), "
    "backward, state_dict(), optim_state_dict(), summon_full_params(), clip_grad_norm_(), and "
    "norms and sums of parameters and gradients. Units that some ranks skip, or run in another "
    "order, such as experts and dropped layers, need allow_divergence (docs/recipes.md)."
)

_KEPT = 64  # number of descriptions that a history keeps

Begun = tuple[int, str]  # the number of a collective in its group, and its description


class CollectiveWatch:
    """Interface of the extra ``deadlock``. Without the extra, this base class does nothing."""

    def add_group(self, history: History) -> None:
        """Watch one more group, whose other ranks may wait for this rank from now on."""

    def explain(self, wait: watched) -> str | None:
        """Return the reason why ``wait`` failed; None if the reason is not known.

        Called inside the block of the wait.
        """
        return None

    def program_line(self) -> str:
        """Return the line of the user's program that this thread runs; "" if unknown."""
        return ""


@cache
def watch() -> CollectiveWatch:
    """The ``CollectiveWatch`` of this process."""
    found = default_extra("deadlock")
    return CollectiveWatch() if found is None else found.WATCH  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what this rank has begun


class WaitCondition(NamedTuple):
    """Condition that ends a wait: all ``ranks`` have begun ``number`` collectives of a kind."""

    group: str  # `History.name`, or the name of a process group
    kind: Hashable
    number: int
    ranks: Sequence[int]  # ranks in the default group
    abort: Callable[[], None] | None = None  # makes the wait fail


class History:
    """The collectives of one group that this rank has begun, counted by kind.

    If collectives match between ranks only by order, each collective also has a description. The
    history keeps the last descriptions, and a digest of all descriptions.
    """

    def __init__(self, name: str, ranks: Iterable[int], rank: int) -> None:
        """Make an empty history.

        Args:
            name: name of the history, the same on all ranks.
            ranks: ranks of the group, as ranks in the default group.
            rank: this rank in the default group.
        """
        self.name = name
        self.others = tuple(other for other in ranks if other != rank)
        self.begun: dict[Hashable, int] = {}
        # Message of the error that every later collective of this group raises, after ranks began
        # different collectives. "": no error.
        self.problem = ""
        # Whether ranks compare names before a collective that gloo matches only by order.
        self.announces = True
        self.described: Hashable = None  # kind of the collectives that have descriptions
        self.digest = 0
        # Time of the first collective that the ranks have not compared yet. 0: all are compared.
        self.unchecked_since = 0.0
        self._recent: deque[Begun] = deque(maxlen=_KEPT)
        self._last_two = "", ""
        # For each pair of consecutive descriptions, the description that has followed the pair. If
        # different descriptions have followed the pair: "".
        self._next: dict[tuple[str, str], str] = {}
        watch().add_group(self)

    def begin(
        self, kind: Hashable, what: str = "", abort: Callable[[], None] | None = None
    ) -> WaitCondition:
        """Count one more collective, and return the condition that ends a wait for the collective.

        The condition: all other ranks of the group have begun the collective, too.

        Args:
            kind: the n-th collective of a kind on one rank matches the n-th on every other rank.
            what: describes the collective, equal on all ranks; "" if ranks need not compare the
                collective.
            abort: function that makes a wait for the collective fail.

        Raises:
            RuntimeError: the ranks began different collectives earlier.
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
        """Record that this rank has begun ``number`` collectives of a kind."""
        self.begun[kind] = number

    def needs(
        self, kind: Hashable, number: int, abort: Callable[[], None] | None = None
    ) -> WaitCondition:
        """The condition that all other ranks have begun ``number`` collectives of a kind."""
        return WaitCondition(self.name, kind, number, self.others, abort)

    def is_usual(self, what: str) -> bool:
        """Whether ``what`` may begin without an announcement.

        True if in the past only ``what`` has followed the last two collectives. Then every other
        rank also begins ``what`` next, or announces a different collective first. All ranks give
        the same answer, because all ranks call ``learn`` together.
        """
        return self._next.get(self._last_two) == what

    def learn(self, what: str) -> None:
        """Record that ``what`` follows the last two collectives. Called on all ranks."""
        first = self._next.setdefault(self._last_two, what)
        self._next[self._last_two] = what if what == first else ""

    def to_compare(self) -> bytes:
        """Return the digest, which the caller compares with the digests of the other ranks."""
        self.unchecked_since = 0.0
        return self.digest.to_bytes(4, "big")

    def recent(self) -> list[Begun]:
        # Copy the deque first, because another thread may append during an iteration.
        return list(self._recent.copy())


def first_difference(recent: Mapping[int, Iterable[Begun]]) -> str | None:
    """Describe the first difference between the ranks' collectives; None if there is none.

    ``recent``: for each rank, the last collectives that the rank has begun.
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


def describe_difference(names: Mapping[int, str]) -> str:
    """Text of an error that lists the collective of each rank, and the remedy."""
    differ = first_difference({rank: [(0, name)] for rank, name in names.items()})
    return f"the ranks are in different collectives. {differ}. {REMEDY} [FS-DEADLOCK]"


# ---------------------------------------------------------------- what this rank waits for


class ThreadWaits(list["watched"]):
    """The waits of one thread, innermost last."""

    thread: int  # the thread's identifier


class _Own(threading.local):
    """The waits of the current thread."""

    def __init__(self) -> None:  # runs once in each thread
        self.waits = ThreadWaits()
        self.waits.thread = threading.get_ident()
        _by_thread[self.waits.thread] = self.waits


# Weak references: the waits of a thread are deleted with the thread.
_by_thread: weakref.WeakValueDictionary[int, ThreadWaits] = weakref.WeakValueDictionary()
_own = _Own()


def waits_by_thread() -> list[ThreadWaits]:
    """Return the waits of each running thread that has ever waited for other ranks."""
    # `valuerefs` returns a list, so other threads may add entries during the loop.
    threads = [known() for known in _by_thread.valuerefs()]
    return [waits for waits in threads if waits is not None]


class watched:
    """A context manager around code in which this thread waits for other ranks."""

    __slots__ = ("_op", "condition")

    def __init__(self, op: str | Callable[[], str], condition: WaitCondition | None = None) -> None:
        """Make the context manager.

        Args:
            op: description of the wait, or a function that returns the description.
            condition: the condition that ends the wait; None if unknown.
        """
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
        """Called when the block raises ``error``. May raise a different error."""


class CollectiveError(RuntimeError):
    """A collective failed because a peer died, ran different units, or missed the timeout.

    Example:
        ```python
        try:
            loss_fn(model(inputs), labels).backward()
        except flatshard.CollectiveError:
            raise SystemExit("another rank ended: start again from the latest checkpoint") from None
        ```
    """


class named(watched):
    """A ``watched`` block that turns errors of the backend into errors that name the operation.

    Raises:
        CollectiveError: the backend raised.
    """

    __slots__ = ()

    def failed(self, error: BaseException) -> None:
        # Leave two kinds of errors unchanged. Callers may catch OutOfMemoryError, and other ranks
        # have not caused it. A CollectiveError from a nested block already names its collective.
        is_named = isinstance(error, torch.OutOfMemoryError | CollectiveError)
        if not isinstance(error, RuntimeError) or is_named:
            return
        # If another rank found a deadlock and raised, the backend of this rank only sees a closed
        # connection. The watch may know that the reason was a deadlock.
        failed, reason = f"{self.describe()} failed", watch().explain(self)
        if reason is not None:
            raise CollectiveError(f"{failed}: {reason}") from error
        remedy = (
            "Another rank died, ran other units, or did not arrive within the process group's "
            "timeout. Look for the first error on the other ranks."
        )
        if "Duplicate GPU" in str(error):  # text of an NCCL error
            remedy = (
                "Several ranks use the same GPU. Call torch.cuda.set_device(local_rank) before "
                "the model is made, or pass device_id=local_rank."
            )
        raise CollectiveError(f"{failed}. {remedy} Reported by the backend: {error}") from error


# ---------------------------------------------------------------- collectives under way


@dataclass(eq=False)
class AsyncWork:
    """An unfinished collective.

    This object keeps the tensors of the collective alive until no rank needs the tensors.
    """

    works: Sequence[Any]  # the backend's handles: the result is complete once all are waited for
    op_name: str  # names the unit, the rank and the collective
    kept: Sequence[object] = ()  # objects kept alive until all ranks have received everything
    _: KW_ONLY
    peers: Sequence[int] = ()  # the senders of the first works, if each work receives from one rank
    then: Callable[[], None] | None = None  # called once after the wait
    # Handles that complete when all ranks have received this rank's data.
    sends: Sequence[Any] = ()
    reports_end: bool = True  # whether `done` can become true before `wait` is called
    need: WaitCondition | None = None  # the condition that ends the wait for ``works``
    sends_need: WaitCondition | None = None  # the condition that ends the wait for ``sends``

    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for other ranks."""
        return all(work.is_completed() for work in self.works)

    def wait(self, pending_sends: PendingSends) -> None:
        """Wait for the result. On an accelerator the current stream waits instead of the host.

        The tensor that this rank sends must not be written before ``pending_sends.wait_sends()``.

        Raises:
            CollectiveError: a peer failed or did not arrive within the group's timeout.
        """
        self._have()
        if self.sends:
            pending_sends.add(self)
        else:
            self.kept = ()

    def finish(self) -> None:
        """Wait for the result and for the sends to the other ranks; raises like ``wait``."""
        self._have()
        self.wait_sends()

    def _have(self) -> None:
        # Clear the fields before waiting. A second wait after a failure would hang or hide the
        # first error. A second wait after success must not run ``then`` again, because ``then``
        # would average or cast the result twice.
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
            self.sends = ()  # a wait for the sends would not end either
            raise

    def _describe(self, works: Sequence[Any]) -> str:
        for work, peer in zip(works, self.peers, strict=False):
            if not work.is_completed():
                return f"{self.op_name} (rank {peer} has not arrived)"
        return self.op_name

    @property
    def reports_sent(self) -> bool:
        """Whether ``is_sent`` can become true before ``wait_sends``."""
        return all(getattr(work, "reports_end", True) for work in self.sends)

    def is_sent(self) -> bool:
        """Whether the other ranks have received everything; if so, releases the kept objects."""
        if not all(work.is_completed() for work in self.sends):
            return False
        self.wait_sends()
        return True

    def wait_sends(self) -> None:
        """Wait until the other ranks have received everything; raises like ``wait``."""
        sends, self.sends = self.sends, ()
        if sends:
            with named(self.op_name, self.sends_need):
                for work in sends:
                    work.wait()
        self.kept = ()

    def keeps(self, tensor: Tensor) -> bool:
        """Whether this work keeps the memory of ``tensor`` alive."""
        # Compare storages, not objects: views of a shard share the shard's memory.
        storage = tensor.untyped_storage()._cdata
        return any(
            isinstance(one, Tensor) and one.untyped_storage()._cdata == storage for one in self.kept
        )


class PendingSends:
    """Collectives that are complete on this rank, but perhaps not on every rank."""

    # A rank has its result as soon as all other ranks have sent their data. At this time the other
    # ranks may not have received this rank's data yet. Until they have, this rank must not
    # overwrite the sent tensor. But this rank may continue with other work: if it waited, the
    # fastest rank would wait at every unit. So the unfinished sends are collected here, and are
    # waited for at the end of a forward or backward, before the shards may be written.

    def __init__(self) -> None:
        self._pending: list[AsyncWork] = []
        # Works that never report their end before a wait. They have a separate list, so that
        # `drop_sent` does not poll them in vain.
        self._silent: list[AsyncWork] = []

    def add(self, pending: AsyncWork) -> None:
        (self._pending if pending.reports_sent else self._silent).append(pending)

    def wait_sends(self) -> None:
        """Wait until other ranks have received all sent tensors. Then the tensors may be written.

        Raises:
            CollectiveError: as ``AsyncWork.wait``.
        """
        for kept in (self._silent, self._pending):
            # Pop the works one by one: if one wait raises, a later call can wait for the rest.
            while kept:
                kept.pop(0).wait_sends()

    def is_sending(self, tensor: Tensor) -> bool:
        """Whether other ranks may still be reading the memory of ``tensor``."""
        self.drop_sent()
        return any(pending.keeps(tensor) for pending in (*self._silent, *self._pending))

    def drop_sent(self) -> None:
        """Release the works whose data the other ranks have received."""
        self._pending = [pending for pending in self._pending if not pending.is_sent()]


@dataclass(eq=False)
class RunLink:
    """State that all objects of one flat parameter share to run its collectives.

    If a module around the unit is wrapped later, the unit's name changes, and the new root collects
    the unfinished sends. All objects see both changes, because they share this object.
    """

    unit_name: str  # for errors
    # Works whose sent tensors other ranks may still be reading. All flat parameters of a model
    # share this object.
    pending_sends: PendingSends = field(default_factory=PendingSends)
