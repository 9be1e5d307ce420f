"""Moves shards and gradients between a unit's device and the ``OffloadTarget``s where they live.

In a target are the tensors that users and optimizers hold. An all-gather copies the shard to
where the unit computes (``HostToDevice``), the result of a reduction is copied back
(``DeviceToHost``). Who asks does not know which target it is.

If the target is on another device than the unit, copies run on a stream of their own and overlap
with compute. Files are read and written through the host's memory; on a CPU the shard's file is
the source of an all-gather, without a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from flatshard.comm.work import AsyncWork, RunLink
from flatshard.memory import mapped_files
from flatshard.memory.buffers import BufferCache
from flatshard.memory.offload_target import OffloadTarget
from flatshard.options.extras import extra
from flatshard.options.offload import CPUOffload
from flatshard.plan.layout import PAGE_BYTES
from flatshard.plan.module_tree import unit_text


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


class HostToDevice:
    def __init__(self, device: torch.device, targets: OffloadTargets, link: RunLink) -> None:
        self._device, self._link = device, link
        self._target, self._keeps_copy = targets.shard, targets.keeps_copy
        self._is_apart = not targets.shard.is_device and device.type != "cpu"
        self._copy: Tensor | None = None
        self._version = -1

    def stream(self) -> contextlib.AbstractContextManager[None]:
        """Let what is queued inside overlap with what the device computes."""
        return _beside(self._device) if self._is_apart else contextlib.nullcontext()

    def copy(self, shard: Tensor, dtype: torch.dtype, version: int) -> Tensor:
        """The shard where the unit computes, in ``dtype``; the input of an all-gather."""
        if not self._is_apart:
            source = shard.to(dtype)
            if source is not shard:
                self._target.page_out(shard)
            return source
        if not self._keeps_copy:
            return self._bring(shard, dtype)
        if self._copy is None or self._version != version or self._copy.dtype != dtype:
            self._copy, self._version = self._bring(shard, dtype), version
        return self._copy

    def _bring(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        # Cast on the device: on the host the result would not be pinned.
        brought = shard.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # The optimizer writes the shard on the host, which no stream holds back.
        copied = SimpleNamespace(is_completed=event.query, wait=event.synchronize)
        copying = AsyncWork([], self._link.unit_name, [shard], sends=[copied])
        copying.wait(self._link.pending_sends)
        self._target.page_out(shard)
        return brought.to(dtype)

    def wait_on_stream(self) -> None:
        """Let the compute stream wait for the copy."""
        if self._is_apart:
            # At the wait for the all-gather, not at its start: until then compute goes on.
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))


class DeviceToHost:
    def __init__(self, target: OffloadTarget) -> None:
        self.target = target
        self._cache = BufferCache(new=None if target.is_device else target.new)
        self._copies: list[torch.cuda.Event] = []

    def copy(self, reduced: Tensor) -> Tensor:
        """``reduced``, ``(shard_numel,)``, in the target; its values are there after ``wait``."""
        if self.target.is_device:
            return reduced
        place = self._cache.take(reduced.numel(), reduced.dtype, torch.device("cpu"))
        self.target.page_in(place)
        if reduced.device.type == "cpu":
            place.copy_(reduced)
        else:
            with _beside(reduced.device):
                place.copy_(reduced, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._copies.append(event)
            # The caller frees it while it is read: its memory is used again once the copy is over,
            # and not kept until `wait`, when it would be the gradients of the full model.
            reduced.record_stream(_stream(reduced.device))
        self.target.page_out(place)
        return place

    def add(self, total: Tensor, more: Tensor) -> Tensor:
        """Add a later copy to an earlier one, in place."""
        self.wait()
        total.add_(more)
        self.target.page_out(total, more)
        return total

    def wait(self) -> None:
        """Wait until every copy is over: users and optimizers read without a stream."""
        for event in self._copies:
            event.synchronize()
        self._copies.clear()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Queue on the stream for copies, behind what was queued so far to compute."""
    stream = _stream(device)
    # What is copied was computed there.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
