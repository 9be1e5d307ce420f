"""``Unit``: a wrapped module with the parameters it owns, gathered and released together.

A parameter's life in a step:

1.  ``_pre_forward`` gathers the unit's flat parameters, unless a prefetch did already, and lets the
    modules hold the full parameters; the next unit's gather starts.
2.  ``_post_forward`` gives the modules the sharded ones back, hooks the outputs, and frees the
    buffer if the strategy says so.
3.  ``_pre_backward``, from an output's hook, gathers again; the unit before starts too.
4.  Each gradient is collected as it comes (``gradients``).
5.  When all have come, the reduction starts, in an order that all ranks share (``context``).
6.  When the gradients of the unit's inputs are there too, nothing can need its parameters: the
    buffer is freed. What never came is settled at the end of backward (``context``).

[Note: recomputation]
Checkpointing runs forwards inside backward. Such a forward gathers and installs, but frees
nothing and records no order: backward goes on to use what it saved. It may be left by an
exception, which is how non-reentrant checkpointing stops early; so it starts no prefetch, unless a
reentrant checkpoint computes the whole model again.

[Note: several modules]
Small neighbours are one unit (``coalescing``), whose forward is that of each of its modules. It is
gathered for the first that is called, and released after as many calls as there were in the last
forward, or at the end of the outermost one: whatever the order of calls is on a rank, all gather
equally often. In backward it is released when nothing can need it, as any unit.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.comm.topology import Topology
from flatshard.diagnostics.forward_edits import ForwardEdits
from flatshard.diagnostics.non_finite import NonFiniteWatch
from flatshard.diagnostics.recorder import Recorder
from flatshard.diagnostics.state_dict_writes import StateDictWrites
from flatshard.diagnostics.step_report import Kind
from flatshard.engine import reduce_buckets
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle, ShardState
from flatshard.engine.module_hook import ModuleHook
from flatshard.engine.nested import tensors_in
from flatshard.engine.profiling import profiled
from flatshard.options.strategy import Placement
from flatshard.plan.module_tree import name_of
from flatshard.precision.casts import UnitCasts

ReduceBucket: TypeAlias = "reduce_buckets.ReduceBucket[Unit]"
"""Flat parameters of a unit that are reduced together."""


_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Whose backward needs the indices alone; what saves their parameters gets them by ``regather``."""


class Phase(enum.Enum):
    """Where a unit is in a step. Moves only in ``Unit``."""

    IDLE = "IDLE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"


class Call:
    """One call of a unit's module, which a backward belongs to.

    Attributes:
        num_inputs: how many of its inputs have a gradient; when all have come, backward is through.
        has_begun: whether its backward has begun.
    """

    __slots__ = ("has_begun", "num_inputs")

    def __init__(self) -> None:
        self.num_inputs = 0
        self.has_begun = False


class Context(Protocol):
    """What a unit asks of the run it is part of (``RunContext``)."""

    expects_backward: bool
    """Whether the outermost forward began with gradients enabled."""

    recorder: Recorder
    """Hears what the run does."""

    non_finite: NonFiniteWatch | None
    """Looks for gradients that are not finite."""

    state_dict_writes: StateDictWrites
    """What state dicts gave."""

    num_loads: int
    """How often state dicts were loaded into units; alike on all ranks."""

    @property
    def in_backward(self) -> bool:
        """Whether this model's backward is running now."""

    def enter(self, unit: Unit) -> None:
        """A unit's forward begins."""

    def leave(self, unit: Unit, *, failed: bool) -> None:
        """A unit's forward is over, or failed."""

    def prefetch_forward(self) -> None:
        """Begin the gather of the unit expected next."""

    def begin_backward(self) -> bool:
        """Something of a backward ran; the first time in one, prepare its end."""

    def will_gather_in_backward(self) -> None:
        """Before a unit is gathered for backward, for which all ranks are needed."""

    def prefetch_recomputed(self, unit: Unit) -> None:
        """Begin that of the unit expected after this one, in a forward that is computed again."""

    def prefetch_backward(self, unit: Unit) -> None:
        """Begin the gather of the unit whose backward is expected after this one's."""

    def gradients_complete(self, bucket: ReduceBucket) -> None:
        """All gradients of a unit, or of a portion of it, have come."""

    def freed_in_backward(self, unit: Unit) -> None:
        """A unit's backward is over."""

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether the unit will be needed again at once."""

    def views_parameters(self, tensor: Tensor) -> bool:
        """Whether a tensor looks into a buffer that will be freed."""


class Unit:
    """A wrapped module, or several, and their flat parameters.

    Attributes:
        modules: the modules, which keep their own class and forward; mostly one.
        names: their names in the unwrapped model; empty for the model itself.
        name: the same in one.
        handles: its flat parameters, one per dtype and ``requires_grad``, and one for each large
            parameter of the root; may be none.
        portions: those that are reduced together; one or more.
        topology: its groups.
        index: its number in the run.
        phase: see ``Phase``.
        placement: what is freed when.
        is_root: whether it is the outermost one.
        sync: what the backward of the forward begun last does with the gradients.
        num_awaited: how often it ran in the last outermost forward, less the backwards of it that
            began since; alike on all ranks, also where an earlier forward failed on some.
    """

    context: Context

    def __init__(
        self,
        modules: Mapping[nn.Module, UnitCasts],
        names: Sequence[str],
        *,
        placement: Placement,
        topology: Topology,
    ) -> None:
        """Hook the forwards of ``modules``. The flat parameters are added by ``own``."""
        self.names, self.name = list(names), name_of(names)
        self.handles: list[FlatParamHandle] = []
        self._edits: list[ForwardEdits] = []
        self.index = -1
        self.phase = Phase.IDLE
        self.placement = placement
        self.topology = topology
        self.sync = Sync.ALL
        self.outstanding_backwards = 0
        self._num_awaited_before = 0
        self._ends_unseen = False  # whether no input tells when a backward of it is over
        self.is_root = True
        self._casts = dict(modules)
        self._num_calls = 0  # in the outermost forward under way, or last
        self._calls_to_come = 0  # in it, if it is like the one before
        self._backward_follows = False  # after the last call
        self._running: list[Call] = []
        self._waiting_for: dict[Call, int] = {}
        self._num_trainable: dict[FlatParamHandle, int] = {}
        self._for_backward: list[FlatParamHandle] = []
        self.buckets: list[ReduceBucket] = reduce_buckets.split(self, [], self._num_trainable)
        self._bucket_of: dict[FlatParamHandle, ReduceBucket] = {}
        self._sticky_version = -1  # of the parameters that a differentiable backward uses
        before, after = ModuleHook(self, "_pre_forward"), ModuleHook(self, "_post_forward")
        for module in modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, always_call=True)

    def copy_for(self, memo: dict[int, Any], twin: Unit) -> None:
        """Make ``twin``, which copied modules already call, a unit like this one."""
        twin.__dict__.update(self.__dict__)
        twin._casts = {memo[id(module)]: casts for module, casts in self._casts.items()}
        twin.names = list(self.names)
        twin.phase, twin.index, twin._sticky_version = Phase.IDLE, -1, -1
        twin._running, twin._waiting_for = [], {}
        twin.own(
            handle.copy_for(memo, twin.on_grad, twin.on_outside_grad) for handle in self.handles
        )

    def refuse_to_part(self) -> NoReturn:
        """Raise for a copy of the module without its wrapper."""
        raise RuntimeError(
            f"unit {self.name!r}: the module of a ShardedWrapper cannot be copied or pickled "
            "without it. Copy the wrapper (copy.deepcopy(model)), and save model.state_dict()."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Not available alone; see ``refuse_to_part``."""
        self.refuse_to_part()

    @property
    def modules(self) -> Collection[nn.Module]:
        """See the class."""
        return self._casts.keys()

    def rename(self, names: Sequence[str], *, is_root: bool) -> None:
        """Take names relative to another root."""
        strip = partial(_renamed, before=self.names, after=names)
        self.names, self.name, self.is_root = list(names), name_of(names), is_root
        for handle in self.handles:
            handle.rename(self.name, strip)

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        """Take flat parameters over."""
        self.handles = list(handles)
        self._num_trainable = {}
        self.buckets = reduce_buckets.split(self, self.handles, self._num_trainable)
        self._bucket_of = {h: bucket for bucket in self.buckets for h in bucket.handles}
        self._edits = [ForwardEdits(handle) for handle in self.handles]
        self._for_backward = []
        for handle in self.handles:
            if _are_looked_up(handle):
                handle.params.bring_back_by(self._bring_back)
            else:
                self._for_backward.append(handle)
        self._count_trainable()

    def _count_trainable(self) -> None:
        for handle in self.handles:
            self._num_trainable[handle] = handle.params.num_trainable()

    @property
    def gathers_in_backward(self) -> bool:
        """Whether backward needs any of the parameters."""
        return bool(self._for_backward)

    def bucket_of(self, handle: FlatParamHandle) -> ReduceBucket:
        """What a flat parameter is reduced with."""
        return self._bucket_of[handle]

    def trainable_handles(self) -> list[FlatParamHandle]:
        """Flat parameters with something to reduce."""
        return [handle for handle, count in self._num_trainable.items() if count]

    @property
    def calls_hook(self) -> bool:
        """Whether a user's function reduces gradients of the unit whose sum is not held back."""
        return self.sync is Sync.ALL and any(
            handle.comm_hook is not None and handle.comm_hook.reduce is not None
            for handle in self.trainable_handles()
        )

    @property
    def buffer_bytes(self) -> int:
        """What its unsharded buffers take while they exist."""
        return sum(handle.buffer_bytes for handle in self.handles)

    @property
    def gradient_bytes(self) -> int:
        """What whole gradients of the unit take while they are added up."""
        return sum(
            handle.layout.padded_numel * handle.grad_buffer.dtypes.accum_dtype.itemsize
            for handle in self.trainable_handles()
        )

    @property
    def gathered_bytes(self) -> int:
        """What gathered parameters take now, and parts that are kept to gather from."""
        return sum(handle.gathered_bytes + handle.secondary_bytes for handle in self.handles)

    @property
    def held_gradient_bytes(self) -> int:
        """What gradients take now that are not in ``.grad``."""
        return sum(handle.gradient_bytes for handle in self.handles)

    @property
    def gives_gradients(self) -> bool:
        """Whether gradients are being reduced, or other ranks are still taking them."""
        return any(
            handle.grad_reduce is not None and handle.grad_reduce.keeps_memory
            for handle in self.handles
        )

    def plan_sync(self, wanted: Sync) -> None:
        """Take what ``wanted`` means for the groups of this unit."""
        if wanted is Sync.INTRA:
            if not self.topology.crosses:
                wanted = Sync.ALL
            elif self.topology.intra_group.size == 1:
                wanted = Sync.NONE
        self.sync = wanted

    # ------------------------------------------------------------ gather and free

    def unshard_ahead(self, purpose: str) -> None:
        """Start gathering what is needed for "forward" or "backward"; don't wait. Collective."""
        self._begin_gather(self._needed_for(purpose), purpose)

    def _begin_gather(self, handles: list[FlatParamHandle], purpose: str) -> None:
        with self.context.recorder.starting(purpose, self), profiled("unshard", self.name):
            for handle in handles:
                handle.unshard(purpose)

    def _needed_for(self, purpose: str) -> list[FlatParamHandle]:
        return self.handles if purpose == "forward" else self._for_backward

    def gather(self, purpose: str) -> None:
        """Gather what is needed for "forward" or "backward", and install all. Collective."""
        self._gather(self._needed_for(purpose), purpose)

    def _gather(self, handles: list[FlatParamHandle], purpose: str) -> None:
        self._begin_gather(handles, purpose)
        waiting = self.context.recorder.waiting(Kind.GATHER_WAIT, self)
        with waiting, profiled("wait_unshard", self.name):
            for handle in handles:
                handle.wait_unshard()
        for handle in self.handles:
            handle.params.use_unsharded_views()

    def release(self) -> None:
        """Give the modules the sharded parameters back and free what the strategy frees.

        State: any -> IDLE. Buffers stay where something saved outside our reach may need them.
        """
        self._leave()
        for handle in self.handles:
            if self._is_sticky:
                handle.keep()
            else:
                handle.drop_secondary()
                if self._frees_after_backward(handle):
                    handle.reshard()
                elif handle.state is ShardState.UNSHARDING:
                    # The optimizer may write the shard next, so it must not be on its way.
                    handle.wait_unshard()

    def _frees_after_backward(self, handle: FlatParamHandle) -> bool:
        # A rank that holds everything saves nothing by keeping it, and sees no edits made through
        # `p.data`.
        return (
            self.placement.reshard_after_backward
            or self.topology.shard.size == 1
            or handle.is_mapped
        )

    def free(self) -> None:
        """As ``release``, and free what the strategy would keep. State: any -> IDLE."""
        self._leave()
        for handle in self.handles:
            handle.drop_secondary()
            handle.reshard()

    def _leave(self) -> None:
        for handle in self.handles:
            handle.params.use_sharded_views()
        self.phase = Phase.IDLE
        self._waiting_for.clear()
        for handle in self.handles:
            handle.grad_buffer.arrived.clear()

    @property
    def is_done(self) -> bool:
        """Whether no forward since the last backward is expected to need the parameters yet."""
        return (
            self.phase is Phase.IDLE
            and self.outstanding_backwards + self._num_awaited_before <= 0
            and not self._ends_unseen
            and not self._is_sticky
        )

    @property
    def _version(self) -> int:
        return sum(handle.version for handle in self.handles)

    @property
    def _is_sticky(self) -> bool:
        """Whether a differentiable backward may still need the buffers."""
        return self._sticky_version >= 0 and self._sticky_version == self._version

    @property
    def is_prefetched(self) -> bool:
        """Whether a gather was started that nobody waited for."""
        return any(handle.state is ShardState.UNSHARDING for handle in self.handles)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is gathered, on its way, or kept for backward."""
        return self.phase is Phase.IDLE and not any(
            handle.state is not ShardState.SHARDED or handle.has_secondary
            for handle in self.handles
        )

    # ------------------------------------------------------------ forward

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = Call()
        self.context.enter(self)
        self._running.append(call)
        recomputing = self.context.in_backward
        if recomputing:
            self._enter_backward()
            self.regather()
            self.context.prefetch_recomputed(self)
        else:
            self.outstanding_backwards += self.context.expects_backward
            if not self.is_open:
                self._begin_forward(module)
        changed = self._casts[module].cast_inputs(args, kwargs, is_root=self.is_root)
        if torch.is_grad_enabled():
            self._hook_inputs(call, (args, kwargs) if changed is None else changed)
        return changed

    @property
    def is_open(self) -> bool:
        """Whether it was gathered for a call in this forward, and not freed since."""
        return self.phase is Phase.FORWARD and all(handle.is_current for handle in self.handles)

    def _begin_forward(self, module: nn.Module) -> None:
        self.gather("forward")
        self.phase = Phase.FORWARD
        if len(self._running) == 1:
            for edits in self._edits:
                edits.begin(training=module.training)
        self._count_trainable()
        self.context.prefetch_forward()

    def _hook_inputs(self, call: Call, inputs: Any) -> None:
        def hook(_: Tensor) -> None:
            self._input_gradient(call)

        for tensor in tensors_in(inputs):
            # A leaf outlives the graph, and would gather a hook in every step.
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)
                call.num_inputs += 1

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Runs after an exception too, with ``output`` None."""
        if not self._running:
            return None
        call = self._running.pop()
        changed = output
        try:
            if output is not None:
                if self.phase is Phase.FORWARD and not self._running:
                    for edits in self._edits:
                        edits.check(module)
                changed = self._protect(self._casts[module].cast_output(output))
                if torch.is_grad_enabled():
                    self._hook_outputs(call, changed)
        finally:
            if self.phase is Phase.FORWARD and not self._running:
                self._end_call(output is not None)
            self.context.leave(self, failed=output is None and sys.exc_info()[0] is not None)
        return changed

    def _end_call(self, has_output: bool) -> None:
        # Under a reentrant checkpoint gradients are disabled here, and a backward follows anyway.
        backward_follows = has_output and (torch.is_grad_enabled() or self.context.expects_backward)
        self._backward_follows = backward_follows
        self._num_calls += 1
        self._calls_to_come -= 1
        if len(self.modules) == 1 or self._calls_to_come <= 0 or not has_output:
            self.end_forward()

    def end_forward(self) -> None:
        """Free what the strategy frees, as no call is to come. State: FORWARD -> IDLE.

        Does nothing elsewhere, or while one runs.
        """
        if self.phase is not Phase.FORWARD or self._running:
            return
        for handle in self.handles:
            handle.params.use_sharded_views()
        self.phase = Phase.IDLE
        backward_follows = self._backward_follows
        stays = backward_follows and self._stays_after_forward
        for handle in self.handles:
            # A backward that reduces nothing may run on this rank alone: it must not need a gather,
            # nor see what others write into shards that are mapped.
            if self._is_sticky or (stays and self.sync is Sync.NONE):
                handle.keep()
            elif handle.is_mapped or not stays or self._spares(handle):
                if backward_follows:
                    handle.keep_secondary()
                handle.reshard()

    def _spares(self, handle: FlatParamHandle) -> bool:
        """Whether to free what backward does not need of a unit that else stays for it."""
        frees = self.placement.reshard_after_forward or handle.is_mapped
        return frees and handle not in self._for_backward

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether autograd is to save values instead of a place that is gathered again.

        In the root, any rank may use a parameter as it likes: backward must not need a gather that
        the other ranks do without.
        """
        return self.is_root and self._spares(handle)

    @property
    def _stays_after_forward(self) -> bool:
        return not self.placement.reshard_after_forward or self.context.keeps_after_forward(self)

    def _protect(self, output: Any) -> Any:
        """Copy outputs that look into a buffer which is about to be freed."""
        if not any(self.context.views_parameters(tensor) for tensor in tensors_in(output)):
            return output
        output = pytree.tree_map_only(
            Tensor, lambda t: t.clone() if self.context.views_parameters(t) else t, output
        )
        if any(self.context.views_parameters(tensor) for tensor in tensors_in(output)):
            raise RuntimeError(
                f"unit {self.name!r} returns a view of its parameters inside an object. They are "
                "freed after forward: return a clone()."
            )
        return output

    def _hook_outputs(self, call: Call, output: Any) -> None:
        def hook(_: Tensor) -> None:
            self._pre_backward(call)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)

    # ------------------------------------------------------------ backward

    def begin_run(self) -> None:
        """An outermost forward begins."""
        self._calls_to_come, self._num_calls = self._num_calls or len(self.modules), 0
        self._num_awaited_before += self.outstanding_backwards
        self.outstanding_backwards = 0
        # A backward that reduces nothing may have run on other ranks alone. What it freed there
        # must not be left here: they would wait for a gather that this rank does without.
        if self.sync is Sync.NONE and self.phase is Phase.IDLE and not self._is_sticky:
            for handle in self.handles:
                if self._frees_after_backward(handle):
                    handle.reshard()

    def end_run(self) -> None:
        """A backward of the model is over, or failed."""
        self.outstanding_backwards = self._num_awaited_before = 0

    def begin_backward(self) -> None:
        """A backward of the model begins; forget the last one's counts."""
        self._waiting_for.clear()
        self._ends_unseen = False
        for handle in self.handles:
            handle.grad_publish.begin_backward()

    def _pre_backward(self, call: Call) -> None:
        self.context.begin_backward()
        if not call.has_begun:
            call.has_begun = True
            self.outstanding_backwards -= 1
        if call.num_inputs:
            self._waiting_for[call] = call.num_inputs
        else:
            self._ends_unseen = True
        self.context.recorder.enter_backward(self)
        self._enter_backward()
        self.context.prefetch_backward(self)

    def _enter_backward(self) -> None:
        if torch.is_grad_enabled() and not self._running and self.context.in_backward:
            # With create_graph, nodes that backward itself makes save views that nothing packs.
            # They are good until the parameters change, and so long the buffer stays.
            self._sticky_version = self._version
        if self.phase is not Phase.BACKWARD:
            if self.gathers_in_backward:
                self.context.will_gather_in_backward()
                self.gather("backward")
            self._count_trainable()
            self.phase = Phase.BACKWARD

    def regather(self) -> None:
        """Bring the parameters back in backward, for a saved view or to compute a forward again.

        Collective, unless they are there.
        """
        if all(handle.is_current for handle in self.handles):
            return
        self._gather(self.handles, "backward")
        if self.context.begin_backward():
            self.phase = Phase.BACKWARD

    def _bring_back(self) -> bool:
        """``regather``, if a backward has begun; what it does without was used after all."""
        if self.phase is not Phase.BACKWARD or not self.context.in_backward:
            return False
        self.regather()
        return True

    def on_grad(self, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """A gradient has come."""
        self.context.begin_backward()
        if self.context.non_finite is not None:
            self.context.non_finite.look(self.name, handle.params.specs[index].name, grad)
        handle.grad_buffer.receive(index, grad, more_to_come=self.sync is Sync.NONE)
        self.context.recorder.look(self)
        bucket = self._bucket_of[handle]
        if bucket.is_complete():
            self.context.gradients_complete(bucket)
            self._maybe_free()

    def on_outside_grad(self) -> None:
        """A sharded parameter gets a gradient from its use outside of forward."""
        self.context.begin_backward()

    def _complete(self) -> bool:
        return all(bucket.is_complete() for bucket in self.buckets)

    def _input_gradient(self, call: Call) -> None:
        waiting = self._waiting_for.get(call)
        if waiting is None:
            return
        if waiting > 1:
            self._waiting_for[call] = waiting - 1
            return
        del self._waiting_for[call]
        self._maybe_free()

    def _maybe_free(self) -> None:
        if self.phase is Phase.BACKWARD and not self._waiting_for and self._complete():
            self.release()
            self.context.freed_in_backward(self)

    def reset(self) -> None:
        """Return to IDLE after a step that failed; drops its gradients."""
        self._running.clear()
        self._sticky_version = -1
        self.end_run()
        for handle in self.handles:
            handle.drop_gradients()
        self.free()


def _are_looked_up(handle: FlatParamHandle) -> bool:
    """Whether only lookups use the parameters."""
    return all(type(module) in _LOOKUPS for module in handle.params.modules())


def _renamed(name: str, before: Sequence[str], after: Sequence[str]) -> str:
    """A parameter's name relative to another root; its module's is ``before`` and ``after``."""
    for old, new in zip(before, after, strict=True):
        if not old or name.startswith(f"{old}."):
            local = name.removeprefix(f"{old}.") if old else name
            return f"{new}.{local}" if new else local
    raise AssertionError(f"{name} belongs to none of {', '.join(before)}")
