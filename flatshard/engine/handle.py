"""``FlatParamHandle``: owns one flat parameter of a unit, its unsharded buffer and its gradients.

A handle works on the current stream. The handle never chooses a stream and never reads the phase of
a step: ``Unit`` decides when to call the handle. ``module.construction`` makes handles, and
``extras.conversion`` converts and copies handles.

[Note: who owns what]
    FlatParamHandle  the unsharded buffer: allocates, fills and frees the buffer
    FlatParameter    ``flat_param``: the padded 1-D parameter; each rank holds a chunk
    OriginalParam    ``params``: the flattened parameters, as users and modules hold them
    Gradients        ``grads``: collects the gradients from autograd, and puts them into ``.grad``
    GradReduce       reduces the gradients over the ranks

[Note: versions of the buffer]
Autograd records the buffer's version with each view that it saves, and raises in backward if the
version is another. So the version stands for the values. Two all-gathers of the same shards (for
forward and for backward) set the same version, ``clean_version``. After a write to the shards, the
next all-gather sets a new version, and so does freeing the buffer: through a saved view, autograd
never reads freed memory or later values.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.engine.gather import ParamGather
from flatshard.engine.grad_reduce import CommHook, ReducePlan
from flatshard.engine.gradients import Gradients, GradSync
from flatshard.memory import BufferMemory, num_uses
from flatshard.tensor import sharded_tensor, unsharded
from flatshard.tensor.flat_parameter import FlatParameter, FlatParamPlan, OriginalParam
from flatshard.units.layout import as_bytes, view_of

# A place where the model holds a parameter: module, name of the attribute, parameter.
Place = tuple[nn.Module, str, OriginalParam]


LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose backward needs only the indices, not the weights.

If another operation uses the weights as well, backward unshards the weights on demand.
"""


_REQUIRES_GRAD = attrgetter("requires_grad")


class ShardState(enum.Enum):
    """Whether the buffer has the unsharded parameters."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"
    UNSHARDED = "UNSHARDED"


class FlatParamHandle:
    """Owns one flat parameter: a unit's parameters with the same dtype and ``requires_grad``."""

    # For each original parameter, the object that modules hold now in place of the sharded
    # parameter. None: modules hold the sharded parameters. Then do not call `put_back`: the user
    # may have replaced a parameter after a failed step, and `put_back` would hide this from
    # `check_places`, which raises.
    held: Sequence[Any] | None = None

    def __init__(self, plan: FlatParamPlan, params: Sequence[OriginalParam], shard: Tensor) -> None:
        """Turn ``params``, in place, into sharded parameters that use the memory of ``shard``.

        ``shard``: the initial values, ``(layout.shard_numel,)``, on ``plan.device``.
        """
        self.plan, self.device = plan, plan.device
        self.layout, self.topology = plan.layout, plan.topology
        # Whether this rank holds the whole flat parameter.
        self.is_whole = plan.topology.shard.size == 1
        self.params = list(params)
        # The sharded parameters, held by users and optimizers.
        self.sharded = [param.sharded for param in self.params]
        # Whether each parameter requires a gradient, and the number of those that do, recorded at
        # each unshard.
        self.trained: list[bool] = []
        self.num_trainable = 0
        self._num_flag_writes = -1  # `sharded_tensor.num_flag_writes` at that time
        self.unit: Any = None  # the `Unit` that owns the flat parameter
        self.number = -1  # index among the model's flat parameters
        # All places of all parameters: a tied parameter has several places.
        self.places: list[Place] = [
            (place.module, place.attribute, param)
            for param in self.params
            for place in param.locations
        ]
        # Whether backward does not read the parameters, because only lookups use them.
        self.is_lookup = all(type(module) in LOOKUPS for module, _, _ in self.places)
        # For each parameter that was a DTensor, how tensor parallelism splits the parameter; None
        # for all other parameters. None in place of the list: there are no DTensors.
        splits = [param.spec.tensor_parallel for param in self.params]
        self._splits = splits if any(splits) else None
        self._rnns = {module for module, _, _ in self.places if isinstance(module, nn.RNNBase)}
        # Inside of `summon_full_params`: the `Summoned` object (`extras.summon`) that lets the
        # modules hold full parameters. Otherwise None.
        self.summoned: Any = None
        self.state = ShardState.SHARDED
        # Whether the buffer was resharded but still has memory, because views of the buffer exist.
        self.is_free_deferred = False
        # Whether views of the buffer were in use when the unit's backward was over. While views are
        # in use, the buffer keeps its memory.
        self.was_held = False
        self.was_read = False  # whether a backward has read a saved view of the buffer
        self._targets = plan.targets
        self.gather = ParamGather(plan)
        self.gather.move_to(plan.device, plan.dtype)
        self._replicate_tag = self.topology.replicate.new_tag(self)
        self.grads = Gradients(self.plan_gradients(plan.dtype), self.params)
        self.adopt(shard)

    @property
    def unit_name(self) -> str:
        return self.plan.unit_name

    # ------------------------------------------------------------ memory

    def adopt(self, shard: Tensor) -> None:
        """Make ``shard``, ``(layout.shard_numel,)``, the handle's shard, in the offload target.

        The sharded parameters become views of the shard, the full parameters views of a new
        unsharded buffer, which has memory only while they are unsharded.
        """
        # Version of the shard at the last all-gather. If it has changed, the buffer is stale.
        self.gathered_version = -1
        # Version of the buffer with the values of that all-gather ([Note: versions of the buffer]).
        # Another version of an unsharded buffer shows a possible edit.
        self.clean_version = self._last_version = -1
        padded_numel = self.layout.padded_numel
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # If all-gathers read the shard itself (`reads_shard`), the transport may map the shard
            # into the buffer: then allocate the buffer first, with the shard's memory. Otherwise
            # allocate it last, after the parameters have freed their previous memory.
            memory = self.gather.allocate(padded_numel) if self.gather.reads_shard else None
            shown = None if memory is None else memory.shard
            # Move the shard to the memory in which the optimizer will update the shard.
            shard = self._targets.shard.take_in(shard) if shown is None else shown.copy_(shard)
            self._set_shard(shard)
            for param in self.params:
                param.show_chunk(self.flat_param, is_whole=self.is_whole)
            self.memory = memory or self.gather.allocate(padded_numel, self.flat_param)
            # The buffer, `(layout.padded_numel,)`, keeps its storage object for life, because
            # autograd saves views of it (`weight.t()`, for example). While the unit is sharded, the
            # storage has zero bytes, or addresses without memory.
            self.buffer, self.is_aliased = self.memory.buffer, self.gather.is_aliased
            self._storage = self.buffer.untyped_storage()._cdata
            for param in self.params:
                param.make_full(None if self.is_aliased else view_of(self.buffer, param.span))
            self.fulls = [param.full for param in self.params]
        self._num_uses = num_uses(self.buffer)
        if not self.is_aliased:
            self._free_buffer()
        self.put_back()

    def _set_shard(self, shard: Tensor) -> None:
        self.flat_param = FlatParameter(shard, self.layout, self.topology.index, self.params)
        self._shard = self.flat_param.detach()  # what all-gathers send

    def part(self, param: OriginalParam) -> Tensor:
        """A view of this rank's part of an original parameter, ``(param.spec.numel,)``."""
        return self.flat_param[param.spec.range]

    def page_out(self) -> None:
        """Free the memory pages of a shard on disk until the shard is used again."""
        self._targets.shard.page_out(self.flat_param)

    # ------------------------------------------------------------ unshard and reshard

    def unshard(self, purpose: str) -> bool:
        """SHARDED -> UNSHARDING: start the all-gather, if one is needed.

        Returns whether an all-gather was started. Collective: all ranks of the shard group.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.unshard(purpose)
        if self.summoned is not None:
            self.summoned.refuse()
        if self.is_aliased:
            # The shard and the unsharded buffer are the same memory, so no all-gather is needed.
            self.state = ShardState.UNSHARDED
            return False
        version = self.flat_param._version
        if self.is_whole:
            self.absorb_replaced()
            version = self.version
        if self.state is not ShardState.SHARDED:
            if self.gathered_version == version:
                return False
            # The shard was written after the all-gather. All-gather again into the same memory.
            self.wait_unshard()
            torch.autograd.graph.increment_version(self.buffer)
            self.memory.renew()
        elif self.is_free_deferred:
            self.memory.renew()
        unsharded.allow(self._storage)
        self.memory.take()
        self.gather.start(self._shard, version, self.memory, purpose)
        if version != self.gathered_version:
            # Set these only after `start`: if `start` raises (out of memory), the buffer is stale.
            self.gathered_version, self.clean_version = version, -1
        self.state = ShardState.UNSHARDING
        # Code that holds a view of the buffer may read it without `wait_unshard`, so wait here.
        if self.is_free_deferred:
            self.is_free_deferred = False
            self.wait_unshard()
        return True

    def wait_unshard(self) -> None:
        """UNSHARDING -> UNSHARDED: wait for the all-gather.

        Raises CollectiveError, and moves to SHARDED, if the all-gather failed.
        """
        if self.state is not ShardState.UNSHARDING:
            return
        try:
            self.gather.finish(self.buffer)
        except Exception:
            self.state = ShardState.SHARDED
            self._free_buffer()
            raise
        if self.clean_version < 0:
            # A version that neither the buffer nor a saved view has had before.
            self._last_version = max(self._last_version, self.buffer._version) + 1
            self.clean_version = self._last_version
        torch._C._autograd._unsafe_set_version_counter((self.buffer,), (self.clean_version,))
        unsharded.set_accessible(self.fulls, True)
        self.state = ShardState.UNSHARDED

    def gather_flat(self, shard: Tensor) -> Tensor:
        """All-gather ``shard`` into a new tensor, in the order of the shards, without a cast.

        ``shard``: the handle's shard, or a 1-D tensor of the same size on all ranks. Collective:
        all ranks of the shard group.
        """
        with torch.inference_mode(False), torch.no_grad():
            flat = shard.new_empty(len(shard) * self.topology.shard.size, device=self.device)
            self.gather.start_full(shard.detach().to(self.device), flat).wait()
        self._targets.shard.page_out(shard)  # nothing needs the shard's pages in memory any more
        return flat

    def reshard(self, *, though_held: bool = True) -> None:
        """UNSHARDED -> SHARDED: free the unsharded buffer, if it has memory. No communication.

        With ``though_held=False``, a buffer whose views are still in use keeps its memory until a
        later call (``is_free_deferred``).
        """
        if self.state is ShardState.UNSHARDING:
            self.wait_unshard()  # an all-gather may still be writing into the buffer
        if self.state is not ShardState.SHARDED:
            self.state = ShardState.SHARDED
            self.is_free_deferred = not self.is_aliased
            if not self._targets.shard.is_device:
                self.page_out()
        # The recomputed forward of activation checkpointing saves views of the buffer without
        # flatshard's saved-tensor hooks. Ranks may free the buffer at different times, because
        # freeing needs no communication.
        if not self.is_free_deferred:
            return
        keeps = self.unit.keeps_views
        if not keeps and (though_held or num_uses(self.buffer) <= self._num_uses):
            self._free_buffer()
        else:
            self.was_held |= not keeps
            # Copy mapped shards: the ranks that own the shards wait until no rank has mapped them.
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def _free_buffer(self) -> None:
        # Until the next all-gather is complete, autograd raises if backward reads a saved view.
        torch._C._increment_version((self.buffer,))  # type: ignore[attr-defined]
        self.memory.free()
        self.is_free_deferred = False
        unsharded.forbid(self._storage, self.plan.unit_name, self.topology.world.global_rank)
        unsharded.set_accessible(self.fulls, False)

    def snapshot(self) -> None:
        """Keep the buffer's present values, even if other ranks write to their shards next.

        Shared-memory transports may have mapped shards of other ranks into the buffer. This method
        copies the mapped shards.
        """
        if self.state is ShardState.UNSHARDED:
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def is_edited_here(self) -> Tensor:
        """Whether this rank's range of the buffer has other values than the shard, as a 1-D tensor.

        False if the shard was written after the all-gather.
        """
        with torch.inference_mode(False), torch.no_grad():
            expected = self.gather.as_gathered(self.flat_param.detach())
            own = self.buffer.chunk(self.layout.world_size)[self.topology.index].detach()
            return (as_bytes(own) != as_bytes(expected)).any().view(1) & self.is_current

    def absorb_replaced(self) -> None:
        """Copy tensors that users assigned to ``p.data`` into the shard.

        Needed only if this rank holds the whole flat parameter: then the sharded parameters are
        plain parameters in the shard's memory.
        """
        if not self.is_whole:
            return
        if all(
            param.sharded.data_ptr() == view_of(self.flat_param, param.span).data_ptr()
            or not param.span.numel
            for param in self.params
        ):
            return
        # New memory: the user may have kept the previous `p.data`, to assign it again later.
        with torch.inference_mode(False), torch.no_grad():
            self._set_shard(self._targets.shard.take_in(self.flat_param.clone()))
            if self.is_aliased:
                self.memory, self.buffer = BufferMemory(self.flat_param), self.flat_param
            for param in self.params:
                place = view_of(self.flat_param, param.span)
                place.copy_(param.sharded)
                param.sharded.data = place
                torch.autograd.graph.increment_version(param.sharded)

    @property
    def version(self) -> int:
        """Version counter of the shard, which grows with every write."""
        if self.is_whole:
            # Here the sharded parameters became views of the shard by assignment to `.data`, so
            # each view has a version counter of its own.
            return sum([param._version for param in self.sharded], self.flat_param._version)
        return self.flat_param._version

    @property
    def is_current(self) -> bool:
        """Whether the buffer is unsharded and contains the present values of the shards."""
        return self.state is ShardState.UNSHARDED and (
            self.is_aliased or self.gathered_version == self.version
        )

    @property
    def buffer_bytes(self) -> int:
        """Size of the unsharded buffer in bytes; 0 if the shard is the buffer."""
        return 0 if self.is_aliased else self.buffer.nbytes

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffer and the secondary shard now, without the shard."""
        is_freed = self.state is ShardState.SHARDED and not self.is_free_deferred
        secondary = 0 if self.gather.secondary is None else self.gather.secondary.nbytes
        return (0 if is_freed else self.memory.held_bytes) + secondary

    # ------------------------------------------------------------ what modules hold

    def show_unsharded(self) -> None:
        """Put the full parameters into the modules.

        Raises RuntimeError if a module's parameter was replaced after wrapping.
        """
        self.count_trainable()
        if self.is_aliased:
            return
        self.check_places()
        self.put(self.fulls)

    def count_trainable(self) -> None:
        """Count the parameters that require a gradient. Users may freeze parameters at any time."""
        num_flag_writes = sharded_tensor.num_flag_writes
        # Only sharded tensors count writes, not the plain parameters of a rank that holds the whole
        # flat parameter.
        if num_flag_writes == self._num_flag_writes and not self.is_whole:
            return
        self._num_flag_writes = num_flag_writes
        with torch._C.DisableTorchFunctionSubclass():
            self.trained = [*map(_REQUIRES_GRAD, self.sharded)]
            # Users set `requires_grad` of the sharded parameters, so copy the flags from there.
            for full, trains in zip(self.fulls, self.trained, strict=True):
                full.requires_grad_(trains)
        self.num_trainable = sum(self.trained)

    def check_places(self) -> None:
        """Raise RuntimeError if a module's parameter was replaced after wrapping."""
        held = self.fulls if self.held is None else self.held
        for module, attribute, param in self.places:
            present = module._parameters.get(attribute)
            if present is not param.sharded and present is not held[param.index]:
                raise RuntimeError(
                    f"{param.where} was replaced after wrapping. Assign values with p.copy_(...) "
                    "under torch.no_grad(), or replace the parameter before wrapping."
                )

    def put(self, shown: Sequence[nn.Parameter]) -> None:
        """Put ``shown`` into the modules: one full parameter for each original parameter."""
        if self._splits is not None:
            splits = enumerate(self._splits)
            shown = [
                shown[i] if split is None else split.as_dtensor(shown[i]) for i, split in splits
            ]
        self.held = shown
        for module, attribute, param in self.places:
            module._parameters[attribute] = shown[param.index]
        if self._rnns:
            self._rebuild_rnns()

    def put_back(self) -> None:
        """Put the sharded parameters into the modules, in place of all other parameters."""
        for module, attribute, param in self.places:
            module._parameters[attribute] = param.sharded
        self.held = None
        if self._rnns:
            self._rebuild_rnns()

    def _rebuild_rnns(self) -> None:
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # RNN modules use these weak references to detect replaced weights. None: no check.
            module._flat_weight_refs = [None] * len(names)

    # ------------------------------------------------------------ gradients

    def plan_gradients(self, dtype: torch.dtype, hook: CommHook | None = None) -> ReducePlan:
        """Plan how to reduce the gradients of a shard of ``dtype``, perhaps with a user's hook."""
        tags = (*self.gather.tags, self._replicate_tag)
        return ReducePlan(self.plan, dtype, self.device, tags, hook)

    @property
    def reduces(self) -> bool:
        """Whether this backward reduces gradients of the flat parameter."""
        return self.num_trainable > 0 and self.unit.sync is not GradSync.ACCUMULATE

    def give_hooks_back(self) -> None:
        """Put back the users' hooks that ``Gradients.hold_earlier`` took off the parameters."""
        for param in self.params if self.is_aliased else ():
            param.give_hooks_back()
