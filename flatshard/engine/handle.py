"""``FlatParamHandle``: owns one flat parameter of a unit, its unsharded buffer and its gradients.

A handle works on the current stream. A handle never chooses a stream, and does not know whether
forward or backward runs: ``Unit`` decides when to unshard and reshard. ``module.construction``
makes handles, and ``extras.conversion`` converts and copies handles.

[Note: parts of a handle]
    FlatParameter    ``flat_param``: the 1-D parameter, of which each rank has one chunk, the shard
    OriginalParam    ``params``: the parameters of the user's model that the flat parameter contains
    ParamGather      ``gather``: all-gathers the shards into ``buffer``, the unsharded buffer
    Gradients        ``grads``: collects gradients from autograd, and puts averages into ``.grad``

[Note: versions of the buffer]
Autograd records the buffer's version counter with each saved view, and raises in backward if the
version has changed. So the handle sets equal versions for equal values: two all-gathers of the
same shards (for forward and for backward) set the same version, ``clean_version``. After a write to
the shards, the next all-gather sets a new version. Freeing the buffer changes the version too, so
that autograd raises if backward reads a view of freed memory.
"""

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

# A place of a parameter in the model: the module, the module's attribute, the original parameter.
Place = tuple[nn.Module, str, OriginalParam]


LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules (embedding tables) whose backward needs only the indices, not the weights.

If another operation uses the weights as well, backward unshards the weights on demand.
"""


CHANGE_MODEL = (
    "To change a trained model, call full_state_dict(model) on all ranks, load the values on rank "
    "0 into a new, changed model, and wrap the new model with sync_module_states=True."
)
"""Remedy in errors about parameters that were replaced, removed or added after wrapping."""

_REQUIRES_GRAD = attrgetter("requires_grad")


class ShardState(enum.Enum):
    """Whether the unsharded buffer has the values of the parameters."""

    SHARDED = "SHARDED"
    UNSHARDING = "UNSHARDING"  # an all-gather was started, and `wait_unshard` was not called yet
    UNSHARDED = "UNSHARDED"


class FlatParamHandle:
    """Owns one flat parameter: a unit's parameters with the same dtype and ``requires_grad``."""

    # For each original parameter, the unsharded parameter that modules hold now. None: modules hold
    # the sharded parameters. Then do not call `put_back`: if the user replaced a parameter after a
    # failed step, `put_back` would restore the old parameter, and `check_places` could not raise.
    installed: Sequence[Any] | None = None

    def __init__(self, plan: FlatParamPlan, params: Sequence[OriginalParam], shard: Tensor) -> None:
        """Turn ``params``, in place, into sharded parameters that use the memory of ``shard``.

        ``shard``: the initial values, ``(layout.shard_numel,)``, on ``plan.device``.
        """
        self.plan, self.device = plan, plan.device
        self.layout, self.topology = plan.layout, plan.topology
        # Whether every rank holds the whole flat parameter (NO_SHARD, or a single rank).
        self.is_whole = plan.topology.shard.size == 1
        self.params = list(params)
        # The sharded parameters, as users and optimizers see them.
        self.sharded = [param.sharded for param in self.params]
        # Whether each parameter requires a gradient, and the number of parameters that do. Updated
        # by `count_trainable` at each unshard.
        self.trained: list[bool] = []
        self.num_trainable = 0
        # Number of times that users had set a `requires_grad` flag when `trained` was last updated.
        self._num_flag_writes = -1
        self.unit: Any = None  # the `Unit` that owns the flat parameter
        self.number = -1  # index among the model's flat parameters
        # Modules and attributes at which the parameters are. A tied parameter has several places.
        self.places: list[Place] = [
            (place.module, place.attribute, param)
            for param in self.params
            for place in param.locations
        ]
        # Whether backward does not read the parameters, because all are embedding tables.
        self.is_lookup = all(type(module) in LOOKUPS for module, _, _ in self.places)
        # How tensor parallelism splits each parameter. None for a parameter that was not a DTensor.
        # If no parameter was a DTensor, `_splits` itself is None.
        splits = [param.spec.tensor_parallel for param in self.params]
        self._splits = splits if any(splits) else None
        self._rnns = {module for module, _, _ in self.places if isinstance(module, nn.RNNBase)}
        # Inside of `summon_full_params`: the `Summoned` object (`extras.summon`) that put full
        # parameters into the modules. Otherwise None.
        self.summoned: Any = None
        self.state = ShardState.SHARDED
        # Whether the buffer was resharded but still has memory, because views of the buffer exist.
        self.is_free_deferred = False
        # Whether views may be in use after a reshard: `reshard` has found some, or an activation
        # checkpoint has run the unit, and may have saved some.
        self.had_views = False
        self.was_read = False  # whether a backward has read a saved view of the buffer
        self._targets = plan.targets
        self.gather = ParamGather(plan)
        self.gather.move_to(plan.device, plan.dtype)
        self._replicate_tag = self.topology.replicate.new_tag(self)
        self.grads = Gradients(self.plan_gradients(plan.dtype), self.params)
        self.adopt(shard)

    # ------------------------------------------------------------ memory

    def adopt(self, shard: Tensor) -> None:
        """Move ``shard``, ``(layout.shard_numel,)``, to device, host or disk, and use it.

        The sharded parameters become views of the new shard. The full parameters become views of a
        new unsharded buffer, which has memory only between unshard and reshard.
        """
        # Version of the shard at the last all-gather. If it has changed, the buffer is stale.
        self.gathered_version = -1
        # Version that the buffer had after the last all-gather ([Note: versions of the buffer]). If
        # the version of an unsharded buffer is different, the parameters may have been edited.
        self.clean_version = self._last_version = -1
        padded_numel = self.layout.padded_numel
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # With `reads_shard`, the transport may allocate the shard together with the buffer. So
            # allocate the buffer before the shard. Otherwise allocate the buffer last, after the
            # parameters have freed their previous memory.
            memory = self.gather.allocate(padded_numel) if self.gather.reads_shard else None
            shown = None if memory is None else memory.shard
            # Move the shard to the memory in which the optimizer will update the shard.
            shard = self._targets.shard.take_in(shard) if shown is None else shown.copy_(shard)
            self._set_shard(shard)
            for param in self.params:
                param.show_chunk(self.flat_param, is_whole=self.is_whole)
            self.memory = memory or self.gather.allocate(padded_numel, self.flat_param)
            # The buffer, `(layout.padded_numel,)`, keeps the same storage object for life, because
            # autograd saves views of the buffer (`weight.t()`, for example). While the unit is
            # sharded, the storage has zero bytes, or only addresses without memory.
            self.buffer, self.shard_is_buffer = self.memory.buffer, self.gather.shard_is_buffer
            self._storage = self.buffer.untyped_storage()._cdata
            for param in self.params:
                param.make_full(None if self.shard_is_buffer else view_of(self.buffer, param.span))
            self.fulls = [param.full for param in self.params]
        self._num_uses = num_uses(self.buffer)
        if not self.shard_is_buffer:
            self._free_buffer()
        self.put_back()

    def _set_shard(self, shard: Tensor) -> None:
        self.flat_param = FlatParameter(shard, self.layout, self.topology.index, self.params)
        # The tensor that all-gathers send. This plain tensor and `flat_param` share a version
        # counter, but torch reads a plain tensor's attributes several times as fast.
        self._shard = self.flat_param.detach()

    def page_out(self) -> None:
        """If the shard is offloaded to disk, free its memory until the shard is used again."""
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
        if self.shard_is_buffer:
            # The shard and the unsharded buffer are the same memory, so no all-gather is needed.
            self.state = ShardState.UNSHARDED
            return False
        version = self._shard._version
        if self.is_whole:
            self.absorb_replaced()
            version = self.version
        if self.state is not ShardState.SHARDED:
            if self.gathered_version == version:
                return False
            # The shard was written since the all-gather. All-gather again into the same memory.
            self.wait_unshard()
            torch.autograd.graph.increment_version(self.buffer)
        unsharded.allow(self._storage)
        self.memory.take()
        self.gather.start(self._shard, version, self.memory, purpose)
        if version != self.gathered_version:
            # Set these after `start`: if `start` raises (out of memory), the buffer is still stale.
            self.gathered_version, self.clean_version = version, -1
        self.state = ShardState.UNSHARDING
        # Wait now, because the graph may have nodes with a saved view of the buffer. These nodes
        # read their view without a call of `wait_unshard`.
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
            # The buffer has new values. So set a version that the buffer never had before: then
            # autograd raises if backward reads a view that was saved with earlier values.
            self.clean_version = max(self._last_version, self.buffer._version) + 1
            self._last_version = self.clean_version
        torch._C._autograd._unsafe_set_version_counter((self.buffer,), (self.clean_version,))
        unsharded.set_accessible(self.fulls, True)
        self.state = ShardState.UNSHARDED

    def gather_flat(self, shard: Tensor) -> Tensor:
        """All-gather ``shard`` into a new tensor, in the order of the shards, without a cast.

        ``shard``: the handle's shard, or another 1-D tensor of the shard's size (a part of the
        optimizer state, for example). Collective: all ranks of the shard group.
        """
        with torch.inference_mode(False), torch.no_grad():
            flat = shard.new_empty(len(shard) * self.topology.shard.size, device=self.device)
            self.gather.start_full(shard.detach().to(self.device), flat).wait()
        self._targets.shard.page_out(shard)  # nothing needs the shard's pages in memory any more
        return flat

    def reshard(self, *, though_viewed: bool = True) -> None:
        """UNSHARDED -> SHARDED: free the unsharded buffer. No communication.

        ``though_viewed``: whether to free the buffer even if views of the buffer exist. If False,
        a buffer with views keeps its memory until a later call (``is_free_deferred``).
        """
        if self.state is ShardState.UNSHARDING:
            self.wait_unshard()  # an all-gather may still be writing into the buffer
        if self.state is not ShardState.SHARDED:
            self.state, self.is_free_deferred = ShardState.SHARDED, not self.shard_is_buffer
            if not self._targets.shard.is_device:
                self.page_out()
        if not self.is_free_deferred:
            return
        # Views may exist, because a recomputed forward (activation checkpointing) saves plain
        # views. Keeping the buffer on only some ranks is safe: freeing it needs no communication.
        if not self.unit.keeps_views and (though_viewed or num_uses(self.buffer) <= self._num_uses):
            self._free_buffer()
        else:
            self.had_views |= not self.unit.keeps_views
            # With shared memory, parts of the buffer are the shards of other ranks. Copy these
            # parts: otherwise the other ranks would have to wait before they write their shards.
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def _free_buffer(self) -> None:
        # Change the version: until the next all-gather, autograd raises on a read of a saved view.
        torch._C._increment_version((self.buffer,))  # type: ignore[attr-defined]
        self.memory.free()
        self.is_free_deferred = False
        unsharded.forbid(self._storage, self.plan.unit_name, self.topology.world.global_rank)
        unsharded.set_accessible(self.fulls, False)

    def snapshot(self) -> None:
        """Preserve the buffer's values, even if other ranks write to their shards.

        With shared memory, parts of the buffer may be the memory of other ranks' shards. This
        method replaces these parts by copies.
        """
        if self.state is ShardState.UNSHARDED:
            with _unsafe_preserve_version_counter(self.buffer):
                self.memory.snapshot()

    def is_edited_here(self) -> Tensor:
        """Whether this rank's range of the buffer was edited, and differs from the shard.

        Returns a tensor with one element: False if the shard was written after the all-gather.
        """
        return self._edited_bytes().any().view(1) & self.is_current

    def edited_params(self) -> list[OriginalParam]:
        """Return the parameters with an edited element in this rank's range of the buffer."""
        is_edited = self._edited_bytes().view(-1, self.buffer.element_size()).any(1)
        at = is_edited.nonzero() + self.topology.index * len(is_edited)
        return [one for one in self.params if ((at >= one.span.start) & (at < one.span.end)).any()]

    def _edited_bytes(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            expected = self.gather.as_gathered(self.flat_param.detach())
            own = self.buffer.chunk(self.layout.world_size)[self.topology.index].detach()
            return as_bytes(own) != as_bytes(expected)

    def absorb_replaced(self) -> None:
        """Copy tensors that users assigned to ``p.data`` into the shard.

        Does nothing unless every rank holds the whole flat parameter. Then users see plain
        parameters, which are views of the shard until the user assigns to ``p.data``.
        """
        if not self.is_whole or all(
            param.sharded.data_ptr() == view_of(self.flat_param, param.span).data_ptr()
            or not param.span.numel
            for param in self.params
        ):
            return
        # Use new memory: the user may have kept the previous `p.data`, to assign it again later.
        with torch.inference_mode(False), torch.no_grad():
            self._set_shard(self._targets.shard.take_in(self.flat_param.clone()))
            if self.shard_is_buffer:
                self.memory, self.buffer = BufferMemory(self.flat_param), self.flat_param
            for param in self.params:
                place = view_of(self.flat_param, param.span)
                place.copy_(param.sharded)
                param.sharded.data = place
                torch.autograd.graph.increment_version(param.sharded)

    @property
    def version(self) -> int:
        """Version counter of the shard, which grows with every write."""
        return self._shard._version + (self._versions_of_params() if self.is_whole else 0)

    def _versions_of_params(self) -> int:
        # The parameters of a whole flat parameter share the shard's memory by assignment to
        # `.data`, so each parameter has a separate version counter.
        return sum(param._version for param in self.sharded)

    @property
    def is_current(self) -> bool:
        """Whether the buffer is unsharded, and no shard was written since the all-gather."""
        return self.state is ShardState.UNSHARDED and (
            self.shard_is_buffer or self.gathered_version == self.version
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether the handle is SHARDED, and keeps no buffer and no secondary shard."""
        secondary = self.gather.secondary
        is_kept = secondary is not None and secondary.waits_for_backward
        return self.state is ShardState.SHARDED and not (self.is_free_deferred or is_kept)

    @property
    def buffer_bytes(self) -> int:
        """Size of the unsharded buffer in bytes. 0 if the shard itself is the buffer."""
        return 0 if self.shard_is_buffer else self.buffer.nbytes

    # ------------------------------------------------------------ what modules hold

    def install_unsharded(self) -> None:
        """Put the unsharded parameters into the modules.

        Raises RuntimeError if a module's parameter was replaced after wrapping.
        """
        self.count_trainable()
        if self.shard_is_buffer:
            return
        self.check_places()
        self.put(self.fulls)

    def count_trainable(self) -> None:
        """Count the parameters that require a gradient. Users may freeze parameters at any time."""
        # Skip if no flag was set since the last call. With `is_whole`, read the flags each time:
        # users see plain parameters, for which nothing counts how often a flag was set.
        if self._num_flag_writes == sharded_tensor.num_flag_writes and not self.is_whole:
            return
        self._num_flag_writes = sharded_tensor.num_flag_writes
        with torch._C.DisableTorchFunctionSubclass():
            self.trained = [*map(_REQUIRES_GRAD, self.sharded)]
            # Users set `requires_grad` of the sharded parameters. Copy the flags to the full ones.
            for full, trains in zip(self.fulls, self.trained, strict=True):
                full.requires_grad_(trains)
        self.num_trainable = sum(self.trained)

    def check_places(self) -> None:
        """Raise RuntimeError if a module's parameter was replaced after wrapping."""
        held = self.fulls if self.installed is None else self.installed
        for module, attribute, param in self.places:
            present = module._parameters.get(attribute)
            if present is not param.sharded and present is not held[param.index]:
                raise RuntimeError(
                    f"{param.where} was replaced or removed after wrapping (by an assignment, "
                    "functional_call, prune, weight_norm, ...). To set values, call p.copy_(...) "
                    f"under torch.no_grad(). {CHANGE_MODEL}"
                )

    def put(self, shown: Sequence[nn.Parameter]) -> None:
        """Put unsharded parameters, one for each original parameter, into the modules."""
        if self._splits is not None:
            pairs = zip(shown, self._splits, strict=False)
            shown = [full if split is None else split.as_dtensor(full) for full, split in pairs]
        self.installed = shown
        self._install(shown)

    def put_back(self) -> None:
        """Put the sharded parameters into the modules, in place of the unsharded parameters."""
        self._install(self.sharded)
        self.installed = None

    def _install(self, params: Sequence[Any]) -> None:
        for module, attribute, param in self.places:
            module._parameters[attribute] = params[param.index]
        for module in self._rnns:
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]
            # RNN modules use these weak references to detect replaced weights. None disables this.
            module._flat_weight_refs = [None] * len(names)

    # ------------------------------------------------------------ gradients

    def plan_gradients(self, dtype: torch.dtype, hook: CommHook | None = None) -> ReducePlan:
        """Plan the reduction of gradients, for a shard of ``dtype`` and the user's comm hook."""
        tags = (*self.gather.tags, self._replicate_tag)
        return ReducePlan(self.plan, dtype, self.device, tags, hook)

    @property
    def reduces(self) -> bool:
        """Whether this backward reduces gradients of the flat parameter."""
        return self.num_trainable > 0 and self.unit.sync is not GradSync.ACCUMULATE

    def give_hooks_back(self) -> None:
        """Register users' hooks again, which ``Gradients.set_aside_earlier`` had removed."""
        for param in self.params if self.shard_is_buffer else ():
            param.give_hooks_back()
