"""``FlatParamHandle``: owns every buffer of one flat parameter, which is one segment of a unit.

It works on the current stream with explicit arguments, never picks a stream and never reads the
phase of a step: ``Unit`` decides when.

[Note: what is where]
    FlatParamHandle   the memory: the shard, the unsharded buffer, and how one becomes the other
    ParamViews        ``params``: the parameters that users and modules hold over that memory
    GradientBuffer, GradReduce, GradPublish: what autograd gave goes in, is reduced, and becomes
                      what users read in ``.grad``; `Backward` calls one after the other
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.topology import Topology
from flatshard.comm.work import PendingSends
from flatshard.engine.gather import ParamGather
from flatshard.engine.grad_buffer import GradientBuffer
from flatshard.engine.grad_publish import GradPublish
from flatshard.engine.grad_reduce import CommHook, GradReduce, ReducePlan
from flatshard.engine.offload import OffloadTargets
from flatshard.engine.param_views import ParamViews
from flatshard.memory.buffer_cache import BufferCache
from flatshard.memory.buffers import BufferMemory, ShardItself
from flatshard.options.precision import GradDtypes, ParamPrecision
from flatshard.plan.layout import memory_order, strides_of
from flatshard.plan.param_info import ParamInfo, layout_of
from flatshard.tensor import freed_parameter
from flatshard.tensor.broadcast_source import BroadcastSource
from flatshard.tensor.flat_parameter import part_of, view_of


class ShardState(enum.Enum):
    """Whether the unsharded buffer exists. Moves only in ``FlatParamHandle._move_to``."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"


_MOVES = {
    # At once where the shard is the buffer: there is nothing to all-gather.
    ShardState.SHARDED: {ShardState.UNSHARDING, ShardState.UNSHARDED},
    # Back where the all-gather failed.
    ShardState.UNSHARDING: {ShardState.UNSHARDED, ShardState.SHARDED},
    # All-gathered again where the shard was written since.
    ShardState.UNSHARDED: {ShardState.SHARDED, ShardState.UNSHARDING},
}


class FlatParamHandle:
    """One flat parameter: parameters of one unit that agree in dtype and ``requires_grad``.

    Attributes:
        unit_name: names the unit in errors.
        reduces_alone: whether its gradients do not wait for the rest of the unit's.
        layout: where each original parameter lies.
        shard: this rank's part, ``(layout.shard_numel,)``; what the optimizer updates.
        buffer: the unsharded buffer, ``(layout.padded_numel,)``; empty storage while SHARDED.
        device: where the unit computes; the shard may live elsewhere.
        params: the sharded and the full parameters, and where in the modules they stand.
        grad_buffer: accumulates their gradients.
        reduce_plan: how these are reduced.
        grad_reduce: the reduction that backward started last; None once gradients are published.
        grad_publish: shows them in ``.grad``.
        local_spans: which range of ``shard`` is of which original parameter.
        state: see ``ShardState``.
        topology: the ranks that share it.
        is_whole: whether this rank's shard is all of it.
        unfilled: original parameters that have no values yet, by index.
        pending_sends: what other ranks may still be reading from this one; of all handles of a run.
        summoned: the ``summon.Summoned`` that is open, or None.
        comm_hook: what the user put in the place of the usual reduction, or None.
    """

    def __init__(
        self,
        owned: list[ParamInfo],
        unit_name: str,
        *,
        topology: Topology,
        device: torch.device,
        targets: OffloadTargets,
        missing: Collection[int],
        source: BroadcastSource | None,
        precision: ParamPrecision,
        use_orig_params: bool,
        reduces_alone: bool,
        grad_hook: Callable[[FlatParamHandle, int], Callable[[Tensor], None]],
        on_outside_grad: Callable[[], object],
    ) -> None:
        """Keep this rank's part of ``owned``, and turn the originals into views of it.

        Collective with a ``source``.

        Args:
            owned: parameters of one dtype and ``requires_grad``.
            unit_name: the unit's name in the unwrapped model.
            topology: the ranks that share the flat parameter.
            missing: ids of parameters without values yet; they are ``unfilled``.
            source: hands rank 0's values out; None: each rank has its own.
            device: where the unit computes.
            targets: where the shard, its gradient and its optimizer state live.
            precision: in which dtypes they are all-gathered and reduced.
            use_orig_params: whether users see original parameters or one ``FlatParameter``.
            reduces_alone: see the class.
            grad_hook: makes, of this handle and a full parameter's index, what that parameter
                calls once autograd has filled its ``.grad``.
            on_outside_grad: called before autograd adds to a sharded parameter's ``.grad`` what
                came of its use outside of forward.
        """
        self.unit_name = unit_name
        self.reduces_alone = reduces_alone
        self.topology = topology
        self.is_whole = topology.shard.size == 1
        self._replicate_tag = topology.replicate.new_tag()
        self.device, self._offload = device, targets
        self._precision = precision
        self.pending_sends = PendingSends()
        self.summoned: Any = None
        self.comm_hook: CommHook | None = None
        self.state = ShardState.SHARDED
        self._unsharded_version = -1

        first = owned[0].param
        self.layout = layout_of(owned, topology.shard.size)
        self.gather = self._new_gather()
        self.params = ParamViews(
            owned,
            unit_name,
            layout=self.layout,
            topology=topology,
            use_orig_params=use_orig_params,
            on_outside_grad=on_outside_grad,
        )
        self.local_spans = self.params.local_spans
        with torch.inference_mode(False), torch.no_grad():
            self._adopt_shard(
                torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=device)
            )
            self.unfilled = {i for i, o in enumerate(owned) if id(o.param) in missing}
            for index, one in enumerate(owned):
                if index not in self.unfilled:
                    self.fill(index, one.param, source)
            self.params.make_sharded(self.shard)
        self._grad_hook = grad_hook
        self._make_gradients()
        self._make_buffer()
        self.params.use_sharded_views()

    # ------------------------------------------------------------ construction

    def _new_gather(self) -> ParamGather:
        return ParamGather(
            self.unit_name,
            self.topology,
            self.device,
            self._precision,
            self._offload,
            self.layout.shard_numel,
        )

    def fill(self, index: int, value: Tensor | None, source: BroadcastSource | None) -> None:
        """Keep this rank's part of the values of original parameter ``index``.

        Collective with a ``source``: all ranks.

        Args:
            index: which one.
            value: all of it, on any device; with a ``source`` rank 0's alone counts.
            source: hands rank 0's values out; None: each rank has its own.
        """
        local, span = self.local_spans[index], self.layout.spans[index]
        if source is not None:
            source.hand_out(self.layout, index, value, self.part(index))
        else:
            assert value is not None, "every rank has the values"
            self.part(index).copy_(part_of(value, span, local))
        self.unfilled.discard(index)

    def part(self, index: int) -> Tensor:
        """This rank's part of original parameter ``index``, ``(numel held here,)``; a view."""
        local = self.local_spans[index]
        return self.shard[local.start : local.end]

    def _adopt_shard(self, shard: Tensor) -> None:
        self._memory: BufferMemory | None = None
        if self.gather.reads_shard(shard.dtype):
            self._memory = self.gather.allocate(self.layout.padded_numel, shard.dtype)
        shown = None if self._memory is None else self._memory.shard
        self.shard = self._offload.shard.take_in(shard) if shown is None else shown.copy_(shard)
        self.page_out()

    def page_out(self) -> None:
        """Nobody reads or writes the shard for a while: on a disk it need not be in memory."""
        self._offload.shard.page_out(self.shard)

    @property
    def memory(self) -> BufferMemory:
        """What the unsharded buffer lies in."""
        assert self._memory is not None, "made at construction"
        return self._memory

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The parameters that users see."""
        return self.params.sharded

    @property
    def full(self) -> list[nn.Parameter]:
        """The parameters that compute, in the order of ``layout.spans``."""
        return self.params.full

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameters."""
        return self._precision.unsharded_dtype(self.shard.dtype)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        of_hook = None if self.comm_hook is None else self.comm_hook.reduce_dtype
        return self._precision.reduced_dtype(self.shard.dtype, of_hook)

    def _make_buffer(self) -> None:
        """The unsharded buffer and the full parameters over it; views are made once."""
        is_there = self.shard.device.type == self.device.type
        is_uncast = self.compute_dtype == self.shard.dtype
        # Whether the shard is the unsharded buffer.
        self._aliased = self.is_whole and is_there and is_uncast
        with torch.inference_mode(False), torch.no_grad():
            # One storage object for life: autograd saves views of it (a `weight.t()`, say). While
            # sharded it is resized to nothing, or its pages are given back.
            if self._aliased:
                self._memory = ShardItself(self.shard)
            elif self._memory is None:
                self._memory = self.gather.allocate(self.layout.padded_numel, self.shard.dtype)
            self.buffer = self._memory.buffer
        self.params.make_full(
            self.buffer, is_shard=self._aliased, grad_hook=partial(self._grad_hook, self)
        )
        self.params.keep_state_at(self._offload)
        if not self._aliased:
            freed_parameter.show_crashes()
            self._free_buffer()

    def _make_gradients(self) -> None:
        # After the shard: its dtype decides in which one gradients are accumulated.
        self.grad_buffer = self._plan_gradients()
        self.grad_reduce: GradReduce | None = None
        self.grad_publish = GradPublish(self.params, self.grad_buffer, self._offload.gradient)

    def _plan_gradients(self) -> GradientBuffer:
        """How gradients are reduced, and where they wait for that."""
        dtype, reduce_dtype = self.shard.dtype, self.reduce_dtype
        self.reduce_plan = ReducePlan(
            self.unit_name,
            self.layout,
            self.topology,
            reduce_dtype,
            self.device,
            tags=(*self.gather.tags, self._replicate_tag),
            fixed_order=self._precision.fixed_order,
            hook=None if self.comm_hook is None else self.comm_hook.reduce,
            output=BufferCache() if self._offload.gradient.is_device else None,
            pending_sends=self.pending_sends,
        )
        return GradientBuffer(
            self.layout,
            dtypes=GradDtypes(
                reduce_dtype=reduce_dtype,
                accum_dtype=dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype,
                grad_dtype=reduce_dtype if self._precision.keeps_reduce_dtype else dtype,
            ),
            device=self.device,
            rank=self.topology.index,
            intra_start=self.reduce_plan.intra_start,
            min_chunk_bytes=self.reduce_plan.min_chunk_bytes,
        )

    def _replan_gradients(self) -> None:
        """Reduce in another way from now on; what was accumulated stays."""
        self.grad_buffer = self._plan_gradients()
        self.grad_publish.replace_buffer(self.grad_buffer)

    def share_pending_sends(self, pending_sends: PendingSends) -> None:
        """Keep what other ranks still read from this one in the run's list."""
        self.pending_sends = self.reduce_plan.pending_sends = pending_sends
        self.gather.share_pending_sends(pending_sends)

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduce as ``hook`` says from now on; no gradients may be accumulated."""
        assert not self.grad_publish.holds_gradients, "they are in the dtype of before"
        self.comm_hook = hook
        self._replan_gradients()

    def rename(self, unit_name: str, strip: Callable[[str], str]) -> None:
        """Take names relative to another root; ``strip`` maps the old to the new ones."""
        self.unit_name = self.reduce_plan.unit_fqn = unit_name
        self.params.rename(unit_name, strip)
        self.gather.rename(unit_name)

    # ------------------------------------------------------------ unshard and reshard

    def unshard(self, purpose: str) -> None:
        """Start to all-gather the parameters, unless they are there or coming.

        Collective: all ranks of the shard group.

        Args:
            purpose: what for, in errors: "forward" or "backward".

        State: SHARDED -> UNSHARDING.
        """
        if self.summoned is not None:
            raise RuntimeError(
                f"unit {self.unit_name!r}: a forward was run under summon_full_params(). Leave "
                "the context first: units unshard what they need by themselves."
            )
        if self._aliased:
            self._move_to(ShardState.UNSHARDED)
            return
        self.absorb_replaced()
        if self.state is not ShardState.SHARDED:
            if self._unsharded_version == self.version:
                return
            # The shard was written since, so the buffer is stale. Its memory is used again.
            self.wait_unshard()
            torch.autograd.graph.increment_version(self.buffer)
            self.memory.renew()
        with torch.inference_mode(False), torch.no_grad():
            self.memory.take()
            self.gather.start(self.shard.detach(), self.version, self.memory, purpose)
            # Not before: where memory for it lacks, a stale buffer must not pass for a current one.
            self._unsharded_version = self.version
        self._move_to(ShardState.UNSHARDING)

    def begin_refresh(self) -> None:
        """Start to all-gather what other nodes changed, if a secondary shard is kept.

        Collective: all ranks of ``inter_group``.
        """
        self.gather.begin_refresh(self.shard.detach(), self.version)

    def keep_secondary(self) -> None:
        """Before ``reshard`` between forward and backward: keep what backward all-gathers from."""
        if self.is_current:
            self.gather.keep_secondary(self.buffer, self._unsharded_version)

    @property
    def has_secondary(self) -> bool:
        """Whether ``keep_secondary`` kept something."""
        return self.topology.regather is not None and self.gather.secondary_bytes > 0

    def absorb_replaced(self) -> None:
        """Where plain originals stand over the shard, take over data assigned to ``p.data``."""
        if not self.params.are_originals:
            return
        places = [view_of(self.shard, span) for span in self.layout.spans]
        if all(
            param.data_ptr() == place.data_ptr() or not param.numel()
            for param, place in zip(self.sharded, places, strict=True)
        ):
            return
        # In new memory: what was assigned over may be kept by somebody to be put back.
        with torch.inference_mode(False), torch.no_grad():
            self.shard = self._offload.shard.take_in(self.shard.clone())
            if self._aliased:
                self.buffer = self.shard
            for param, span in zip(self.sharded, self.layout.spans, strict=True):
                place = view_of(self.shard, span)
                place.copy_(param)
                param.data = place
                torch.autograd.graph.increment_version(param)

    def wait_unshard(self) -> None:
        """Finish the all-gather that ``unshard`` started.

        State: UNSHARDING -> UNSHARDED.

        Raises:
            CollectiveError: a peer failed.
        """
        if self.gather.is_under_way:
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

    def _move_to(self, state: ShardState) -> None:
        assert state is self.state or state in _MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    def reshard(self) -> None:
        """Free the unsharded buffer; does nothing when there is none.

        State: UNSHARDED -> SHARDED. No communication.
        """
        if self.state is ShardState.SHARDED:
            return
        if self.state is ShardState.UNSHARDING:
            # Memory that an all-gather is still writing must not be freed.
            self.wait_unshard()
        self._move_to(ShardState.SHARDED)
        if not self._aliased:
            self._free_buffer()
        self.page_out()

    @property
    def version(self) -> int:
        """Grows whenever the shard is written."""
        if self.params.are_originals:
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
        return 0 if self._aliased else self.buffer.numel() * self.buffer.element_size()

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffer now, besides all ranks' shards."""
        return 0 if self.state is ShardState.SHARDED else self.memory.held_bytes

    @property
    def is_local(self) -> bool:
        """Whether there is nothing to all-gather or to reduce."""
        return self._aliased and self.topology.world.size == 1

    @property
    def is_mapped(self) -> bool:
        """Whether all-gathers copy nothing: then keeping the buffer saves nothing."""
        return self.memory.shows_shards

    def snapshot(self) -> None:
        """Let the buffer stay as it is when shards change: what shows them becomes a copy."""
        if self.state is ShardState.UNSHARDED:
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def _free_buffer(self) -> None:
        # Whoever still holds a raw view now gets autograd's error instead of freed memory.
        torch.autograd.graph.increment_version(self.buffer)
        self.memory.free()
        self.params.set_accessible(False)

    # ------------------------------------------------------------ gradients

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction has started that is not finished."""
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
    def has_unpublished_part(self) -> bool:
        """Whether gradients wait, or are being reduced, that ``publish`` would leave out."""
        return self.is_reducing or bool(self.grad_buffer.accumulated)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are not in ``.grad``, also of those that others still read."""
        under_way = 0 if self.grad_reduce is None else self.grad_reduce.nbytes
        return self.grad_buffer.nbytes + under_way + self.grad_publish.nbytes

    # ------------------------------------------------------------ conversion, copies

    def check_keeps_order(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse a ``module._apply`` function that gives a parameter another memory format.

        Optimizer state lies in the order of the shard, and nobody would rearrange it.

        Raises:
            RuntimeError: it does.
        """
        after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for span, spec in zip(self.layout.spans, self.params.specs, strict=True):
            if span.order not in after:
                # As many dimensions in the same order, but small: the shape takes no part.
                sizes = (2,) * len(span.order)
                strides = strides_of(sizes, span.order)
                probe = fn(self.shard.new_zeros(2 ** len(sizes)).as_strided(sizes, strides))
                after[span.order] = memory_order(probe.shape, probe.stride())
            if strides_of(span.shape, after[span.order]) != span.strides:
                raise RuntimeError(
                    f"parameter {spec.name!r} (unit {self.unit_name!r}): the memory format cannot "
                    f"be changed after wrapping: strides are {span.strides}, "
                    f"{strides_of(span.shape, after[span.order])} are asked for. Call "
                    "model.to(memory_format=...) before ShardedWrapper(model): formats are kept."
                )

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``module._apply``'s function to the shard and re-point everything at the result."""
        self.reshard()
        # Other ranks may still be reading the shard's present memory.
        self.gather.finish_refresh()
        self.absorb_replaced()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            before = self.shard.data_ptr()
            converted = fn(self.shard)
            if converted is self.shard and converted.data_ptr() == before:
                return
            if converted.device.type == "meta":
                raise RuntimeError(
                    f"unit {self.unit_name!r}: moving a sharded model to the meta device would "
                    "lose its weights"
                )
            if converted.device != self.shard.device:
                self.device = converted.device
            self.gather.move_to(self.device)
            grads = self.grad_publish.take_off()
            self._adopt_shard(converted)
            self.shard = self.params.repoint(self.shard)
            self.grad_publish.put_back(grads, lambda grad: self._offload.gradient.take_in(fn(grad)))
        self._make_buffer()
        self._replan_gradients()
        self.params.use_sharded_views()

    def copy_for(
        self,
        memo: dict[int, Any],
        grad_hook: Callable[[FlatParamHandle, int], Callable[[Tensor], None]],
        on_outside_grad: Callable[[], object],
    ) -> FlatParamHandle:
        """A handle like this one for modules that were deep-copied; no communication.

        Ranks that use the copy make it in one order of copies, so that tags agree.

        Args:
            memo: the finished copy's memo, which knows every module's and parameter's copy.
            grad_hook: as at construction, for the copy.
            on_outside_grad: likewise.
        """
        self.absorb_replaced()
        twin = copy.copy(self)
        twin.state, twin._unsharded_version = ShardState.SHARDED, -1
        twin.unfilled, twin.comm_hook = set(self.unfilled), None
        twin._replicate_tag = self.topology.replicate.new_tag()
        twin.gather = self._new_gather()
        twin.params = self.params.copy_for(memo, on_outside_grad)
        twin.local_spans = twin.params.local_spans
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            twin._adopt_shard(self.shard.detach().clone())
            twin.shard = twin.params.repoint(twin.shard)
        twin._grad_hook = grad_hook
        twin._make_gradients()
        twin._make_buffer()
        twin.params.use_sharded_views()
        return twin
