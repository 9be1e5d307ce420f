"""Extra: detects ranks that deadlock, makes these ranks raise, and logs long waits.

Used if this folder is installed. Without this folder, ranks that exchange values under different
names still raise. Ranks that wait in different collectives wait until the timeout of the process
group, and errors do not name lines of the program.

One thread per process looks at the process's waits each second (``Watchdog``). The thread logs a
long wait once (logger ``flatshard``, level WARNING), with the program's line and the ranks that
report no wait. The thread ends a wait only if the wait would certainly never end (``detector``).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist

from flatshard.comm.process_groups import abort
from flatshard.comm.work import CollectiveWatch, History, WaitCondition, waits_by_thread, watched
from flatshard.extras.deadlock import detector, program
from flatshard.extras.deadlock.detector import UNKNOWN, BlockedWait, Deadlock
from flatshard.extras.deadlock.program import OwnCollective

# Seconds after which a wait is logged.
PATIENCE_SECONDS = 60.0

_REMEDY = (
    "If another rank is only slow, this wait ends by itself. If another rank is past this call, "
    "the wait never ends: call forward, backward, state_dict() and every other collective on every "
    "rank, not under `if rank == 0:`"
)

_END_SECONDS = 5.0  # longest wait for the thread at the end of the program

_logger = logging.getLogger("flatshard")


class Watchdog(CollectiveWatch):
    """Watches the waits of this process, in a thread."""

    def __init__(self) -> None:
        self._pid = 0  # no thread runs before the first group
        self._waits: dict[watched, BlockedWait] = {}  # the waits that the last `look` found
        self._users: set[int] = set()  # threads that communicate
        self._thread: threading.Thread | None = None
        self._looking = threading.Lock()  # held while the thread may be in a backend's code
        self._deadlock = Deadlock()
        # The wait that the last `look` found in a collective of the program; None if there was no
        # such wait.
        self._own: _OwnWait | None = None
        self._failure = ""

    def add_group(self, history: History) -> None:
        if self._pid != os.getpid():
            self._start()
        detector.histories[history.name] = history
        tell_of_end()  # from now on other ranks wait for this rank

    def explain(self, wait: watched) -> str | None:
        return detector.explain(self._waits.get(wait) or _blocked(wait))

    def program_line(self) -> str:
        return program.line_of(threading.get_ident())

    def _start(self) -> None:
        # A forked process has neither the thread nor the waits of its parent.
        self.__init__()  # type: ignore[misc]
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="flatshard-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        # At its end Python unwinds threads that still run. A thread that is unwound in the middle
        # of a backend's C++ code ends the process with SIGABRT, whatever the exit code of the
        # program was. The lock, held from here on, keeps the thread out of backends' code.
        if self._thread is not None and self._thread.is_alive():
            self._looking.acquire(timeout=_END_SECONDS)

    def _watch(self) -> None:
        while True:
            time.sleep(min(PATIENCE_SECONDS / 4, detector.LOOK_SECONDS))
            try:
                self.look()
            except Exception as error:  # mostly an error of the store, which may recover
                if str(error) != self._failure:
                    self._failure = str(error)
                    _logger.warning("a check for deadlocks failed, and is tried again: %s", error)

    def look(self) -> None:
        """Look once at all waits."""
        if self._looking.acquire(timeout=_END_SECONDS):
            try:
                self._look()
            finally:
                self._looking.release()

    def _look(self) -> None:
        stacks = {waits.thread: [*waits] for waits in waits_by_thread()}
        # Do not count autograd's threads (one per accelerator; Python did not start them). While
        # autograd's thread runs, the thread that called backward only waits, so the two threads
        # never begin collectives at the same time.
        ours = (one for one in threading.enumerate() if not isinstance(one, threading._DummyThread))
        self._users = {one.ident or 0 for one in ours} & stacks.keys()
        self._waits = {
            wait: self._waits.get(wait) or _blocked(wait, thread)
            for thread, waits in stacks.items()
            for wait in waits
        }
        now = time.monotonic()
        for wait in (self._waits[waits[-1]] for waits in stacks.values() if waits):
            if not wait.was_logged and now - wait.began >= PATIENCE_SECONDS:
                wait.was_logged = True
                _logger.warning("waiting for %d seconds: %s", now - wait.began, self._about(wait))
        # If several threads communicate, another thread may still begin the collective that other
        # ranks wait for. So look for deadlocks only if a single thread communicates.
        if len(self._users) == 1:
            (user,) = self._users
            # Put the waits of the user's thread first, because a thread of autograd begins its
            # waits inside the waits of the user's thread.
            waits = chain(stacks.pop(user), *stacks.values())
            self._deadlock.look(self._wait_of(user, [self._waits[wait] for wait in waits]))

    def _wait_of(self, user: int, waits: list[BlockedWait]) -> BlockedWait | None:
        """The wait of the only communicating thread, perhaps in a collective of the program."""
        wait = waits[-1] if waits else None
        found = None
        if wait is None or wait.need is UNKNOWN:
            found = program.own_collective(user)
        if found is None:
            self._own = None
            return wait
        if self._own is None or self._own.work() is not found.work:
            self._own = _OwnWait(found, user, wait)
        return self._own if self._own.is_known(found) else wait

    def _about(self, wait: BlockedWait) -> str:
        lines = [wait.text()]
        if len(self._users) > 1:
            lines.append(
                f"{len(self._users)} threads of this process communicate, so flatshard cannot "
                "check whether the ranks wait for one another"
            )
        elsewhere = ", ".join(map(str, self._deadlock.ranks_elsewhere(wait)))
        if elsewhere:
            lines.append(
                f"No wait is known of rank {elsewhere}, which computes, has ended, or waits in "
                "send(), recv() or an asynchronous work of the program"
            )
        return ". ".join([*lines, _REMEDY])


def _blocked(wait: watched, thread: int = 0) -> BlockedWait:
    return BlockedWait(wait.describe, wait.condition or UNKNOWN, thread=thread)


class _OwnWait(BlockedWait):
    """A wait in a collective of the program, perhaps inside a wait of flatshard."""

    def __init__(self, found: OwnCollective, thread: int, outer: BlockedWait | None) -> None:
        name = found.name
        super().__init__(lambda: name, UNKNOWN, thread=thread)
        # A weak reference, because a work keeps its tensors alive.
        self.work = weakref.ref(found.work)
        self._outer = outer
        self._was_asked = False

    def is_known(self, found: OwnCollective) -> bool:
        """Whether ``need`` is known. Looks ``need`` up once, after the wait has lasted seconds."""
        is_long = time.monotonic() - self.began >= detector.FIRST_LOOK_SECONDS
        if is_long and not self._was_asked:
            self._was_asked = True
            if (number := found.number()) is not None:
                group, ranks = found.group, dist.get_process_group_ranks(found.group)
                others = tuple(rank for rank in ranks if rank != dist.get_rank())
                end = partial(self._end, group)
                self.need = WaitCondition(group.group_name, detector.PROGRAM, number, others, end)
        return self.need is not UNKNOWN

    def _end(self, group: dist.ProcessGroup) -> None:
        if self._outer is not None:
            self._outer.verdict, self._outer.is_given_up = self.verdict, True
        abort(group)


def tell_of_end() -> None:
    """Make this process tell the other ranks at once when and how its program ends."""
    # Otherwise the other ranks would notice the end only after the process's exit handlers, which
    # may take long. Report an exception only if the program does not catch the exception, because a
    # program that catches the exception continues.
    if getattr(sys.excepthook, "func", None) is not _tell_error:
        sys.excepthook = partial(_tell_error, sys.excepthook)
    # Register last, because exit handlers run in reverse order. So `_tell` runs before the exit
    # handlers of other libraries, which take time.
    atexit.unregister(_tell)
    atexit.register(_tell, "sys.exit(), or as its program was over")


def _tell_error(before: Callable[..., Any], kind: type, error: BaseException, trace: Any) -> None:
    _tell(f"{kind.__name__}: {error}"[:400])
    before(kind, error, trace)


def _tell(how: str) -> None:
    if WATCH._pid != os.getpid():  # a forked process is not a rank
        return
    # Ignore an error of the store: if the store is gone, the other ranks fail too.
    with contextlib.suppress(Exception):
        if WATCH._own is not None:  # a thread was in a collective of the program
            WATCH.look()  # logs why the collective failed
        detector.tell_end(how)


WATCH = Watchdog()
atexit.register(WATCH.stop)
