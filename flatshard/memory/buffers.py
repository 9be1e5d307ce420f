"""Memory of buffers: ``BufferMemory`` of an unsharded buffer, ``BufferCache`` of results.

The memory of an unsharded buffer is taken and given back each time: the allocator's for small
buffers and on accelerators, ``PooledBuffer`` for large ones on a CPU. A transport may have kinds of
its own, which need fewer copies.

A cache reuses the memory of a result once nobody else refers to the result. glibc returns the
memory of a tensor of ``GLIBC_LIMIT_BYTES`` or more to the operating system, and the next one costs
a page fault for every few kilobytes. Accelerators' allocators keep memory themselves.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)

GLIBC_LIMIT_BYTES = 32 << 20
"""From here on glibc maps tensors one by one, and unmaps them when they are freed."""


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
        if _use_count is None or not is_worth_it or self._kept is not None:
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free what is kept, unless somebody else uses it."""
        if self._kept is not None and _is_unused(self._kept):
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """How many tensors and others have a tensor's storage, with this call; 0: torch cannot tell."""
    return int(_use_count(tensor.untyped_storage()._cdata)) if _use_count is not None else 0


_ALONE = num_uses(torch.empty(1))


def _is_unused(kept: Tensor) -> bool:
    return num_uses(kept) <= _ALONE
