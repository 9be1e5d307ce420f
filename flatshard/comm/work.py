"""``AsyncWork``: a collective under way, and what other ranks have yet to read of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.watch import WaitCondition, watch, watched


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
