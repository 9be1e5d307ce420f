"""``OffloadTarget``: the device, host memory or disk that stores shards, gradients and state."""

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
    """Memory that stores tensors between uses. This base class does not move tensors.

    Attributes:
        is_device: whether the target is the device itself, so no tensor is copied.
    """

    is_device = True

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new tensor in the target, ``(numel,)``; the values are undefined."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the target; returns the tensor itself if it is already there."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor; the copy is in the target if the tensor is."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare the target's tensors among ``tensors`` for writing, in one call."""

    def page_out(self, *tensors: Tensor) -> None:
        """Free memory that tensors do not need until their next use; the values stay."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve room for future tensors; ``what`` names them in errors. Raises OffloadError."""

    def keep_state_of(self, param: Tensor) -> None:
        """Let the target store the per-element state of a plain parameter.

        For sharded parameters the spec names the target.
        """

    def create(self, nbytes: int) -> int:
        """An open file of ``nbytes`` zeros that can be mapped; raises OSError or OffloadError."""
        return mapped_files.create(nbytes)

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """A range of addresses that shows an open file, for reading and writing; raises OSError."""
        return mapped_files.mapped(number, nbytes)

    def create_mapped(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """A new open file, and a range that shows the file; raises OSError or OffloadError."""
        number = self.create(nbytes)
        try:
            return number, self.mapped(number, nbytes)
        except OSError:
            os.close(number)
            raise


class HostMemory(OffloadTarget):
    """Host memory for a unit on an accelerator, which can copy pinned memory by itself."""

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
    shard: OffloadTarget = DEVICE
    gradient: OffloadTarget = DEVICE
    # Target on which optimizers keep per-element state. None: the state lives with the shard.
    state: OffloadTarget | None = None
    # Whether the device keeps a copy of the shard for all-gathers.
    keeps_copy: bool = False

    @classmethod
    def find(cls, offload: CPUOffload, device: torch.device) -> OffloadTargets:
        """The targets of a policy on ``device``. Raises ValueError and NotImplementedError."""
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
        """Reserve room on the disk for a unit's shards and gradients. Raises OffloadError."""
        if self.state is None or self.shard.is_device:
            return
        total = sum((-(-one // PAGE_BYTES) + 2) * PAGE_BYTES for one in nbytes)
        self.state.reserve(total, f"{unit_text(unit)} (shards and gradients)")

    def trim(self) -> None:
        """Return the memory that the construction used to the system; no step needs it."""
        if self.state is not None:
            mapped_files.give_back_freed()


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which an accelerator copies shards from the host, and gradients to the host."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue work on the copy stream, behind all work queued so far on the compute stream."""
    stream = copy_stream(device)
    # The compute stream computed the tensors that are copied.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
