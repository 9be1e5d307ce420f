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
from typing import NamedTuple

_ROUND = 512  # the size of each block is a multiple of this number
_SMALL_BYTES = 1 << 20  # maximum size of a small block
_SMALL_PAGE, _LARGE_PAGE = 2 << 20, 20 << 20  # growth of segments is a multiple


class Place(NamedTuple):
    pool: Pool
    start: int
    nbytes: int


class Pool:
    """The blocks of one stream, either all small or all large.

    ``page``: number of bytes. An expandable segment grows by multiples of ``page``. Without
    expandable segments, a new segment has ``page`` bytes, or, if the block has at least 10 MB,
    the size of the block.
    """

    def __init__(self, page: int, *, expandable: bool) -> None:
        self._page, self._expandable = page, expandable
        self.reserved_bytes = 0
        self._end = 0  # first address that no segment has used
        self._free: list[tuple[int, int]] = []  # start and size of each free block, by start

    def allocate(self, nbytes: int) -> Place:
        fits = [(size, start) for start, size in self._free if size >= nbytes]
        size, start = min(fits) if fits else self._grow(nbytes)
        place = bisect_left(self._free, (start, size))
        del self._free[place]
        # Without expandable segments, the allocator splits a large block only if more than
        # `_SMALL_BYTES` would remain.
        least = 0 if self._expandable or self._page == _SMALL_PAGE else _SMALL_BYTES
        if size - nbytes > least:
            self._free.insert(place, (start + nbytes, size - nbytes))
            size = nbytes
        return Place(self, start, size)

    def _grow(self, nbytes: int) -> tuple[int, int]:
        """Reserve memory for a block of ``nbytes``. Returns size and start of a free block."""
        start = self._end
        if not self._expandable:
            is_large = self._page > _SMALL_PAGE and nbytes >= _LARGE_PAGE // 2
            size = -(-nbytes // _SMALL_PAGE) * _SMALL_PAGE if is_large else self._page
            self._end += size + 1  # leave a gap: `free` must not join blocks of two segments
            self.reserved_bytes += size
        else:
            if self._free and sum(self._free[-1]) == start:
                start = self._free.pop()[0]
            self._end += -(-(start + nbytes - self._end) // self._page) * self._page
            size, self.reserved_bytes = self._end - start, self._end
        self._free.append((start, size))
        return size, start

    def free(self, start: int, nbytes: int) -> None:
        insort(self._free, (start, nbytes))
        place = bisect_left(self._free, (start, nbytes))
        # Join the block with the free blocks after it and before it.
        for index in (place, place - 1):
            if 0 <= index < len(self._free) - 1:
                (begin, size), (after, rest) = self._free[index : index + 2]
                if begin + size == after:
                    self._free[index : index + 2] = [(begin, size + rest)]


class CachingAllocator:
    """Allocates blocks, and counts the memory that is reserved for the blocks."""

    def __init__(self, *, expandable: bool = True) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], Pool] = {}

    def allocate(self, nbytes: int, stream: str) -> Place:
        is_small = nbytes <= _SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            page = _SMALL_PAGE if is_small else _LARGE_PAGE
            pool = self._pools[stream, is_small] = Pool(page, expandable=self._expandable)
        return pool.allocate(max(_ROUND, -(-nbytes // _ROUND) * _ROUND))

    def free(self, place: Place) -> None:
        place.pool.free(place.start, place.nbytes)

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self._pools.values())
