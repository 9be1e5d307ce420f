"""``Progress``: how far a save or load has come, on rank 0."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import time
from typing import Any

logger = logging.getLogger("flatshard.checkpoint")


class Progress:
    """In a terminal a bar for what takes seconds, by tqdm; at the end a line in the log."""

    def __init__(self, verb: str, total: int, *, is_shown: bool) -> None:
        self._verb, self._is_shown, self._begun = verb, is_shown, time.monotonic()
        self._bar: Any = None
        # Elsewhere tqdm shows none, but makes a semaphore, which a kill would leave behind.
        if is_shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            make = importlib.import_module("tqdm").tqdm
            options = {"unit": "B", "unit_scale": True, "delay": 2, "leave": False}
            self._bar = make(desc=verb, total=total, **options)

    def advance(self, num_bytes: int) -> None:
        """Count bytes that this rank has written or read."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def end(self, path: object, num_bytes: int) -> None:
        """Say how many bytes all ranks moved, and how fast."""
        if self._bar is not None:
            self._bar.close()
        if self._is_shown:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            said = f"{num_bytes / 1e9:.3f} GB in {seconds:.2f} s, {num_bytes / seconds / 1e9:.2f}"
            logger.info("%s %s: %s GB/s", self._verb, path, said)
