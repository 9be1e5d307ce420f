"""Tells the other ranks at once that an exception ends this rank's program.

They would hear of it when its process ends, which takes as long as what else the program does then.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

from flatshard.comm.deadlock.detector import tell_end

_LONGEST = 400  # characters of an exception's message


class _Tells:
    """A ``sys.excepthook`` that tells, and then does what the one before does."""

    # Not where the exception is raised: who catches it goes on.
    def __init__(self) -> None:
        self._before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):  # the store may have ended: they see that, too
            tell_end(f"{kind.__name__}: {error}"[:_LONGEST])
        self._before(kind, error, trace)


def install() -> None:
    """Tell them from now on; again where something else has taken the hook's place."""
    if not isinstance(sys.excepthook, _Tells):
        sys.excepthook = _Tells()
