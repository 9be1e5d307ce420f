"""Memory of buffers: ``BufferMemory`` (unsharded ones), ``PagePool``, ``BufferCache`` (results).

Each unshard takes the memory of an unsharded buffer (``BufferMemory``), and each reshard gives the
memory back. Small buffers and buffers on accelerators use the allocator. Large buffers on a CPU are
``PooledBuffer``s. A transport may define further kinds that need fewer copies.

[Note: pages]
``PagePool`` holds pages that the unsharded parameters of one unit give back and those of the next
unit take. New memory costs a page fault for every few kilobytes, and the page faults take longer
than filling the memory. A buffer's addresses stay the same for life, since autograd holds views of
the buffer. So ``mremap`` moves pages to these addresses and away, in a tenth of the time. Pages
move in chunks. While a chunk is idle, its pages lie at addresses that nobody reads. The pool grows
to the largest number of chunks that were leased at the same time. If pages cannot be moved (another
system, too many mappings), a buffer gets new pages by page faults.

A ``BufferCache`` reuses the memory of a result once nobody else refers to the result. glibc returns
the memory of a tensor of ``GLIBC_LIMIT_BYTES`` or more to the operating system, so the next tensor
costs a page fault for every few kilobytes. The allocators of accelerators cache memory themselves.
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

# Moving a chunk takes 15 us. The unused rest of a buffer's last chunk is idle while the buffer has
# the chunk.
_CHUNK_BYTES = 1 << 20
# Each chunk in a buffer is a separate mapping, and a process may have about 65,000 mappings.
_MAX_CHUNKS = 1 << 13


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one buffer; the address or the storage stays the same for life."""

    # The buffer, (numel,). It may be used only between ``take`` and ``free``.
    buffer: Tensor
    # This rank's shard, (shard_numel,), initially zeros, which the buffer shows without a copy.
    # None: the shard lies outside of the buffer.
    shard: Tensor | None = None
    # Whether the buffer shows the shards of all ranks without a copy. Then keeping the buffer
    # unsharded saves no work.
    shows_shards = False

    @property
    def held_bytes(self) -> int:
        """Bytes that the buffer holds now in addition to the shards."""
        return 0

    def take(self) -> None:
        """Get the memory, unless taken already. Contents are undefined, except for the shard."""

    def renew(self) -> None:
        """Called when the contents are stale, before the buffer is filled again."""

    def free(self) -> None:
        """Give the memory back. A second call does nothing."""

    def snapshot(self) -> None:
        """Keep the current values until ``free``, even if shards are written meanwhile."""


class ShardItself(BufferMemory):
    """An unsharded buffer that is also the shard: always in memory, and never stale."""

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
        # Resizing a storage to its present size would allocate and copy.
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    def free(self) -> None:
        # Resize the storage instead of dropping it: views that autograd saved must find the same
        # storage again.
        self.buffer.untyped_storage().resize_(0)


def own_pages(values: Tensor) -> None:
    """Turn whole pages of a private file mapping into a copy of this process."""
    touched = values.detach()[:: mmap.PAGESIZE // values.element_size()]
    touched.copy_(touched.clone())  # a write gives this process its own copy of the page


class PageLease(NamedTuple):
    chunk: int  # address of the chunk
    # Address of the buffer range to which the first ``nbytes`` of the chunk's pages are lent.
    place: int
    nbytes: int


class PagePool:
    """A pool of chunks that are lent to buffers."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        # Finalizers, which may run at any place, also append here. Therefore each access is a
        # single operation.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages to a reserved range; returns the first address without a page, or ``end``."""
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
            return self._idle.pop()  # the chunk that came back last, because it has pages
        if len(self._chunks) < _MAX_CHUNKS:
            with contextlib.suppress(OSError):
                self._chunks.append(mapped_files.reserve_range(_CHUNK_BYTES))
                return mapped_files.address_of(self._chunks[-1])
        return None

    def take_back(self, leases: list[PageLease]) -> None:
        """Move pages back to their chunks; empties ``leases``."""
        # In reverse order, so that the next buffer gets the chunks in the same order.
        while leases:
            chunk, place, nbytes = leases.pop()
            if not mapped_files.move_pages(place, chunk, nbytes):
                mapped_files.drop_pages(place, nbytes)
            self._idle.append(chunk)

    def forget(self, leases: list[PageLease]) -> None:
        """Take chunks back without pages: the addresses of the chunks' buffer are gone."""
        while leases:
            # Insert at the front: chunks that still have pages are lent first, from the back.
            self._idle.insert(0, leases.pop().chunk)

    def give_back(self) -> None:
        """Give the pages of idle chunks back to the operating system."""
        for chunk in list(self._idle):
            mapped_files.drop_pages(chunk, _CHUNK_BYTES)


POOL = PagePool()  # the pool of this process


class PooledBuffer(BufferMemory):
    """An unsharded buffer with pages of the pool; this rank's part may show the shard's file."""

    # Over sockets an all-gather would copy this rank's shard into the buffer. A large shard is
    # mapped into the buffer instead. The mapping is private: a module's writes to its parameters do
    # not reach the shard, and are dropped when the parameters are resharded.

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        own: range = range(0),
        target: OffloadTarget = DEVICE,
    ) -> None:
        """Reserve the addresses. ``own``: the elements over which to map a new file of ``target``.

        Raises:
            OSError: no addresses are left, or no file can be made.
            OffloadError: the file's disk is full.
        """
        nbytes = numel * dtype.itemsize
        everything = mapped_files.reserve_range(nbytes)
        self.buffer = torch.frombuffer(everything, dtype=dtype)
        address = self.buffer.data_ptr()
        end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # ``_own`` has the addresses that show the shard. ``_rooms`` has the other address ranges,
        # whose pages are taken and given back.
        start, stop = (address + at * dtype.itemsize for at in (own.start, own.stop))
        self._own, self._rooms = (start, stop), [(address, start), (stop, end)]
        self._own_values = self.buffer[own.start : own.stop]
        if own:
            self.shard = _shown_twice(start, stop - start, dtype, target)
        self._leases: list[PageLease] = []
        self._is_taken = self._is_kept = False
        self._forbid()
        # The finalizer need not run at the end of the process, when all memory is freed anyway.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        if not self._is_taken:
            return 0
        start, stop = self._own
        return self.buffer.nbytes - (0 if self._is_kept else stop - start)

    def take(self) -> None:
        """See ``BufferMemory``. Raises ``MemoryError`` if the process has too many mappings."""
        if self._is_taken:
            return
        # Set before leasing, because ``free`` must undo leases after a failure.
        self._is_taken = True
        try:
            for start, end in self._rooms:
                # If the pool has too few pages, page faults provide the rest.
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
            # Drop private pages of the range. The next access reads the file again.
            mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Move pages out before the range is closed: ``drop_pages`` would discard them.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # Without this protection a read would silently return zeros for parameters, and that would
        # be worse than ending the process.
        for start, end in self._rooms:
            if start < end:
                mapped_files.drop_pages(start, end - start)
                mapped_files.forbid(start, end - start)

    def snapshot(self) -> None:
        if self._is_taken:
            own_pages(self._own_values)
            self._is_kept = True


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> BufferMemory:
    """Memory for an unsharded buffer, ``(numel,)``, that is filled by copies."""
    # For small buffers the allocator is as fast as the pool.
    is_paged = mapped_files.CAN_MAP and numel * dtype.itemsize >= PAGED_BYTES
    if device.type == "cpu" and is_paged:
        # No addresses are left, but the allocator may have free memory.
        with contextlib.suppress(OSError):
            return PooledBuffer(numel, dtype)
    return AllocatedBuffer(numel, dtype, device)


def fills_pages(nbytes: int) -> bool:
    """Whether files of ``nbytes`` can be mapped side by side, and are large enough to gain."""
    # All ranks get the same answer, as long as they run the same kind of system.
    return mapped_files.CAN_MAP and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0


def _shown_twice(place: int, nbytes: int, dtype: torch.dtype, target: OffloadTarget) -> Tensor:
    """Memory of a new file that is also mapped privately at address ``place``."""
    number, found = target.create_mapped(nbytes)
    try:
        mapped_files.map_at(number, place, nbytes, private=True)
    finally:
        os.close(number)
    return torch.frombuffer(found, dtype=dtype)


# ---------------------------------------------------------------- results


def storage_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages behind the tensors in ``tensors``; a shared storage counts once."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def prepare_allocator() -> None:
    """Make the CPU's allocator keep the memory of a step for the next step."""
    # glibc's malloc returns freed memory to the system above a threshold. When a mapped block of up
    # to 32 MiB is freed, malloc raises the threshold to the size of the block, because more blocks
    # of that size may follow. In training such blocks follow in every step, so raise the threshold
    # now. If users set the thresholds (MALLOC_TRIM_THRESHOLD_) or use another allocator, this line
    # changes nothing.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Hands out 1-D tensors of one kind, and reuses memory that is not used any more.

    Keeps at most one tensor. ``new`` makes tensors; None: tensors are made on the requested device.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._new = new
        self._kept: Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, ``(numel,)``."""
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
            # The allocator caches smaller tensors, and can use the memory for other purposes
            # meanwhile.
            is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free the kept tensor, unless somebody still uses it."""
        if self._kept is not None and _is_unused(self._kept):
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """How many references a tensor's storage has, including the reference of this call."""
    return int(_use_count(tensor.untyped_storage()._cdata))


_ALONE = num_uses(torch.empty(1))


def _is_unused(kept: Tensor) -> bool:
    return num_uses(kept) <= _ALONE
