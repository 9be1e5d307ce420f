"""``GradReduce``: the gradients of one flat parameter on their way through one or more collectives.

[Note: two stages]
Gradients are averaged within the intra group, each rank keeping its part, and then, where there
are more ranks, across: split further over the inter group, or averaged over replicas. The second
stage can wait for a later backward (``Sync.INTRA``): what the first gave is held and added up.
What travels in either is in the reduce dtype, sums may be wider (``collectives``): they are rounded
only to cross. Where replicas' averages are added up in parts, a third stage gathers the parts.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.flat_chunks import FlatChunks
from flatshard.comm.topology import Topology
from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.memory.buffer_cache import BufferCache
from flatshard.options.precision import GradDtypes


class Reduced(Protocol):
    """What a reduction asks of whose gradients it reduces (``GradientBuffer``, which says more)."""

    unit_fqn: str
    tags: tuple[int, int, int]
    dtypes: GradDtypes
    fixed_order: bool
    pending_sends: PendingSends
    spare: BufferCache

    @property
    def adds_replicas(self) -> bool:
        """Whether replicas' averages are added up in parts, which are then gathered."""

    def new_part(self, comm: Communicator) -> Tensor:
        """Where this rank's part of a reduction over ``comm`` goes."""

    def sum_dtype(self, comm: Communicator) -> torch.dtype:
        """In which a reduction over ``comm`` adds up and gives its part."""


class GradReduce:
    """One buffer on its way through the stages.

    Attributes:
        hold: whether it ends with the first stage, whose result waits for a later backward.
        out: what the last stage fills, or did.
        stages: those that have begun.
    """

    def __init__(
        self,
        of: Reduced,
        whole: FlatChunks,
        topology: Topology,
        *,
        hold: bool,
        held: Tensor | None,
    ) -> None:
        """Begin the first stage.

        Args:
            of: whose gradients; has the unit's name, tags, and what is unsettled.
            whole: the gradients; not to be touched until the end.
            topology: the ranks.
            hold: stop after the first stage.
            held: what earlier first stages gave, to be added before the second.
        """
        self.hold = hold
        self._topology, self._of, self._held = topology, of, held
        self._computed = _event_after(whole)
        self._read_behind: list[object] = []
        intra_group = topology.intra_group
        self._pending = AsyncWork([], of.unit_fqn)
        if intra_group.size > 1:
            self.out = of.new_part(intra_group)
            self._pending = self._reduce_scatter(intra_group, whole, of.tags[0])
        else:
            (self.out,) = whole.tensors
        self.stages = [self._pending]
        self._must_cross = topology.crosses and not hold
        self._part: Tensor | None = None  # of the replicas' average, until that is gathered
        self._replicated_numel = 0
        across = topology.inter_group if topology.inter_group.size > 1 else topology.replicate
        # Of all models: which first stage is over first may differ between ranks.
        self._queue = across.second_stages
        # gloo moves an accelerator's tensors, too, but the host waits for it.
        self._streams_wait = across.is_stream_ordered(self.out.device)
        if self._must_cross:
            self._queue.append(self)
        if self._must_cross and (intra_group.size == 1 or self._streams_wait):
            # A side stream waits for what reads these, the stream that they are freed on does not
            # before `finish`: until then their memory must not become another tensor's.
            self._read_behind = [whole, held, *self._pending.kept]
            self._cross_behind()

    def _reduce_scatter(
        self, comm: Communicator, whole: FlatChunks, tag: int, kind: str = "reduce"
    ) -> AsyncWork:
        """Begin to fill ``out`` with this rank's part of the average over ``comm``."""
        unit_fqn, fixed_order = self._of.unit_fqn, self._of.fixed_order
        return comm.reduce_scatter(
            whole, self.out, unit_fqn=unit_fqn, tag=tag, fixed_order=fixed_order, kind=kind
        )

    def _cross_behind(self) -> None:
        """Queue the later stages behind the first at once, where none holds up the host."""
        if not self._streams_wait:
            self.cross()
            return
        waits = self._topology.intra_group.size > 1 or self._of.adds_replicas
        side = _side_stream(self.out) if waits else None
        with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
            self.cross()
            self._read_behind += self._pending.kept
            self._gather_replicas()

    def cross(self) -> None:
        """See ``GradientBuffer.cross``; those that began before come first."""
        while self._must_cross:
            self._queue[0]._begin_second()

    def _begin_second(self) -> None:
        self._pending.wait(self._of.pending_sends)
        self._queue.popleft()
        self._must_cross = False
        topology, of = self._topology, self._of
        if self._held is not None:
            self.out.add_(self._held)
            self._held = None
        self.out = out = self.out.to(of.dtypes.reduce_dtype)
        if topology.inter_group.size > 1:
            numel, dtype = (
                out.numel() // topology.inter_group.size,
                of.sum_dtype(topology.inter_group),
            )
            self.out = out.new_empty(numel, dtype=dtype)
            self._pending = self._reduce_scatter(
                topology.inter_group, FlatChunks.of(out), of.tags[1]
            )
        elif of.adds_replicas:
            self._pending = self._average_replicas(out)
        else:
            self._pending = topology.replicate.all_reduce(out, unit_fqn=of.unit_fqn)
        self.stages.append(self._pending)

    def _average_replicas(self, values: Tensor) -> AsyncWork:
        """Begin to fill this rank's part of the replicas' average."""
        replicate = self._topology.replicate
        whole = FlatChunks.of(_padded(values, replicate.size))
        dtype = self._of.sum_dtype(replicate)
        self._part = self.out = values.new_empty(whole.numel // replicate.size, dtype=dtype)
        self._replicated_numel = values.numel()
        return self._reduce_scatter(replicate, whole, self._of.tags[2], kind="all_reduce")

    def _gather_replicas(self) -> None:
        """Wait for this rank's part of the replicas' average and begin the third stage, if any."""
        part, self._part = self._part, None
        if part is None:
            return
        self._pending.wait(self._of.pending_sends)
        replicate, of = self._topology.replicate, self._of
        whole = of.spare.take(part.numel() * replicate.size, part.dtype, part.device)
        self.out = whole[: self._replicated_numel]
        self._pending = replicate.gather_reduced(part, whole, unit_fqn=of.unit_fqn, tag=of.tags[2])
        self.stages.append(self._pending)

    def advance(self) -> bool:
        """See ``GradientBuffer.advance``."""
        while self._must_cross and self._queue[0]._pending.done():
            self._queue[0]._begin_second()
        # Not where it is by chance that a rank sees that the second is over: the backend's own
        # collectives must begin in one order.
        if not self._must_cross and self._pending.tells and self._pending.done():
            self._gather_replicas()
        return not self._must_cross

    def done(self) -> bool:
        """Whether ``finish`` would return at once."""
        return not self._must_cross and self._part is None and self._pending.done()

    def tells_when_done(self) -> bool:
        """Whether ``done`` can become true by itself."""
        return self._pending.tells

    def is_computed(self) -> bool:
        """Whether the gradients are there, and not only queued to be computed on a device."""
        return self._computed is None or self._computed.query()

    def finish(self) -> Tensor:
        """Wait for the last stage and return its result."""
        self.cross()
        self._gather_replicas()
        self._pending.wait(self._of.pending_sends)
        self._read_behind = []
        return self.out


def _padded(values: Tensor, size: int) -> Tensor:
    """With as many zeros behind them as make them divide by ``size``; themselves if they do."""
    missing = -values.numel() % size
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def _event_after(whole: FlatChunks) -> torch.Event | None:
    """What an accelerator comes to when it has computed ``whole``."""
    device = next((part.device for part in whole.tensors), None)
    if device is None or device.type != "cuda":
        return None
    event = torch.Event(device)
    event.record()  # on the stream that is current on its device
    return event


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(tensor: Tensor) -> torch.cuda.Stream:
    """A stream that waits for a first stage in place of the one that computes."""
    if tensor.device not in _side_streams:
        _side_streams[tensor.device] = torch.cuda.Stream(tensor.device)
    side = _side_streams[tensor.device]
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    return side
