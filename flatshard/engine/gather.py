"""``ParamGather``: fills the unsharded buffer of one flat parameter by an all-gather.

Each rank usually sends its shard, cast to the compute dtype and copied to the compute device.
Options change this:

- ``gather_dtype=`` (float8): each rank sends a float8 copy of its shard.
- ``HYBRID_SHARD_OP`` or ``reshard_after_forward=k``: each rank keeps a larger part of the
  parameters, its secondary shard, so that an all-gather needs only nearby ranks.
- offloaded shards: a separate stream copies shards to the device, overlapped with compute.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.transports import BufferRequest, Gather
from flatshard.comm.work import AsyncWork
from flatshard.memory import NOTHING, AllocatedBuffer, BufferMemory, on_side_stream, side_stream
from flatshard.options.extras import extra
from flatshard.tensor.flat_parameter import FlatParamPlan


class ParamGather:
    """All-gathers one flat parameter. Keeps the unfinished all-gather, and copies of the shard."""

    def __init__(self, plan: FlatParamPlan) -> None:
        """Prepare to all-gather the planned flat parameter. The caller must call ``move_to`` next.

        Takes the next free tags, so all ranks must make their flat parameters in the same order.
        """
        self._plan, self._topology = plan, plan.topology
        self._precision, self._targets = plan.precision, plan.targets
        topology, gather_dtype = plan.topology, plan.precision.gather_dtype
        intra_group, inter_group = topology.intra_group, topology.inter_group
        # A tag is a number by which some transports (sockets, for example) match the messages of a
        # flat parameter on different ranks.
        tags = [(intra_group.new_tag(self), inter_group.new_tag(self)) for _ in range(3)]
        # `tags` are for all-gathers and reductions in a step. `_full_tags` are for state_dict(): if
        # only one rank calls state_dict() by mistake, the all-gather must not match the all-gather
        # in the other ranks' forward. `read_tags` are for full_tensors(), because a program may
        # call state_dict() while an all-gather of full_tensors() is unfinished.
        self.tags, self._full_tags, self.read_tags = tags
        self._float8: Any = None
        if gather_dtype is not None and topology.shard.size > 1:
            reduction = extra("reduction", "MixedPrecision(gather_dtype=...)")
            self._float8 = reduction.Float8Shard(gather_dtype, plan.layout.shard_numel)
        # The `SecondaryShard` that this rank keeps for all-gathers with nearby ranks, or None.
        self.secondary: Any = None
        if topology.post_forward_group is not None or inter_group.size > 1:
            options = "HYBRID_SHARD_OP or reshard_after_forward=k"
            self.secondary = extra("secondary_shards", options).SecondaryShard(plan)
        self._work: AsyncWork | None = None
        self._packed: Tensor | None = None

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """From now on, all-gather shards of ``dtype`` into buffers on ``device``."""
        self._device = device
        self._is_offloaded = not self._targets.shard.is_device and device.type != "cpu"
        # `compute_dtype`: dtype of the unsharded buffer. `_sent_dtype`: dtype of the sent shard.
        self.compute_dtype = self._sent_dtype = self._precision.unsharded_dtype(dtype)
        is_alone = self._topology.shard.size == 1
        # Two cases need the shard without a cast. If every rank holds the whole parameter, the
        # all-gather is a local copy, and this copy casts. With `gather_dtype`, float8 values are
        # computed from the uncast shard.
        if (is_alone and not self._targets.keeps_copy) or self._float8 is not None:
            self._sent_dtype = dtype
        # Whether all-gathers send the shard itself, from host memory, and not a copy of the shard.
        is_copied = self.secondary is not None or self._float8 is not None
        is_cast = self.compute_dtype != dtype
        self.reads_shard = device.type == "cpu" and not (is_copied or is_cast or is_alone)
        # Whether the shard is the whole parameter, and itself serves as the unsharded buffer.
        self.shard_is_buffer = is_alone and not (is_cast or self._is_offloaded)
        # Copy of an offloaded shard that stays on the device, and the version of the copied shard.
        self._device_copy: tuple[Tensor, int] | None = None
        if self.secondary is not None:
            self.secondary.drop()

    def allocate(self, numel: int, shard: Tensor | None = None) -> BufferMemory:
        """Allocate memory for the unsharded buffer, ``(numel,)``.

        With ``shard_is_buffer``, returns the memory of ``shard``. With ``reads_shard``, the result
        may also have memory for this rank's shard.
        """
        if shard is not None and self.shard_is_buffer:
            return BufferMemory(shard)
        if not self.reads_shard:
            return AllocatedBuffer(numel, self.compute_dtype, self._device)
        request = BufferRequest(numel, self.compute_dtype, self.tags[0], self._targets.shard)
        transport = self._topology.intra_group.transport_for(self._device, self.tags[0])
        return transport.allocate_unsharded(request)

    def start(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> None:
        """Start the all-gather into the buffer of ``memory``. Collective: all ranks of the group.

        ``version``: the version counter of ``shard``, which shows whether earlier copies of the
        shard are stale.
        """
        with on_side_stream(self._device, "offload") if self._is_offloaded else NOTHING:
            if self.secondary is not None:
                self.begin_refresh(shard, version)
                if self.secondary.is_current(version):
                    self._work = self.secondary.gather(memory.buffer, purpose)
                    return
            source, unit_name = self._source(shard, version), self._plan.unit_name
            request = Gather(source, memory.buffer, unit_name, self.tags[0], purpose, memory)
            if self._float8 is not None:
                packed = self._float8.pack(source)
                # All-gather float8 values into separate memory. `finish` unpacks the values.
                self._packed = packed.new_empty(packed.numel() * self._topology.intra_group.size)
                request = request._replace(shard=packed, out=self._packed, memory=None)
            self._work = self._topology.intra_group.all_gather(request)

    def _source(self, shard: Tensor, version: int) -> Tensor:
        """Return the shard on the compute device, in the dtype to send."""
        if self._is_offloaded:
            return self._on_device(shard, version)
        if shard.dtype is self._sent_dtype:
            return shard
        source = shard.to(self._sent_dtype)
        self._targets.shard.page_out(shard)
        return source

    def _on_device(self, shard: Tensor, version: int) -> Tensor:
        """Return a copy of an offloaded shard on the device. Reuse the last copy if up to date."""
        if self._device_copy is not None and self._device_copy[1] == version:
            return self._device_copy[0]
        # Copy first, and cast on the device: a cast on the host would write to unpinned memory, and
        # copies from unpinned memory do not overlap with compute.
        brought = shard.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # The optimizer, on the host, must not write the shard before this copy has read it. So
        # treat the copy like an unfinished send, for which the end of forward or backward waits.
        copied = SimpleNamespace(is_completed=event.query, wait=event.synchronize)
        AsyncWork([], self._plan.unit_name, [shard], sends=[copied]).wait(self._plan.pending_sends)
        self._targets.shard.page_out(shard)
        source = brought.to(self._sent_dtype)
        if self._targets.keeps_copy:
            self._device_copy = source, version
        return source

    def as_gathered(self, shard: Tensor) -> Tensor:
        """Return the values of ``shard`` after the rounding to the compute dtype or to float8."""
        values = shard.to(self._device)
        if self._float8 is None:
            return values.to(self.compute_dtype)
        out = torch.empty_like(values, dtype=self.compute_dtype)
        self._float8.unpack(self._float8.pack(values), out)
        return out

    def finish(self, buffer: Tensor) -> None:
        """Wait until the all-gather has filled ``buffer``.

        Raises CollectiveError if the all-gather failed.
        """
        if self._work is not None:  # None: an earlier call has waited, and was interrupted
            self._work.wait(self._plan.pending_sends)
            self._work = None
        if self._is_offloaded:
            # Make the compute stream wait until the side stream has filled the buffer. Wait only
            # now, so that kernels that do not need the parameters run before.
            offload = side_stream(self._device, "offload")
            torch.cuda.current_stream(self._device).wait_stream(offload)
        if self._packed is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._float8.unpack(self._packed, buffer)
            self._packed = None

    def start_full(self, part: Tensor, out: Tensor, tags: tuple[int, ...] = ()) -> AsyncWork:
        """Start to all-gather ``part``, ``(shard_numel,)``, into ``out``, outside of a step.

        ``out``: ``(padded_numel,)``, in the dtype of ``part``. ``tags``: ``read_tags``, if other
        all-gathers of the flat parameter may run at the same time. Otherwise empty.

        Collective: all ranks that share the flat parameter.
        """
        unit, topology = self._plan.unit_name, self._topology
        purpose = "full tensors, which all ranks must ask for together (state_dict(), for example),"
        intra_tag, inter_tag = tags or self._full_tags
        if topology.inter_group.size > 1:  # first all-gather across nodes, then within the node
            source, part = part, part.new_empty(part.numel() * topology.inter_group.size)
            request = Gather(source, part, unit, inter_tag, purpose, exact=True)
            topology.inter_group.all_gather(request).wait()
        request = Gather(part, out, unit, intra_tag, purpose, exact=True)
        return topology.intra_group.all_gather(request)

    def begin_refresh(self, shard: Tensor, version: int) -> None:
        """Start to all-gather the secondary shard across nodes, if the secondary shard is stale.

        Does nothing without ``HYBRID_SHARD_OP``. Collective: all ranks of the inter group, which
        has one rank of each node.
        """
        secondary = self.secondary
        if secondary is None or self._topology.inter_group.size == 1:
            return
        if not secondary.is_current(version):
            copying = on_side_stream(self._device, "offload") if self._is_offloaded else NOTHING
            with torch.inference_mode(False), torch.no_grad(), copying:
                secondary.begin_refresh(self._source(shard, version), version, self.tags[1])
