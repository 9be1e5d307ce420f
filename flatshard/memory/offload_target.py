"""``OffloadTarget``: where shards, gradients and optimizer state are stored between uses."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatshard.memory import mapped_files
from flatshard.options.extras import extra
from flatshard.options.offload import CPUOffload
from flatshard.plan.layout import PAGE_BYTES
from flatshard.plan.module_tree import unit_text


class OffloadTarget:
    """Memory that stores tensors between uses. This base class leaves tensors on the device.

    Attributes:
        is_device: whether the target is the device itself, so that no tensor is copied.
    """

    is_device = True

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor in the target, ``(numel,)``."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the target; return the tensor itself if it is already there."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor. If the tensor is in the target, the copy is in the target too."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare ``tensors`` for writing. Tensors that are not in the target are ignored."""

    def page_out(self, *tensors: Tensor) -> None:
        """Free memory that ``tensors`` need only while they are used. The values are kept."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve space for later tensors, which ``what`` names in errors. Raises OffloadError."""

    def keep_state_of(self, param: Tensor) -> None:
        """Make optimizers store state with one value per element of ``param`` in the target.

        This method is for plain parameters; sharded parameters have ``ShardSpec.state_target``.
        """

    def create(self, nbytes: int) -> int:
        """Make and open a file of ``nbytes`` zeros to map. Raises OSError or OffloadError."""
        return mapped_files.create(nbytes)

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """Map an open file for reading and writing. Raises OSError."""
        return mapped_files.mapped(number, nbytes)

    def create_mapped(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """Make, open and map a file. Raises OSError or OffloadError."""
        number = self.create(nbytes)
        try:
            return number, self.mapped(number, nbytes)
        except OSError:
            os.close(number)
            raise


class HostMemory(OffloadTarget):
    """Host memory, for units on an accelerator. Pinned memory is copied asynchronously."""

    is_device = False

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def take_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.is_pinned() is self._pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned).copy_(tensor)


DEVICE = OffloadTarget()


@dataclass(frozen=True)
class OffloadTargets:
    """The offload targets of one unit."""

    shard: OffloadTarget = DEVICE
    gradient: OffloadTarget = DEVICE
    # Target of optimizer state with one value per element. None: the device of the shard.
    state: OffloadTarget | None = None
    # Whether the device keeps a copy of the shard for all-gathers.
    keeps_copy: bool = False

    @classmethod
    def find(cls, offload: CPUOffload, device: torch.device) -> OffloadTargets:
        """Return the targets for a user's policy and the device that computes.

        Raises ValueError and NotImplementedError.
        """
        is_apart = device.type != "cpu"
        if not offload.is_on or (not is_apart and offload.path is None):
            return cls()
        if offload.path is None:
            host = HostMemory(pinned=offload.pin_memory)
            return cls(host, host, keeps_copy=not offload.takes_params)
        disk = extra("disk", "CPUOffload(path=...)").DiskMemory(offload.path)
        if offload.takes_params or is_apart:
            return cls(disk, disk, disk, keeps_copy=not offload.takes_params)
        return cls(state=disk)

    def reserve(self, unit: str, nbytes: Iterable[int]) -> None:
        """Reserve space on the disk for a unit's shards and gradients. Raises OffloadError."""
        if self.state is None or self.shard.is_device:
            return
        total = sum((-(-one // PAGE_BYTES) + 2) * PAGE_BYTES for one in nbytes)
        self.state.reserve(total, f"{unit_text(unit)} (shards and gradients)")

    def trim(self) -> None:
        """Return memory that was freed during wrapping to the operating system."""
        if self.state is not None:
            mapped_files.give_back_freed()


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies of shards from the host and of gradients to the host."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Context in which work is queued on the copy stream.

    The work begins after all work that the compute stream has queued so far.
    """
    stream = copy_stream(device)
    # Wait, because the compute stream computes the tensors that are copied.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
