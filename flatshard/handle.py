"""``FlatParamHandle``: owns every buffer of one flat parameter, which is one segment of a unit.

It works on the current stream with explicit arguments, never picks a stream and never reads the
phase of a step: ``Unit`` decides when.

[Note: one storage for life]
Autograd saves views of the gathered parameters (a ``weight.t()``, say). They stay valid because
the unsharded buffer's storage object stays the same: it is resized to zero to free it and back
before the next gather.

Where all shards can be mapped side by side (``MappedShards``), the buffer is that range of
addresses, whose pages come and go instead.

[Note: who is who]
    sharded   what users and optimizers hold: true-shape ``FlatShardTensor`` parameters, or one
              ``FlatParameter`` (``use_orig_params=False``), over this rank's shard
    full      plain parameters over the unsharded buffer; modules hold them while they compute
Where one rank holds everything and nothing is cast, the shard *is* the unsharded buffer and, with
``use_orig_params=True``, the sharded parameters are the full ones.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.flat_param import FlatParameter, part_of, view_of
from flatshard.gradients import CommHook, GradientBuffer
from flatshard.layout import FlatLayout, LocalSpan, memory_order, strides_of
from flatshard.mapped_shards import MappedShards
from flatshard.ownership import OwnedParam, Site
from flatshard.pending import Pending, Unsettled
from flatshard.secondary import WHOLE, SecondaryShard, gather_in_two
from flatshard.shard_tensor import FlatShardTensor, ShardSpec, attributes_of
from flatshard.starting import RankZero, Start
from flatshard.topology import Topology


class ShardState(enum.Enum):
    """Whether the unsharded buffer exists. Moves only in ``FlatParamHandle``."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"


class FlatParamHandle:
    """One flat parameter: parameters of one unit that agree in dtype and ``requires_grad``.

    Attributes:
        unit_name: names the unit in errors.
        layout: where each original parameter lies.
        shard: this rank's part, ``(layout.shard_numel,)``; what the optimizer updates.
        buffer: the unsharded buffer, ``(layout.padded_numel,)``; empty storage while SHARDED.
        sharded: the parameters that users see.
        full: the parameters that compute, in the order of ``layout.spans``.
        state: see ``ShardState``.
        topology: the ranks that share it.
        is_whole: whether this rank's shard is all of it.
        gradients: what backward brought and what became of it.
        unfilled: original parameters that have no values yet, by index.
        unsettled: what other ranks may still be taking from this one; of all handles of a run.
        summoned: the ``summon.Summoned`` that is open, or None.
        comm_hook: what the user put in the place of the usual reduction, or None.
    """

    def __init__(
        self,
        owned: list[OwnedParam],
        unit_name: str,
        *,
        topology: Topology,
        device: torch.device,
        start: Start,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        use_orig_params: bool,
        on_grad: Callable[[FlatParamHandle, int, Tensor], None],
        on_outside_grad: Callable[[], object],
    ) -> None:
        """Keep this rank's part of ``owned``, and turn the originals into views of it.

        Collective where ``start`` sends rank 0's values.

        Args:
            owned: parameters of one dtype and ``requires_grad``.
            unit_name: the unit's name in the unwrapped model.
            topology: the ranks that share the flat parameter.
            start: whose values count. What has none yet is ``unfilled``.
            device: where the shard lives and the unit computes.
            compute_dtype: dtype of the full parameters; None keeps the parameters' own.
            reduce_dtype: dtype in which gradients are reduced; None takes ``compute_dtype``.
            use_orig_params: whether users see original parameters or one ``FlatParameter``.
            on_grad: called with this handle, an original parameter's index and its gradient when
                that has come; calls ``receive_grad``.
            on_outside_grad: called before autograd adds to a sharded parameter's ``.grad`` what
                came of its use outside of forward.
        """
        self.unit_name = unit_name
        self._owned = owned
        self.topology = topology
        self.is_whole = topology.shard.size == 1
        self._take_tags()
        self._secondary = self._plan_secondary()
        self._use_orig_params = use_orig_params
        self._compute_dtype, self._reduce_dtype = compute_dtype, reduce_dtype
        self._on_grad, self._on_outside_grad = on_grad, on_outside_grad
        self._is_installed = False
        self.unsettled = Unsettled()
        self.summoned: Any = None
        self.comm_hook: CommHook | None = None
        self._hooked: set[int] = set()
        self.full: list[nn.Parameter] = []
        self.state = ShardState.SHARDED
        self._gather: Pending | None = None
        self._gathered_version = -1
        self._earlier_grads: list[Tensor | None] = []
        self._unreduced: dict[int, tuple[Any, int, bool]] = {}

        first = owned[0].param
        self.layout = FlatLayout.build(
            ((o.name, o.param.shape) for o in owned),
            world_size=topology.shard.size,
            itemsize=first.element_size(),
            orders=[memory_order(o.param.shape, o.param.stride()) for o in owned],
        )
        with torch.inference_mode(False), torch.no_grad():
            self._adopt_shard(
                torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=device)
            )
            self.unfilled = {i for i, o in enumerate(owned) if id(o.param) in start.missing}
            source = start.source(topology)
            for index, one in enumerate(owned):
                if index not in self.unfilled:
                    self.fill(index, one.param, source)
            self.sharded = self._make_sharded([o.param.requires_grad for o in owned])
        self._make_buffer()
        self.uninstall()

    # ------------------------------------------------------------ construction

    def _take_tags(self) -> None:
        """Numbers that tell this one's messages from others'."""
        topology = self.topology
        self._tag, self._outer_tag = topology.inner.new_tag(), topology.outer.new_tag()
        # Apart from those of a step: a state_dict() on one rank alone must not take what another
        # rank sends for its forward.
        self._parts_tags = topology.inner.new_tag(), topology.outer.new_tag()
        self._map_tag = topology.inner.new_tag()

    def _plan_secondary(self) -> SecondaryShard | None:
        topology = self.topology
        if topology.regather is not None:
            return SecondaryShard(topology.regather, self.unit_name)
        if topology.outer.size > 1:
            return SecondaryShard(topology.inner, self.unit_name)
        return None

    def fill(self, index: int, value: Tensor | None, source: RankZero | None) -> None:
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
            assert value is not None, "without a source every rank has the values"
            self.part(index).copy_(part_of(value, span, local))
        self.unfilled.discard(index)

    def part(self, index: int) -> Tensor:
        """This rank's part of original parameter ``index``, ``(numel held here,)``; a view."""
        local = self.local_spans[index]
        return self.shard[local.start : local.end]

    def traits(self, index: int) -> tuple[bool, dict[str, Any]]:
        """Whether original parameter ``index`` is trained, and the attributes users gave it."""
        if not self._use_orig_params:
            return self.sharded[0].requires_grad, {}
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded[index].requires_grad, attributes_of(self.sharded[index])

    def _adopt_shard(self, shard: Tensor) -> None:
        self._mapped = self._map_like(shard)
        self.shard = shard if self._mapped is None else self._mapped.shard.copy_(shard)
        self.local_spans: list[LocalSpan] = [
            self.layout.local_span(index, self.topology.index) for index in range(len(self._owned))
        ]
        self._specs = [
            ShardSpec(
                span.name,
                self.unit_name,
                span.shape,
                offset=local.offset,
                numel=local.numel,
                comm=self.topology.shard,
                replicas=self.topology.replicate,
                order=span.order,
                on_outside_grad=_weakly(self._on_outside_grad),
            )
            for span, local in zip(self.layout.spans, self.local_spans, strict=True)
        ]
        self._flat_spec = ShardSpec(
            f"{self.unit_name or 'the root'}'s flat parameter",
            self.unit_name,
            shard.shape,
            offset=0,
            numel=shard.numel(),
            comm=self.topology.shard,
            replicas=self.topology.replicate,
            originals=self.local_spans,
            number=self.topology.index,
            total_numel=self.layout.numel,
        )

    def _map_like(self, shard: Tensor) -> MappedShards | None:
        """Memory for a shard that gathers need not copy, where that is possible."""
        uncast = _lowered(shard.dtype, self._compute_dtype) == shard.dtype
        if shard.device.type != "cpu" or self._secondary is not None or not uncast:
            return None
        return self.topology.inner.map_shards(
            shard.numel(), shard.dtype, tag=self._tag, map_tag=self._map_tag
        )

    def _make_sharded(self, requires_grad: list[bool]) -> list[nn.Parameter]:
        """The parameters that users see; originals keep their identity."""
        if not self._use_orig_params:
            self._placeholders: list[FlatShardTensor] = self._shard_views(None)
            flat = FlatParameter(self.shard, requires_grad[0], self.layout, self.topology.index)
            for owned in self._owned:
                # Kept any longer, the originals would be a whole copy of the unit on every rank.
                owned.param = flat
            return [flat]
        self._placeholders = []
        if self.is_whole:
            for index, (owned, span) in enumerate(zip(self._owned, self.layout.spans, strict=True)):
                view = view_of(self.shard, span)
                if owned.param.is_meta:
                    owned.become(nn.Parameter(view, requires_grad[index]))
                else:
                    # Hooks and attributes stay where they are: only the memory moves.
                    owned.param.data = view
        else:
            views = self._shard_views(requires_grad)
            for owned, view in zip(self._owned, views, strict=True):
                owned.become(view)
        return [owned.param for owned in self._owned]

    def _shard_views(self, requires_grad: list[bool] | None) -> list[FlatShardTensor]:
        """One true-shape tensor per original parameter, over this rank's range of it."""
        views: list[FlatShardTensor] = []
        for index, (spec, local) in enumerate(zip(self._specs, self.local_spans, strict=True)):
            piece = self.shard[local.start : local.end]
            if requires_grad is None:
                views.append(FlatShardTensor.placeholder(piece, spec))
            else:
                views.append(FlatShardTensor.parameter(piece, spec, requires_grad[index]))
        return views

    @property
    def _aliased(self) -> bool:
        """Whether the shard is the unsharded buffer."""
        return self.is_whole and self.compute_dtype == self.shard.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameters."""
        return _lowered(self.shard.dtype, self._compute_dtype)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        of_hook = self.comm_hook and self.comm_hook.reduce_dtype
        lower = of_hook or self._reduce_dtype or self._compute_dtype
        return _lowered(self.shard.dtype, lower)

    def _make_buffer(self) -> None:
        """The unsharded buffer and the full parameters over it; views are made once."""
        requires_grad = [p.requires_grad for p in self.sharded]
        if not self._use_orig_params:
            requires_grad = requires_grad * len(self._owned)
        before = self.full
        with torch.inference_mode(False), torch.no_grad():
            if self._aliased:
                self.buffer = self.shard
            elif self._mapped is not None:
                self.buffer = self._mapped.buffer
            else:
                self.buffer = torch.empty(
                    self.layout.padded_numel, dtype=self.compute_dtype, device=self.shard.device
                )
            if self._aliased and self._use_orig_params:
                self.full = self.sharded
            else:
                self.full = [
                    nn.Parameter(view_of(self.buffer, span), requires_grad=False)
                    for span in self.layout.spans
                ]
            for index, (spec, full) in enumerate(zip(self._specs, self.full, strict=True)):
                spec.full = full
                differentiable = full.is_floating_point() or full.is_complex()
                if differentiable and id(full) not in self._hooked:
                    # A frozen tensor refuses hooks; it may be unfrozen later.
                    full.requires_grad_(True)
                    full.register_post_accumulate_grad_hook(self._grad_hook(index))
                    if before:
                        # The dictionary, so that handles can still remove what is in it.
                        full._backward_hooks = before[index]._backward_hooks
                full.requires_grad_(requires_grad[index])  # False for integers
                if self._use_orig_params and not self.is_whole:
                    self._owned[index].move_hooks(full)
        # Originals that compute themselves stay the same objects through a conversion.
        self._hooked = {id(full) for full in self.full}
        if not self._aliased:
            self._free_buffer()
        self._sites = [
            (site.module, site.attribute, index)
            for index, owned in enumerate(self._owned)
            for site in owned.sites
        ]
        self.gradients = self._make_gradients()
        modules = {site.module for owned in self._owned for site in owned.sites}
        self._rnns = [module for module in modules if isinstance(module, nn.RNNBase)]

    def _make_gradients(self) -> GradientBuffer:
        return GradientBuffer(
            self.layout,
            self.unit_name,
            topology=self.topology,
            dtype=self.reduce_dtype,
            like=self.shard,
            comm_hook=self.comm_hook,
            tags=(self._tag, self._outer_tag),
            unsettled=self.unsettled,
        )

    def share_unsettled(self, unsettled: Unsettled) -> None:
        """Keep what is unsettled where a whole run does."""
        self.unsettled = self.gradients.unsettled = unsettled
        if self._secondary is not None:
            self._secondary.unsettled = unsettled

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduce as ``hook`` says from now on; no gradients may be accumulated."""
        assert not self.holds_gradients, "they are in the dtype of before"
        self.comm_hook = hook
        self.gradients = self._make_gradients()

    def rename(self, unit_name: str, strip: Callable[[str], str]) -> None:
        """Take names relative to another root; ``strip`` maps the old to the new ones."""
        self.unit_name = self._flat_spec.unit = self.gradients.label = unit_name
        if self._secondary is not None:
            self._secondary.rename(unit_name)
        for spec in self._specs:
            spec.name, spec.unit = strip(spec.name), unit_name

    # ------------------------------------------------------------ gather and free

    def unshard(self, purpose: str) -> None:
        """Begin gathering the parameters, unless they are there or coming.

        Collective: all ranks of the shard group.

        Args:
            purpose: what for, in errors: "forward" or "backward".

        State: SHARDED -> UNSHARDING.
        """
        if self.summoned is not None:
            raise RuntimeError(
                f"unit {self.unit_name!r}: a forward was run under summon_full_params(). Leave "
                "the context first: units gather what they need by themselves."
            )
        if self._aliased:
            self.state = ShardState.UNSHARDED
            return
        self._absorb_replaced()
        if self.state is not ShardState.SHARDED:
            if self._gathered_version == self.version:
                return
            # The shard was written since: what was gathered is stale. Its memory is used again.
            self.wait_unshard()
            torch.autograd.graph.increment_version(self.buffer)
            if self._mapped is not None:
                self._mapped.end()
        with torch.inference_mode(False), torch.no_grad():
            self._allocate_buffer()
            self._gathered_version = self.version
            self._gather = self._begin_gather(purpose)
        self.state = ShardState.UNSHARDING

    def _begin_gather(self, purpose: str) -> Pending:
        """Begin filling the buffer from where that is cheapest."""
        if self._secondary is not None:
            self.begin_refresh()
            if self._secondary.is_current(self.version):
                return self._secondary.gather(self.buffer, purpose)
        return self.topology.inner.all_gather(
            self._source(),
            self.buffer,
            label=self.unit_name,
            tag=self._tag,
            purpose=purpose,
            mapped=self._mapped,
        )

    def _source(self) -> Tensor:
        """The shard in the dtype that computes."""
        return self.shard.detach().to(self.compute_dtype)

    def begin_refresh(self) -> None:
        """Begin to bring parameters from other nodes, if they are kept there and have changed.

        Collective: all ranks of the outer group.
        """
        outer = self.topology.outer
        if self._secondary is not None and outer.size > 1:
            with torch.inference_mode(False), torch.no_grad():
                self._secondary.begin_refresh(self._source(), self.version, outer, self._outer_tag)

    def finish_refresh(self) -> None:
        """Wait for what ``begin_refresh`` began: the shard may be written after it."""
        if self._secondary is not None:
            self._secondary.finish_refresh()

    def begin_gather_parts(self, part: Tensor, out: Tensor) -> Pending:
        """Begin gathering something of the shard's shape, ``(padded_numel,)`` in all.

        Collective: all ranks of the shard group.
        """
        topology = self.topology
        if topology.outer.size == 1:
            return topology.inner.all_gather(
                part, out, label=self.unit_name, tag=self._parts_tags[0], purpose=WHOLE, exact=True
            )
        return gather_in_two(
            part, out, topology.inner, topology.outer, self.unit_name, self._parts_tags
        )

    def keep_secondary(self) -> None:
        """Before ``reshard`` between forward and backward: keep what backward gathers from."""
        if self.topology.regather is not None and self.is_current:
            assert self._secondary is not None, "planned with the topology"
            self._secondary.cut(self.buffer, self._gathered_version)

    def drop_secondary(self) -> None:
        """After backward: give back what ``keep_secondary`` kept."""
        if self.topology.regather is not None:
            assert self._secondary is not None, "planned with the topology"
            self._secondary.drop()

    @property
    def has_secondary(self) -> bool:
        """Whether ``keep_secondary`` kept something."""
        return self.topology.regather is not None and self.secondary_bytes > 0

    @property
    def secondary_bytes(self) -> int:
        """What is held beside the shard to gather from, in bytes."""
        return 0 if self._secondary is None else self._secondary.nbytes

    def _absorb_replaced(self) -> None:
        """Where plain originals stand over the shard, take over data assigned to ``p.data``."""
        if not (self._use_orig_params and self.is_whole):
            return
        places = [view_of(self.shard, span) for span in self.layout.spans]
        if all(
            param.data_ptr() == place.data_ptr() or not param.numel()
            for param, place in zip(self.sharded, places, strict=True)
        ):
            return
        # In new memory: what was assigned over may be kept by somebody to be put back.
        with torch.inference_mode(False), torch.no_grad():
            self.shard = self.shard.clone()
            if self._aliased:
                self.buffer = self.shard
            for param, span in zip(self.sharded, self.layout.spans, strict=True):
                place = view_of(self.shard, span)
                place.copy_(param)
                param.data = place
                torch.autograd.graph.increment_version(param)

    def wait_unshard(self) -> None:
        """Finish the gather that ``unshard`` began.

        State: UNSHARDING -> UNSHARDED.

        Raises:
            CollectiveError: a peer failed.
        """
        gather, self._gather = self._gather, None
        if gather is not None:
            try:
                # Autograd must not take the refill for an edit of what it saved.
                with _unsafe_preserve_version_counter(self.buffer):
                    gather.wait(self.unsettled)
            except Exception:
                self.state = ShardState.SHARDED
                self._free_buffer()
                raise
        self.state = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Give back the unsharded buffer; does nothing when there is none.

        State: UNSHARDED -> SHARDED. No communication.
        """
        if self.state is ShardState.SHARDED:
            return
        if self.state is ShardState.UNSHARDING:
            self.wait_unshard()
        self.state = ShardState.SHARDED
        if not self._aliased:
            self._free_buffer()

    @property
    def version(self) -> int:
        """Grows whenever the shard is written."""
        if self._use_orig_params and self.is_whole:
            return sum(param._version for param in self.sharded)
        return self.shard._version

    @property
    def is_current(self) -> bool:
        """Whether the buffer holds what the shards hold."""
        return self.state is ShardState.UNSHARDED and (
            self._aliased or self._gathered_version == self.version
        )

    @property
    def buffer_bytes(self) -> int:
        """Size of the unsharded buffer in bytes; 0 where the shard is the buffer."""
        return 0 if self._aliased else self.buffer.numel() * self.buffer.element_size()

    @property
    def gathered_bytes(self) -> int:
        """What the unsharded buffer takes now, beside all ranks' shards."""
        if self.state is ShardState.SHARDED:
            return 0
        return self.buffer_bytes if self._mapped is None else self._mapped.copied_bytes

    @property
    def is_mapped(self) -> bool:
        """Whether gathers copy nothing: then keeping the buffer saves nothing."""
        return self._mapped is not None

    def keep(self) -> None:
        """Let the buffer outlive changes of the shards, of whatever rank."""
        if self._mapped is not None and self.state is ShardState.UNSHARDED:
            with _unsafe_preserve_version_counter(self.buffer):
                self._mapped.keep()

    def _allocate_buffer(self) -> None:
        if self._mapped is None:
            self.buffer.untyped_storage().resize_(self.buffer.numel() * self.buffer.element_size())

    def _free_buffer(self) -> None:
        # Whatever still holds a raw view now gets autograd's error instead of freed memory.
        torch.autograd.graph.increment_version(self.buffer)
        if self._mapped is not None:
            self._mapped.end()
        else:
            self.buffer.untyped_storage().resize_(0)

    def install(self) -> None:
        """Give the modules the full parameters.

        Raises:
            RuntimeError: a module's parameter was replaced by another object since wrapping.
        """
        if self.full is self.sharded:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if self._use_orig_params:
                for full, sharded in zip(self.full, self.sharded, strict=True):
                    if full.requires_grad is not sharded.requires_grad:
                        full.requires_grad_(sharded.requires_grad)
            else:
                for full in self.full:
                    full.requires_grad_(self.sharded[0].requires_grad)
        self.check_places()
        self._put(self.full)

    def check_places(self) -> None:
        """See that the modules hold what they were given.

        Raises:
            RuntimeError: a module's parameter was replaced by another object since wrapping.
        """
        for module, attribute, index in self._sites:
            present = module._parameters.get(attribute)
            if present is not self._outside(index) and present is not self.full[index]:
                raise RuntimeError(
                    f"parameter {self.layout.spans[index].name!r} (unit {self.unit_name!r}) was "
                    "replaced after wrapping. Assign values with p.copy_(...), or replace the "
                    "parameter before wrapping."
                )

    def _put(self, params: list[nn.Parameter]) -> None:
        for module, attribute, index in self._sites:
            module.__dict__.pop(attribute, None)
            module._parameters[attribute] = params[index]
        self._is_installed = True
        self._rebuild_rnns()

    def uninstall(self) -> None:
        """Give the modules the sharded parameters back."""
        if self.full is not self.sharded:
            self.show_sharded()

    def show_sharded(self) -> None:
        """Let the modules hold the sharded parameters, whatever they hold now."""
        for module, attribute, index in self._sites:
            module._parameters[attribute] = self._outside(index)
            if self._placeholders:
                # Found before ``_parameters``: reading the weight gives a tensor that explains.
                module.__dict__[attribute] = self._placeholders[index]
        self._is_installed = False
        self._rebuild_rnns()

    def _outside(self, index: int) -> nn.Parameter | None:
        return self.sharded[index] if self._use_orig_params else None

    def _rebuild_rnns(self) -> None:
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # Recurrent modules compare these weak references with their weights; None means equal.
            module._flat_weight_refs = [None] * len(names)

    # ------------------------------------------------------------ gradients

    def num_trainable(self) -> int:
        """Full parameters that ask for a gradient."""
        return sum(full.requires_grad for full in self.full)

    def begin_backward(self) -> None:
        """Keep earlier gradients apart from those of the backward that begins.

        Only where the sharded parameters compute themselves: autograd would add to them.
        """
        self.gradients.seen.clear()
        self._collect_unreduced()
        if self.full is not self.sharded:
            return
        self.check_places()  # where others are installed for each forward, that checks
        self._hold_hooks()
        self._earlier_grads = self._earlier_grads or [None] * len(self.sharded)
        for index, param in enumerate(self.sharded):
            if param.grad is not None:
                self._earlier_grads[index] = param.grad
                param.grad = None

    @property
    def holds_gradients(self) -> bool:
        """Whether there are earlier gradients that a failing backward would take along."""
        return bool(self.gradients.accumulated) or any(g is not None for g in self._earlier_grads)

    def _hold_hooks(self) -> None:
        """Keep users' post-accumulate hooks back: they want the reduced gradient."""
        for param, spec in zip(self.sharded, self._specs, strict=True):
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for key in [k for k, hook in hooks.items() if not hasattr(hook, "of_flatshard")]:
                spec.post_accumulate_hooks[key] = hooks.pop(key)

    def show_unreduced(self) -> None:
        """After a backward under ``no_sync``: let ``.grad`` show that there is something.

        So ``zero_grad()`` can drop it, as under DistributedDataParallel, and a step that would
        use it is refused.
        """
        gradients = self.gradients
        waiting = gradients.accumulated
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, earlier in enumerate(self._earlier_grads):
                if earlier is not None and index not in waiting:
                    self.sharded[index].grad, self._earlier_grads[index] = earlier, None
            # Slots show gradients whole; what was reduced within a group exists in parts only.
            in_parts = gradients.held is not None or not self._use_orig_params
            part = gradients.shard_part() if in_parts and waiting else None
            for index in waiting if self._use_orig_params or not waiting else {0}:
                param = self.sharded[index]
                is_view = param.grad is None
                if is_view:
                    param.grad = self._unreduced_view(index, part)
                grad: Any = param.grad
                grad._unreduced_of = self.unit_name
                self._unreduced[index] = (grad, getattr(grad, "_local", grad)._version, is_view)
        self.give_hooks_back()

    def shows_unreduced(self) -> bool:
        """Whether some ``.grad`` lacks what was accumulated under ``no_sync``, or is only that."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                self.sharded[index].grad is shown for index, (shown, *_) in self._unreduced.items()
            )

    def published_grads(self) -> list[Tensor]:
        """The gradients in ``.grad``, one per original parameter that has one.

        With ``use_orig_params=False`` they are views of the flat parameter's gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grads = [param.grad for param in self.sharded]
            if self._use_orig_params:
                return [grad for grad in grads if grad is not None]
            if grads[0] is None:
                return []
            local = getattr(grads[0], "_local", grads[0])
            return [self._grad_view(local, index) for index in range(len(self._owned))]

    def _unreduced_view(self, index: int, part: Tensor | None) -> Tensor:
        if part is not None:
            if not self._use_orig_params:
                return FlatShardTensor(part, self._flat_spec)
            return self._grad_view(part, index)
        slot = self.gradients.slot(index)
        if self.is_whole:
            return slot.to(self.shard.dtype).view(slot.shape)
        # Cut out first: a cast of the whole would be kept alive by its part.
        part = self._specs[index].slice(slot).to(self.shard.dtype)
        return FlatShardTensor(part, self._specs[index])

    def _collect_unreduced(self) -> None:
        """Take back what ``show_unreduced`` showed; what the user dropped is forgotten.

        Raises:
            RuntimeError: it was edited, which would not reach the other ranks' parts.
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            everything = range(len(self._owned))
            for index in list(self.gradients.accumulated if self._use_orig_params else [0]):
                param = self.sharded[index]
                shown, version, is_view = self._unreduced.pop(index, (None, 0, False))
                if shown is None:
                    continue
                dropped = param.grad is None
                local = getattr(shown, "_local", shown)
                replaced = not dropped and param.grad is not shown
                if replaced or (not dropped and local._version != version):
                    if replaced or local.any():
                        raise RuntimeError(
                            f"unit {self.unit_name!r}: gradients accumulated under no_sync were "
                            "edited before they were reduced. Edit them after a backward outside "
                            "of no_sync."
                        )
                    dropped = True
                del shown._unreduced_of
                if is_view:
                    param.grad = None
                if dropped:
                    for one in [index] if self._use_orig_params else everything:
                        self.gradients.forget(one)
                        if self._earlier_grads:
                            self._earlier_grads[one] = None

    def _grad_hook(self, index: int) -> Callable[[Tensor], None]:
        # Weakly: Python's collector does not see what autograd holds, and would free no cycle.
        this = weakref.ref(self)

        def hook(full: Tensor) -> None:
            handle = this()
            if handle is not None:
                handle._take_grad(full, index)

        hook.of_flatshard = True  # type: ignore[attr-defined]
        return hook

    def _take_grad(self, full: Tensor, index: int) -> None:
        grad = full.grad
        if grad is None:
            return
        full.grad = None
        if index in self._unreduced and self._unreduced[index][0] is grad:
            # Autograd added to what is shown of the buffer, before anything of this backward
            # could take it back: move it out.
            del self._unreduced[index]
            grad = grad.clone()
            self.gradients.forget(index)
        self._on_grad(self, index, grad)

    def receive_grad(self, index: int, grad: Tensor) -> None:
        """Put a gradient that autograd accumulated into its slot."""
        if grad.requires_grad:
            raise RuntimeError(
                f"parameter {self.layout.spans[index].name!r}: backward(create_graph=True) gives "
                "gradients that are differentiable themselves, which sharded ones cannot be. Use "
                "torch.autograd.grad for the inner gradient and backward() for the outer one."
            )
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        self.gradients.receive(index, grad)

    def publish(self, used: list[bool]) -> None:
        """Put the reduced gradients into ``.grad``, adding to what is there.

        Args:
            used: per original parameter, whether any rank used it; ``.grad`` of the others stays.
        """
        reduced = self.gradients.take()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if not self._use_orig_params:
                if reduced is not None and any(used):
                    _add_grad(self.sharded[0], FlatShardTensor(reduced, self._flat_spec))
                return
            for index, param in enumerate(self.sharded):
                earlier = self._earlier_grads[index] if self._earlier_grads else None
                if reduced is not None and used[index]:
                    _add_grad(param, self._grad_view(reduced, index), earlier)
                elif earlier is not None:
                    param.grad = earlier
        self._earlier_grads = []

    def run_post_accumulate_hooks(self, used: list[bool]) -> None:
        """Call the users' hooks of every parameter that got a gradient."""
        if not self._use_orig_params:
            flat = self.sharded[0]
            assert isinstance(flat, FlatParameter)
            hooked: list[tuple[nn.Parameter, Any]] = (
                [(flat, flat.post_accumulate_hooks)] if any(used) else []
            )
        else:
            hooked = [
                (param, spec.post_accumulate_hooks)
                for param, spec, was_used in zip(self.sharded, self._specs, used, strict=True)
                if was_used
            ]
        for param, hooks in hooked:
            for hook in list(hooks.values()):
                hook(param)

    def give_hooks_back(self) -> None:
        """Put the hooks that waited where users registered, and may remove, them."""
        if self.full is self.sharded:
            for param, spec in zip(self.sharded, self._specs, strict=True):
                if spec.post_accumulate_hooks:
                    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
                    hooks.update(spec.post_accumulate_hooks)
                    spec.post_accumulate_hooks.clear()

    def _grad_view(self, reduced: Tensor, index: int) -> Tensor:
        local = self.local_spans[index]
        piece = reduced[local.start : local.end]
        if self.is_whole:
            return view_of(reduced, self.layout.spans[index])
        return FlatShardTensor(piece, self._specs[index])

    def drop_grads(self) -> None:
        """Forget gradients that were not published, after a backward that failed."""
        self.gradients.drop()
        for full in self.full:
            full.grad = None
        # Not put back: the user may have called zero_grad() since, and would get them again.
        self._earlier_grads = []
        self.give_hooks_back()

    # ------------------------------------------------------------ places, conversion, copies

    def modules(self) -> set[nn.Module]:
        """The modules in which the parameters stand."""
        return {module for module, _, _ in self._sites}

    def places(self) -> list[tuple[nn.Module, str, int]]:
        """Every place of every original parameter: the module, the attribute and the index."""
        return self._sites

    def sites(self, index: int) -> list[Site]:
        """Where original parameter ``index`` stands; the first place names it."""
        return self._owned[index].sites

    def spec(self, index: int) -> ShardSpec:
        """What this rank holds of original parameter ``index``."""
        return self._specs[index]

    def hide(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Take the parameters out of the modules; returns what to put back where."""
        hidden = []
        for module, attribute, _ in self._sites:
            hidden.append((module._parameters, attribute, module._parameters[attribute]))
            module._parameters[attribute] = None
        return hidden

    def check_keeps_order(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse a ``module._apply`` function that gives a parameter another memory format.

        Optimizer state lies in the order of the shard, and nobody would rearrange it.

        Raises:
            RuntimeError: it does.
        """
        after: dict[tuple[int, ...], tuple[int, ...]] = {}
        for span in self.layout.spans:
            if span.order not in after:
                # As many dimensions in the same order, but small: the shape takes no part.
                sizes = (2,) * len(span.order)
                strides = strides_of(sizes, span.order)
                probe = fn(self.shard.new_zeros(2 ** len(sizes)).as_strided(sizes, strides))
                after[span.order] = memory_order(probe.shape, probe.stride())
            if strides_of(span.shape, after[span.order]) != span.strides:
                raise RuntimeError(
                    f"parameter {span.name!r} (unit {self.unit_name!r}): the memory format cannot "
                    f"be changed after wrapping: strides are {span.strides}, "
                    f"{strides_of(span.shape, after[span.order])} are asked for. Call "
                    "model.to(memory_format=...) before ShardedWrapper(model): formats are kept."
                )

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``module._apply``'s function to the shard and re-point everything at the result."""
        self.reshard()
        if self._secondary is not None:
            self._secondary.drop()
        self._absorb_replaced()
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
            self._collect_unreduced()  # shown again below
            accumulated = self.gradients
            self._earlier_grads = [None if g is None else fn(g) for g in self._earlier_grads]
            grads = [p.grad for p in self.sharded]
            requires_grad = [p.requires_grad for p in self.sharded]
            specs = self._specs
            self._adopt_shard(converted)
            for spec, old in zip(self._specs, specs, strict=True):
                spec.post_accumulate_hooks = old.post_accumulate_hooks
            for param in self.sharded:
                param.grad = None
            self._repoint(requires_grad)
            for index, (param, grad) in enumerate(zip(self.sharded, grads, strict=True)):
                if isinstance(grad, FlatShardTensor):
                    spec = self._specs[index] if self._use_orig_params else self._flat_spec
                    param.grad = FlatShardTensor(fn(grad._local), spec)
                elif grad is not None:
                    param.grad = fn(grad)
        self._make_buffer()
        self.gradients.take_over(accumulated)
        self.show_unreduced()
        self.uninstall()

    def copy_for(
        self,
        memo: dict[int, Any],
        on_grad: Callable[[FlatParamHandle, int, Tensor], None],
        on_outside_grad: Callable[[], object],
    ) -> FlatParamHandle:
        """A handle like this one for modules that were deep-copied; no communication.

        All ranks copy in one order, so that tags agree.

        Args:
            memo: the finished copy's memo, which knows every module's and parameter's copy.
            on_grad: as at construction, for the copy.
            on_outside_grad: likewise.
        """
        self._absorb_replaced()
        twin = copy.copy(self)
        twin._on_grad, twin._on_outside_grad = on_grad, on_outside_grad
        twin._owned = [
            OwnedParam(
                memo.get(id(owned.param), owned.param),
                [Site(memo[id(site.module)], site.attribute, site.name) for site in owned.sites],
            )
            for owned in self._owned
        ]
        twin.state, twin._gather, twin._gathered_version = ShardState.SHARDED, None, -1
        twin._earlier_grads, twin._unreduced = [], {}
        twin._hooked, twin.full, twin.unfilled = set(), [], set(self.unfilled)
        twin.comm_hook = None
        twin._take_tags()
        twin._secondary = twin._plan_secondary()
        twin.sharded = [memo[id(param)] for param in self.sharded]
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            twin._adopt_shard(self.shard.detach().clone())
            twin._repoint([param.requires_grad for param in self.sharded])
        twin._make_buffer()
        twin.uninstall()
        return twin

    def _repoint(self, requires_grad: list[bool]) -> None:
        """Let the sharded parameters show the new shard, keeping their identity."""
        if not self._use_orig_params:
            flat = self.sharded[0]
            assert isinstance(flat, FlatParameter)
            flat.point_at(self.shard)
            # A view of the parameter, so that both share one version counter.
            self.shard = self.sharded[0].detach()
            self._placeholders = self._shard_views(None)
        elif self.is_whole:
            for param, span in zip(self.sharded, self.layout.spans, strict=True):
                param.data = view_of(self.shard, span)
        else:
            views = self._shard_views(requires_grad)
            for owned, view in zip(self._owned, views, strict=True):
                owned.become(view)


def _lowered(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """What a policy's ``to`` makes of a parameter's ``dtype``."""
    return to if to is not None and dtype.is_floating_point else dtype


def _weakly(method: Callable[[], object]) -> Callable[[], object]:
    """A bound method that does not keep its object: ``.grad`` is unseen by the collector too."""
    this = weakref.WeakMethod(method)

    def call() -> None:
        found = this()
        if found is not None:
            found()

    return call


def _add_grad(param: nn.Parameter, grad: Tensor, earlier: Tensor | None = None) -> None:
    """Publish ``grad``; what was accumulated before, or by the user, stays in it."""
    for present in (param.grad, earlier):
        if present is not None:
            grad.add_(present)
    param.grad = grad
