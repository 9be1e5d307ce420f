"""``BufferMemory``: what an unsharded buffer lies in, which comes and goes.

ShardItself                for one rank that has everything.
AllocatedBuffer            the allocator's, for small buffers and on accelerators.
ring.PooledBuffer            pages that go from unit to unit, for large ones on a CPU.
mapped_shards.MappedShards the shards themselves, for ranks on one host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class BufferMemory(Protocol):
    """The memory of one buffer, whose address, or storage, is the same for life.

    Attributes:
        buffer: ``(numel,)``; may be used after ``take`` and before ``free``.
    """

    buffer: Tensor

    @property
    def held_bytes(self) -> int:
        """What it takes now beside the shards."""

    def take(self) -> None:
        """Have the memory, unless it is there; what is in it is undefined."""

    def renew(self) -> None:
        """What is in it is stale, and to be filled again."""

    def free(self) -> None:
        """Give the memory back; does nothing the second time."""

    def keep(self) -> None:
        """Let the values stay as they are whatever becomes of the shards, until it is freed."""


class ShardItself:
    """An unsharded buffer that is the shard."""

    held_bytes = 0

    def __init__(self, shard: Tensor) -> None:
        """``shard``: all of the flat parameter."""
        self.buffer = shard

    def take(self) -> None:
        """It is there."""

    def renew(self) -> None:
        """It is never stale."""

    def free(self) -> None:
        """It stays there."""

    def keep(self) -> None:
        """Whoever writes the shard writes the parameters."""


class AllocatedBuffer:
    """An unsharded buffer of the device's allocator, for small ones and on accelerators."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate ``(numel,)`` elements."""
        self.buffer = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        """What it takes now."""
        return self.buffer.untyped_storage().nbytes()

    def take(self) -> None:
        """Have the memory, unless it is there."""
        storage = self.buffer.untyped_storage()
        # To resize to the same size is a new allocation and a copy.
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    def renew(self) -> None:
        """It can be overwritten."""

    def free(self) -> None:
        """Give the memory back."""
        self.buffer.untyped_storage().resize_(0)

    def keep(self) -> None:
        """It is a copy."""


def storage_bytes(tensors: Iterable[object]) -> int:
    """Bytes of memory behind the tensors among them; shared memory counts once."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
