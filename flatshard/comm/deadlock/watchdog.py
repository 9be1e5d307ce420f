"""Says who waits for whom when a collective takes long, well before it times out.

One thread per process looks now and then at what the process waits for, and logs it (logger
``flatshard``, level WARNING) once per wait. It ends a wait only where it is certain that it would
last for ever (``standstill``). The program's own waits are not logged, unless they last for ever.

[Note: the end of the program]
Python ends a thread that is still there by unwinding it, and a thread that is unwound in the middle
of a backend's code ends the process with SIGABRT, whatever the program's own end was. So the end of
the program waits until the thread is outside of it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

import torch

from flatshard.comm.deadlock import detector
from flatshard.comm.deadlock.detector import BlockedWait, Deadlock, ProgramWaits, WaitCondition

PATIENCE_SECONDS = 60.0
"""How long a wait may take before it is logged."""

_REMEDY = (
    "A rank that is slow ends this when it comes. Ranks that are past this place, in a barrier or "
    "a collective of the program itself, say, never will: call forward, backward, state_dict() "
    "and whatever else is collective on every rank, not under `if rank == 0:`"
)

_END_SECONDS = 5.0
"""How long the end of the program waits for the thread."""

_logger = logging.getLogger("flatshard")
_thread: threading.Thread | None = None
_looking = threading.Lock()  # held where the thread is in a backend's code
_wait: BlockedWait | None = None
_waiting_threads: set[int] = set()


class watched:
    """Log ``describe()`` if the block, which waits for other ranks, takes long.

    Args:
        describe: says what is waited for.
        need: what ends the wait; None: nobody looks whether it ever ends.

    Attributes:
        wait: the wait.
    """

    __slots__ = ("_before", "wait")

    def __init__(self, describe: Callable[[], str], need: WaitCondition | None = None) -> None:
        self.wait = BlockedWait(describe, need)

    def __enter__(self) -> BlockedWait:
        global _wait
        _start()
        # Autograd has a thread per accelerator; who called backward does nothing meanwhile.
        if torch._C._current_graph_task_id() == -1:
            _waiting_threads.add(threading.get_ident())
        self._before, _wait = _wait, self.wait
        return self.wait

    def __exit__(self, *_: object) -> None:
        global _wait
        _wait = self._before


def check() -> None:
    """Raise if the wait of this thread will never end.

    Raises:
        RuntimeError: other ranks wait for this one in another collective.
    """
    wait = _wait
    if wait is not None and wait.verdict is not None:
        raise RuntimeError(wait.verdict)


def _start() -> None:
    global _thread, _looking
    if _thread is None or not _thread.is_alive():  # a forked child has none
        _looking = threading.Lock()
        _thread = threading.Thread(
            target=_watch, args=(_looking,), name="flatshard-watchdog", daemon=True
        )
        _thread.start()


@atexit.register
def _stop() -> None:
    """Let the thread look at nothing any more; see the note on the end of the program."""
    if _thread is not None and _thread.is_alive():
        _looking.acquire(timeout=_END_SECONDS)


def _look_at_own(watcher: Deadlock, wait: BlockedWait | None) -> None:
    """Look at a wait of the program's own, and log that it does not end: nobody makes it fail."""
    if wait is not None and wait.verdict is None:
        watcher.look(wait)
        if wait.verdict is not None:
            _logger.warning("%s", wait.verdict)


def _watch(looking: threading.Lock) -> None:
    said = None
    watcher: Deadlock | None = Deadlock()
    program = ProgramWaits()
    while True:
        time.sleep(min(PATIENCE_SECONDS / 4, detector.LOOK_SECONDS))
        wait = _wait
        try:
            threads = tuple(_waiting_threads)
            if watcher is not None and len(threads) == 1:
                with looking:
                    if wait is not None:
                        watcher.look(wait)
                    else:
                        _look_at_own(watcher, program.of(threads[0]))
        except Exception:  # a store that is gone, say; what is waited for tells the rest
            _logger.debug("standstills are not looked for any more", exc_info=True)
            watcher = None
        if wait is None or wait is said or time.monotonic() - wait.began < PATIENCE_SECONDS:
            continue
        said = wait
        seconds = round(time.monotonic() - wait.began)
        _logger.warning("waiting for %d seconds: %s. %s", seconds, wait.describe(), _REMEDY)
