"""``BufferMemory``: memory of an unsharded buffer, which is taken and given back each time.

The allocator's for small buffers and on accelerators, ``PooledBuffer`` for large ones on a CPU. A
transport may have kinds of its own, which need fewer copies.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor


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
