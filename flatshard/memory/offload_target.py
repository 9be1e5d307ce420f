"""``OffloadTarget``: device, host or disk, where a shard, its gradient and its state live."""

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
    """Memory in which tensors live between uses. This target leaves them where they are made.

    Attributes:
        is_device: whether nothing is copied.
    """

    is_device = True

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor in the target, ``(numel,)``; its values are undefined."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A tensor's values in the target; the tensor itself if it is there."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, in the target if the tensor is there."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare for writing all of the tensors that are in the target, in one go."""

    def page_out(self, *tensors: Tensor) -> None:
        """Give memory back that tensors do not need until their next use; values stay."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Keep room for tensors to come, which ``what`` names. Raises OffloadError."""

    def keep_state_of(self, param: Tensor) -> None:
        """Keep state per element of a plain parameter; other parameters' specs name the target."""

    def create(self, nbytes: int) -> int:
        """An open file of ``nbytes`` zeros, to be mapped; raises OSError or OffloadError."""
        return mapped_files.create(nbytes)

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """A range in which an open file is seen, and written; raises OSError."""
        return mapped_files.mapped(number, nbytes)

    def create_mapped(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """A new open file, and a range in which it is seen; raises OSError or OffloadError."""
        number = self.create(nbytes)
        try:
            return number, self.mapped(number, nbytes)
        except OSError:
            os.close(number)
            raise


class HostMemory(OffloadTarget):
    """The host's, for a unit on an accelerator, which copies to and from pinned memory itself."""

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
    # Keeps what optimizers make; None where it lives with the shard.
    state: OffloadTarget | None = None
    # Whether the device keeps a copy of the shard to all-gather from.
    keeps_copy: bool = False

    @classmethod
    def find(cls, offload: CPUOffload, device: torch.device) -> OffloadTargets:
        """What a policy means on ``device``. Raises ValueError and NotImplementedError."""
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
        """Keep room on the disk for a unit's shards and gradients. Raises OffloadError."""
        if self.state is None or self.shard.is_device:
            return
        total = sum((-(-one // PAGE_BYTES) + 2) * PAGE_BYTES for one in nbytes)
        self.state.reserve(total, f"{unit_text(unit)} (shards and gradients)")

    def trim(self) -> None:
        """After construction: what it took in memory is not needed for a step."""
        if self.state is not None:
            mapped_files.give_back_freed()


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which an accelerator copies shards from the host, and gradients to the host."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue on the stream for copies, behind what was queued so far to compute."""
    stream = copy_stream(device)
    # What is copied was computed there.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
