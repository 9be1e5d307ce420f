"""``Pool``: simulates torch's CUDA allocator, to predict the reserved memory.

torch asks the driver for large segments, and cuts blocks out of the segments. Freed blocks stay
reserved. So the reserved memory, which ``nvidia-smi`` and most published runs report, is larger
than the memory of the tensors: a freed block may be too small for the next tensor. The simulation
follows ``c10/cuda/CUDACachingAllocator.cpp``. With expandable segments
(``PYTORCH_ALLOC_CONF=expandable_segments:True``), there is one segment for small blocks and one
segment for large blocks. A segment grows at its end. An allocation takes the smallest free block
that is large enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUND = 512  # the size of each block is a multiple of this number
SMALL_BYTES = 1 << 20  # maximum size of a small block

# The segments of small and of large blocks grow by multiples of these numbers of bytes.
SMALL_PAGE, LARGE_PAGE = 2 << 20, 20 << 20


@dataclass(eq=False)
class Held:
    """A block of memory that is currently allocated."""

    category: str
    nbytes: int
    pool: Pool
    start: int

    @property
    def size(self) -> int:
        """Number of bytes that the block takes in the segment."""
        return max(_ROUND, -(-self.nbytes // _ROUND) * _ROUND)


class Pool:
    """A segment with all small blocks, or with all large blocks.

    ``page``: the segment grows by multiples of this number of bytes.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self.reserved_bytes = 0
        self._free: list[tuple[int, int]] = []  # start and size of each free block, by start

    def allocate(self, nbytes: int, category: str) -> Held:
        """Take the smallest free block that fits, or grow the segment."""
        made = Held(category, nbytes, self, 0)
        fits = [(size, start) for start, size in self._free if size >= made.size]
        if fits:
            size, made.start = min(fits)
            self._free.remove((made.start, size))
        else:
            made.start = self.reserved_bytes
            if self._free and sum(self._free[-1]) == made.start:
                made.start = self._free.pop()[0]
            missing = made.start + made.size - self.reserved_bytes
            self.reserved_bytes += -(-missing // self._page) * self._page
            size = self.reserved_bytes - made.start
        if size > made.size:
            insort(self._free, (made.start + made.size, size - made.size))
        return made

    def free(self, held: Held) -> None:
        place = bisect_left(self._free, (held.start, held.size))
        self._free.insert(place, (held.start, held.size))
        # Join the block with the free blocks after it and before it.
        for index in (place, place - 1):
            if 0 <= index < len(self._free) - 1:
                (begin, size), (after, rest) = self._free[index : index + 2]
                if begin + size == after:
                    self._free[index : index + 2] = [(begin, size + rest)]
