"""``OffloadTarget``: device, host or disk, where a shard, its gradient and its state live.

In the target are the tensors that users and optimizers hold. An all-gather copies the shard to
where the unit computes (``HostToDevice``), the result of a reduction is copied back
(``DeviceToHost``). Who asks does not know which target it is.

If the target is on another device than the unit, copies run on a stream of their own and overlap
with compute. Files are read and written through the host's memory; on a CPU the shard's file is
the source of an all-gather, without a copy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.memory import mapped_files
from flatshard.memory.buffer_cache import BufferCache
from flatshard.memory.disk import DiskMemory, fetch, release, rounded
from flatshard.memory.mapped_files import Files
from flatshard.options.offload import CPUOffload
from flatshard.plan.layout import ALIGNMENT_BYTES, PAGE_BYTES


class OffloadTarget:
    """Memory in which tensors live between uses; this one: where they are made.

    Attributes:
        is_device: whether nothing is copied.
        files: makes the file of a shard that an unsharded buffer shows.
    """

    is_device = True
    files: Files = mapped_files

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor there, ``(numel,)``; its values are undefined."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A tensor's values there; the tensor itself if it is there."""
        return tensor

    def page_in(self, tensor: Tensor) -> None:
        """Prepare for writing all of a tensor there, in one go."""

    def page_out(self, *tensors: Tensor | None) -> None:
        """Give memory back that the tensors do not need until their next use; values stay."""


class HostMemory(OffloadTarget):
    """Memory of the host, for a unit that computes on an accelerator."""

    is_device = False

    def __init__(self, *, pinned: bool) -> None:
        """``pinned``: the accelerator copies to and from it by itself."""
        self._pinned = pinned

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See ``OffloadTarget``."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def take_in(self, tensor: Tensor) -> Tensor:
        """See ``OffloadTarget``."""
        if tensor.device.type == "cpu" and tensor.is_pinned() is self._pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned).copy_(tensor)


class Disk(OffloadTarget):
    """Files in a directory."""

    is_device = False

    def __init__(self, memory: DiskMemory) -> None:
        """``memory`` makes the files."""
        self._memory = self.files = memory

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See ``OffloadTarget``."""
        return self._memory.new(numel, dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """See ``OffloadTarget``."""
        return self._memory.take_in(tensor)

    def page_in(self, tensor: Tensor) -> None:
        """See ``OffloadTarget``: a fault for every page would take longer."""
        fetch(tensor)

    def page_out(self, *tensors: Tensor | None) -> None:
        """See ``OffloadTarget``."""
        release(*tensors)


DEVICE = OffloadTarget()


@dataclass(frozen=True)
class OffloadTargets:
    """Where the parts of one unit's flat parameters live.

    Attributes:
        shard: the shard that users and optimizers hold.
        gradient: its reduced gradient.
        state: what makes files for optimizers, where their state does not live with the shard.
        keeps_copy: whether the device keeps a copy of the shard to all-gather from.
    """

    shard: OffloadTarget = DEVICE
    gradient: OffloadTarget = DEVICE
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
        memory = DiskMemory(offload.path)
        if offload.takes_params or is_apart:
            disk = Disk(memory)
            return cls(disk, disk, memory, keeps_copy=not offload.takes_params)
        return cls(state=memory)

    def reserve(self, unit: str, params: Iterable[nn.Parameter], shard_size: int) -> None:
        """Keep room on the disk for a unit's shards and gradients, if they go there.

        Args:
            unit: its name, for errors.
            params: what it owns.
            shard_size: ranks that share them.

        Raises:
            OffloadError: the disk is full.
        """
        if self.state is None or self.shard.is_device:
            return
        nbytes: dict[torch.dtype, int] = {}
        for param in params:
            times = 2 if param.requires_grad else 1
            held = -(-param.numel() // shard_size) * param.element_size() + ALIGNMENT_BYTES
            nbytes[param.dtype] = nbytes.get(param.dtype, 0) + times * held
        total = sum(rounded(one) + 2 * PAGE_BYTES for one in nbytes.values())
        what = f"unit {unit!r}" if unit else "the root unit"
        self.state.reserve(total, f"{what} (shards and gradients)")

    def trim(self) -> None:
        """After construction: what it took in memory is not needed for a step."""
        if self.state is not None:
            mapped_files.give_back_freed()


class HostToDevice:
    """Copies one shard to where its unit computes."""

    def __init__(self, device: torch.device, targets: OffloadTargets) -> None:
        """Plan; allocates nothing.

        Args:
            device: where the unit computes.
            targets: where the shard lives.
        """
        self._device = device
        self._target = targets.shard
        self._is_apart = not targets.shard.is_device and device.type != "cpu"
        self._keeps_copy = targets.keeps_copy
        self._copy: Tensor | None = None
        self._version = -1
        self._event: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy that the device keeps."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Let what is queued inside overlap with what the device computes."""
        with _beside(self._device) if self._is_apart else contextlib.nullcontext():
            yield

    def copy(self, shard: Tensor, dtype: torch.dtype, version: int) -> Tensor:
        """The shard where the unit computes, in ``dtype``; the input of an all-gather.

        Args:
            shard: ``(shard_numel,)``, in its target.
            dtype: to cast to.
            version: the shard's; tells whether a copy is stale.
        """
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
        self._event = torch.cuda.Event()
        self._event.record()
        self._target.page_out(shard)
        return brought.to(dtype)

    def track(self, shard: Tensor, unit_fqn: str, pending_sends: PendingSends) -> None:
        """Let ``pending_sends`` know of a copy under way: the shard must not be written before."""
        event, self._event = self._event, None
        if event is not None:
            # The optimizer writes the shard on the host, which no stream holds back.
            pending = AsyncWork([], unit_fqn, [shard], sends=[_Passed(event)])
            pending.wait(pending_sends)

    def wait_on_stream(self) -> None:
        """Let the compute stream wait for the copy."""
        if self._is_apart:
            # At the wait for the all-gather, not at its start: until then compute goes on.
            torch.cuda.current_stream(self._device).wait_stream(_stream(self._device))


class DeviceToHost:
    """Copies reduced gradients of one flat parameter to their target."""

    def __init__(self, target: OffloadTarget) -> None:
        """``target``: where they live."""
        self.target = target
        self._cache = BufferCache(new=target.new)
        self._copies: list[tuple[torch.cuda.Event, torch.device]] = []

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
                # Waited for in `wait`, before users may see `.grad`.
                event = torch.cuda.Event()
                event.record()
            self._copies.append((event, reduced.device))
            _keep_until(event, reduced)
        self.target.page_out(place)
        return place

    def add(self, total: Tensor, more: Tensor) -> Tensor:
        """Add a later copy to an earlier one, in place."""
        self.wait()
        total.add_(more)
        self.target.page_out(total, more)
        return total

    def wait(self) -> None:
        """Wait until every copy is over."""
        for event, device in self._copies:
            event.synchronize()
            _drop_passed(device)
        self._copies.clear()


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
    """Keep a tensor until an event: freed before, compute could overwrite it while it is read.

    No longer: at the end of a backward they would be the gradients of the full model.
    """
    _drop_passed(tensor.device)
    _leaving.setdefault(tensor.device, deque()).append((event, tensor))


def _drop_passed(device: torch.device) -> None:
    kept = _leaving.get(device)
    # Events of one stream pass in order: behind one that has not, none has.
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
    # What is copied was computed there.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
