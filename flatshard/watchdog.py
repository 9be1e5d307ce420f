"""Says who waits for whom when a collective takes long, well before it times out.

One thread per process looks now and then at what the process waits for, and logs it (logger
``flatshard``, level WARNING) once per wait. It changes nothing and ends nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0
"""How long a wait may take before it is logged."""

_logger = logging.getLogger("flatshard")
_thread: threading.Thread | None = None
_wait: tuple[float, Callable[[], str]] | None = None


class watched:
    """Log ``describe()`` if the block, which waits for other ranks, takes long."""

    __slots__ = ("_before", "_describe")

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        global _wait
        _start()
        self._before, _wait = _wait, (time.monotonic(), self._describe)

    def __exit__(self, *_: object) -> None:
        global _wait
        _wait = self._before


def _start() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():  # a forked child has none
        _thread = threading.Thread(target=_watch, name="flatshard-watchdog", daemon=True)
        _thread.start()


def _watch() -> None:
    said = None
    while True:
        time.sleep(PATIENCE_SECONDS / 4)
        wait = _wait
        if wait is None or wait is said or time.monotonic() - wait[0] < PATIENCE_SECONDS:
            continue
        said = wait
        seconds = round(time.monotonic() - wait[0])
        _logger.warning("waiting for %d seconds: %s", seconds, wait[1]())
