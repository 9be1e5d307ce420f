"""``AsyncWork``: a collective under way, and what other ranks have yet to read of it.

[Note: sends]
A rank has what it asked for as soon as all others have sent theirs; that the others have taken what
this one sent is a matter of its own. Until then it must not be overwritten, but nothing else need
wait for it: a rank that is ahead would otherwise wait at every unit. ``PendingSends`` keeps it
until the end of a forward or backward, before anybody may write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.deadlock.detector import BlockedWait, WaitCondition, explain
from flatshard.comm.deadlock.watchdog import watched


class CollectiveError(RuntimeError):
    """A collective failed: a peer died, ran other units, or did not come within the timeout."""


class AsyncWork:
    """A collective under way. Keeps its tensors alive until nobody needs them."""

    def __init__(
        self,
        works: list[Any],
        op_name: str,
        *kept: object,
        peers: Sequence[int] = (),
        then: Callable[[], None] | None = None,
        sends: Sequence[Any] = (),
        reports_end: bool = True,
        need: WaitCondition | None = None,
        sends_need: WaitCondition | None = None,
    ) -> None:
        """Keep what was started; ``op_name`` names the unit, the rank and the collective."""
        self._works = works  # the backend's handles that the result needs
        self._op_name = op_name
        self.kept = kept  # alive until the other ranks have taken everything
        self._peers = peers  # the ranks that the first handles receive from, where each has its own
        self._then = then  # called once after the wait
        self._sends = sends  # complete when the other ranks have taken what this one gave
        self.reports_end = reports_end  # whether `done` can become true before the wait
        self._need, self._sends_need = need, sends_need  # what works and sends wait for

    def done(self) -> bool:
        """Whether ``wait`` would return without waiting for other ranks."""
        return all(work.is_completed() for work in self._works)

    def wait(self, pending_sends: PendingSends) -> None:
        """Have the result; on an accelerator the current stream waits, not the host.

        The source must not be written before ``pending_sends.wait_sends()``.

        Raises:
            CollectiveError: a peer failed or did not come within the group's timeout.
        """
        self._have()
        if self._sends:
            pending_sends.add(self)
        else:
            self.wait_sends()

    def finish(self) -> None:
        """Have the result, and see that the others have theirs; raises as ``wait``."""
        self._have()
        self.wait_sends()

    def _have(self) -> None:
        self._wait_for(self._works, self._need)
        self._works = []
        # Once: a second wait must not average or widen again.
        then, self._then = self._then, None
        if then is not None:
            try:
                then()
            except torch.OutOfMemoryError:
                raise  # nobody else's fault
            except RuntimeError as error:
                raise self._failed(error) from error

    @property
    def reports_sent(self) -> bool:
        """Whether ``is_sent`` can become true before ``wait_sends``."""
        return all(getattr(work, "reports_end", True) for work in self._sends)

    def is_sent(self) -> bool:
        """Whether the others have taken everything; nothing is kept then."""
        if not all(work.is_completed() for work in self._sends):
            return False
        self.wait_sends()
        return True

    def keeps(self, tensor: Tensor) -> bool:
        """Whether it keeps the memory of ``tensor`` alive."""
        # By storage, not by object: views of a shard share its memory.
        storage = tensor.untyped_storage()._cdata
        return any(
            isinstance(one, Tensor) and one.untyped_storage()._cdata == storage for one in self.kept
        )

    def wait_sends(self) -> None:
        """Wait until the others have taken everything; raises as ``wait``."""
        self._wait_for(self._sends, self._sends_need)
        self._sends, self.kept = (), ()

    def _wait_for(self, works: Sequence[Any], need: WaitCondition | None) -> None:
        if not works:
            return
        with watched(self._describe, need) as wait:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._failed(error, wait) from error

    def _failed(self, error: RuntimeError, wait: BlockedWait | None = None) -> CollectiveError:
        # A second wait for what failed would hang, or hide the first error.
        described, self._works, self._sends = self._describe(), [], ()
        reason = None if wait is None else explain(wait)
        if reason is not None:
            return CollectiveError(f"{described} failed: {reason}")
        return CollectiveError(
            f"{described} failed. A peer died, ran other units than this rank, or did not "
            "come within the group's timeout. Look for the first error on the other ranks. "
            f"Reported by the backend: {error}"
        )

    def _describe(self) -> str:
        for work, peer in zip(self._works, self._peers, strict=False):
            if not work.is_completed():
                return f"{self._op_name}, not heard of rank {peer}"
        return self._op_name


class PendingSends:
    """Collectives of which this rank has the result, and other ranks perhaps not yet."""

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
