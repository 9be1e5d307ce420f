"""``ParamGather``: fills the unsharded buffer of one flat parameter by an all-gather.

Each rank usually sends its shard, cast to the compute dtype and copied to the compute device. If
the user asks for float8, each rank sends a float8 copy of the shard. With ``HYBRID_SHARD_OP`` or
``reshard_after_forward=k``, each rank sends a larger part of the parameters than the shard, so that
an all-gather needs only nearby ranks (the extra ``secondary_shards``). If shards are offloaded, a
separate stream copies shards to the compute device, and the copies overlap with compute.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.transports import BufferRequest, Gather
from flatshard.comm.work import AsyncWork
from flatshard.memory import NOTHING, BufferMemory, copy_stream, on_copy_stream
from flatshard.options.extras import extra
from flatshard.tensor.flat_parameter import FlatParamPlan


class ParamGather:
    """All-gathers one flat parameter: keeps the unfinished all-gather and copies of the shard."""

    def __init__(self, plan: FlatParamPlan) -> None:
        """Prepare to all-gather the planned flat parameter. The caller must call ``move_to`` next.

        Takes new tags from the process groups, so all ranks make flat parameters in one order.
        """
        self._plan, self._topology = plan, plan.topology
        self._precision, self._targets = plan.precision, plan.targets
        topology, gather_dtype = plan.topology, plan.precision.gather_dtype
        intra_group, inter_group = topology.intra_group, topology.inter_group
        # Transports such as sockets match collectives by tag. Reductions use the same tags.
        tags = [(intra_group.new_tag(self), inter_group.new_tag(self)) for _ in range(3)]
        # Separate tags for all-gathers outside of a step: if by mistake only one rank calls
        # state_dict(), its all-gather must not match the all-gather of the same parameter in the
        # other ranks' forward. `read_tags`: for full_tensors(), because programs may call
        # state_dict() while the next all-gather of full_tensors() is unfinished.
        self.tags, self._full_tags, self.read_tags = tags
        self._float8: Any = None
        if gather_dtype is not None and topology.shard.size > 1:
            reduction = extra("reduction", "MixedPrecision(gather_dtype=...)")
            self._float8 = reduction.Float8Shard(gather_dtype, plan.layout.shard_numel)
        # `SecondaryShard`. None: every all-gather reads the shards.
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
        # Do not cast the shard before the all-gather in two cases: on one rank, the all-gather is a
        # copy, which also casts; float8 values are computed from the uncast shard.
        if (is_alone and not self._targets.keeps_copy) or self._float8 is not None:
            self._sent_dtype = dtype
        # Whether all-gathers read the shard itself, in host memory, and not a copy of the shard.
        is_copied = self.secondary is not None or self._float8 is not None
        is_cast = self.compute_dtype != dtype
        self.reads_shard = device.type == "cpu" and not (is_copied or is_cast or is_alone)
        # Whether the shard is the unsharded buffer: modules compute with the sharded parameters.
        self.is_aliased = is_alone and not (is_cast or self._is_offloaded)
        # Copy of an offloaded shard that stays on the device, and the shard's version then.
        self._device_copy: tuple[Tensor, int] | None = None
        if self.secondary is not None:
            self.secondary.drop()

    def allocate(self, numel: int, shard: Tensor | None = None) -> BufferMemory:
        """Allocate memory for the unsharded buffer, ``(numel,)``.

        With ``is_aliased``, returns the memory of ``shard``. With ``reads_shard``, the transport
        may map this rank's shard into the buffer: then the result also has memory for the shard.
        """
        if shard is not None and self.is_aliased:
            return BufferMemory(shard)
        target = self._targets.shard if self.reads_shard else None
        request = BufferRequest(numel, self.compute_dtype, self._device, self.tags[0], target)
        transport = self._topology.intra_group.transport_for(self._device, self.tags[0])
        return transport.allocate_unsharded(request)

    def start(self, shard: Tensor, version: int, memory: BufferMemory, purpose: str) -> None:
        """Start the all-gather into the buffer of ``memory``. Collective: all ranks of the group.

        ``version``: the counter of ``shard``, which shows whether an earlier copy is stale.
        """
        with on_copy_stream(self._device) if self._is_offloaded else NOTHING:
            if self.secondary is not None:
                self.begin_refresh(shard, version)
                if self.secondary.is_current(version):
                    self._work = self.secondary.gather(memory.buffer, purpose)
                    return
            source = self._source(shard, version)
            request = Gather(
                source, memory.buffer, self._plan.unit_name, self.tags[0], purpose, memory=memory
            )
            if self._float8 is not None:
                packed = self._float8.pack(source)
                # All-gather the smaller float8 values into separate memory. `finish` unpacks them.
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
        """Return a copy of an offloaded shard on the device.

        Reuse the last copy if it is up to date.
        """
        if self._device_copy is not None and self._device_copy[1] == version:
            return self._device_copy[0]
        # Cast on the device: a cast on the host would write to unpinned memory, from which a copy
        # does not overlap with compute.
        brought = shard.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # The optimizer writes the shard on the host, and the host does not wait for this stream. So
        # treat the copy like an unfinished send: the end of the forward or backward waits for it.
        copied = SimpleNamespace(is_completed=event.query, wait=event.synchronize)
        AsyncWork([], self._plan.unit_name, [shard], sends=[copied]).wait(self._plan.pending_sends)
        self._targets.shard.page_out(shard)
        source = brought.to(self._sent_dtype)
        if self._targets.keeps_copy:
            self._device_copy = source, version
        return source

    def as_gathered(self, shard: Tensor) -> Tensor:
        """Return the values of ``shard`` as an all-gather puts them into the buffer."""
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
        if self._work is not None:  # None: the user interrupted an earlier call after the wait
            self._work.wait(self._plan.pending_sends)
            self._work = None
        if self._is_offloaded:
            # The compute stream must wait until the copy stream has filled the buffer, but only
            # here: until now, it can run kernels that do not need the parameters.
            torch.cuda.current_stream(self._device).wait_stream(copy_stream(self._device))
        if self._packed is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._float8.unpack(self._packed, buffer)
            self._packed = None

    def start_full(self, part: Tensor, out: Tensor, tags: tuple[int, ...] = ()) -> AsyncWork:
        """Start to all-gather ``part``, ``(shard_numel,)``, into ``out``, outside of a step.

        ``out``: ``(padded_numel,)``, in the dtype of ``part``. ``tags``: pass ``read_tags`` if
        other all-gathers of the flat parameter may run before the caller finishes this one.

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

        Does nothing if the inter group has one rank. Collective: all ranks of the inter group.
        """
        secondary = self.secondary
        if secondary is None or self._topology.inter_group.size == 1:
            return
        if not secondary.is_current(version):
            copying = on_copy_stream(self._device) if self._is_offloaded else NOTHING
            with torch.inference_mode(False), torch.no_grad(), copying:
                secondary.begin_refresh(self._source(shard, version), version, self.tags[1])
