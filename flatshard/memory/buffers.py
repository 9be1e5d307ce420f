"""Memory of unsharded buffers (``BufferMemory``, ``PagePool``) and of results (``BufferCache``).

A unit's unsharded buffers get memory (a ``BufferMemory``) when the unit is unsharded, and give the
memory back when the unit is resharded. Small buffers, and buffers on accelerators, get their memory
from torch's allocator. Large buffers on a CPU are ``PooledBuffer``s. A transport may define further
subclasses of ``BufferMemory`` that need fewer copies.

[Note: pages]
When a unit is resharded, ``PagePool`` keeps the memory pages of its unsharded buffer for the unit
that is unsharded next. New memory would cost a page fault for every few kilobytes, and the page
faults take longer than filling the memory. The address of a buffer must never change, because
autograd holds views of the buffer. So ``mremap`` moves pages to the buffer's address, and later
away from the address, in a tenth of the time of page faults.

Pages are moved in chunks of equal size, which the pool lends to buffers. While a chunk is idle (not
lent), its pages lie at an address of the pool's own, which no other code reads. The pool grows to
the largest number of chunks that were lent at the same time. If pages cannot be moved (another
operating system, too many mappings), a buffer gets new pages by page faults.

A ``BufferCache`` keeps the memory of a result, such as a reduced gradient, and reuses the memory
once no other code refers to the result. Without the cache, glibc would return the memory of each
freed tensor of at least ``GLIBC_LIMIT_BYTES`` to the operating system, and the next tensor would
cost page faults. On accelerators the cache is not needed, because their allocators cache memory.
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

# Size of a chunk of the page pool. Larger chunks are moved with fewer calls (15 us each), but waste
# more memory: the last chunk of a buffer is rarely used in full.
_CHUNK_BYTES = 1 << 20
# Maximum number of chunks in the page pool. Each chunk in a buffer is a separate mapping. Linux
# allows a process about 65,000 mappings, and the pool must not use up all of them.
_MAX_CHUNKS = 1 << 13


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one unsharded buffer, which is allocated and freed many times.

    The buffer always has the same storage object. So autograd's views of the buffer are valid again
    after the next unshard. In this base class the buffer is the shard of a flat parameter that is
    not sharded, and nothing is allocated or freed.
    """

    # Memory for this rank's shard, (shard_numel,), initially zeros. The same memory is also mapped
    # into the buffer, so an all-gather need not copy this rank's shard. If None, the shard has
    # memory of its own, and an all-gather copies it.
    shard: Tensor | None = None
    # Whether the shards of all ranks are mapped into the buffer. Then an all-gather copies nothing,
    # so the unit need not stay unsharded between forward and backward to save an all-gather.
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
        """Prepare the buffer for new values. Called if the buffer already has memory.

        Undoes ``snapshot``: mapped shards show their current values again.
        """

    def free(self) -> None:
        """Free the memory of the buffer. A second call does nothing."""

    def snapshot(self) -> None:
        """Copy mapped shards, to keep the buffer's values if ranks write to their shards.

        The values are kept until ``renew`` or ``free``.
        """


class AllocatedBuffer(BufferMemory):
    """An unsharded buffer whose memory comes from torch's allocator for the device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device=device))
        self._storage, self._nbytes = self.buffer.untyped_storage(), self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        return self._storage.nbytes()

    def take(self) -> None:
        # Check the size first, because torch would allocate new memory and copy even if the storage
        # has the requested size already.
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        # Resize the storage instead of deleting it: views that autograd saved must refer to the
        # same storage after the next unshard.
        self._storage.resize_(0)


def own_pages(values: Tensor) -> None:
    """Give this process its own copy of ``values``, which lie in a private mapping of a file.

    Later writes to the file then do not change ``values``.
    """
    touched = values.detach()[:: mmap.PAGESIZE // values.element_size()]
    # Write one element of each page: at the first write to a page of a private mapping, the system
    # copies the page for this process.
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

        # Addresses of idle chunks. Finalizers of buffers also change this list, and may run between
        # any two Python operations. Therefore each access to the list is a single operation.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages of idle chunks to the address range from ``place`` to ``end``.

        For each chunk, a lease is appended to ``leases``. If the pool has too few pages, only the
        beginning of the range gets pages. Returns the end of the part that got pages.
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
        # Return the last chunk first: `_find_chunk` takes chunks from the back of the list, so the
        # next buffer gets the chunks in the same order as this buffer.
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


POOL = PagePool()  # the pool of this process


class PooledBuffer(BufferMemory):
    """An unsharded buffer whose memory pages come from ``POOL``.

    The memory of this rank's shard may be mapped into the buffer.
    """

    # With sockets an all-gather would copy this rank's shard into the buffer. To save the copy, the
    # memory of a large shard is a file that is also mapped into the buffer. The mapping in the
    # buffer is private: if a module writes to its unsharded parameters, the writes do not reach the
    # shard, and are dropped when the unit is resharded.

    def __init__(
        self, numel: int, dtype: torch.dtype, own: range = range(0), target: OffloadTarget = DEVICE
    ) -> None:
        """Reserve the addresses of the buffer, and make the file of this rank's shard, if any.

        Args:
            numel: number of elements of the buffer.
            dtype: dtype of the elements.
            own: range of this rank's shard in the buffer, to which a new file is mapped. Empty: no
                file is made, and the shard has memory of its own.
            target: offload target (memory or disk) in which the file is made.
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
        # When the buffer is deleted, tell the pool that the pages are gone. Do not run this
        # finalizer when Python exits, because the end of the process frees all memory.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        if not self._is_taken:
            return 0
        start, stop = self._own
        return self.buffer.nbytes - (0 if self._is_kept else stop - start)

    def take(self) -> None:
        """Take pages from the pool, or new pages if the pool has too few."""
        if self._is_taken:
            return
        # Set this flag before taking pages, because `free` does nothing without the flag: if taking
        # pages fails, `free` must return the pages that were taken so far.
        self._is_taken = True
        try:
            for start, end in self._rooms:
                # The pool may have too few pages. For the rest of the range, allow accesses: at the
                # first access to a page, the system provides a new page.
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
            # Drop this process's own copies of pages of the private mapping, so that the next
            # access reads the shard's file again.
            mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Return the pages to the pool before `_forbid`, which frees all pages that are left in
            # the range.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # Forbid accesses to the freed buffer, so that a read ends the process. Without this
        # protection, the read would silently return zeros instead of parameters.
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
    # Use the page pool only for large buffers. For small buffers, torch's allocator is as fast.
    is_paged = mapped_files.CAN_MAP and numel * dtype.itemsize >= PAGED_BYTES
    if device.type == "cpu" and is_paged:
        # If no addresses are left, fall back to torch's allocator, which may have free memory.
        with contextlib.suppress(OSError):
            return PooledBuffer(numel, dtype)
    return AllocatedBuffer(numel, dtype, device)


def fills_pages(nbytes: int) -> bool:
    """Whether shards of ``nbytes`` each should be mapped next to each other into a buffer.

    A mapping needs whole pages, and is faster than a copy only for large shards.
    """
    # All ranks must get the same result, which is so if they run the same operating system.
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
            # Do not keep smaller tensors: the allocator itself keeps the memory of a freed smaller
            # tensor, and can give the memory to other code in the meantime.
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
    """Return the number of references to a tensor's storage, which all views of the tensor share.

    The number includes the reference made by this function.
    """
    return int(_use_count(tensor.untyped_storage()._cdata))


# The result of `num_uses` for the storage of a single tensor.
_ALONE = num_uses(torch.empty(1))
