"""``FlatParamHandle``: owns every buffer of one flat parameter, which is one segment of a unit.

It works on the current stream with explicit arguments, never picks a stream and never reads the
phase of a step: ``Unit`` decides when. ``handle_making`` makes, converts and copies handles.

[Note: what is where]
    FlatParamHandle   the memory: the shard, the unsharded buffer, and how one becomes the other
    ParamViews        ``params``: the parameters that users and modules hold over that memory
    GradientBuffer, GradReduce, GradPublish: what autograd gave goes in, is reduced, and becomes
                      what users read in ``.grad``; `Backward` calls one after the other
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.engine.gather import ParamGather
from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.engine.grad_publish import GradPublish
from flatshard.engine.grad_reduce import CommHook, GradReduce, ReducePlan
from flatshard.engine.param_views import ParamViews
from flatshard.memory import disk
from flatshard.memory.buffer_cache import BufferCache, num_uses
from flatshard.memory.buffers import BufferMemory, ShardItself
from flatshard.options.precision import GradDtypes
from flatshard.plan.layout import view_of
from flatshard.tensor import freed_parameter


class ShardState(enum.Enum):
    """Whether the unsharded buffer exists. Moves only in ``FlatParamHandle._move_to``."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"


_MOVES = {
    ShardState.SHARDED: {ShardState.UNSHARDING},
    ShardState.UNSHARDING: {ShardState.UNSHARDED, ShardState.SHARDED},  # SHARDED: it failed
    ShardState.UNSHARDED: {ShardState.UNSHARDING, ShardState.SHARDED},  # UNSHARDING: it was stale
}


class FlatParamHandle:
    """One flat parameter: parameters of one unit that agree in dtype and ``requires_grad``."""

    def __init__(self, params: ParamViews, *, dtype: torch.dtype, device: torch.device) -> None:
        """Without memory: ``adopt``, ``params.show_shard`` and ``make_buffer`` follow."""
        self.params, self.device = params, device
        self.options = options = params.options
        self.layout, self.link, self.local_spans = params.layout, params.link, params.local_spans
        self.topology, self.reduces_alone = options.topology, options.reduces_alone
        self.is_whole = params.is_whole
        self.unfilled: set[int] = set()  # originals that have no values yet
        self.summoned: Any = None  # the ``state.full_params.Summoned`` that is open
        self.comm_hook: CommHook | None = None
        self.state = ShardState.SHARDED
        self.lingers = False  # whether it has a buffer only as somebody has views of that
        self._unsharded_version = -1  # of the shard when the buffer was filled
        self._targets, self._precision = options.targets, options.precision
        self.gather = ParamGather(self.link, options, device, self.layout.shard_numel)
        self._replicate_tag = self.topology.replicate.new_tag()
        self.grad_buffer = self._plan_gradients(dtype)
        self.grad_publish = GradPublish(params, self.grad_buffer, self._targets.gradient)
        # What backward started last; None once gradients are published.
        self.grad_reduce: GradReduce | None = None

    @property
    def unit_name(self) -> str:
        return self.link.unit_name

    @property
    def sharded(self) -> list[nn.Parameter]:
        return self.params.sharded

    # ------------------------------------------------------------ memory

    def adopt(self, shard: Tensor) -> None:
        """Keep ``shard``, ``(layout.shard_numel,)``, where its target is."""
        memory: BufferMemory | None = None
        if self.gather.reads_shard(shard.dtype):
            memory = self.gather.allocate(self.layout.padded_numel, shard.dtype)
        shown = None if memory is None else memory.shard
        # What the optimizer updates.
        self.shard = self._targets.shard.take_in(shard) if shown is None else shown.copy_(shard)
        # Of the unsharded buffer; where it is apart from the shard, `make_buffer` allocates it.
        self.memory = ShardItself(self.shard) if memory is None else memory
        self.page_out()

    def make_buffer(self) -> None:
        """Make the unsharded buffer and the full parameters over it; views are made once."""
        shard, device = self.shard, self.device
        is_uncast = self._precision.unsharded_dtype(shard.dtype) == shard.dtype
        # Whether the shard is the unsharded buffer.
        self._aliased = self.is_whole and is_uncast and shard.device.type == device.type
        with torch.inference_mode(False), torch.no_grad():
            if self._aliased:
                self.memory = ShardItself(shard)
            elif not self.gather.reads_shard(shard.dtype):
                self.memory = self.gather.allocate(self.layout.padded_numel, shard.dtype)
            # ``(layout.padded_numel,)``. One storage object for life: autograd saves views of it (a
            # `weight.t()`, say). While sharded it is resized to nothing, or gives its pages back.
            self.buffer = self.memory.buffer
        self.params.make_full(self.buffer, is_shard=self._aliased)
        self._num_uses = num_uses(self.buffer)
        if not self._aliased:
            self._free_buffer()
        self.params.use_sharded_views()

    def part(self, index: int) -> Tensor:
        """This rank's part of original parameter ``index``, ``(numel held here,)``; a view."""
        local = self.local_spans[index]
        return self.shard[local.start : local.end]

    def page_out(self) -> None:
        """Nobody reads or writes the shard for a while: on a disk it need not be in memory."""
        self._targets.shard.page_out(self.shard)

    # ------------------------------------------------------------ unshard and reshard

    def unshard(self, purpose: str) -> bool:
        """SHARDED -> UNSHARDING: start to all-gather, unless nothing is to be all-gathered.

        Returns whether it was started. Collective: all ranks of the shard group.
        """
        if self.summoned is not None:
            self.summoned.refuse()
        if self._aliased:
            if self.state is ShardState.SHARDED:
                self._move_to(ShardState.UNSHARDING)
                self._move_to(ShardState.UNSHARDED)  # at once: there is nothing to all-gather
            return False
        self.absorb_replaced()
        lingers, self.lingers = self.lingers, False
        if self.state is not ShardState.SHARDED:
            if self._unsharded_version == self.version:
                return False
            # The shard was written since, so the buffer is stale. Its memory is used again.
            self.wait_unshard()
            torch.autograd.graph.increment_version(self.buffer)
            self.memory.renew()
        elif lingers:
            self.memory.renew()
        with torch.inference_mode(False), torch.no_grad():
            freed_parameter.allow(self.buffer)
            self.memory.take()
            self.gather.start(self.shard.detach(), self.version, self.memory, purpose)
            # Not before: where memory for it lacks, a stale buffer must not pass for a current one.
            self._unsharded_version = self.version
        self._move_to(ShardState.UNSHARDING)
        if lingers:  # what has views may read them before anybody else waits
            self.wait_unshard()
        return True

    def wait_unshard(self) -> None:
        """UNSHARDING -> UNSHARDED: finish the all-gather. Raises CollectiveError."""
        if self.state is not ShardState.UNSHARDING:
            return
        try:
            # Autograd must not take the refill for an edit of what it saved.
            with _unsafe_preserve_version_counter(self.buffer):
                self.gather.finish(self.buffer)
        except Exception:
            self._move_to(ShardState.SHARDED)
            self._free_buffer()
            raise
        self.params.set_accessible(True)
        self._move_to(ShardState.UNSHARDED)

    def gather_flat(self, shard: Tensor) -> Tensor:
        """All-gather ``shard`` into a new tensor, ``(layout.padded_numel,)``, without a cast.

        ``shard`` is the handle's shard, or a tensor of the same shape such as the gradient's shard.
        Collective: all ranks of the shard group.
        """
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self.device)
            self.gather.fill(shard.detach().to(self.device), flat)
        disk.release(shard)  # its pages were read for the all-gather alone
        return flat

    def reshard(self, *, though_held: bool = True) -> None:
        """UNSHARDED -> SHARDED: free the unsharded buffer, if there is one. No communication.

        Unless ``though_held``, memory of which somebody has views lingers until the next call.
        """
        if self.state is not ShardState.SHARDED:
            self.wait_unshard()  # memory that an all-gather is still writing must not be freed
            self._move_to(ShardState.SHARDED)
            self.lingers = not self._aliased
            self.page_out()
        # Recomputed forwards save views, and not through our hooks. Ranks may differ in that.
        if self.lingers and (though_held or num_uses(self.buffer) <= self._num_uses):
            self._free_buffer()

    def _move_to(self, state: ShardState) -> None:
        assert state in _MOVES[self.state], f"{self.unit_name}: {self.state} to {state}"
        self.state = state

    def _free_buffer(self) -> None:
        # Whoever still holds a raw view gets an error, now and when other values are there.
        torch.autograd.graph.increment_version(self.buffer)
        self.memory.free()
        self.lingers = False
        freed_parameter.forbid(self.buffer, self.unit_name, self.topology.world.global_rank)
        self.params.set_accessible(False)

    def snapshot(self) -> None:
        """Let the buffer stay as it is when shards change: what shows them becomes a copy."""
        if self.state is ShardState.UNSHARDED:
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def absorb_replaced(self) -> None:
        """Where plain originals stand over the shard, take over data assigned to ``p.data``."""
        if not self.is_whole:
            return
        places = [view_of(self.shard, span) for span in self.layout.spans]
        if all(
            param.data_ptr() == place.data_ptr() or not param.numel()
            for param, place in zip(self.sharded, places, strict=True)
        ):
            return
        # In new memory: what was assigned over may be kept by somebody to be put back.
        with torch.inference_mode(False), torch.no_grad():
            self.shard = self._targets.shard.take_in(self.shard.clone())
            if self._aliased:
                self.memory, self.buffer = ShardItself(self.shard), self.shard
            for param, span in zip(self.sharded, self.layout.spans, strict=True):
                place = view_of(self.shard, span)
                place.copy_(param)
                param.data = place
                torch.autograd.graph.increment_version(param)

    @property
    def version(self) -> int:
        """Grows whenever the shard is written."""
        if self.is_whole:
            # Each has a counter of its own: they are views made through `.data`.
            return sum(param._version for param in self.sharded)
        return self.shard._version

    @property
    def is_current(self) -> bool:
        """Whether the buffer holds what the shards hold."""
        return self.state is ShardState.UNSHARDED and (
            self._aliased or self._unsharded_version == self.version
        )

    @property
    def buffer_bytes(self) -> int:
        """Size of the unsharded buffer in bytes; 0 where the shard is the buffer."""
        return 0 if self._aliased else self.buffer.nbytes

    @property
    def unsharded_bytes(self) -> int:
        """Bytes now of the unsharded buffer, besides all ranks' shards, and of a secondary one."""
        is_freed = self.state is ShardState.SHARDED and not self.lingers
        return (0 if is_freed else self.memory.held_bytes) + self.gather.secondary.nbytes

    # ------------------------------------------------------------ gradients

    def _plan_gradients(self, dtype: torch.dtype) -> GradientBuffer:
        """Decide how gradients of a shard of ``dtype`` are reduced, and where they wait for it."""
        hook, precision = self.comm_hook or CommHook(), self._precision
        reduce_dtype = precision.reduced_dtype(dtype, hook.reduce_dtype)
        self.reduce_plan = ReducePlan(
            self.link,
            self.layout,
            self.topology,
            reduce_dtype,
            self.device,
            tags=(*self.gather.tags, self._replicate_tag),
            fixed_order=precision.fixed_order,
            hook=hook.reduce,
            output=BufferCache() if self._targets.gradient.is_device else None,
        )
        return GradientBuffer(
            self.layout,
            dtypes=GradDtypes(
                reduce_dtype=reduce_dtype,
                # A sum in a narrower dtype than the shard's would lose small gradients.
                accum_dtype=dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype,
                grad_dtype=reduce_dtype if precision.keeps_reduce_dtype else dtype,
            ),
            device=self.device,
            rank=self.topology.index,
            intra_start=self.reduce_plan.intra_start,
            min_chunk_bytes=self.reduce_plan.min_chunk_bytes,
        )

    def replan_gradients(self) -> None:
        """Reduce in another way from now on; what was accumulated stays."""
        self.grad_buffer = self._plan_gradients(self.shard.dtype)
        self.grad_publish.replace_buffer(self.grad_buffer)

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduce as ``hook`` says from now on; no gradients may be accumulated."""
        assert not self.grad_publish.holds_gradients, "they are in the dtype of before"
        self.comm_hook = hook
        self.replan_gradients()

    @property
    def is_reducing(self) -> bool:
        return self.grad_reduce is not None and not self.grad_reduce.is_finished

    def publish(self, used: list[bool]) -> None:
        """Let ``.grad`` show what was reduced; ``used``: which originals any rank used."""
        self.grad_reduce = None
        self.grad_publish.publish(used)

    def drop_gradients(self) -> None:
        """Forget gradients that were not published, after a backward that failed."""
        reduce, self.grad_reduce = self.grad_reduce, None
        if reduce is not None:
            # First: a collective under way may still write the memory that is dropped.
            reduce.abandon()
        self.grad_publish.drop()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are not in ``.grad``, also of those that others still read."""
        under_way = 0 if self.grad_reduce is None else self.grad_reduce.nbytes
        return self.grad_buffer.nbytes + under_way + self.grad_publish.nbytes
