"""Memory of buffers: ``BufferMemory`` (unsharded ones), ``PagePool``, ``BufferCache`` (results).

The memory of an unsharded buffer (``BufferMemory``) is taken and given back each time: the
allocator's for small buffers and on accelerators, ``PooledBuffer`` for large ones on a CPU. A
transport may have kinds of its own, which need fewer copies.

[Note: pages]
``PagePool`` holds pages that one unit's unsharded parameters give back and the next unit's take.
New memory costs a page fault for every few kilobytes, which takes longer than filling the memory. A
buffer's addresses stay the same for life, since autograd holds views of the buffer. So ``mremap``
moves pages to these addresses and away, in a tenth of the time. Pages move in chunks; each chunk
has addresses of its own that nobody reads. The pool grows to as many chunks as were leased at once.
Where pages cannot be moved (another system, too many mappings), a buffer gets new pages, by faults.

A ``BufferCache`` reuses the memory of a result once nobody else refers to the result. glibc returns
the memory of a tensor of ``GLIBC_LIMIT_BYTES`` or more to the operating system, and the next one
costs a page fault for every few kilobytes. Accelerators' allocators keep memory themselves.
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
"""From here on glibc maps tensors one by one, and unmaps them when they are freed."""

# To move one takes 15 us. What a buffer does not fill of its last one lies idle meanwhile.
_CHUNK_BYTES = 1 << 20
# Chunks in buffers are mappings of their own, of which a process has some 65,000.
_MAX_CHUNKS = 1 << 13


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one buffer, whose address, or storage, is the same for life."""

    # (numel,); may be used after ``take`` and before ``free``.
    buffer: Tensor
    # This rank's part, (shard_numel,), zeros at first, which the buffer shows without a copy; None
    # where the shard lies elsewhere.
    shard: Tensor | None = None
    # Whether it shows every rank's shard so; to keep it saves nothing then.
    shows_shards = False

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds now beside the shards."""
        return 0

    def take(self) -> None:
        """Have the memory, unless it is there; what is in it is undefined, but for the shard."""

    def renew(self) -> None:
        """What is in it is stale, and to be filled again."""

    def free(self) -> None:
        """Give the memory back; does nothing the second time."""

    def snapshot(self) -> None:
        """Keep the values as they are, whatever is written to the shards, until ``free``."""


class ShardItself(BufferMemory):
    """An unsharded buffer that is the shard: always there, and never stale."""

    def __init__(self, shard: Tensor) -> None:
        self.buffer = shard


class AllocatedBuffer(BufferMemory):
    """An unsharded buffer of the device's allocator."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        return self.buffer.untyped_storage().nbytes()

    def take(self) -> None:
        storage = self.buffer.untyped_storage()
        # To resize to the same size is a new allocation and a copy.
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    def free(self) -> None:
        # Resized, not dropped: views that autograd saved must find the same storage again.
        self.buffer.untyped_storage().resize_(0)


def own_pages(values: Tensor) -> None:
    """Turn whole pages that show a file privately into a copy."""
    touched = values.detach()[:: mmap.PAGESIZE // values.element_size()]
    touched.copy_(touched.clone())  # a write makes the page this process's own


class PageLease(NamedTuple):
    chunk: int  # the address of a chunk
    place: int  # where its pages, or the first ones, are lent to
    nbytes: int


class PagePool:
    """Chunks that are lent to buffers."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        # Appended to by finalizers, too, which may run anywhere: each use is one operation.
        self._idle: list[int] = []

    def lend(self, place: int, end: int, leases: list[PageLease]) -> int:
        """Move pages to a reserved range; returns where it has none, ``end`` if it has all."""
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
            return self._idle.pop()  # what came back last: it has pages
        if len(self._chunks) < _MAX_CHUNKS:
            with contextlib.suppress(OSError):
                self._chunks.append(mapped_files.reserve_range(_CHUNK_BYTES))
                return mapped_files.address_of(self._chunks[-1])
        return None

    def take_back(self, leases: list[PageLease]) -> None:
        """Move pages back to their chunks; empties ``leases``."""
        # In reverse, so that the next buffer gets them in the same order.
        while leases:
            chunk, place, nbytes = leases.pop()
            if not mapped_files.move_pages(place, chunk, nbytes):
                mapped_files.drop_pages(place, nbytes)
            self._idle.append(chunk)

    def forget(self, leases: list[PageLease]) -> None:
        """The addresses of a buffer are gone, and its pages with them: the chunks have none now."""
        while leases:
            # At the front: chunks that still have pages are lent first, from the back.
            self._idle.insert(0, leases.pop().chunk)

    def give_back(self) -> None:
        """Give the pages that no buffer has to the system."""
        for chunk in list(self._idle):
            mapped_files.drop_pages(chunk, _CHUNK_BYTES)


POOL = PagePool()  # this process's


class PooledBuffer(BufferMemory):
    """An unsharded buffer with pages of the pool, and perhaps of a file that is the shard."""

    # Over sockets an all-gather would copy this rank's shard into the buffer, which maps a large
    # one instead: privately, so that what a module writes into its parameters stays out of the
    # shard, and is dropped when they are resharded.

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        own: range = range(0),
        target: OffloadTarget = DEVICE,
    ) -> None:
        """Reserve the addresses. ``own``: the elements to map a new file of ``target`` over.

        Raises:
            OSError: there are no addresses left, or no file is to be had.
            OffloadError: the file's disk is full.
        """
        nbytes = numel * dtype.itemsize
        everything = mapped_files.reserve_range(nbytes)
        self.buffer = torch.frombuffer(everything, dtype=dtype)
        address = self.buffer.data_ptr()
        end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # The addresses that show the shard, and ranges of those whose pages come and go.
        start, stop = (address + at * dtype.itemsize for at in (own.start, own.stop))
        self._own, self._rooms = (start, stop), [(address, start), (stop, end)]
        self._own_values = self.buffer[own.start : own.stop]
        if own:
            self.shard = _shown_twice(start, stop - start, dtype, target)
        self._leases: list[PageLease] = []
        self._is_taken = self._is_kept = False
        self._forbid()
        # Not at the end of the process, which has other worries.
        weakref.finalize(everything, POOL.forget, self._leases).atexit = False

    @property
    def held_bytes(self) -> int:
        if not self._is_taken:
            return 0
        start, stop = self._own
        return self.buffer.nbytes - (0 if self._is_kept else stop - start)

    def take(self) -> None:
        """See ``BufferMemory``; raises ``MemoryError`` if the process has too many mappings."""
        if self._is_taken:
            return
        self._is_taken = True  # first: ``free`` must undo a lease that fails half-way
        try:
            for start, end in self._rooms:
                # Where the pool has too few pages, the rest comes by faults.
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
            # Private pages of the range go; the next access reads the file again.
            mapped_files.drop_pages(start, stop - start)

    def free(self) -> None:
        if self._is_taken:
            self._is_taken = False
            # Pages leave before the range is closed: ``drop_pages`` would discard them.
            POOL.take_back(self._leases)
            self._forbid()
            self.renew()

    def _forbid(self) -> None:
        # To hand out zeros for parameters would be worse than the end of the process.
        for start, end in self._rooms:
            if start < end:
                mapped_files.drop_pages(start, end - start)
                mapped_files.forbid(start, end - start)

    def snapshot(self) -> None:
        if self._is_taken:
            own_pages(self._own_values)
            self._is_kept = True


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> BufferMemory:
    """Memory for an unsharded buffer, ``(numel,)``, to be filled by copies."""
    # The allocator is as good for small ones.
    is_paged = mapped_files.CAN_MAP and numel * dtype.itemsize >= PAGED_BYTES
    if device.type == "cpu" and is_paged:
        with contextlib.suppress(OSError):  # no addresses left: the allocator may have some
            return PooledBuffer(numel, dtype)
    return AllocatedBuffer(numel, dtype, device)


def fills_pages(nbytes: int) -> bool:
    """Whether files of ``nbytes`` can be mapped side by side; smaller ones would gain nothing."""
    # The same on all ranks, as long as they run the same kind of system.
    return mapped_files.CAN_MAP and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0


def _shown_twice(place: int, nbytes: int, dtype: torch.dtype, target: OffloadTarget) -> Tensor:
    """A new file's memory, whose values also show, privately, in a range of addresses."""
    number, found = target.create_mapped(nbytes)
    try:
        mapped_files.map_at(number, place, nbytes, private=True)
    finally:
        os.close(number)
    return torch.frombuffer(found, dtype=dtype)


# ---------------------------------------------------------------- results


def storage_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages behind the tensors in ``tensors``; a shared one counts once."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def prepare_allocator() -> None:
    """Let the CPU's allocator keep the memory of a step for the next one."""
    # glibc's malloc gives freed memory back above a threshold, which it raises, up to 32 MiB, to
    # the size of what was freed, since more of that size may follow. In training it does, in every
    # step. Where users set the thresholds (MALLOC_TRIM_THRESHOLD_), or use another allocator, this
    # changes nothing.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Hands out 1-D tensors of one kind, the same memory again where that is unused.

    Keeps one at most. ``new`` makes tensors; None: on the device asked for.
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
                return kept.detach()  # an alias, which counts as a use
        self.give_back()
        if self._new is not None:
            new, is_worth_it = self._new(numel, dtype), True
        else:
            new = torch.empty(numel, dtype=dtype, device=device)
            # Smaller ones the allocator keeps, and they serve other things meanwhile.
            is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free what is kept, unless somebody else uses it."""
        if self._kept is not None and _is_unused(self._kept):
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """How many tensors and others have a tensor's storage, with this call."""
    return int(_use_count(tensor.untyped_storage()._cdata))


_ALONE = num_uses(torch.empty(1))


def _is_unused(kept: Tensor) -> bool:
    return num_uses(kept) <= _ALONE
