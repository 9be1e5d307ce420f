"""``CachingAllocator``: simulates torch's CUDA allocator, to predict the reserved memory.

torch asks the driver for large segments, and cuts blocks out of the segments. Freed blocks stay
reserved. So the reserved memory, which ``nvidia-smi`` and most published runs report, is larger
than the memory of the tensors: a freed block may be too small for the next tensor, and each CUDA
stream has its own segments. The simulation follows ``c10/cuda/CUDACachingAllocator.cpp``. With
expandable segments (``PYTORCH_ALLOC_CONF=expandable_segments:True``), each stream has one segment
for small blocks and one segment for large blocks. A segment grows at its end. An allocation takes
the smallest free block that is large enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUND = 512  # the size of each block is a multiple of this number
_SMALL_BYTES = 1 << 20  # maximum size of a small block

# The segments of small and of large blocks grow by multiples of these numbers of bytes.
_SMALL_PAGE, _LARGE_PAGE = 2 << 20, 20 << 20


@dataclass(eq=False)
class Held:
    """A block of memory that is currently allocated."""

    category: str
    nbytes: int
    pool: Pool
    start: int
    size: int


class Pool:
    """The blocks of one stream, either all small or all large, in one segment.

    ``page``: the segment grows by multiples of this number of bytes.
    """

    min_rest = 1  # a free block is split if at least this number of bytes remains

    def __init__(self, page: int) -> None:
        self._page = page
        self.reserved_bytes = 0
        self._free: list[tuple[int, int]] = []  # start and size of each free block, by start

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Take the smallest free block that fits, or grow the segment. Returns start and size."""
        fits = [(size, start) for start, size in self._free if size >= nbytes]
        if fits:
            size, start = min(fits)
            self._free.remove((start, size))
        else:
            start, size = self.grow(nbytes)
        if size - nbytes >= self.min_rest:
            insort(self._free, (start + nbytes, size - nbytes))
            size = nbytes
        return start, size

    def grow(self, nbytes: int) -> tuple[int, int]:
        """Grow the segment for a block of ``nbytes``. Returns start and size of the new block."""
        start = self.reserved_bytes
        if self._free and sum(self._free[-1]) == start:
            start = self._free.pop()[0]
        missing = start + nbytes - self.reserved_bytes
        self.reserved_bytes += -(-missing // self._page) * self._page
        return start, self.reserved_bytes - start

    def free(self, start: int, nbytes: int) -> None:
        place = bisect_left(self._free, (start, nbytes))
        self._free.insert(place, (start, nbytes))
        # Join the block with the free blocks after it and before it.
        for index in (place, place - 1):
            if 0 <= index < len(self._free) - 1:
                (begin, size), (after, rest) = self._free[index : index + 2]
                if begin + size == after:
                    self._free[index : index + 2] = [(begin, size + rest)]


class CachingAllocator:
    """Allocates blocks, and counts the memory that is reserved for the blocks."""

    def __init__(self, pool: type[Pool] = Pool) -> None:
        self._make_pool = pool
        self._pools: dict[tuple[str, int], Pool] = {}

    def allocate(self, nbytes: int, category: str, stream: str) -> Held:
        page = _SMALL_PAGE if nbytes <= _SMALL_BYTES else _LARGE_PAGE
        pool = self._pools.setdefault((stream, page), self._make_pool(page))
        start, size = pool.allocate(max(_ROUND, -(-nbytes // _ROUND) * _ROUND))
        return Held(category, nbytes, pool, start, size)

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._pools.values())
