"""``OffloadTargets``: where a shard, its gradient and its optimizer state live between uses.

At home are the tensors that users and optimizers hold. A gather brings the shard up to where the
unit computes (``HostToDevice``), a reduction's result is brought down (``DeviceToHost``). Nobody
else asks where home is.

[Note: apart]
Home may be on another device than the unit's. Then copies run on a stream of their own, which
waits for what was queued before, and overlap with what is queued after:

- up: the stream that computes waits for it when it waits for the gather; the host waits before
  anybody may write the shard (``PendingSends``).
- down: the host waits before users may see ``.grad``.

Files are read and written through the host's memory. On a CPU the shard's file is the source of a
gather, without a copy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.memory import disk, mapped_files
from flatshard.memory.buffer_cache import BufferCache
from flatshard.memory.disk import DiskMemory
from flatshard.memory.mapped_files import Files
from flatshard.options.offload import CPUOffload
from flatshard.plan.layout import ALIGNMENT_BYTES, PAGE_BYTES


class OffloadTarget(Protocol):
    """A kind of memory."""

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor there, ``(numel,)``."""

    def take_in(self, tensor: Tensor) -> Tensor:
        """A tensor's values there; the tensor itself if it is there."""


class HostMemory:
    """Memory of the host, for a unit that computes on an accelerator."""

    def __init__(self, *, pinned: bool) -> None:
        """``pinned``: the accelerator copies to and from it by itself."""
        self._pinned = pinned

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See ``OffloadTarget``; uninitialised."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def take_in(self, tensor: Tensor) -> Tensor:
        """See ``OffloadTarget``."""
        if tensor.device.type == "cpu" and tensor.is_pinned() is self._pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned).copy_(tensor)


@dataclass(frozen=True)
class OffloadTargets:
    """Where the parts of one unit's flat parameters live; None: on the device that computes.

    Attributes:
        shard: the shard that users and optimizers hold.
        gradient: its reduced gradient.
        state: what optimizers keep, where that is not beside the shard.
        keeps_copy: whether the device keeps a copy of the shard to gather from.
    """

    shard: OffloadTarget | None = None
    gradient: OffloadTarget | None = None
    state: DiskMemory | None = None
    keeps_copy: bool = False

    @classmethod
    def find(cls, offload: CPUOffload, device: torch.device) -> OffloadTargets:
        """What a policy means for a model that computes on ``device``.

        Raises:
            ValueError: its path cannot take files.
            NotImplementedError: this system cannot map files.
        """
        is_apart = device.type != "cpu"
        if not offload.is_on or (not is_apart and offload.path is None):
            return cls()
        if offload.path is None:
            host = HostMemory(pinned=offload.pin_memory)
            return cls(host, host, keeps_copy=not offload.takes_params)
        disk = DiskMemory(offload.path)
        if offload.takes_params or is_apart:
            return cls(disk, disk, disk, keeps_copy=not offload.takes_params)
        return cls(state=disk)

    @property
    def disk(self) -> DiskMemory | None:
        """Where files are, if any."""
        return self.state

    @property
    def shard_files(self) -> Files:
        """What makes the file of a shard that an unsharded buffer shows: in memory, or on disk."""
        return self.disk if self.disk is not None and self.shard is not None else mapped_files

    def reserve(self, unit: str, params: Iterable[nn.Parameter], shard_size: int) -> None:
        """Keep room on the disk for a unit's shards and gradients, if they go there.

        Args:
            unit: its name, for errors.
            params: what it owns.
            shard_size: ranks that share them.

        Raises:
            OffloadError: the disk is full.
        """
        if self.disk is None or self.shard is None:
            return
        nbytes: dict[torch.dtype, int] = {}
        for param in params:
            times = 2 if param.requires_grad else 1
            held = -(-param.numel() // shard_size) * param.element_size() + ALIGNMENT_BYTES
            nbytes[param.dtype] = nbytes.get(param.dtype, 0) + times * held
        total = sum(disk.rounded(one) + 2 * PAGE_BYTES for one in nbytes.values())
        what = f"unit {unit!r}" if unit else "the root unit"
        self.disk.reserve(total, f"{what} (shards and gradients)")

    def settle(self) -> None:
        """After construction: what it took in memory is not needed for a step."""
        if self.disk is not None:
            mapped_files.give_back_freed()

    def house(self, shard: Tensor) -> Tensor:
        """The shard's values at home."""
        return shard if self.shard is None else self.shard.take_in(shard)

    def house_gradient(self, gradient: Tensor) -> Tensor:
        """The values of a reduced gradient at home."""
        return gradient if self.gradient is None else self.gradient.take_in(gradient)


class HostToDevice:
    """Brings one shard up to where its unit computes."""

    def __init__(self, device: torch.device, homes: OffloadTargets) -> None:
        """Plan; allocates nothing.

        Args:
            device: where the unit computes.
            homes: where the shard lives.
        """
        self._device = device
        self._is_apart = homes.shard is not None and device.type != "cpu"
        self._keeps_copy = homes.keeps_copy
        self._copy: Tensor | None = None
        self._version = -1
        self._event: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy that the device keeps."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Let what is queued inside run beside what the device computes."""
        with _beside(self._device) if self._is_apart else contextlib.nullcontext():
            yield

    def up(self, shard: Tensor, dtype: torch.dtype, version: int) -> Tensor:
        """The shard where the unit computes, in ``dtype``; what a gather takes.

        Args:
            shard: ``(shard_numel,)``, at home.
            dtype: to cast to.
            version: the shard's; tells whether a copy is stale.
        """
        if not self._is_apart:
            source = shard.to(dtype)
            if source is not shard:
                disk.release(shard)
            return source
        if not self._keeps_copy:
            return self._bring(shard, dtype)
        if self._copy is None or self._version != version or self._copy.dtype != dtype:
            self._copy, self._version = self._bring(shard, dtype), version
        return self._copy

    def _bring(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        # Cast there: on the host the result would not be pinned.
        brought = shard.to(self._device, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        disk.release(shard)
        return brought.to(dtype)

    def report(self, shard: Tensor, what: str, pending_sends: PendingSends) -> None:
        """Let ``pending_sends`` know of a copy under way: the shard must not be written before."""
        event, self._event = self._event, None
        if event is not None:
            pending = AsyncWork([], what, shard, sends=[_Passed(event)])
            pending.wait(pending_sends)

    def join(self) -> None:
        """Let the stream that computes wait for what was copied up."""
        if self._is_apart:
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))


class DeviceToHost:
    """Takes reduced gradients of one flat parameter home."""

    def __init__(self, home: OffloadTarget | None) -> None:
        """``home``: where they live; None: where they were reduced."""
        self._home = home
        self._spare = None if home is None else BufferCache(new=home.new)
        self._under_way: list[tuple[torch.cuda.Event, torch.device]] = []

    @property
    def is_apart(self) -> bool:
        """Whether they live elsewhere than where they were reduced."""
        return self._home is not None

    def land(self, reduced: Tensor) -> Tensor:
        """``reduced``, ``(shard_numel,)``, at home; its values are there after ``settle``."""
        if self._spare is None:
            return reduced
        place = self._spare.take(reduced.numel(), reduced.dtype, torch.device("cpu"))
        disk.fetch(place)
        if reduced.device.type == "cpu":
            place.copy_(reduced)
        else:
            with _beside(reduced.device):
                place.copy_(reduced, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            self._under_way.append((event, reduced.device))
            _keep_until(event, reduced)
        disk.release(place)
        return place

    def add(self, total: Tensor, more: Tensor) -> Tensor:
        """Add what has landed later to what has before, in place."""
        self.settle()
        total.add_(more)
        disk.release(total, more)
        return total

    def settle(self) -> None:
        """Wait until everything has landed."""
        for event, device in self._under_way:
            event.synchronize()
            _drop_passed(device)
        self._under_way.clear()


class _Passed:
    """An event as something that ``AsyncWork`` waits for."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """Whether the device has come to it."""
        return self._event.query()

    def wait(self) -> None:
        """Until it has."""
        self._event.synchronize()


_leaving: dict[torch.device, deque[tuple[torch.cuda.Event, Tensor]]] = {}
"""What is copied down from a device, for all its flat parameters, in the order of the copies."""


def _keep_until(event: torch.cuda.Event, tensor: Tensor) -> None:
    """Keep a tensor until an event: freed before, what computes could write it while it is read.

    No longer: at the end of a backward they would be the gradients of the whole model.
    """
    _drop_passed(tensor.device)
    _leaving.setdefault(tensor.device, deque()).append((event, tensor))


def _drop_passed(device: torch.device) -> None:
    kept = _leaving.get(device)
    while kept and kept[0][0].query():
        kept.popleft()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Queue on the stream for copies, behind what was queued so far to compute."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
