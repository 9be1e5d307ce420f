"""``Heap``: what one step frees on a CPU, the next one finds again.

[Note: remnants]
For an aligned tensor glibc looks for ``_REMNANT_BYTES`` more than it needs, and gives the remnants
on both sides back. The freed tensor's place is as large as before only if they lie free beside it,
joined to it: else the next tensor of the same size does not fit, and takes another place. Small
freed places are not joined but kept, seven of a size, for the next small objects (the thread's
cache). While autograd builds its graph that cache is empty, so that remnants go into it and out
again as parts of the graph. ``_release_remnants`` swaps what is in the cache for other places when
hardly anything of a step is in use, and when nearly everything is: after that tensors fit. In gpt
models a step's page faults fell by two thirds, and resident memory by 6 to 9 %. The environment can
switch the cache off (``GLIBC_TUNABLES``), a program cannot.

[Note: growth]
Where a program keeps something small from every step, a loss say, glibc cannot use places beside it
for tensors of the same size again, and takes others: its heap grows from step to step, and pages
that nothing reads stay resident. To give all free ones back costs a page fault for each that is
used again. So that is done when most of what a step uses is in use, at the end of forward, and when
the free lists have grown by a part of what they held when all was new.
"""

from __future__ import annotations

import ctypes

from flatshard.memory import mapped_files

_MIN_BYTES = 32 << 20
"""Growth that is worth a step's page faults."""

_NEW_STEPS = 2
"""Steps that make what stays, an optimizer's state say."""

_REMNANT_BYTES = 96
"""What glibc's ``posix_memalign`` asks for beyond a tensor's bytes: 64 to align, 32 to split."""

_NUM_CACHED = 7
"""Freed places of a size that a thread of glibc's keeps unjoined."""


class Heap:
    """Watches this process's heap from step to step."""

    def __init__(self) -> None:
        """No step has been."""
        self._num_steps = 0
        self._free = 0
        self._limit = _MIN_BYTES

    def begin_forward(self) -> None:
        """Let the places of the last step's tensors be whole again."""
        _release_remnants()

    def end_forward(self) -> None:
        """The same; give free memory back if there is much more of it than at the last time."""
        _release_remnants()
        free = _free_bytes()
        if self._num_steps <= _NEW_STEPS:
            self._num_steps += 1
            self._free, self._limit = free, max(_MIN_BYTES, free // 4)
        elif free - self._free > self._limit:
            mapped_files.give_back_freed()
            self._free = free


def _release_remnants() -> None:
    """Have other small places in the thread's cache than it holds now; see the note."""
    if _mallinfo is None:
        return  # it is not glibc
    for nbytes in range(24, _REMNANT_BYTES, 16):  # what a place of 32, 48, ... 96 bytes holds
        cached = [_malloc(nbytes) for _ in range(_NUM_CACHED)]
        others = [_malloc(nbytes) for _ in range(_NUM_CACHED)]
        for place in (*others, *cached):  # the cache is full after the others
            _free(place)


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(f"other_{number}", ctypes.c_size_t) for number in range(8)] + [
        ("fordblks", ctypes.c_size_t),  # bytes in the free lists
        ("keepcost", ctypes.c_size_t),
    ]


def _free_bytes() -> int:
    """In glibc's free lists, resident or not; 0 where there is no such thing."""
    return 0 if _mallinfo is None else int(_mallinfo().fordblks)


_mallinfo = mapped_files.find_function("mallinfo2", _Info)
_malloc = mapped_files.find_function("malloc", ctypes.c_void_p, ctypes.c_size_t)
_free = mapped_files.find_function("free", None, ctypes.c_void_p)
