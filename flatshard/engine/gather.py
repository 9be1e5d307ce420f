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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Topology
from flatshard.comm.transports import BufferRequest, Gather
from flatshard.comm.work import AsyncWork, RunLink
from flatshard.engine.offload_copies import HostToDevice, OffloadTargets
from flatshard.memory.buffers import BufferMemory
from flatshard.options.extras import extra
from flatshard.options.precision import ParamPrecision


@dataclass(frozen=True)
class HandleOptions:
    """How a flat parameter is sharded, kept and sent."""

    topology: Topology
    targets: OffloadTargets
    precision: ParamPrecision
    reduces_alone: bool  # its gradients do not wait for the rest of the unit's


class ParamGather:
    """All-gathers one flat parameter. Keeps what is under way, and no state of the handle's."""

    def __init__(
        self,
        link: RunLink,
        options: HandleOptions,
        device: torch.device,
        shard_numel: int,
    ) -> None:
        self._link, self._topology = link, options.topology
        self._precision, self._targets = options.precision, options.targets
        topology, gather_dtype = options.topology, options.precision.gather_dtype
        intra_group, inter_group = topology.intra_group, topology.inter_group
        self.tags = intra_group.new_tag(), inter_group.new_tag()  # reductions use them too
        # Apart from those of a step: a state_dict() on one rank alone must not take what another
        # rank sends for its forward.
        self.full_tags = intra_group.new_tag(), inter_group.new_tag()
        self._float8: Any = None
        if gather_dtype is not None and topology.shard.size > 1:
            reduction = extra("reduction", "MixedPrecision(gather_dtype=...)")
            self._float8 = reduction.Float8Shard(gather_dtype, shard_numel)
        self.secondary = SecondaryShard(topology, link)
        self._work: AsyncWork | None = None
        self._packed: Tensor | None = None
        self.move_to(device)

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on; what was kept to all-gather from is dropped."""
        self._device, self._to_device = device, HostToDevice(device, self._targets, self._link)
        self.secondary.drop()

    def reads_shard(self, dtype: torch.dtype) -> bool:
        """Whether all-gathers read the shard as it lies in host memory, in its own ``dtype``."""
        is_copied = self.secondary.is_kept or self._float8 is not None
        is_cast = self._precision.unsharded_dtype(dtype) != dtype
        is_alone = self._topology.shard.size == 1
        return self._device.type == "cpu" and not (is_copied or is_cast or is_alone)

    def allocate(self, numel: int, dtype: torch.dtype) -> BufferMemory:
        """Memory for the unsharded buffer, ``(numel,)``; maybe for a shard of ``dtype`` too."""
        files = self._targets.shard.files if self.reads_shard(dtype) else None
        compute_dtype = self._precision.unsharded_dtype(dtype)
        request = BufferRequest(numel, compute_dtype, self._device, self.tags[0], files)
        return self._topology.intra_group.allocate_unsharded(request)

    def start(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> None:
        """Fill the buffer in ``memory``, later. Collective: all ranks that it is gathered from."""
        # `version` is the shard's, and tells whether what was kept of it is stale.
        with self._to_device.stream():
            self.begin_refresh(shard, version)
            if self.secondary.is_current(version):
                self._work = self.secondary.gather(memory.buffer, purpose)
            else:
                self._work = self._gather(shard, version, memory, purpose)

    def _gather(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> AsyncWork:
        comm, out = self._topology.intra_group, memory.buffer
        if self._float8 is None:
            source = self._source(shard, version)
        else:
            source = self._float8.pack(self._to_device.copy(shard, shard.dtype, version))
            # Not into the buffer: float8 is unpacked there when all of it has come.
            self._packed = out = source.new_empty(source.numel() * comm.size)
        buffer = None if out is self._packed else memory
        return comm.all_gather(
            Gather(source, out, self._link.unit_name, self.tags[0], purpose, memory=buffer)
        )

    def _source(self, shard: Tensor, version: int) -> Tensor:
        """The shard where the unit computes, in the dtype that computes."""
        dtype = self._precision.unsharded_dtype(shard.dtype)
        if self._topology.shard.size == 1 and not self._targets.keeps_copy:
            dtype = shard.dtype  # one rank's all-gather is a copy, which casts
        return self._to_device.copy(shard, dtype, version)

    def finish(self, buffer: Tensor) -> None:
        """Wait for what ``start`` began: ``buffer`` is filled then. Raises CollectiveError."""
        assert self._work is not None, "something was started"
        work, self._work = self._work, None
        packed, self._packed = self._packed, None
        work.wait(self._link.pending_sends)
        # What is on the stream for copies must be over before the compute stream reads.
        self._to_device.wait_on_stream()
        if packed is not None:
            assert self._float8 is not None, "it was packed"
            with torch.inference_mode(False), torch.no_grad():
                self._float8.unpack(packed, buffer)

    def fill(self, part: Tensor, out: Tensor) -> None:
        """All-gather ``part``, ``(shard_numel,)``, into ``out`` as it is. Collective."""
        unit, topology = self._link.unit_name, self._topology
        purpose = "full tensors, which all ranks must ask for together (state_dict(), say),"
        intra_tag, inter_tag = self.full_tags
        if topology.inter_group.size > 1:  # first across nodes, then within
            source, part = part, part.new_empty(part.numel() * topology.inter_group.size)
            request = Gather(source, part, unit, inter_tag, purpose, exact=True)
            topology.inter_group.all_gather(request).finish()
        request = Gather(part, out, unit, intra_tag, purpose, exact=True)
        topology.intra_group.all_gather(request).finish()

    def begin_refresh(self, shard: Tensor, version: int) -> None:
        """All-gather what other nodes changed, later. Collective: the ranks of ``inter_group``."""
        if self._topology.inter_group.size > 1 and not self.secondary.is_current(version):
            with torch.inference_mode(False), torch.no_grad(), self._to_device.stream():
                source = self._source(shard, version)
                self.secondary.begin_refresh(source, version, self.tags[1])


class SecondaryShard:
    """This rank's part of what nearby ranks all-gather; nothing with most strategies."""

    def __init__(self, topology: Topology, link: RunLink) -> None:
        self._link, self._inter_group = link, topology.inter_group
        self._is_temporary = topology.regather is not None  # from a forward to its backward
        self.is_kept = self._is_temporary or topology.inter_group.size > 1
        self._comm = topology.intra_group if topology.regather is None else topology.regather
        self._tag = self._comm.new_tag() if self.is_kept else 0
        self._part: Tensor | None = None
        self._version = -1  # of the shards that it shows, or will once the refresh is over
        self._refresh: AsyncWork | None = None

    def is_current(self, version: int) -> bool:
        return self._part is not None and self._version == version

    @property
    def nbytes(self) -> int:
        return 0 if self._part is None else self._part.nbytes

    @property
    def waits_for_backward(self) -> bool:
        return self._is_temporary and self._part is not None

    def cut(self, buffer: Tensor, version: int) -> None:
        """Keep, of an unsharded buffer, ``(padded_numel,)``, what backward all-gathers from."""
        if self._is_temporary and not self.is_current(version):
            self._part = buffer.chunk(self._comm.size)[self._comm.rank].clone()
            self._version = version

    def end_backward(self) -> None:
        if self._is_temporary:
            self.drop()

    def begin_refresh(self, source: Tensor, version: int, tag: int) -> None:
        """Start to all-gather it over the inter group. Collective: all ranks of that group.

        ``source``: this rank's shard in the dtype to keep; not to be written before it is sent.
        """
        self.finish_refresh()
        if self._part is None:
            self._part = source.new_empty(source.numel() * self._inter_group.size)
        self._refresh = self._inter_group.all_gather(
            Gather(source, self._part, self._link.unit_name, tag, "this node")
        )
        self._version = version

    def finish_refresh(self) -> None:
        """After it the shard may be written. Raises CollectiveError."""
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            try:
                refresh.wait(self._link.pending_sends)
            except Exception:
                self._version = -1  # what came is partial: all-gather it again
                raise

    def gather(self, out: Tensor, purpose: str) -> AsyncWork:
        """Begin filling ``out``, ``(padded_numel,)``. Collective: all nearby ranks."""
        self.finish_refresh()
        assert self._part is not None, "there is a part to gather from"
        return self._comm.all_gather(
            Gather(self._part, out, self._link.unit_name, self._tag, purpose)
        )

    def drop(self) -> None:
        self.finish_refresh()
        self._part, self._version = None, -1
