"""Extra: detects a deadlock of ranks, makes the deadlocked ranks raise, and logs long waits.

Used by default if this folder is installed. Without this folder, ranks that are in different
exchanges of small values still raise (see ``HostExchange``). But ranks in different collectives
wait until the process group's timeout, and errors do not name lines of the program.

In each process, a thread (``Watchdog``) checks about once a second all waits for collectives, on
the host and on the GPU. If a wait on the host lasts ``PATIENCE_SECONDS``, the thread logs the wait
once (logger ``flatshard``, level WARNING), with the line of the program and the ranks that report
no wait. The thread ends a wait only if the wait would certainly never end (see ``detector.py``).
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import torch.distributed as dist

from flatshard.comm.work import CollectiveError, CollectiveWatch, History, waits_by_thread, watched
from flatshard.extras.deadlock import detector, gpu, program
from flatshard.extras.deadlock.detector import Deadlock
from flatshard.extras.deadlock.program import UNKNOWN, BlockedWait, OwnWait

# Minimum durations of waits that are logged: in general, and in the constructor of a wrapper. The
# second is short: if another rank uses DDP, only this rank's log tells the user about the mistake.
PATIENCE_SECONDS, MEETING_SECONDS = 60.0, 10.0

_REMEDY = (
    "If another rank is only slow, this wait ends by itself. If another rank is past this call, or "
    "uses DistributedDataParallel, the wait never ends: wrap the same model on every rank, and "
    "call forward, backward, state_dict() and every other collective on every rank, not under `if "
    "rank == 0:`."
)

_TWO_THREADS = (
    "rank {}: thread {!r} used a model while thread {!r} was in a forward, backward or collective "
    "({}). So ranks may begin collectives in different orders. Use the models of a process group "
    "in one thread at a time, in the same order of threads on all ranks: call join() of the second "
    "thread. To save in the background, call flatshard.checkpoint.save(..., async_=True)."
)

_END_SECONDS = 5.0  # at exit, maximum time to wait for the end of a running check

_ERROR_LENGTH = 400  # maximum number of characters of an error that a rank publishes when it ends

_logger = logging.getLogger("flatshard")
_warn_once = cache(_logger.warning)


class Watchdog(CollectiveWatch):
    def __init__(self) -> None:
        self._pid = 0  # id of the process in which the watchdog's thread runs; 0: not started
        self._waits: dict[watched, BlockedWait] = {}  # waits of all threads at the last `look`
        self._users: set[int] = set()  # ids of the program's threads that ever waited for ranks
        self._thread: threading.Thread | None = None
        # Locked during a check. Before Python ends, `stop` waits for this lock: if a check were in
        # a backend's C++ code when Python ends, that code would end the process with SIGABRT.
        self._looking = threading.Lock()
        self._deadlock = Deadlock()
        self._own: OwnWait | None = None  # wait in a collective of the program, at the last `look`
        self._is_store_lost = False  # whether the store once took too long to answer
        self._gpu_waits = gpu.GpuWaits()

    def add_group(self, history: History) -> None:
        if self._pid != os.getpid():
            self._start()
        detector.histories[history.name] = history
        detector.default_store()
        tell_of_end()  # from now on, other ranks may wait for this rank

    def ask(self, question: Callable[[], Any]) -> Any:
        """Return the result of ``question``, which uses the process group's store.

        None: the store has failed, or has not answered within ``_END_SECONDS``.
        """
        # Call the function in another thread: if the host of the store cannot be reached any more,
        # a call of the store may block for hours, and ignores the process group's timeout.
        answers: list[Any] = []

        def run() -> None:
            with contextlib.suppress(Exception):
                answers.append(question())

        thread = threading.Thread(target=run, name="flatshard question", daemon=True)
        if not self._is_store_lost:
            thread.start()
            thread.join(_END_SECONDS)
            self._is_store_lost = thread.is_alive()
        return answers[0] if answers else None

    def explain(self, wait: watched) -> str | None:
        blocked = self._waits.get(wait) or _blocked(wait)
        reason = self.ask(partial(detector.explain, blocked)) or blocked.verdict
        # Call `take_back_error` last: while `detector.explain` runs, the watchdog may set an error.
        taken_back = gpu.take_back_error()
        return reason or taken_back

    def program_line(self) -> str:
        return program.line_of(threading.get_ident())

    def take_turn(self, previous: int) -> int:
        me = threading.current_thread()
        # Autograd's threads (`_DummyThread`) run while the thread that called backward waits, and
        # flatshard's threads use separate process groups. So neither breaks the order.
        if isinstance(me, threading._DummyThread) or me.name.startswith(program.OUR_THREADS):
            return previous
        if program.is_in_step(previous):
            before = next((one.name for one in threading.enumerate() if one.ident == previous), "")
            rank = dist.get_rank() if dist.is_initialized() else 0
            text = _TWO_THREADS.format(rank, me.name, before, program.line_of(previous))
            # From now on, ranks may begin different collectives: make all later ones raise.
            for history in detector.known_histories():
                history.make_error = partial(CollectiveError, text)
            raise CollectiveError(text)
        return threading.get_ident()

    def _start(self) -> None:
        # A forked process has neither the thread nor the waits of its parent.
        self.__init__()  # type: ignore[misc]
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._watch, name="flatshard-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        # Do not release the lock, so that the watchdog's thread calls no backend any more.
        if self._thread is not None and self._thread.is_alive():
            self._looking.acquire(timeout=_END_SECONDS)
            # Abort NCCL collectives that do not complete. After an error, a collective may never
            # complete, and torch's own watchdog could end the process with SIGABRT.
            gpu.settle(_END_SECONDS)

    def _watch(self) -> None:
        while True:
            time.sleep(min(PATIENCE_SECONDS / 4, detector.LOOK_SECONDS))
            try:
                self.look()
            except Exception as error:  # usually the process group's store failed; it may recover
                _warn_once(f"a check for deadlocks failed, and is tried again: {error}")

    def look(self) -> None:
        """Log long waits, and end waits that never end."""
        if self._looking.acquire(timeout=_END_SECONDS):
            try:
                self._look()
            finally:
                self._looking.release()

    def _look(self) -> None:
        stacks = {waits.thread: [*waits] for waits in waits_by_thread()}
        # Leave out autograd's threads (one per accelerator, not started by Python): while they run,
        # the thread that called `backward()` waits, and begins no collectives.
        self._users = program.python_threads() & stacks.keys()
        found = ((thread, wait) for thread, waits in stacks.items() for wait in waits)
        self._waits = {one: self._waits.get(one) or _blocked(one, thread) for thread, one in found}
        now = time.monotonic()
        for wait in (self._waits[waits[-1]] for waits in stacks.values() if waits):
            is_meeting = wait.describe().startswith("ShardedWrapper")
            patience = min(MEETING_SECONDS, PATIENCE_SECONDS) if is_meeting else PATIENCE_SECONDS
            if not wait.was_logged and now - wait.began >= patience:
                wait.was_logged = True
                _logger.warning("waiting for %d seconds: %s", now - wait.began, self._about(wait))
        # Look for a deadlock only if a single thread communicates. A second thread that does not
        # wait may still begin the collective that the other ranks need.
        if len(self._users) == 1:
            (user,) = self._users
            # Put the user's thread first, so that the last wait is the innermost: while a thread of
            # autograd waits, the user's thread is in backward.
            waits = chain(stacks.pop(user), *stacks.values())
            self._deadlock.look(self._wait_of(user, [self._waits[wait] for wait in waits]))

    def _wait_of(self, user: int, waits: list[BlockedWait]) -> BlockedWait | None:
        """Return the innermost wait of thread ``user``, or None if the thread does not wait.

        ``waits``: the waits for flatshard's collectives on the host, the innermost last.
        """
        wait, after = waits[-1] if waits else None, detector.FIRST_LOOK_SECONDS
        if wait is not None and wait.need is not UNKNOWN:
            self._own = None
            return wait
        self._own = program.own_wait(user, self._own)
        if self._own is not None:
            self._own.outer = wait
            if self._own.is_known(after):
                return self._own
        gathers = {history.described for history in detector.known_histories()}
        return self._gpu_waits.look(user, after, gathers) or wait

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
                f"No wait is reported by rank {elsewhere}, which computes, has ended, or waits in "
                "send(), recv() or an asynchronous work of the program"
            )
        return ". ".join([*lines, _REMEDY])


def _blocked(wait: watched, thread: int = 0) -> BlockedWait:
    return BlockedWait(wait.describe, wait.condition or UNKNOWN, thread=thread)


def tell_of_end() -> None:
    """Install exit hooks that tell the other ranks how the user's program ended."""
    # Report an uncaught exception in `sys.excepthook`, which Python calls before the exit handlers:
    # exit handlers of libraries may take long.
    if getattr(sys.excepthook, "func", None) is not _tell_error:
        sys.excepthook = partial(_tell_error, sys.excepthook)
    # Register `_tell` again, because Python runs the last registered exit handler first.
    atexit.unregister(_tell)
    atexit.register(_tell, "sys.exit() or the end of its program")


def _tell_error(before: Callable[..., Any], kind: type, error: BaseException, trace: Any) -> None:
    with contextlib.suppress(Exception):
        own = program.failed_collective(trace)
        if own is not None and (WATCH._own is None or WATCH._own.verdict is None):
            WATCH.ask(partial(detector.log_failure, *own))
    how = f"{kind.__name__}: {error}"[:_ERROR_LENGTH]
    WATCH.ask(partial(_tell, how, threading.get_ident()))
    # Tell the other ranks once more at exit, because another thread may begin collectives until
    # then.
    atexit.unregister(_tell)
    atexit.register(_tell, how)
    before(kind, error, trace)


def _tell(how: str, thread: int | None = None) -> None:
    # A forked process, such as a DataLoader worker, is not a rank.
    if WATCH._pid != os.getpid() or WATCH._is_store_lost:
        return
    # If the store is gone, the other ranks fail anyway.
    with contextlib.suppress(Exception):
        if WATCH._own is not None:  # a thread waited in a collective of the program
            WATCH.look()  # logs why the collective failed
        detector.tell_end(how, thread)


WATCH = Watchdog()
atexit.register(WATCH.stop)
