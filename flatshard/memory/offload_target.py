"""``OffloadTarget``: the place where shards, gradients and optimizer state lie between uses.

The targets are the device itself, host memory, and the disk (``flatshard/extras/disk``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.options.extras import extra
from flatshard.options.offload import CPUOffload
from flatshard.units.layout import PAGE_BYTES
from flatshard.units.module_tree import unit_text


class OffloadTarget:
    """A place where tensors lie between uses. In this base class the place is the device itself."""

    is_device = True
    # Methods of a target on a disk, which make and map a file. None: files are made in memory.
    create: Any = None
    mapped: Any = None

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor in the target, ``(numel,)``."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it lies in the target; otherwise return a copy in the target."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor. If the tensor lies in the target, the copy does, too."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare ``tensors`` for being written. Tensors that are not in the target are ignored."""

    def page_out(self, *tensors: Tensor) -> None:
        """Free the memory of ``tensors`` that lie in files; later reads load the values again."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve space on the disk for later tensors, which an error calls ``what``."""

    def keep_state_of(self, param: Tensor) -> None:
        """Make optimizers keep per-element state of the plain parameter ``param`` in the target.

        For a sharded parameter, ``ShardSpec.state_target`` is the target.
        """

    def trim(self) -> None:
        """Give memory that wrapping has freed back to the operating system."""


class HostMemory(OffloadTarget):
    """Host memory, as the target of units on an accelerator."""

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
    """The places where the tensors of one unit lie between uses."""

    shard: OffloadTarget = DEVICE  # target of shards of parameters
    gradient: OffloadTarget = DEVICE  # target of reduced gradients

    # Target of optimizer state with one value per element. None: where the shard lies.
    state: OffloadTarget | None = None
    # Whether the device keeps a copy of the shard, so that an all-gather need not copy it there.
    keeps_copy: bool = False

    @classmethod
    def find(cls, offload: CPUOffload, device: torch.device) -> OffloadTargets:
        """Return the targets for the user's offload policy and the device that computes.

        Raises ValueError or NotImplementedError if the policy's disk cannot be used.
        """
        if not offload.is_on or (device.type == "cpu" and offload.path is None):
            return cls()
        if offload.path is None:
            host = HostMemory(pinned=offload.pin_memory)
            return cls(host, host, keeps_copy=not offload.takes_params)
        disk = extra("disk", "CPUOffload(path=...)").DiskMemory(offload.path)
        if offload.takes_params or device.type != "cpu":
            return cls(disk, disk, disk, keeps_copy=not offload.takes_params)
        return cls(state=disk)

    def reserve(self, unit: str, nbytes: Iterable[int]) -> None:
        """Reserve space for the shards and gradients of a unit, if they lie on a disk."""
        if self.state is None or self.shard.is_device:
            return
        total = sum((-(-one // PAGE_BYTES) + 2) * PAGE_BYTES for one in nbytes)
        self.state.reserve(total, f"{unit_text(unit)} (shards and gradients)")


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream on which shards are copied from the host and gradients to the host."""
    return torch.cuda.Stream(device)


class _Nothing:
    """A context manager that does nothing."""

    # A C function, because each step enters many of these contexts. The function accepts any
    # arguments, and returns an empty string, which is false.
    __enter__ = __exit__ = "".format


NOTHING: contextlib.AbstractContextManager[object] = _Nothing()  # type: ignore[assignment]


@contextlib.contextmanager
def on_copy_stream(device: torch.device) -> Iterator[None]:
    """Context manager in which CUDA work is queued on the copy stream of ``device``.

    The work begins after all work that was queued on the current (compute) stream so far.
    """
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
