"""Memory of unsharded buffers (``BufferMemory``, ``PagePool``) and of results (``BufferCache``).

A unit's unsharded buffers have memory (a ``BufferMemory``) from unshard to reshard. Small buffers,
and buffers on accelerators, get it from torch's allocator. Large buffers on a CPU are
``PooledBuffer``s. A transport may define further subclasses that need fewer copies.

[Note: pages]
When a unit is resharded, ``PagePool`` keeps the memory pages of its unsharded buffer for the unit
that is unsharded next. New memory would cost page faults, which take longer than filling the
memory. The address of a buffer must never change, because autograd holds views of the buffer. So
``mremap`` moves pages to and from the buffer's address, in a tenth of the time of page faults.

Pages are moved in chunks of equal size, which the pool lends to buffers. The pages of an idle (not
lent) chunk lie at the pool's own address. The pool grows to the largest number of chunks that were
lent at the same time. If pages cannot be moved (another operating system, too many mappings), a
buffer gets new pages by page faults.

A ``BufferCache`` keeps the memory of a result, such as a reduced gradient, and reuses the memory
once no other code refers to the result. Without the cache, glibc would return each freed tensor of
at least ``GLIBC_LIMIT_BYTES`` to the operating system, and the next tensor would cost page faults.
Allocators of accelerators cache memory themselves.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.memory import mapped_files
from flatshard.memory.offload_target import DEVICE, OffloadTarget
from flatshard.units.layout import PAGED_BYTES

_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]

GLIBC_LIMIT_BYTES = 32 << 20
"""glibc maps each tensor of at least this size separately, and unmaps it when it is freed."""

# Larger chunks are moved with fewer calls (15 us each), but waste more memory: the last chunk of a
# buffer is rarely used in full.
_CHUNK_BYTES = 1 << 20
# Each lent chunk is a separate mapping, and Linux allows a process about 65,000 mappings.
_MAX_CHUNKS = 1 << 13


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one unsharded buffer, which is allocated and freed many times.

    The buffer's storage object never changes, so autograd's views are valid again after the next
    unshard. This base class never allocates or frees: its buffer is the shard of a flat parameter
    that is not sharded.
    """

    # Memory for this rank's shard, (shard_numel,), which is also mapped into the buffer, so that an
    # all-gather need not copy the shard. None: the shard has memory of its own.
    shard: Tensor | None = None
    # Whether the shards of all ranks are mapped into the buffer. Then an all-gather copies nothing,
    # so the unit need not stay unsharded between forward and backward.
    shows_shards = False

    def __init__(self, buffer: Tensor) -> None:
        # The buffer, (numel,). It may be used only between ``take`` and ``free``.
        self.buffer = buffer

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the buffer occupies now. Mapped shards are not counted."""
        return 0

    def take(self) -> None:
        """Allocate the memory, unless the buffer has memory already.

        The values of the buffer are undefined, except in the range of a mapped shard.
        """

    def renew(self) -> None:
        """Undo ``snapshot``: mapped shards show their current values again."""

    def free(self) -> None:
        """Free the memory of the buffer. A second call does nothing."""

    def snapshot(self) -> None:
        """Until ``renew`` or ``free``, keep the buffer's values if ranks write to their shards."""


class AllocatedBuffer(BufferMemory):
    """An unsharded buffer whose memory comes from torch's allocator for the device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device=device))
        self._storage, self._nbytes = self.buffer.untyped_storage(), self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        return self._storage.nbytes()

    def take(self) -> None:
        # torch would allocate and copy even if the storage has the requested size already.
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        # Do not delete the storage: autograd's views must refer to it after the next unshard.
        self._storage.resize_(0)


def own_pages(values: Tensor) -> None:
    """Keep ``values``, which lie in a private mapping, when others write to the mapped file."""
    touched = values.detach()[:: mmap.PAGESIZE // values.element_size()]
    # At the first write to a page of a private mapping, the system copies the page.
    touched.copy_(touched.clone())


class PageLease(NamedTuple):
    chunk: int  # the chunk's own address, at which its pages lie while the chunk is idle

    # Address in a buffer to which the first ``nbytes`` of the chunk's pages were moved.
    place: int
    nbytes: int


class PagePool:
    """A pool of chunks of memory pages that are lent to buffers; see [Note: pages]."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []  # the address ranges of all chunks

        # Addresses of idle chunks. Finalizers of buffers change this list between any two Python
        # operations. Therefore each access to the list is a single operation.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages of idle chunks to the address range from ``place`` to ``end``.

        Appends a lease for each chunk. Returns the end of the part that got pages, which is less
        than ``end`` if the pool has too few.
        """
        while place < end and (chunk := self._find_chunk()) is not None:
            nbytes = min(end - place, _CHUNK_BYTES)
            if not mapped_files.move_pages(chunk, place, nbytes):
                self._idle.append(chunk)
                break
            leases.append(PageLease(chunk, place, nbytes))
            place += nbytes
        return place

    def _find_chunk(self) -> int | None:
        with contextlib.suppress(IndexError):
            return self._idle.pop()  # from the back, because chunks without pages lie at the front
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
            if not mapped_files.move_pages(place, chunk, nbytes):
                mapped_files.drop_pages(place, nbytes)
            self._idle.append(chunk)

    def forget(self, leases: list[PageLease]) -> None:
        """Take back chunks whose pages are lost, and empty ``leases``.

        Called when a buffer was deleted: the system has freed the pages together with the buffer's
        address range.
        """
        while leases:
            # Insert chunks without pages at the front of the list. `lend` takes chunks from the
            # back, so chunks that still have pages are lent first.
            self._idle.insert(0, leases.pop().chunk)

    def give_back(self) -> None:
        """Free the pages of idle chunks, so that other programs can use the memory."""
        for chunk in list(self._idle):
            mapped_files.drop_pages(chunk, _CHUNK_BYTES)


POOL = PagePool()


class PooledBuffer(BufferMemory):
    """An unsharded buffer whose memory pages come from ``POOL``."""

    # To save an all-gather's copy of this rank's shard, the memory of a large shard is a file that
    # is also mapped into the buffer. That mapping is private: if a module writes to its unsharded
    # parameters, the writes do not reach the shard, and are dropped when the unit is resharded.

    def __init__(
        self, numel: int, dtype: torch.dtype, own: range = range(0), target: OffloadTarget = DEVICE
    ) -> None:
        """Reserve the buffer's addresses, and make a file for this rank's shard in ``target``.

        ``own``: range of the shard in the buffer. Empty: the shard has memory of its own.
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
            self.shard = _shown_twice(start, stop - start, dtype, target)
        self._leases: list[PageLease] = []
        self._is_taken = self._is_kept = False
        self._forbid()
        # Not when Python exits, because the end of the process frees all memory.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        if not self._is_taken:
            return 0
        start, stop = self._own
        return self.buffer.nbytes - (0 if self._is_kept else stop - start)

    def take(self) -> None:
        if self._is_taken:
            return
        # Set the flag first, without which `free` would not return pages if taking more fails.
        self._is_taken = True
        try:
            for start, end in self._rooms:
                # The system provides new pages for the rest of the range, at the first access.
                missing = POOL.lend(start, end, self._leases)
                if missing < end:
                    mapped_files.allow(missing, end - missing)
        except MemoryError:
            self.free()
            raise

    def renew(self) -> None:
        self._is_kept = False
        start, stop = self._own
        if start < stop:
            # Drop copies of pages, so that the next access reads the shard's file again.
            mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Before `_forbid`, which frees all pages that are left in the range.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # A read of the freed buffer ends the process instead of silently returning zeros.
        for start, end in self._rooms:
            if start < end:
                mapped_files.drop_pages(start, end - start)
                mapped_files.forbid(start, end - start)

    def snapshot(self) -> None:
        if self._is_taken:
            own_pages(self._own_values)
            self._is_kept = True


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> BufferMemory:
    """Make the memory of an unsharded buffer, ``(numel,)``, into which no shard is mapped."""
    # For small buffers, torch's allocator is as fast as the page pool.
    is_paged = mapped_files.CAN_MAP and numel * dtype.itemsize >= PAGED_BYTES
    if device.type == "cpu" and is_paged:
        # If no addresses are left, torch's allocator may have free memory.
        with contextlib.suppress(OSError):
            return PooledBuffer(numel, dtype)
    return AllocatedBuffer(numel, dtype, device)


def fills_pages(nbytes: int) -> bool:
    """Whether shards of ``nbytes`` each should be mapped next to each other into a buffer.

    Ranks on the same operating system get the same result.
    """
    return mapped_files.CAN_MAP and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0


def _shown_twice(place: int, nbytes: int, dtype: torch.dtype, target: OffloadTarget) -> Tensor:
    """Make a file of ``nbytes``, map it twice, and return a tensor with the first mapping.

    The first mapping is shared: writes to the returned tensor reach the file. The second mapping,
    at address ``place``, is private: it shows the file, but writes do not reach the file.
    """
    number, found = target.create_mapped(nbytes)
    try:
        mapped_files.map_at(number, place, nbytes, private=True)
    finally:
        os.close(number)
    return torch.frombuffer(found, dtype=dtype)


# ---------------------------------------------------------------- results


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the total size in bytes of the storages of ``tensors``.

    Objects that are not tensors are ignored. A storage that several tensors share counts once.
    """
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def prepare_allocator() -> None:
    """Make the C library's allocator keep freed memory of a training step for the next step."""
    # glibc's malloc returns freed blocks above a threshold to the operating system. When a block of
    # up to 32 MiB is freed, malloc raises the threshold to the size of the block. In training,
    # large blocks are allocated in every step. So raise the threshold to the maximum now, by
    # allocating and freeing a block of this size. This has no effect if the user sets the threshold
    # (MALLOC_TRIM_THRESHOLD_) or uses another allocator.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Makes 1-D tensors for results, and reuses the memory of a tensor that is no longer used.

    The cache keeps at most one tensor.

    ``new``: function that allocates a tensor from a number of elements and a dtype. None: tensors
    come from torch's allocator, and only large CPU tensors are kept.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._new = new
        self._kept: Tensor | None = None  # the tensor whose memory the next `take` may reuse

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, ``(numel,)``, in the kept memory if possible."""
        kept = self._kept
        if kept is not None:
            fits = kept.numel() == numel and kept.dtype == dtype and kept.device == device
            if fits and num_uses(kept) <= _ALONE:
                return kept.detach()  # an alias; while it lives, the storage counts as used
            self.give_back()
        if self._new is not None:
            new, is_worth_it = self._new(numel, dtype), True
        else:
            new = torch.empty(numel, dtype=dtype, device=device)
            # The allocator itself keeps the memory of a freed smaller tensor.
            is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free the kept tensor, unless other code still uses its memory."""
        if self._kept is not None and num_uses(self._kept) <= _ALONE:
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """Return the number of references to a tensor's storage, including one by this function."""
    return int(_use_count(tensor.untyped_storage()._cdata))


# The result of `num_uses` for the storage of a single tensor.
_ALONE = num_uses(torch.empty(1))
