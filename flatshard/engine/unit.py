"""``Unit``: one or several modules whose parameters are unsharded and resharded together.

The files ``forward.py`` and ``backward.py`` decide when a unit is unsharded and resharded. The
unit counts its calls for these decisions. ``Unit.handles`` has the unit's flat parameters.

[Note: several modules]
Coalescing joins small neighbouring modules into one unit. The first call of any of these modules
unshards the unit. The unit is resharded after as many calls as in the last forward of the model, or
at the end of the forward if there are fewer calls. So all ranks all-gather the unit equally often,
even if ranks call the modules in different orders.
"""

import enum
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
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

    A backward may run inside a forward (to compute forces, for example). Then the unit moves from
    FORWARD to BACKWARD, and its next call moves the unit to FORWARD again. While activation
    checkpointing runs a forward again inside backward, the unit stays in BACKWARD.
    """

    IDLE = "IDLE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"


class ReshardPoint(enum.Enum):
    """Points of a step at which ``Unit.buffer_action`` decides to keep or free a buffer."""

    AFTER_FORWARD = "this forward will not call the unit again"
    AFTER_BACKWARD = "the rest of this backward does not need the parameters"
    BACKWARD_OVER = "the model's backward is over"
    STEP_LEFT = "cleanup: a step failed, or a prefetched unit did not run"


class BufferAction(enum.Enum):
    """Whether the unsharded buffer of a flat parameter is freed or kept."""

    FREE = "free the memory; the next use all-gathers again"
    KEEP = "keep the buffer; the next use all-gathers again only if the shards were written"
    SNAPSHOT = "keep the buffer and copy other ranks' shards that shared memory maps into it"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """One call of a unit's module, and the backward of this call."""

    # Number of inputs that require a gradient. The call's backward is over once all of these
    # gradients are computed.
    num_inputs: int = 0
    has_begun: bool = False  # whether the call's backward has begun
    # Whether the call's backward is over once all gradients of the unit's parameters are computed,
    # so that input gradients need not be counted (`num_inputs` stays 0).
    ends_with_gradients: bool = False

    # Autograd's number for the next graph node when the call began. -1: not recorded.
    first_node: int = -1
    # Whether the call's forward runs under flatshard's saved-tensor hooks, or in an activation
    # checkpoint. If so, backward may read views of buffers even after the last parameter gradient.
    has_hooks: bool = True
    # If the forward runs without hooks: the versions, at the end of the forward, of the unsharded
    # buffers that backward reads through saved views.
    versions: dict[FlatParamHandle, int] = field(default_factory=dict)


class Unit:
    """One or several modules whose parameters are unsharded and resharded together."""

    # The objects that run the model's steps, set by `RunState.connect`. The hooks on modules and
    # parameters have only a reference to the unit, and find these objects through the unit.
    forward: Any  # `Forward` of the model
    backward: Any  # `Backward` of the model
    context: Any  # `RunState` of the model, set by `start_run`
    state_dict: Any  # `UnitStateDict`
    reasons: Sequence[str]  # why the wrap policy chose each module, for `unit_report`

    # If tensors were left without values at wrapping (`leave_empty`): a function that runs before
    # the first forward, and raises if a tensor still has no values. Otherwise None.
    check_loaded: Callable[[nn.Module, Communicator], None] | None = None

    def __init__(
        self,
        modules: Mapping[nn.Module, UnitCasts],
        names: Sequence[str],
        settings: Any,  # `Settings` (`module.settings`)
        ignored: Ignored,
    ) -> None:
        # For each module of the unit, the casts of inputs and outputs (mixed precision).
        self.casts = dict(modules)
        # `names`: names of the modules in the unwrapped model. `name`: one name made of all names.
        self.names, self.name = list(names), name_of(names)
        # The unit's flat parameters: one for each combination of dtype and `requires_grad`, and in
        # the root unit also one for each large parameter. Empty if the unit owns no parameter.
        self.handles: list[FlatParamHandle] = []
        # The flat parameters that backward reads: all that contain more than embedding tables.
        self.for_backward: list[FlatParamHandle] = []
        # The keys are the unit's modules. The values list each flat parameter with the places
        # (submodule, attribute name) of its original parameters inside of the module.
        self.places_in: dict[nn.Module, list[tuple[FlatParamHandle, list[Place]]]] = {}
        self.index, self.phase = -1, Phase.IDLE
        self.settings, self.ignored = settings, ignored
        self.placement, self.topology = settings.placement, settings.topology
        # The outermost wrapper of each model that contains the unit (several if wrapped again).
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.is_root, self.is_summoned = True, False  # summoned: inside of `summon_full_params`
        # Whether ranks may skip the unit in a step, or run units in different orders.
        self.may_diverge = False
        # How often each state dict or checkpoint was loaded, and how often each parameter was
        # written through a tensor of a state dict. The counts must be the same on all ranks. The
        # keys describe the load in error messages.
        self.loads: Counter[str] = Counter()
        # Checksum of `loads`. Each backward compares this number between ranks. Only if it differs,
        # the ranks exchange `loads`, to name the difference.
        self.loads_sum = 0
        self.sync = GradSync.FULL  # how the backward of the latest forward reduces gradients
        self.running: list[Call] = []  # calls whose forward is running, the innermost last

        # Number of calls in the model's latest forward whose backward has not begun yet. The count
        # restarts with each forward of the model. Otherwise ranks would have different counts after
        # a forward that failed on only some ranks.
        self.outstanding_backwards = 0
        self._outstanding_before = 0  # the same count for all earlier forwards of the model

        # Whether the end of a call's backward cannot be seen, because no input of the call requires
        # a gradient. Then frozen parameters stay unsharded until the end of the model's backward.
        self._ends_unseen = False
        self._num_calls = 0  # number of calls in the model's present or latest forward
        self._num_expected = 0  # number of calls in the previous forward
        self.backward_follows = False  # whether a backward follows the latest use of the unit

        # Whether the unsharded buffers keep their memory after a reshard, because autograd may have
        # saved views of the buffers that backward reads at any time. The unit is all-gathered again
        # as usual, so this flag may differ between ranks.
        self.keeps_views = False
        # Whether a backward has read a saved view of a buffer after all gradients of the unit's
        # parameters were computed (because an operation used `p.detach()`, for example).
        self.is_read_late = False
        # Whether an operation outside of the unit's forward has used the parameters in this step.
        self.is_used_outside = False
        # For each call whose backward runs, the number of input gradients that have not arrived.
        self._outstanding_inputs: dict[Call | None, int] = {}
        # Sum of the version counters of the shards at the latest backward with create_graph, or -1.
        # As long as no shard is written, the unit keeps its buffers (`keep_unsharded`).
        self._kept_version = -1

    def count_load(self, what: str) -> None:
        """Count that this rank loaded or wrote ``what``: a state dict, checkpoint or parameter.

        The next backward compares the counts between ranks, and raises if they differ.
        """
        self.loads[what] += 1
        self.loads_sum += crc32(f"{self.name}: {what}".encode())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # Called to copy or pickle a module that refers to this unit.
        raise RuntimeError(
            f"{unit_text(self.name)}: a sharded module cannot be copied or pickled without its "
            "wrapper. Copy the model, a wrapper in flatshard.sharded_modules(model), or the values "
            "(into a new module). To save the model, call flatshard.checkpoint.save."
        )

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

        ``receive(handle, index, full)`` is called after autograd has filled ``full.grad``, where
        ``full`` is the unsharded parameter number ``index`` of the flat parameter ``handle``.
        """
        self.handles = list(handles)
        for handle in self.handles:
            handle.unit = self
            with torch.inference_mode(False):
                for param in handle.params:
                    # Give the hook only a weak reference to the handle. The garbage collector does
                    # not see autograd's reference to the hook, so it could never free a cycle
                    # through the hook: the model would leak.
                    param.connect(partial(receive, weakref.ref(handle), param.index))
            handle.count_trainable()
        self.for_backward = [handle for handle in self.handles if not handle.is_lookup]
        for module in self.modules:
            inside = set(module.modules())
            self.places_in[module] = [
                (handle, [place for place in handle.places if place[0] in inside])
                for handle in self.handles
            ]

    @property
    def buffer_bytes(self) -> int:
        return sum(handle.buffer_bytes for handle in self.handles)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether forward frees unsharded buffers, which backward must fill again."""
        shows_shards = any(handle.memory.shows_shards for handle in self.handles)
        return self.placement.reshard_after_forward or shows_shards

    @property
    def is_current(self) -> bool:
        """Whether all parameters are unsharded, and the shards were not written since."""
        return all(handle.is_current for handle in self.handles)

    @property
    def is_prefetched(self) -> bool:
        """Whether an all-gather of the unit was started, and no code has waited for it yet."""
        return any(handle.state is ShardState.UNSHARDING for handle in self.handles)

    @property
    def is_at_rest(self) -> bool:
        """Whether the unit is IDLE, and keeps no buffer and no secondary shard for backward."""
        return self.phase is Phase.IDLE and all(handle.is_at_rest for handle in self.handles)

    @property
    def is_done(self) -> bool:
        """Whether no further backward of the unit's earlier calls can need the parameters."""
        return (
            self.phase is Phase.IDLE
            and self.outstanding_backwards + self._outstanding_before <= 0
            and not (self._ends_unseen or self.is_used_outside)
            and not self._is_kept_unsharded
        )

    def keep_unsharded(self) -> None:
        """Keep the unsharded buffers until the shards change."""
        # Called in a backward with create_graph. Such a backward adds nodes to the graph without
        # calling saved-tensor hooks, so these nodes save plain views of the unsharded buffers.
        self._kept_version = sum(handle.version for handle in self.handles)

    @property
    def _is_kept_unsharded(self) -> bool:
        return self._kept_version == sum(handle.version for handle in self.handles)

    # ------------------------------------------------------------ unshard and reshard

    def wait_unshard(self) -> None:
        """Wait for the all-gathers. Then put the unsharded parameters into the modules."""
        for handle in self.handles:
            handle.wait_unshard()
        # Also install parameters that were not all-gathered (embedding tables in backward), because
        # a recomputed forward reads all parameters from the modules.
        for handle in self.handles:
            handle.install_unsharded()

    def buffer_action(
        self, handle: FlatParamHandle, point: ReshardPoint, *, is_needed_soon: bool = False
    ) -> BufferAction:
        """Decide whether the unit frees or keeps the unsharded buffer of ``handle``.

        ``is_needed_soon``: whether the rest of the forward, or the beginning of backward, uses the
        unit.
        """
        if point is ReshardPoint.STEP_LEFT:
            return BufferAction.FREE
        # A backward with create_graph has added graph nodes, which will read the buffer later.
        if self._kept_version >= 0 and self._is_kept_unsharded:
            return BufferAction.SNAPSHOT
        shows_shards = handle.memory.shows_shards
        if point is not ReshardPoint.AFTER_FORWARD:
            # Free the buffer after each backward if this rank holds the whole parameter: keeping it
            # would save no all-gather, and the next forward would miss edits of the shard through
            # `p.data`, which do not change the version counter.
            frees = self.placement.reshard_after_backward or handle.is_whole or shows_shards
            return BufferAction.FREE if frees else BufferAction.KEEP
        stays = is_needed_soon or not self.placement.reshard_after_forward
        if not (stays and self.backward_follows):
            return BufferAction.FREE
        if self.sync is GradSync.ACCUMULATE:
            # A backward under no_sync may run on this rank only. So the backward must not start an
            # all-gather, and must not read shards in shared memory that other ranks may be writing.
            return BufferAction.SNAPSHOT
        # Backward does not read embedding tables.
        is_unread = self.reshards_after_forward and handle.is_lookup
        return BufferAction.FREE if shows_shards or is_unread else BufferAction.KEEP

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether copies of the embedding tables in ``handle`` are saved for backward.

        Otherwise a ``SavedView`` is saved, and backward unshards the unit again to read the table.
        """
        # The root unit saves copies, to avoid a deadlock: if only one rank uses a table in another
        # operation than a lookup (a tied output layer), only its backward would unshard the table.
        return self.is_root and self.reshards_after_forward and handle.is_lookup

    def reshard(
        self, point: ReshardPoint = ReshardPoint.STEP_LEFT, *, is_needed_soon: bool = False
    ) -> None:
        """Put the sharded parameters into the modules, and free or keep the unsharded buffers.

        ``buffer_action`` decides which buffers are freed. The unit moves to phase IDLE.
        """
        self.phase, is_over = Phase.IDLE, point is not ReshardPoint.AFTER_FORWARD
        for handle in self.handles:
            if handle.installed is not None:
                handle.put_back()
            if is_over:
                handle.grads.arrived.clear()
        for handle in self.handles:
            action = self.buffer_action(handle, point, is_needed_soon=is_needed_soon)
            if (secondary := handle.gather.secondary) and action is not BufferAction.SNAPSHOT:
                if is_over:
                    secondary.end_backward()
                elif action is BufferAction.FREE and self.backward_follows and handle.is_current:
                    # Backward all-gathers from secondary shards (`gather.py`). So cut this rank's
                    # secondary shard out of the buffer before the buffer is freed.
                    secondary.cut(handle.buffer, handle.version)
            if action is BufferAction.FREE:
                # In backward, a recomputed forward may have saved views of the buffer, which are
                # read later. So the buffer keeps its memory as long as views exist. A graph made
                # without saved-tensor hooks has views too, but reads them only after an all-gather.
                may_be_viewed = handle.had_views or self.forward.saved.has_hooks
                in_backward = point is ReshardPoint.AFTER_BACKWARD
                handle.reshard(though_viewed=not (in_backward and may_be_viewed))
            elif action is BufferAction.SNAPSHOT:
                handle.snapshot()
            else:
                # Finish the all-gather, which reads the shard: an optimizer may write the shard.
                handle.wait_unshard()

    # ------------------------------------------------------------ forward

    def begin_iteration(self) -> None:
        """Reset the counts of calls, because a forward of the model begins."""
        self._num_expected, self._num_calls = self._num_calls or len(self.casts), 0
        self._outstanding_before += self.outstanding_backwards
        self.outstanding_backwards = 0
        # Under no_sync, perhaps only some ranks ran a backward, which resharded the unit. So
        # reshard the unit on this rank too: otherwise only the other ranks would all-gather.
        if self.sync is GradSync.ACCUMULATE and self.phase is Phase.IDLE:
            for handle in self.handles:
                if self.buffer_action(handle, ReshardPoint.AFTER_BACKWARD) is BufferAction.FREE:
                    handle.reshard()

    def end_iteration(self) -> None:
        """Reset the counts of outstanding backwards, after the end of the model's backward."""
        self.is_used_outside = False
        self.outstanding_backwards = self._outstanding_before = 0

    def end_call(self, *, backward_follows: bool) -> bool:
        """Count a finished call of a module of the unit.

        Returns True after the last call that the model's forward is expected to make.
        """
        self.backward_follows = backward_follows
        self._num_calls += 1
        is_last = len(self.casts) == 1 or self._num_calls >= self._num_expected
        return is_last and not self.may_diverge

    def end_forward(self, *, is_needed_soon: bool) -> None:
        """Reshard the unit, because the model's forward will not call it again.

        Does nothing if the unit is not in phase FORWARD, or while a call of the unit is running.
        """
        if self.phase is Phase.FORWARD and not self.running:
            self.reshard(ReshardPoint.AFTER_FORWARD, is_needed_soon=is_needed_soon)

    # ------------------------------------------------------------ backward

    def begin_model_backward(self) -> None:
        """Forget what the last backward counted, and prepare the parameters' ``.grad``.

        Removes unreduced gradients from ``.grad``, where autograd would add new gradients in place
        (to tensors of the program). ``Gradients`` keeps the unreduced gradients, and adds new ones.
        """
        self._outstanding_inputs.clear()
        self._ends_unseen = False
        for handle in self.handles:
            # If forward has not called `install_unsharded`, check here that no parameter was
            # replaced.
            if handle.shard_is_buffer or self.may_diverge:
                handle.check_places()
                handle.count_trainable()  # not done yet if this rank skipped the unit in forward
            handle.grads.arrived.clear()
            if handle.grads.shown or ASSIGNED:
                handle.grads.take_all_back()
            if handle.is_whole:
                handle.grads.take_assigned_of_whole()
            if handle.shard_is_buffer:
                handle.grads.set_aside_earlier()

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
        """Count a gradient of an input of ``call``. Return whether this was the last gradient."""
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
        """Whether the rest of this backward cannot need the unit's parameters."""
        return (
            self.phase is Phase.BACKWARD
            and not self.may_diverge
            and not self._outstanding_inputs
            and self.has_all_gradients
            # A frozen parameter gets no gradient, so backward may need the parameter until the
            # gradients of all inputs of all calls have arrived. If a call has no input that
            # requires a gradient (`_ends_unseen`), keep the unit unsharded until the end of the
            # model's backward.
            and not (self._ends_unseen and not self.trains_all)
        )

    def leave_failed_backward(self) -> None:
        """After a failed backward, restore ``.grad``, hooks, and the sharded parameters in modules.

        Does not communicate or wait. ``reset`` does the rest of the cleanup later.
        """
        for handle in self.handles:
            handle.grads.leave_failed_backward()
            handle.give_hooks_back()
        # If the backward failed inside of a forward of the unit, the forward may continue.
        if not self.running:
            self.put_back()

    def put_back(self) -> None:
        """Put the sharded parameters into the modules, but do not free the buffers yet.

        Does not communicate or wait. The unit moves to phase IDLE.
        """
        for handle in self.handles:
            if handle.installed is not None and not self.is_summoned:
                handle.put_back()
        self.phase = Phase.IDLE

    def reset(self) -> None:
        """Return to IDLE after a failed step, and drop the step's gradients and calls."""
        self.running.clear()
        self.keeps_views = False
        self._kept_version, self._num_calls = -1, 0
        self.end_iteration()
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
