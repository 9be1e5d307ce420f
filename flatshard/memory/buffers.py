"""Memory of unsharded buffers (``BufferMemory``, ``PagePool``) and of results (``BufferCache``).

Unsharding a unit takes the memory of its unsharded buffers (``BufferMemory``), and resharding gives
the memory back. Small buffers and buffers on accelerators use torch's allocator. Large buffers on a
CPU are ``PooledBuffer``s. A transport may define further subclasses that need fewer copies.

[Note: pages]
``PagePool`` keeps the memory pages of a unit's unsharded buffer for the next unit. New memory costs
a page fault for every few kilobytes, and the page faults take longer than filling the memory. The
address of a buffer must never change, because autograd holds views of the buffer. So ``mremap``
moves pages to the buffer's address and away again, in a tenth of the time of page faults. Pages are
moved in chunks. While a chunk is idle, its pages lie at the chunk's own address, and no other code
reads them. The pool grows to the largest number of chunks that were lent at the same time. If pages
cannot be moved (another operating system, too many mappings), a buffer gets new pages by page
faults.

A ``BufferCache`` reuses the memory of a result once no other code refers to the result. Without the
cache, glibc returns the memory of a tensor of at least ``GLIBC_LIMIT_BYTES`` to the operating
system, and the next tensor costs page faults. The allocators of accelerators cache memory
themselves.
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
from flatshard.plan.layout import PAGED_BYTES

_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]

GLIBC_LIMIT_BYTES = 32 << 20
"""glibc maps each tensor of at least this size separately, and unmaps it when it is freed."""

# Size of a chunk. Larger chunks are moved with fewer calls (15 us each), but waste more memory: a
# buffer's last chunk is rarely used in full.
_CHUNK_BYTES = 1 << 20
# Maximum number of chunks. The pool must not use up the mappings of the process: each chunk in a
# buffer is a separate mapping, and Linux allows a process about 65,000 mappings.
_MAX_CHUNKS = 1 << 13


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one buffer. The buffer keeps its storage object for life.

    Views of the buffer therefore stay valid from one unshard to the next.
    """

    # The buffer, (numel,). It may be used only between ``take`` and ``free``.
    buffer: Tensor
    # This rank's shard, (shard_numel,), initially zeros, if the shard's memory is mapped into the
    # buffer, so that the shard need not be copied. None: the shard has separate memory.
    shard: Tensor | None = None
    # Whether the shards of all ranks are mapped into the buffer. Then keeping the unit unsharded
    # saves no work.
    shows_shards = False

    @property
    def held_bytes(self) -> int:
        """Bytes that the buffer holds now in addition to the shards."""
        return 0

    def take(self) -> None:
        """Allocate the memory, unless the buffer has memory already.

        The values are undefined, except those of a mapped shard.
        """

    def renew(self) -> None:
        """Called before the buffer is filled again with new values."""

    def free(self) -> None:
        """Free the memory. A second call does nothing."""

    def snapshot(self) -> None:
        """Keep the current values until ``free``, even if mapped shards are written."""


class ShardItself(BufferMemory):
    """An unsharded buffer that is also the shard, because one rank holds all parameters."""

    def __init__(self, shard: Tensor) -> None:
        self.buffer = shard


class AllocatedBuffer(BufferMemory):
    """An unsharded buffer from the device's allocator."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        return self.buffer.untyped_storage().nbytes()

    def take(self) -> None:
        storage = self.buffer.untyped_storage()
        # Check the size first: resizing a storage to its present size would allocate and copy.
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    def free(self) -> None:
        # Resize the storage instead of deleting it: views that autograd saved must refer to the
        # same storage after the next unshard.
        self.buffer.untyped_storage().resize_(0)


def own_pages(values: Tensor) -> None:
    """Copy the pages of a private file mapping, so that later writes do not change ``values``."""
    touched = values.detach()[:: mmap.PAGESIZE // values.element_size()]
    # Write one element of each page: on a write, the system gives this process its own copy of the
    # page.
    touched.copy_(touched.clone())


class PageLease(NamedTuple):
    chunk: int  # address of the chunk
    # Address of the buffer range to which the first ``nbytes`` of the chunk's pages are lent.
    place: int
    nbytes: int


class PagePool:
    """A pool of chunks that are lent to buffers; see [Note: pages]."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        # Addresses of idle chunks. Finalizers, which may run between any two operations, also
        # change this list. Therefore each access is a single list operation.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages to the address range from ``place`` to ``end``.

        New leases are appended to ``leases``. Return the first address that got no page, or
        ``end``.
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
            return self._idle.pop()  # the chunk that was returned last, because it has pages
        if len(self._chunks) < _MAX_CHUNKS:
            with contextlib.suppress(OSError):
                self._chunks.append(mapped_files.reserve_range(_CHUNK_BYTES))
                return mapped_files.address_of(self._chunks[-1])
        return None

    def take_back(self, leases: list[PageLease]) -> None:
        """Move pages back to their chunks, and empty ``leases``."""
        # Return chunks in reverse order, so that the next buffer gets them in the same order.
        while leases:
            chunk, place, nbytes = leases.pop()
            if not mapped_files.move_pages(place, chunk, nbytes):
                mapped_files.drop_pages(place, nbytes)
            self._idle.append(chunk)

    def forget(self, leases: list[PageLease]) -> None:
        """Take chunks back without their pages, because the buffer's addresses were unmapped."""
        while leases:
            # Insert at the front, because chunks are lent from the back, and chunks that still have
            # pages should be lent first.
            self._idle.insert(0, leases.pop().chunk)

    def give_back(self) -> None:
        """Give the pages of idle chunks back to the operating system."""
        for chunk in list(self._idle):
            mapped_files.drop_pages(chunk, _CHUNK_BYTES)


POOL = PagePool()  # the pool of this process


class PooledBuffer(BufferMemory):
    """An unsharded buffer with pages from the pool; this rank's shard may be mapped into it."""

    # Over sockets an all-gather would copy this rank's shard into the buffer. To save the copy, the
    # file of a large shard is mapped into the buffer. The mapping is private, so writes of a module
    # to its unsharded parameters do not reach the shard, and are dropped by reshard.

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        own: range = range(0),
        target: OffloadTarget = DEVICE,
    ) -> None:
        """Reserve the addresses of the buffer.

        Args:
            numel: number of elements.
            dtype: dtype of the elements.
            own: range of this rank's shard in the buffer, to which a new file is mapped. Empty: no
                file.
            target: offload target in which the file is created.

        Raises:
            OSError: no addresses are left, or no file can be made.
            OffloadError: the file's disk is full.
        """
        nbytes = numel * dtype.itemsize
        everything = mapped_files.reserve_range(nbytes)
        self.buffer = torch.frombuffer(everything, dtype=dtype)
        address = self.buffer.data_ptr()
        end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # ``_own``: address range of the shard. ``_rooms``: the address ranges before and after it,
        # whose pages come from the pool.
        start, stop = (address + at * dtype.itemsize for at in (own.start, own.stop))
        self._own, self._rooms = (start, stop), [(address, start), (stop, end)]
        self._own_values = self.buffer[own.start : own.stop]
        if own:
            self.shard = _shown_twice(start, stop - start, dtype, target)
        self._leases: list[PageLease] = []
        self._is_taken = self._is_kept = False
        self._forbid()
        # Do not run the finalizer when Python exits: the end of the process frees all memory.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        if not self._is_taken:
            return 0
        start, stop = self._own
        return self.buffer.nbytes - (0 if self._is_kept else stop - start)

    def take(self) -> None:
        """Take pages from the pool. Raises ``MemoryError`` if the process has too many mappings."""
        if self._is_taken:
            return
        # Set this flag before taking pages: if taking pages fails, ``free`` must return the pages
        # that were taken so far.
        self._is_taken = True
        try:
            for start, end in self._rooms:
                # If the pool has too few pages, the system provides new pages at the first access.
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
            # Drop this process's private pages, so that the next access reads the file again.
            mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Return the pages first, because ``_forbid`` drops all pages of the range.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # Let a read of the freed buffer end the process. Without this protection the read would
        # silently return zeros for parameters.
        for start, end in self._rooms:
            if start < end:
                mapped_files.drop_pages(start, end - start)
                mapped_files.forbid(start, end - start)

    def snapshot(self) -> None:
        if self._is_taken:
            own_pages(self._own_values)
            self._is_kept = True


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> BufferMemory:
    """Make the memory of an unsharded buffer, ``(numel,)``, without mapped shards."""
    # For small buffers the allocator is as fast as the pool.
    is_paged = mapped_files.CAN_MAP and numel * dtype.itemsize >= PAGED_BYTES
    if device.type == "cpu" and is_paged:
        # If no addresses are left, fall back to the allocator, which may have free memory.
        with contextlib.suppress(OSError):
            return PooledBuffer(numel, dtype)
    return AllocatedBuffer(numel, dtype, device)


def fills_pages(nbytes: int) -> bool:
    """Whether mapping shards of ``nbytes`` next to each other is possible and saves time."""
    # All ranks must get the same answer. They do if they run the same operating system.
    return mapped_files.CAN_MAP and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0


def _shown_twice(place: int, nbytes: int, dtype: torch.dtype, target: OffloadTarget) -> Tensor:
    """Make a file, map it privately at address ``place``, and return the file's own memory."""
    number, found = target.create_mapped(nbytes)
    try:
        mapped_files.map_at(number, place, nbytes, private=True)
    finally:
        os.close(number)
    return torch.frombuffer(found, dtype=dtype)


# ---------------------------------------------------------------- results


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the total bytes of the storages of ``tensors``. A shared storage counts once."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def prepare_allocator() -> None:
    """Make the CPU's allocator keep the memory of a step for the next step."""
    # glibc's malloc returns freed blocks above a threshold to the operating system. When a block of
    # up to 32 MiB is freed, malloc raises the threshold to the size of the block. In training,
    # large blocks are allocated in every step, so raise the threshold now by freeing one such
    # block. This has no effect if the user sets the threshold (MALLOC_TRIM_THRESHOLD_) or uses
    # another allocator.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Returns 1-D tensors, and reuses the memory of the last tensor once it is unused.

    The cache keeps at most one tensor.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._new = new
        self._kept: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, ``(numel,)``."""
        kept = self._kept
        if kept is not None:
            fits = kept.numel() == numel and kept.dtype == dtype and kept.device == device
            if fits and _is_unused(kept):
                return kept.detach()  # an alias; the alias counts as a use of the storage
        self.give_back()
        if self._new is not None:
            new, is_worth_it = self._new(numel, dtype), True
        else:
            new = torch.empty(numel, dtype=dtype, device=device)
            # Do not cache smaller tensors: the allocator already caches the memory of smaller
            # tensors, and can lend this memory to other code in between.
            is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free the kept tensor, unless other code still uses it."""
        if self._kept is not None and _is_unused(self._kept):
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """Return the number of references to a tensor's storage, including the one of this call."""
    return int(_use_count(tensor.untyped_storage()._cdata))


_ALONE = num_uses(torch.empty(1))


def _is_unused(kept: Tensor) -> bool:
    return num_uses(kept) <= _ALONE
