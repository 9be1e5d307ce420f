"""Extra: keeps memory pages of resharded units on a CPU for the units that are unsharded next.

Without this folder, unsharded buffers on a CPU come from torch's allocator, and steps are slower.

[Note: pages]
When a unit is resharded, ``PagePool`` keeps the memory pages of its unsharded buffer for the unit
that is unsharded next. New memory would cost page faults, which take longer than filling the
memory. The address of a buffer must never change, because autograd holds views of the buffer. So
``mremap`` moves pages to and from the buffer's address, in a tenth of the time of page faults.

Pages are moved in chunks of equal size, which the pool lends to buffers. The pages of an idle (not
lent) chunk lie at the chunk's own address. The pool grows to the largest number of chunks that were
lent at the same time. If pages cannot be moved (another operating system, too many mappings), the
buffer gets new pages by page faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import NamedTuple

import torch

from flatshard.extras import mapped_files
from flatshard.extras.mapped_files import fills_pages, own_pages
from flatshard.memory import DEVICE, BufferMemory, OffloadTarget, give_back_kept

__all__ = ["PooledBuffer", "fills_pages"]

# Larger chunks need fewer calls (15 us each), but waste more of a buffer's last chunk.
_CHUNK_BYTES = 1 << 20
# Each lent chunk is a separate mapping, and Linux allows a process about 65,000 mappings.
_MAX_CHUNKS = 1 << 13


class PageLease(NamedTuple):
    chunk: int  # address at which the chunk's pages lie while the chunk is idle

    # Address, in the buffer, of the first ``nbytes`` of the chunk's pages during the lease.
    place: int
    nbytes: int


class PagePool:
    """A pool of chunks of memory pages that are lent to buffers; see [Note: pages]."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []  # the address ranges of all chunks

        # Addresses of idle chunks. Each access is a single operation, because finalizers of buffers
        # change the list between any two Python operations.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages of idle chunks to the address range from ``place`` to ``end``.

        Appends a lease for each chunk. Returns the end of the part that got pages, which is less
        than ``end`` if the pool has too few.
        """
        while place < end and (chunk := self._find_chunk()) is not None:
            nbytes = min(end - place, _CHUNK_BYTES)
            if not _move_pages(chunk, place, nbytes):
                self._idle.append(chunk)
                break
            leases.append(PageLease(chunk, place, nbytes))
            place += nbytes
        return place

    def _find_chunk(self) -> int | None:
        with contextlib.suppress(IndexError):
            # Take from the back: chunks at the front may have lost their pages, and the system
            # would have to allocate new pages for them.
            return self._idle.pop()
        if len(self._chunks) < _MAX_CHUNKS:
            with contextlib.suppress(OSError):
                self._chunks.append(mapped_files.reserve_range(_CHUNK_BYTES))
                return mapped_files.address_of(self._chunks[-1])
        return None

    def take_back(self, leases: list[PageLease]) -> None:
        """Move the pages of all ``leases`` back to their chunks, and empty the list."""
        # Return the last chunk first, so that the next buffer gets the chunks in the same order.
        while leases:
            chunk, place, nbytes = leases.pop()
            if not _move_pages(place, chunk, nbytes):
                mapped_files.drop_pages(place, nbytes)
            self._idle.append(chunk)

    def forget(self, leases: list[PageLease]) -> None:
        """Take back chunks whose pages are lost, and empty ``leases``.

        Called when a buffer was deleted, and the system has freed the pages with its addresses.
        """
        while leases:
            # `lend` takes chunks from the back, so put chunks without pages at the front.
            self._idle.insert(0, leases.pop().chunk)

    def give_back(self) -> None:
        """Free the pages of idle chunks, so that other programs can use the memory."""
        for chunk in list(self._idle):
            mapped_files.drop_pages(chunk, _CHUNK_BYTES)


POOL = PagePool()
give_back_kept.append(POOL.give_back)


class PooledBuffer(BufferMemory):
    """An unsharded buffer whose memory pages come from ``POOL``."""

    # The memory of a large shard is a file. The file is also mapped into the buffer, so that an
    # all-gather need not copy the shard. The mapping in the buffer is private: if a module writes
    # to its unsharded parameters, the shard does not change.

    def __init__(
        self, numel: int, dtype: torch.dtype, own: range = range(0), target: OffloadTarget = DEVICE
    ) -> None:
        """Reserve the buffer's addresses, and make a file for this rank's shard in ``target``.

        ``own``: range of the shard in the buffer. Empty: the shard has separate memory.
        """
        nbytes = numel * dtype.itemsize
        everything = mapped_files.reserve_range(nbytes)
        super().__init__(torch.frombuffer(everything, dtype=dtype))
        address = self.buffer.data_ptr()
        end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # ``_own``: address range of this rank's shard. ``_rooms``: the address ranges before and
        # after the shard, whose pages come from the pool.
        start, stop = (address + at * dtype.itemsize for at in (own.start, own.stop))
        self._own, self._rooms = (start, stop), [(address, start), (stop, end)]
        self._own_values = self.buffer[own.start : own.stop]
        if own:
            # The first mapping is shared: writes to the shard reach the file. The second mapping is
            # private: the buffer shows the file, but writes to the buffer do not reach the file.
            number, found = mapped_files.create_mapped(target, stop - start)
            try:
                mapped_files.map_at(number, start, stop - start, private=True)
            finally:
                os.close(number)
            self.shard = torch.frombuffer(found, dtype=dtype)
        self._leases: list[PageLease] = []
        self._is_taken = self._is_kept = False
        self._forbid()
        # Do not call `forget` when Python exits: the end of the process frees all memory.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        start, stop = self._own
        held = self.buffer.nbytes - (0 if self._is_kept else stop - start)
        return held if self._is_taken else 0

    def take(self) -> None:
        if self._is_taken:
            return
        # Set the flag first, so that `free` returns the pages if taking more pages fails.
        self._is_taken = True
        for start, end in self._rooms:
            # The system provides new pages for the rest of the range, at the first access.
            missing = POOL.lend(start, end, self._leases)
            if missing < end and _mprotect(missing, end - missing, _PROT_READ_WRITE) != 0:
                error = ctypes.get_errno()
                self.free()
                raise MemoryError(f"mprotect: {os.strerror(error)}")

    def renew(self) -> None:
        self._is_kept = False
        start, stop = self._own
        # Drop copies of pages, so that the next access reads the shard's file again.
        mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Take the pages back before `_forbid`, which frees all pages that are left in the
            # range.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # A read of the freed buffer ends the process instead of silently returning zeros.
        for start, end in self._rooms:
            mapped_files.drop_pages(start, end - start)
            _mprotect(start, end - start, _PROT_NONE)

    def snapshot(self) -> None:
        if self._is_taken:
            own_pages(self._own_values)
            self._is_kept = True


# ---------------------------------------------------------------- system calls

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4


def _move_pages(source: int, place: int, nbytes: int) -> bool:
    """Move pages from address ``source`` to ``place``, and return whether the move succeeded.

    Afterwards the range at ``source`` reads as zeros and has no memory.
    """
    # Fails on Linux before 5.7 (no DONTUNMAP), and if the process has too many mappings.
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_mremap(source, nbytes, nbytes, flags, place) == place)


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mremap = mapped_files.c_function("mremap", _address, _address, _size, _size, _int, _address)
_mprotect = mapped_files.c_function("mprotect", _int, _address, _size, _int)
