"""``Heap``: what glibc's free lists hold and no step uses again goes back to the system.

[Note: growth]
Where a program keeps something small from every step, a loss say, glibc cannot use places beside it
for tensors of the same size again, and takes others: its heap grows from step to step, and pages
that nothing reads stay resident. To give all free ones back costs a page fault for each that is
used again. So that is done when most of what a step uses is in use, at the end of forward, and when
the free lists have grown by a part of what they held when all was new.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flatshard import memory_file

_MIN_BYTES = 32 << 20
"""Growth that is worth a step's page faults."""

_NEW_STEPS = 2
"""Steps that make what stays, an optimizer's state say."""


class Heap:
    """Watches this process's heap from step to step."""

    def __init__(self) -> None:
        """No step has been."""
        self._num_steps = 0
        self._free = 0
        self._limit = _MIN_BYTES

    def end_forward(self) -> None:
        """Give free memory back if there is much more of it than at the last time."""
        free = _free_bytes()
        if self._num_steps <= _NEW_STEPS:
            self._num_steps += 1
            self._free, self._limit = free, max(_MIN_BYTES, free // 4)
        elif free - self._free > self._limit:
            memory_file.give_back_freed()
            self._free = free


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(f"other_{number}", ctypes.c_size_t) for number in range(8)] + [
        ("fordblks", ctypes.c_size_t),  # bytes in the free lists
        ("keepcost", ctypes.c_size_t),
    ]


def _free_bytes() -> int:
    """In glibc's free lists, resident or not; 0 where there is no such thing."""
    return 0 if _mallinfo is None else int(_mallinfo().fordblks)


def _find() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if memory_file.CAN_MAP else None
    if found is not None:
        found.restype, found.argtypes = _Info, []
    return found


_mallinfo = _find()
