"""``ParamGather``: fills the unsharded buffer of one flat parameter from the ranks' shards.

The source of an all-gather is usually the shard itself, copied to the device that computes and
cast. It is a float8 copy if the user asks for float8, or a ``SecondaryShard``: a larger part of the
parameters than the shard, all-gathered over nearby ranks. If shards live in another memory than the
device that computes, a separate stream runs the copies, which then overlap with compute.

Two strategies keep a secondary shard. If forward all-gathers over all ranks and backward over
fewer, the secondary shard is cut out of the unsharded buffer after forward and dropped after
backward (hierarchical partitioning of ZeRO++, arXiv 2306.10209). If only optimizer state is split
over all nodes, the secondary shard is all-gathered from the nodes' shards once after each optimizer
step, and every other all-gather stays within the node.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Topology
from flatshard.comm.transports import BufferRequest, Gather
from flatshard.comm.work import AsyncWork, RunLink
from flatshard.memory.buffers import BufferMemory
from flatshard.memory.offload_target import OffloadTargets, beside, copy_stream
from flatshard.options.extras import extra
from flatshard.options.precision import ParamPrecision


@dataclass(frozen=True)
class HandleOptions:
    """How a flat parameter is sharded, kept and sent."""

    topology: Topology
    targets: OffloadTargets
    precision: ParamPrecision
    reduces_alone: bool  # its gradients are reduced apart from the rest of the unit's


class ParamGather:
    """All-gathers one flat parameter. Keeps the work under way, but no state of the handle."""

    def __init__(
        self,
        link: RunLink,
        options: HandleOptions,
        device: torch.device,
        dtype: torch.dtype,
        shard_numel: int,
    ) -> None:
        self._link, self._topology = link, options.topology
        self._precision, self._targets = options.precision, options.targets
        topology, gather_dtype = options.topology, options.precision.gather_dtype
        intra_group, inter_group = topology.intra_group, topology.inter_group
        self.tags = intra_group.new_tag(), inter_group.new_tag()  # reductions use the same tags
        # Tags apart from the tags of a step: if only one rank calls state_dict(), its all-gather
        # must not receive the messages that another rank sends for its forward.
        self.full_tags = intra_group.new_tag(), inter_group.new_tag()
        self._float8: Any = None
        if gather_dtype is not None and topology.shard.size > 1:
            reduction = extra("reduction", "MixedPrecision(gather_dtype=...)")
            self._float8 = reduction.Float8Shard(gather_dtype, shard_numel)
        # None: the strategy all-gathers from the shards only.
        self.secondary: SecondaryShard | None = None
        if topology.regather is not None or inter_group.size > 1:
            self.secondary = SecondaryShard(topology, link)
        self._work: AsyncWork | None = None
        self._packed: Tensor | None = None
        self.move_to(device, dtype)

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """All-gather shards of ``dtype`` to ``device`` from now on, and drop kept copies."""
        self._device = device
        self._is_offloaded = not self._targets.shard.is_device and device.type != "cpu"
        # The dtype of the unsharded buffer, and the dtype in which the shard is sent.
        self.compute_dtype = self._sent_dtype = self._precision.unsharded_dtype(dtype)
        is_alone = self._topology.shard.size == 1
        # With one rank, the all-gather is a copy, and the copy casts. Float8 is packed from the
        # shard's own dtype.
        if (is_alone and not self._targets.keeps_copy) or self._float8 is not None:
            self._sent_dtype = dtype
        # Whether all-gathers read the shard as it lies in host memory.
        is_copied = self.secondary is not None or self._float8 is not None
        is_cast = self.compute_dtype != dtype
        self.reads_shard = device.type == "cpu" and not (is_copied or is_cast or is_alone)
        # For an offloaded shard whose copy stays on the device: the copy, and the version of the
        # shard.
        self._device_copy: tuple[Tensor, int] | None = None
        if self.secondary is not None:
            self.secondary.drop()

    def allocate(self, numel: int) -> BufferMemory:
        """Memory for the unsharded buffer, ``(numel,)``; for the shard too if ``reads_shard``."""
        target = self._targets.shard if self.reads_shard else None
        request = BufferRequest(numel, self.compute_dtype, self._device, self.tags[0], target)
        return self._topology.intra_group.allocate_unsharded(request)

    def start(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> None:
        """Start filling the buffer in ``memory``. Collective: all ranks that send or receive."""
        # `version` is the shard's version. It shows whether a kept copy is stale.
        with beside(self._device) if self._is_offloaded else nullcontext():
            if self.secondary is not None:
                self.begin_refresh(shard, version)
                if self.secondary.is_current(version):
                    self._work = self.secondary.gather(memory.buffer, purpose)
                    return
            source = self._source(shard, version)
            request = Gather(
                source, memory.buffer, self._link.unit_name, self.tags[0], purpose, memory=memory
            )
            if self._float8 is not None:
                packed = self._float8.pack(source)
                # Gather into memory of its own: float8 is unpacked into the buffer after all of it
                # arrived.
                self._packed = packed.new_empty(packed.numel() * self._topology.intra_group.size)
                request = request._replace(shard=packed, out=self._packed, memory=None)
            self._work = self._topology.intra_group.all_gather(request)

    def _source(self, shard: Tensor, version: int) -> Tensor:
        """The shard on the device that computes, in the dtype to send."""
        if self._is_offloaded:
            return self._on_device(shard, version)
        source = shard.to(self._sent_dtype)
        if source is not shard:
            self._targets.shard.page_out(shard)
        return source

    def _on_device(self, shard: Tensor, version: int) -> Tensor:
        """Copy of an offloaded shard on the device; the earlier copy if it is kept and current."""
        if self._device_copy is not None and self._device_copy[1] == version:
            return self._device_copy[0]
        # Cast on the device: the result of a cast on the host would not be in pinned memory.
        brought = shard.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # The optimizer writes the shard on the host, and no stream makes the host wait. So the end
        # of the step waits for this copy.
        copied = SimpleNamespace(is_completed=event.query, wait=event.synchronize)
        copying = AsyncWork([], self._link.unit_name, [shard], sends=[copied])
        copying.wait(self._link.pending_sends)
        self._targets.shard.page_out(shard)
        source = brought.to(self._sent_dtype)
        if self._targets.keeps_copy:
            self._device_copy = source, version
        return source

    def finish(self, buffer: Tensor) -> None:
        """Wait until the all-gather has filled ``buffer``. Raises CollectiveError."""
        assert self._work is not None, "something was started"
        work, self._work = self._work, None
        packed, self._packed = self._packed, None
        work.wait(self._link.pending_sends)
        if self._is_offloaded:
            # The compute stream must not read before the copy stream is done. Wait here and not in
            # `start`, so that compute continues until the parameters are needed.
            torch.cuda.current_stream(self._device).wait_stream(copy_stream(self._device))
        if packed is not None:
            assert self._float8 is not None, "it was packed"
            with torch.inference_mode(False), torch.no_grad():
                self._float8.unpack(packed, buffer)

    def fill(self, part: Tensor, out: Tensor) -> None:
        """All-gather ``part``, ``(shard_numel,)``, into ``out`` without a cast. Collective."""
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
        """All-gather other nodes' shards if stale. Collective: the ranks of ``inter_group``."""
        secondary = self.secondary
        if secondary is None or self._topology.inter_group.size == 1:
            return
        if not secondary.is_current(version):
            copying = beside(self._device) if self._is_offloaded else nullcontext()
            with torch.inference_mode(False), torch.no_grad(), copying:
                source = self._source(shard, version)
                secondary.begin_refresh(source, version, self.tags[1])


class SecondaryShard:
    """This rank's larger part of the parameters, which nearby ranks all-gather."""

    def __init__(self, topology: Topology, link: RunLink) -> None:
        self._link, self._inter_group = link, topology.inter_group
        # Kept only from a forward to its backward.
        self._is_temporary = topology.regather is not None
        self._comm = topology.intra_group if topology.regather is None else topology.regather
        self._tag = self._comm.new_tag()
        self._part: Tensor | None = None
        self._version = -1  # version of the shards in `_part`, after any refresh
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
        """Keep this rank's part of an unsharded buffer, ``(padded_numel,)``, for backward."""
        if self._is_temporary and not self.is_current(version):
            self._part = buffer.chunk(self._comm.size)[self._comm.rank].clone()
            self._version = version

    def end_backward(self) -> None:
        if self._is_temporary:
            self.drop()

    def begin_refresh(self, source: Tensor, version: int, tag: int) -> None:
        """Start the all-gather that refreshes this rank's kept part of the unsharded parameters.

        Collective: all ranks of the inter group.

        ``source``: this rank's shard in the dtype to keep. It must not be written until it is sent.
        """
        self.finish_refresh()
        if self._part is None:
            self._part = source.new_empty(source.numel() * self._inter_group.size)
        self._refresh = self._inter_group.all_gather(
            Gather(source, self._part, self._link.unit_name, tag, "this node")
        )
        self._version = version

    def finish_refresh(self) -> None:
        """Wait for the refresh; afterwards the shard may be written. Raises CollectiveError."""
        refresh, self._refresh = self._refresh, None
        if refresh is not None:
            try:
                refresh.wait(self._link.pending_sends)
            except Exception:
                self._version = -1  # the part is incomplete, so all-gather it again
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
