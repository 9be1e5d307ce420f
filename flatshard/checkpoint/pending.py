"""``PendingSave``: a checkpoint that a thread writes while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_logger = logging.getLogger("flatshard.checkpoint")


class PendingSave:
    """A checkpoint that a thread writes while training continues.

    Example:
        ```python
        from flatshard import checkpoint

        pending = checkpoint.save("runs/step-1", model, optimizer, async_=True)
        loss_fn(model(inputs), labels).backward()  # training continues
        optimizer.step()
        pending.wait()
        ```
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        global _pending
        self.path = path
        # Python waits for the threads of executors at the end of a program.
        thread = ThreadPoolExecutor(1, "flatshard-checkpoint")
        self._written = thread.submit(write)
        thread.shutdown(wait=False)  # the thread ends when the save ends
        _pending = self

    def done(self) -> bool:
        """Whether the save has ended, so that ``wait`` would not block."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises the errors that ``save`` lists. The next save or load does not repeat these errors.
        """
        global _pending
        if _pending is self:
            _pending = None
        self._written.result()


_pending: PendingSave | None = None


def wait_for_pending() -> None:
    """Wait for an unfinished save. Raises the save's error, unless ``wait()`` has raised it."""
    if _pending is not None:
        if not _pending.done():
            _logger.info("waiting until %s is saved", _pending.path)
        _pending.wait()


@atexit.register
def _at_exit() -> None:
    try:
        wait_for_pending()
    except Exception:
        # Exit with status 1: Python would only print the exception, and exit with status 0.
        traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
