"""``ParamGather``: how the shards of one flat parameter become the unsharded buffer.

Usually from the shards themselves, copied to where the unit computes and cast; in float8 where the
user asks for it; or from a ``SecondaryShard``, a larger part of the parameters than the shard, over
nearby ranks.

Two strategies keep one. Where forward all-gathers over all ranks and backward over fewer, it is cut
out of the unsharded buffer after forward and dropped after backward (hierarchical partitioning of
ZeRO++, arXiv 2306.10209). Where only optimizer state is split over all nodes, it is all-gathered
from the nodes' shards once after each optimizer step, and every other all-gather stays within the
node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.requests import BufferRequest, Gather
from flatshard.comm.topology import Topology
from flatshard.comm.work import AsyncWork, PendingSends
from flatshard.engine.offload import HostToDevice, OffloadTargets
from flatshard.memory.buffers import BufferMemory
from flatshard.options.precision import ParamPrecision
from flatshard.precision.float8 import Float8Shard

_FULL = "full tensors, which all ranks must ask for together (state_dict(), say),"
"""What such an all-gather is for, in errors."""


class ParamGather:
    """All-gathers one flat parameter. Keeps what is under way, and no state of the handle's.

    Attributes:
        tags: of its all-gathers over the intra and the inter group; reductions use them too.
    """

    def __init__(
        self,
        unit_fqn: str,
        topology: Topology,
        device: torch.device,
        precision: ParamPrecision,
        targets: OffloadTargets,
        shard_numel: int,
    ) -> None:
        """Plan; allocates and communicates nothing.

        Args:
            unit_fqn: names the unit in errors.
            topology: the ranks that share the flat parameter.
            device: where the unit computes.
            precision: in which dtype it is all-gathered.
            targets: where the shard lives.
            shard_numel: elements of a shard.
        """
        self._unit_fqn, self._topology = unit_fqn, topology
        self._precision, self._targets = precision, targets
        self._is_whole = topology.shard.size == 1
        intra_group, inter_group = topology.intra_group, topology.inter_group
        self.tags = intra_group.new_tag(), inter_group.new_tag()
        # Apart from those of a step: a state_dict() on one rank alone must not take what another
        # rank sends for its forward.
        self._full_tags = intra_group.new_tag(), inter_group.new_tag()
        self._float8: Float8Shard | None = None
        if precision.gather_dtype is not None and not self._is_whole:
            self._float8 = Float8Shard(precision.gather_dtype, shard_numel)
        self._secondary: SecondaryShard | None = None
        if topology.regather is not None:
            self._secondary = SecondaryShard(topology.regather, unit_fqn)
        elif inter_group.size > 1:
            self._secondary = SecondaryShard(intra_group, unit_fqn)
        self._pending_sends = PendingSends()
        self._work: AsyncWork | None = None
        self._packed: Tensor | None = None
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on; what was kept to all-gather from is dropped."""
        self._device, self._to_device = device, HostToDevice(device, self._targets)
        if self._secondary is not None:
            self._secondary.drop()

    def share_pending_sends(self, pending_sends: PendingSends) -> None:
        """Keep what other ranks still read from this one in the run's list."""
        self._pending_sends = pending_sends
        if self._secondary is not None:
            self._secondary.pending_sends = pending_sends

    def rename(self, unit_fqn: str) -> None:
        """Take another name for errors."""
        self._unit_fqn = unit_fqn
        if self._secondary is not None:
            self._secondary.rename(unit_fqn)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the unsharded parameters, for a shard of ``dtype``."""
        return self._precision.unsharded_dtype(dtype)

    def reads_shard(self, dtype: torch.dtype) -> bool:
        """Whether all-gathers read the shard as it lies in host memory, in its own ``dtype``."""
        is_copied = self._secondary is not None or self._float8 is not None or self._is_whole
        return self._device.type == "cpu" and not is_copied and self.compute_dtype(dtype) == dtype

    def allocate(self, numel: int, dtype: torch.dtype) -> BufferMemory:
        """Memory for the unsharded buffer, ``(numel,)``; maybe for a shard of ``dtype`` too."""
        files = self._targets.shard.files if self.reads_shard(dtype) else None
        compute_dtype = self.compute_dtype(dtype)
        request = BufferRequest(numel, compute_dtype, self._device, self.tags[0], files)
        return self._topology.intra_group.allocate_unsharded(request)

    # ------------------------------------------------------------ during a step

    def start(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> None:
        """Start to fill the unsharded buffer from where that is cheapest.

        Collective: all ranks that it is all-gathered from.

        Args:
            shard: ``(shard_numel,)``, in its target.
            version: the shard's; tells what is stale.
            memory: of the buffer.
            purpose: what for, in errors.
        """
        with self._to_device.stream():
            self._work = self._begin(shard, version, memory, purpose)
        self._to_device.track(shard, self._unit_fqn, self._pending_sends)

    def _begin(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> AsyncWork:
        if self._secondary is not None:
            self.begin_refresh(shard, version)
            if self._secondary.is_current(version):
                return self._secondary.gather(memory.buffer, purpose)
        comm, out = self._topology.intra_group, memory.buffer
        if self._float8 is None:
            source = self._source(shard, version)
        else:
            source = self._float8.pack(self._to_device.copy(shard, shard.dtype, version))
            # Not into the buffer: float8 is unpacked there when all of it has come.
            self._packed = out = source.new_empty(source.numel() * comm.size)
        buffer = None if out is self._packed else memory
        return comm.all_gather(
            Gather(source, out, self._unit_fqn, self.tags[0], purpose, memory=buffer)
        )

    def _source(self, shard: Tensor, version: int) -> Tensor:
        """The shard where the unit computes, in the dtype that computes."""
        dtype = self.compute_dtype(shard.dtype)
        if self._is_whole and not self._targets.keeps_copy:
            dtype = shard.dtype  # one rank's all-gather is a copy, which casts
        return self._to_device.copy(shard, dtype, version)

    def finish(self, buffer: Tensor) -> None:
        """Wait for what ``start`` began: ``buffer`` holds the parameters after it.

        Raises:
            CollectiveError: a peer failed.
        """
        work, self._work = self._work, None
        packed, self._packed = self._packed, None
        if work is None:
            return
        work.wait(self._pending_sends)
        # What is on the stream for copies must be over before the compute stream reads.
        self._to_device.wait_on_stream()
        if packed is not None:
            assert self._float8 is not None, "it was packed"
            with torch.inference_mode(False), torch.no_grad():
                self._float8.unpack(packed, buffer)

    @property
    def is_under_way(self) -> bool:
        """Whether ``start`` began something that ``finish`` has not waited for."""
        return self._work is not None

    # ------------------------------------------------------------ the secondary shard

    def begin_refresh(self, shard: Tensor, version: int) -> None:
        """Start to all-gather what other nodes changed, if a secondary shard is kept.

        Collective: all ranks of ``inter_group``.
        """
        inter_group = self._topology.inter_group
        if self._secondary is not None and inter_group.size > 1:
            with torch.inference_mode(False), torch.no_grad(), self._to_device.stream():
                source = self._source(shard, version)
                self._secondary.begin_refresh(source, version, inter_group, self.tags[1])
            self._to_device.track(shard, self._unit_fqn, self._pending_sends)

    def finish_refresh(self) -> None:
        """Wait for what ``begin_refresh`` began: the shard may be written after it."""
        if self._secondary is not None:
            self._secondary.finish_refresh()

    def keep_secondary(self, buffer: Tensor, version: int) -> None:
        """Keep, of an unsharded buffer, what backward all-gathers from, if it does so."""
        if self._topology.regather is not None and self._secondary is not None:
            self._secondary.cut(buffer, version)

    def drop_secondary(self) -> None:
        """After backward: give back what ``keep_secondary`` kept."""
        if self._topology.regather is not None and self._secondary is not None:
            self._secondary.drop()

    @property
    def secondary_bytes(self) -> int:
        """Bytes that are kept, besides the shard, to all-gather from."""
        return 0 if self._secondary is None else self._secondary.nbytes

    # ------------------------------------------------------------ between steps

    def gather_full(self, part: Tensor, out: Tensor) -> AsyncWork:
        """Start to all-gather something of the shard's shape, ``(padded_numel,)`` in all, as it is.

        Over two groups first across nodes, for which it waits, then within.

        Collective: all ranks of the shard group.
        """
        intra_group, inter_group = self._topology.intra_group, self._topology.inter_group
        if inter_group.size > 1:
            with torch.no_grad():
                source, part = part, part.new_empty(part.numel() * inter_group.size)
                self._gather_exactly(inter_group, source, part, self._full_tags[1]).finish()
        return self._gather_exactly(intra_group, part, out, self._full_tags[0])

    def _gather_exactly(self, comm: Communicator, part: Tensor, out: Tensor, tag: int) -> AsyncWork:
        return comm.all_gather(Gather(part, out, self._unit_fqn, tag, _FULL, exact=True))


class SecondaryShard:
    """This rank's part of what ``comm`` all-gathers.

    Attributes:
        comm: the ranks whose parts make up the flat parameter.
        pending_sends: what other ranks may still be reading from this one.
    """

    def __init__(self, comm: Communicator, unit_name: str) -> None:
        """Plan; allocates nothing."""
        self.comm = comm
        self.pending_sends = PendingSends()
        self._unit_name = unit_name
        self._tag = comm.new_tag()
        self._part: Tensor | None = None
        self._version = -1
        self._refresh: AsyncWork | None = None

    def is_current(self, version: int) -> bool:
        """Whether it has, or will have, the parameters as of ``version``."""
        return self._part is not None and self._version == version

    @property
    def nbytes(self) -> int:
        """Bytes of it now."""
        return 0 if self._part is None else self._part.numel() * self._part.element_size()

    def cut(self, buffer: Tensor, version: int) -> None:
        """Keep this rank's part of an unsharded buffer, ``(padded_numel,)``."""
        if not self.is_current(version):
            self._part = buffer.chunk(self.comm.size)[self.comm.rank].clone()
            self._version = version

    def begin_refresh(
        self, source: Tensor, version: int, inter_group: Communicator, tag: int
    ) -> None:
        """Start to all-gather the part over ``inter_group``, unless it is current.

        Collective: all ranks of ``inter_group``.

        Args:
            source: this rank's shard in the dtype to keep; not to be written before it is sent.
            version: the shard's.
            inter_group: the ranks whose shards make up the part.
            tag: from ``inter_group.new_tag()``, once.
        """
        if self.is_current(version):
            return
        self.finish_refresh()
        if self._part is None:
            self._part = source.new_empty(source.numel() * inter_group.size)
        self._refresh = inter_group.all_gather(
            Gather(source, self._part, self._unit_name, tag, "this node")
        )
        self._version = version

    def finish_refresh(self) -> None:
        """Wait for what ``begin_refresh`` began.

        Raises:
            CollectiveError: a peer failed.
        """
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            try:
                refresh.wait(self.pending_sends)
            except Exception:
                self._version = -1  # what came is partial: all-gather it again
                raise

    def gather(self, out: Tensor, purpose: str) -> AsyncWork:
        """Begin filling ``out``, ``(padded_numel,)``. Collective: all ranks of ``comm``."""
        self.finish_refresh()
        assert self._part is not None, "there is a part to gather from"
        return self.comm.all_gather(Gather(self._part, out, self._unit_name, self._tag, purpose))

    def drop(self) -> None:
        """Give the memory back."""
        self.finish_refresh()
        self._part, self._version = None, -1

    def rename(self, unit_name: str) -> None:
        """Take another name for errors."""
        self._unit_name = unit_name
