"""``Unit``: one or several wrapped modules with the parameters that they own, and a ``Phase``.

All parameters of a unit are unsharded and resharded together. ``forward`` and ``backward`` decide
when; a unit knows nothing of the step around it.

[Note: several modules]
Coalescing joins small neighbouring modules into one unit. The first call of any of these modules
unshards the unit. The unit is resharded after as many calls as in the last forward, or at the end
of the outermost forward if there are fewer calls. So all ranks all-gather the unit equally often,
even if ranks call the modules in different orders. In backward, the unit is resharded like every
other unit: when no computation can need the parameters any more.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import FlatParamHandle, Place, ShardState
from flatshard.precision import UnitCasts
from flatshard.tensor.sharded_tensor import ASSIGNED
from flatshard.units.module_tree import Ignored, name_of, renamed, unit_text


class Phase(enum.Enum):
    """The part of a step that a unit is in (``Unit.phase``).

    A backward may run inside a forward (to compute forces, for example): the unit moves from
    FORWARD to BACKWARD, and back to FORWARD if that backward fails. A recomputation, a forward
    inside a backward, leaves the unit in BACKWARD.
    """

    IDLE = "IDLE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"


class ReshardPoint(enum.Enum):
    """Points of a step at which ``Unit.buffer_action`` keeps or frees an unsharded buffer."""

    AFTER_FORWARD = "this forward will not call the unit again"
    AFTER_BACKWARD = "the rest of this backward does not need the parameters"
    BACKWARD_OVER = "the model's backward is over"
    STEP_LEFT = "cleanup: a step failed, or a prefetched unit did not run"


class BufferAction(enum.Enum):
    """Whether an unsharded buffer is freed or kept."""

    FREE = "free the memory; the next use all-gathers again"
    KEEP = "keep the buffer; the next use all-gathers again only if the shards were written"
    SNAPSHOT = "keep the buffer with its present values; copy shards of other ranks that it maps"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """One call of a unit's module, and the backward of this call."""

    # Number of inputs that require a gradient. The call's backward is over once all of these
    # gradients are computed.
    num_inputs: int = 0
    has_begun: bool = False  # whether the call's backward has begun
    # Whether the call's backward is over once all gradients of parameters have arrived. Then no
    # inputs are counted.
    ends_with_gradients: bool = False

    # For `SavedTensors`: the number of autograd's next node when the call began, or -1; whether the
    # forward has saved-tensor hooks; if not, the versions of the
    # buffers that backward reads through saved views, when the forward ended.
    first_node: int = -1
    has_hooks: bool = True
    versions: dict[FlatParamHandle, int] = field(default_factory=dict)


class Unit:
    """One or several modules whose parameters are unsharded and resharded together."""

    # `Forward` and `Backward` of the model, set by `RunState`. Torch's hooks of modules and
    # parameters hold the unit, and call these two.
    forward: Any
    backward: Any
    context: Any  # `RunState` of the model, set by `start_run`
    state_dict: Any  # `UnitStateDict`
    reasons: Sequence[str]  # why a policy chose each module

    # Called before the first forward; raises if a tensor is still empty after `leave_empty`.
    check_loaded: Callable[[nn.Module, Communicator], None] | None = None
    # Whether a `param_init_fn` is running: `apply` and conversions in it skip wrapped submodules.
    is_initialising = False

    def __init__(
        self,
        modules: Mapping[nn.Module, UnitCasts],
        names: Sequence[str],
        settings: Any,  # `Settings` (`module.settings`)
        ignored: Ignored,
    ) -> None:
        # For each module of the unit, how inputs and outputs are cast.
        self.casts = dict(modules)
        # `names`: names of the modules in the unwrapped model. `name`: a name made of all names.
        self.names, self.name = list(names), name_of(names)
        # One flat parameter for each combination of dtype and `requires_grad`; in the root, also
        # one for each large parameter. Empty if the unit owns no parameter.
        self.handles: list[FlatParamHandle] = []
        # Flat parameters that backward reads: those without `FlatParamHandle.is_lookup`.
        self.for_backward: list[FlatParamHandle] = []
        # For each module of the unit, the flat parameters whose original parameters are in the
        # module or its submodules. A `Place` says which module attribute holds the parameter.
        self.places_in: dict[nn.Module, list[tuple[FlatParamHandle, list[Place]]]] = {}
        self.index, self.phase = -1, Phase.IDLE
        self.settings, self.ignored = settings, ignored
        self.placement, self.topology = settings.placement, settings.topology
        # The outermost wrappers that contained the unit when they were made.
        self.roots: WeakSet[nn.Module] = WeakSet()
        self.is_root, self.is_summoned = True, False
        self.stays_unsharded = False  # inside of `no_sync(uneven=True)`
        # Whether ranks may skip the unit in a step, or run units in different orders.
        self.may_diverge = False
        # How often each parameter was written through a tensor of a state dict, and how often a
        # state dict or checkpoint was loaded, keyed by its name in messages. Must be the same on
        # all ranks.
        self.loads: Counter[str] = Counter()
        # Sum of the checksums of these loads and writes. Each backward compares this sum between
        # ranks; only if the sums differ, the ranks exchange ``loads``.
        self.loads_sum = 0
        self.sync = GradSync.FULL  # how the backward of the latest forward reduces gradients
        self.running: list[Call] = []  # calls under way, the innermost last

        # Number of calls in the latest outermost forward whose own backward has not begun yet. The
        # count restarts with each outermost forward, so that all ranks have the same count after a
        # forward that failed on only some ranks.
        self.outstanding_backwards = 0
        self._outstanding_before = 0  # the same count for all earlier outermost forwards

        # Whether the unit cannot see the end of a call's backward, because no input of the call
        # requires a gradient.
        self._ends_unseen = False
        self._num_calls = 0  # number of calls in the present or latest outermost forward

        # Calls still expected in this outermost forward, according to the last forward.
        self._calls_to_come = 0
        self.backward_follows = False  # whether a backward follows the latest use of the unit

        # Whether the unsharded buffers keep their memory after a reshard, because autograd may have
        # saved views that backward reads at any time. Ranks may differ: the unit is all-gathered
        # again as usual.
        self.keeps_views = False
        # Whether a backward has read a saved view after the gradients of all parameters arrived,
        # because an operation used a detached parameter, for example.
        self.is_read_late = False
        # Whether an operation outside of the unit's forward has used the parameters in this step.
        self.is_used_outside = False
        # For each call whose backward runs, the number of input gradients that have not arrived.
        self._outstanding_inputs: dict[Call | None, int] = {}
        # Sum of the shards' versions in the latest backward with create_graph, or -1. While the sum
        # stays the same, the unit keeps its buffers (`keep_unsharded`).
        self._kept_version = -1

    def count_load(self, what: str) -> None:
        """Count that this rank loaded or wrote ``what``: a state dict, checkpoint or parameter.

        The next backward raises an error on all ranks if the ranks have counted differently.
        """
        self.loads[what] += 1
        self.loads_sum += crc32(f"{self.name}: {what}".encode())

    def refuse_to_part(self) -> NoReturn:
        raise RuntimeError(
            f"{unit_text(self.name)}: the module of a ShardedWrapper cannot be copied or pickled "
            "without the wrapper. Call copy.deepcopy(model) or flatshard.checkpoint.save."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse_to_part()

    @property
    def modules(self) -> Collection[nn.Module]:
        return self.casts.keys()

    def rename(self, names: Sequence[str], *, is_root: bool) -> None:
        strip = partial(renamed, before=self.names, after=names)
        self.names, self.name, self.is_root = list(names), name_of(names), is_root
        self.may_diverge = self.placement.may_diverge and not is_root
        for handle in self.handles:
            handle.plan.unit_name = self.name
            for param in handle.params:
                param.spec.name, param.spec.unit = strip(param.spec.name), self.name

    def own(
        self,
        handles: Iterable[FlatParamHandle],
        receive: Callable[[weakref.ref[FlatParamHandle], int, Tensor], None],
    ) -> None:
        """Make ``handles`` the unit's flat parameters.

        ``receive`` is called after autograd has filled ``.grad`` of a full parameter, with the flat
        parameter, the index of the parameter there, and the full parameter.
        """
        self.handles = list(handles)
        for handle in self.handles:
            handle.unit = self
            with torch.inference_mode(False):
                for param in handle.params:
                    # Keep only a weak reference to the handle. Python's garbage collector does not
                    # see the references from autograd to the hook. So the collector could never
                    # free a reference cycle through the hook.
                    param.connect(partial(receive, weakref.ref(handle), param.index))
        self.for_backward = [handle for handle in self.handles if not handle.is_lookup]
        for module in self.modules:
            inside = set(module.modules())
            self.places_in[module] = [
                (handle, [place for place in handle.places if place[0] in inside])
                for handle in self.handles
            ]
        for handle in self.handles:
            handle.count_trainable()

    @property
    def buffer_bytes(self) -> int:
        return sum(handle.buffer_bytes for handle in self.handles)

    @property
    def is_current(self) -> bool:
        """Whether all parameters are unsharded, with the present values of the shards."""
        return all(handle.is_current for handle in self.handles)

    @property
    def is_prefetched(self) -> bool:
        """Whether an all-gather of the unit was started, but not awaited yet."""
        return any(handle.state is ShardState.UNSHARDING for handle in self.handles)

    @property
    def is_at_rest(self) -> bool:
        """Whether the unit is IDLE, without unsharded buffers, all-gathers and secondary shards."""
        return self.phase is Phase.IDLE and not any(
            handle.state is not ShardState.SHARDED
            or handle.is_free_deferred
            or (handle.gather.secondary is not None and handle.gather.secondary.waits_for_backward)
            for handle in self.handles
        )

    @property
    def is_done(self) -> bool:
        """Whether no later backward can need the parameters."""
        return (
            self.phase is Phase.IDLE
            and self.outstanding_backwards + self._outstanding_before <= 0
            and not (self._ends_unseen or self.is_used_outside)
            and not self._is_kept_unsharded
        )

    def keep_unsharded(self) -> None:
        """Keep the unsharded buffers until the shards change."""
        # A backward with create_graph adds nodes for which saved-tensor hooks do not run, so these
        # nodes save plain views of the unsharded buffers.
        self._kept_version = sum(handle.version for handle in self.handles)

    @property
    def _is_kept_unsharded(self) -> bool:
        return self._kept_version == sum(handle.version for handle in self.handles)

    # ------------------------------------------------------------ unshard and reshard

    def wait_unshard(self) -> None:
        """Wait for the all-gathers; then let the modules hold the unsharded parameters."""
        for handle in self.handles:
            handle.wait_unshard()
        # Backward may have all-gathered only a part, but a recomputed forward reads all parameters.
        for handle in self.handles:
            handle.show_unsharded()

    def buffer_action(
        self, handle: FlatParamHandle, point: ReshardPoint, *, is_needed_soon: bool = False
    ) -> BufferAction:
        """Decide whether to free the unsharded buffer of ``handle``. Only this method decides.

        ``is_needed_soon``: whether the rest of the forward, or the beginning of backward, uses the
        unit.
        """
        if self.stays_unsharded:
            return BufferAction.KEEP
        if point is ReshardPoint.STEP_LEFT:
            return BufferAction.FREE
        # After a backward with create_graph, later nodes of the graph may read the buffer.
        if self._kept_version >= 0 and self._is_kept_unsharded:
            return BufferAction.SNAPSHOT
        shows_shards = handle.memory.shows_shards
        if point is not ReshardPoint.AFTER_FORWARD:
            # With a single rank, keeping the buffer would save no all-gather, and would miss edits
            # of a shard through `p.data`, which do not change the version.
            frees = self.placement.reshard_after_backward or handle.is_whole or shows_shards
            return BufferAction.FREE if frees else BufferAction.KEEP
        # Keep a unit that is needed soon: otherwise the unit would have to be all-gathered again.
        stays = is_needed_soon or not self.placement.reshard_after_forward
        if not (stays and self.backward_follows):
            return BufferAction.FREE
        if self.sync is GradSync.ACCUMULATE:
            # A backward under no_sync may run on this rank only. So it must not start an
            # all-gather, and must not read shards in shared memory that other ranks may be writing.
            return BufferAction.SNAPSHOT
        return BufferAction.FREE if shows_shards or self._is_spare(handle) else BufferAction.KEEP

    def _is_spare(self, handle: FlatParamHandle) -> bool:
        """Whether to free the buffer of ``handle`` after forward, since backward does not read it.

        False if the strategy keeps all buffers after forward.
        """
        reshards = self.placement.reshard_after_forward or handle.memory.shows_shards
        return reshards and handle.is_lookup

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether autograd saves copies of the parameters of ``handle`` for backward.

        Otherwise autograd saves a ``SavedView``, and backward unshards the unit again to read it.
        """
        # Save copies for the root: different ranks may use a parameter of the root in different
        # operations. With `SavedView`s, perhaps only one rank's backward would start an all-gather.
        return self.is_root and self._is_spare(handle)

    def reshard(
        self, point: ReshardPoint = ReshardPoint.STEP_LEFT, *, is_needed_soon: bool = False
    ) -> None:
        """Let the modules hold sharded parameters, and free or keep the unsharded buffers.

        ``buffer_action`` decides which buffers are freed.
        State: any phase -> IDLE.
        """
        for handle in self.handles:
            if handle.held is not None:
                handle.put_back()
        self.phase = Phase.IDLE
        if point is not ReshardPoint.AFTER_FORWARD:
            self._outstanding_inputs.clear()
            for handle in self.handles:
                handle.grads.arrived.clear()
        for handle in self.handles:
            action = self.buffer_action(handle, point, is_needed_soon=is_needed_soon)
            secondary = handle.gather.secondary
            if secondary is not None and action is not BufferAction.SNAPSHOT:
                if point is not ReshardPoint.AFTER_FORWARD:
                    secondary.end_backward()
                elif action is BufferAction.FREE and self.backward_follows and handle.is_current:
                    # Backward all-gathers from secondary shards, so cut this rank's secondary shard
                    # out of the buffer before the buffer is freed.
                    secondary.cut(handle.buffer, handle.version)
            if action is BufferAction.FREE:
                # In backward, nodes of a recomputed forward may still need views of the buffer.
                # Without hooks, the nodes of a retained graph hold views, too, but need none.
                may_be_held = point is ReshardPoint.AFTER_BACKWARD and (
                    handle.was_held or self.forward.saved.has_hooks
                )
                handle.reshard(though_held=not may_be_held)
            elif action is BufferAction.SNAPSHOT:
                handle.snapshot()
            else:
                # An unfinished all-gather reads the shard, which the optimizer may write next.
                handle.wait_unshard()

    # ------------------------------------------------------------ forward

    def begin_iteration(self) -> None:
        """Reset the counts of calls, because an outermost forward begins."""
        self._calls_to_come, self._num_calls = self._num_calls or len(self.casts), 0
        self._outstanding_before += self.outstanding_backwards
        self.outstanding_backwards = 0
        # A backward under no_sync may have run, and resharded the unit, on only some ranks. Reshard
        # it here too: otherwise the other ranks would start an all-gather without this rank.
        if self.sync is GradSync.ACCUMULATE and self.phase is Phase.IDLE:
            for handle in self.handles:
                if self.buffer_action(handle, ReshardPoint.AFTER_BACKWARD) is BufferAction.FREE:
                    handle.reshard()

    def end_iteration(self) -> None:
        """Reset the counts of outstanding backwards: the model's backward is over, or failed."""
        self.is_used_outside = False
        self.outstanding_backwards = self._outstanding_before = 0

    def end_call(self, *, backward_follows: bool) -> bool:
        """Count a finished call of a module of the unit.

        Returns True after the last call that this forward is expected to make.
        """
        self.backward_follows = backward_follows
        self._num_calls += 1
        self._calls_to_come -= 1
        return not self.may_diverge and (len(self.casts) == 1 or self._calls_to_come <= 0)

    def end_forward(self, *, is_needed_soon: bool) -> None:
        """Move from FORWARD to IDLE, and free buffers as ``buffer_action`` says.

        Called when this outermost forward will not call the unit again.
        """
        if self.phase is Phase.FORWARD and not self.running:
            self.reshard(ReshardPoint.AFTER_FORWARD, is_needed_soon=is_needed_soon)

    # ------------------------------------------------------------ backward

    def begin_model_backward(self) -> None:
        """Reset the counts of the last backward, and remove gradients from ``.grad``.

        Otherwise autograd would add new gradients to them in place.
        """
        self._outstanding_inputs.clear()
        self._ends_unseen = False
        for handle in self.handles:
            # For all other handles, `show_unsharded` has checked the places in forward.
            if handle.is_aliased or self.may_diverge:
                handle.check_places()
                handle.count_trainable()  # also if this rank has skipped the unit in forward
            handle.grads.arrived.clear()
            # Unreduced gradients stay in `grads`, to which backward adds.
            if handle.grads.shown or ASSIGNED:
                handle.grads.take_all_back()
            if handle.is_whole:
                handle.grads.take_assigned_of_whole()
            if handle.is_aliased:
                handle.grads.hold_earlier()

    def begin_call_backward(self, call: Call) -> None:
        """Count the beginning of the backward of ``call``, when an output's gradient arrives."""
        if not call.has_begun:
            call.has_begun = True
            self.outstanding_backwards -= 1
        if call.num_inputs:
            self._outstanding_inputs[call] = call.num_inputs
        elif not (call.ends_with_gradients and self.trains_all):
            self._ends_unseen = True

    def receive_input_gradient(self, call: Call | None) -> bool:
        """Count a gradient of an input of ``call``. Return whether no input gradient is missing."""
        outstanding = self._outstanding_inputs.pop(call, 0)
        if outstanding > 1:
            self._outstanding_inputs[call] = outstanding - 1
        return outstanding == 1

    @property
    def has_all_gradients(self) -> bool:
        """Whether all gradients of trained parameters have arrived in this backward."""
        return all(len(h.grads.arrived) >= h.num_trainable for h in self.handles)

    @property
    def trains_all(self) -> bool:
        """Whether the unit has parameters, and none of them is frozen."""
        return bool(self.handles) and all(h.num_trainable == len(h.params) for h in self.handles)

    @property
    def ends_backward(self) -> bool:
        """Whether the rest of this backward cannot need the parameters."""
        return (
            self.phase is Phase.BACKWARD
            and not self.may_diverge
            and not self._outstanding_inputs
            and self.has_all_gradients
            # All gradients of trained parameters have arrived. But a frozen parameter gets no
            # gradient, so backward may still need it until the gradients of all inputs of all calls
            # have arrived. If a call has no input that requires a gradient (`_ends_unseen`), the
            # unit stays unsharded until the end of the model's backward.
            and not (self._ends_unseen and not self.trains_all)
        )

    def leave_failed_backward(self) -> None:
        """Undo what users can see of a failed backward. No communication, and no wait.

        State: any phase -> IDLE, unless a forward of the unit is around the backward.
        """
        for handle in self.handles:
            handle.grads.leave_failed_backward()
            handle.give_hooks_back()
        if not self.running:  # otherwise the forward around the failed backward may go on
            self.put_back()

    def put_back(self) -> None:
        """Let the modules hold sharded parameters, and keep the buffers for now.

        No communication, and no wait. State: any phase -> IDLE.
        """
        for handle in self.handles:
            if handle.held is not None and not self.is_summoned:
                handle.put_back()
        self.phase = Phase.IDLE

    def forget_calls(self) -> None:
        """Forget this rank's calls of the unit's modules.

        Allowed only if no later backward runs through the graphs of these calls.
        """
        self.running.clear()
        self.keeps_views = False
        self._kept_version, self._num_calls = -1, 0
        self.end_iteration()

    def reset(self) -> None:
        """Return to IDLE after a failed step, and drop the step's gradients."""
        self.forget_calls()
        for handle in self.handles:
            handle.grads.drop()
        self.reshard()


def written_since_forward(unit: Unit) -> RuntimeError:
    """Return the error to raise if backward needs parameters that were written since forward."""
    return RuntimeError(
        f"{unit_text(unit.name)}: its parameters were modified between forward and backward (by "
        "an optimizer step, or by an edit in place), but backward needs the values of the forward. "
        "Run backward before the modification, or run forward again."
    )
