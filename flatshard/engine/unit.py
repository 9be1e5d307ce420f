"""``Unit``: a wrapped module, or several, with the parameters it owns, and its ``Phase``.

All parameters of a unit are unsharded and resharded together. A unit knows nothing of the step
around it: ``forward`` and ``backward`` decide the order of calls.

[Note: several modules]
``coalescing`` joins small neighbouring modules into one unit. The unit is unsharded for the first
module that is called. It is resharded after as many calls as the last forward had, or at the end of
the outermost forward. So all ranks all-gather equally often, whatever the order of calls is on a
rank. In backward the unit is resharded, as every unit, when no more computation can need its
parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import nn

from flatshard.comm.communicator import Topology
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle, ShardState
from flatshard.options.strategy import Placement
from flatshard.plan.module_tree import name_of, renamed, unit_text
from flatshard.precision import UnitCasts

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""The backward of these modules needs only the indices, not the weights.

If another operation uses their parameters, backward unshards the parameters on demand.
"""


class Phase(enum.Enum):
    """Where a unit is in a step. Moves only in ``Unit.enter``."""

    IDLE = "IDLE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"


_MOVES = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    # BACKWARD: a backward may run inside a forward (to compute forces, for example).
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    # No FORWARD: a forward that runs inside a backward is a recomputation, and the phase stays
    # BACKWARD.
    Phase.BACKWARD: {Phase.IDLE},
}


class Moment(enum.Enum):
    """Moments at which the engine asks whether to free unsharded buffers; see ``Unit.fate``."""

    AFTER_FORWARD = "no call of the unit is to come in this forward"
    AFTER_BACKWARD = "nothing of the backward under way needs the parameters any more"
    STEP_LEFT = "nobody needs them: a step failed, or a prefetched unit did not run"


class Fate(enum.Enum):
    """Whether an unsharded buffer is freed or kept."""

    FREE = "its memory is given back, and the next use all-gathers again"
    KEEP = "it stays, and is all-gathered again if the shards were written until its next use"
    SNAPSHOT = "it stays with its present values, also where it shows memory of other ranks"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """One call of a unit's module, and the backward of this call."""

    # Inputs that require a gradient. After the last of their gradients the call's backward is over.
    num_inputs: int = 0
    has_begun: bool = False  # whether the call's backward has begun


class Unit:
    def __init__(
        self,
        modules: Mapping[nn.Module, UnitCasts],
        names: Sequence[str],
        *,
        placement: Placement,
        topology: Topology,
    ) -> None:
        # For each module, how its inputs and outputs are cast. A module keeps its class and
        # forward.
        self.casts = dict(modules)
        # `names`: the modules' names in the unwrapped model. `name`: all names joined into one.
        self.names, self.name = list(names), name_of(names)
        # The unit's flat parameters, possibly none: one per dtype and `requires_grad`, and one for
        # each large parameter of the root.
        self.handles: list[FlatParamHandle] = []
        # Flat parameters that backward reads; embedding tables are not among them.
        self.for_backward: list[FlatParamHandle] = []
        # For each flat parameter, the number of gradients in a full backward.
        self.num_trainable: dict[FlatParamHandle, int] = {}
        self.index, self.phase = -1, Phase.IDLE
        self.placement, self.topology = placement, topology
        self.is_root, self.is_summoned = True, False
        # Whether ranks may skip the unit, or run units in different orders.
        self.may_diverge = False
        self.num_loads = 0  # number of state dicts loaded into this unit; the same on all ranks
        self.sync = Sync.ALL  # how the backward of the latest forward reduces gradients
        self.running: list[Call] = []  # calls under way, the innermost last
        # Forward calls in the last iteration whose backward has not started. The number is the same
        # on all ranks, even if an earlier forward failed on some ranks.
        self.outstanding_backwards = 0
        self._outstanding_before = 0  # the same number for earlier iterations
        # Whether some call has no input whose gradient would mark the end of the call's backward.
        self._ends_unseen = False
        self._num_calls = 0  # calls in the outermost forward under way, or in the last one
        self._calls_to_come = 0  # calls still expected in this forward, if like the last forward
        self.backward_follows = False  # whether a backward follows the last call or use
        # Whether backward, or the rest of the forward, starts with this unit.
        self.is_needed_soon = False
        # Whether parameters were used outside of the unit's forward, in this iteration.
        self.is_touched = False
        self._outstanding_inputs: dict[Call | None, int] = {}
        # Version of the parameters that a backward with create_graph used; -1: none.
        self._sticky_version = -1

    def copy_into(self, memo: dict[int, Any], twin: Unit) -> None:
        """Make ``twin`` a copy of this unit, with copied modules and without parameters."""
        twin.__dict__.update(self.__dict__)
        twin.casts = {memo[id(module)]: casts for module, casts in self.casts.items()}
        twin.names = list(self.names)
        twin.phase, twin.index, twin._sticky_version = Phase.IDLE, -1, -1
        twin.running, twin._outstanding_inputs = [], {}

    def refuse_to_part(self) -> NoReturn:
        raise RuntimeError(
            f"{unit_text(self.name)}: the module of a ShardedWrapper cannot be copied or pickled "
            "without it. copy.deepcopy(model) copies, flatshard.checkpoint.save saves the wrapper."
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
            handle.link.unit_name = self.name
            handle.rename(strip)

    def own(self, handles: Iterable[FlatParamHandle]) -> None:
        self.handles = list(handles)
        self.for_backward = [
            handle
            for handle in self.handles
            if not all(type(module) in _LOOKUPS for module, _, _ in handle.places)
        ]
        self.count_trainable()

    def count_trainable(self) -> None:
        """Count again which parameters require a gradient: users may freeze some between steps."""
        self.num_trainable = {
            h: sum([p.full.requires_grad for p in h.params]) for h in self.handles
        }

    def plan_sync(self, wanted: Sync) -> None:
        """Set ``sync`` to ``wanted``, simplified if one of the unit's groups has a single rank."""
        if wanted is Sync.INTRA:
            if self.topology.across.size == 1:
                wanted = Sync.ALL
            elif self.topology.intra_group.size == 1:
                wanted = Sync.NONE
        self.sync = wanted

    @property
    def buffer_bytes(self) -> int:
        return sum(handle.buffer_bytes for handle in self.handles)

    def enter(self, phase: Phase) -> None:
        moves = phase is self.phase or phase in _MOVES[self.phase]
        assert moves, f"{unit_text(self.name)}: {self.phase.name} to {phase.name}"
        self.phase = phase
        if phase is not Phase.IDLE:
            self.count_trainable()

    @property
    def is_current(self) -> bool:
        """Whether all parameters are unsharded and have the shards' present values."""
        return all(handle.is_current for handle in self.handles)

    @property
    def is_prefetched(self) -> bool:
        """Whether an all-gather of the unit was started and not yet waited for."""
        return any(handle.state is ShardState.UNSHARDING for handle in self.handles)

    @property
    def is_at_rest(self) -> bool:
        """Whether no parameter is unsharded, being all-gathered, or kept for backward."""
        return self.phase is Phase.IDLE and not any(
            handle.state is not ShardState.SHARDED
            or (handle.gather.secondary is not None and handle.gather.secondary.waits_for_backward)
            for handle in self.handles
        )

    @property
    def is_done(self) -> bool:
        """Whether no backward that is still to come needs the parameters."""
        return (
            self.phase is Phase.IDLE
            and self.outstanding_backwards + self._outstanding_before <= 0
            and not (self._ends_unseen or self.is_touched)
            and not self._is_sticky
        )

    def stick(self) -> None:
        """Keep the buffers until the parameters change."""
        # With create_graph, backward makes new graph nodes. They save raw views of the buffers,
        # which no saved-tensor hook replaces.
        self._sticky_version = sum(handle.version for handle in self.handles)

    @property
    def _is_sticky(self) -> bool:
        version = self._sticky_version
        return version >= 0 and version == sum(handle.version for handle in self.handles)

    # ------------------------------------------------------------ unshard and reshard

    def unshard(self, purpose: str, *, everything: bool = False) -> list[FlatParamHandle]:
        """Start the all-gathers that "forward" or "backward" needs. Collective.

        Returns the flat parameters whose all-gather was started; the rest is already unsharded.
        """
        needs_all = everything or purpose == "forward"
        handles = self.handles if needs_all else self.for_backward
        return [handle for handle in handles if handle.unshard(purpose)]

    def wait_unshard(self) -> None:
        """Wait for the all-gathers, and let the modules hold unsharded parameters."""
        for handle in self.handles:
            handle.wait_unshard()
        # Show all parameters, also those that backward does not read: recomputed forwards use the
        # modules.
        for handle in self.handles:
            handle.show_unsharded()

    def fate(self, handle: FlatParamHandle, moment: Moment) -> Fate:
        """Decide whether ``handle``'s unsharded buffer is freed now. No other code decides this."""
        if moment is Moment.STEP_LEFT:
            return Fate.FREE
        if self._is_sticky:  # a graph with create_graph may hold raw views of the buffer
            return Fate.SNAPSHOT
        shows_shards = handle.memory.shows_shards
        if moment is Moment.AFTER_BACKWARD:
            # A single rank saves no all-gather by keeping the buffer, and a kept buffer would not
            # show edits made through `p.data`.
            is_alone = self.topology.shard.size == 1
            frees = self.placement.reshard_after_backward or is_alone or shows_shards
            return Fate.FREE if frees else Fate.KEEP
        # If backward begins with this unit, resharding it now would only cost another all-gather.
        stays = self.is_needed_soon or not self.placement.reshard_after_forward
        if not (stays and self.backward_follows):
            return Fate.FREE
        if self.sync is Sync.NONE:
            # A backward under ``no_sync`` may run on this rank only. So it must not start an
            # all-gather, and must not read mapped shards that other ranks may be writing.
            return Fate.SNAPSHOT
        return Fate.FREE if shows_shards or self._is_spare(handle) else Fate.KEEP

    def _is_spare(self, handle: FlatParamHandle) -> bool:
        """Whether ``handle`` is freed after forward because backward does not read it."""
        reshards = self.placement.reshard_after_forward or handle.memory.shows_shards
        return reshards and handle not in self.for_backward

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether autograd saves copies of the values instead of a view that is unsharded again."""
        # Ranks may use a parameter of the root differently. So its backward must not start an
        # all-gather, which other ranks might not start.
        return self.is_root and self._is_spare(handle)

    def reshard(self, moment: Moment = Moment.STEP_LEFT) -> None:
        """Let the modules hold sharded parameters, and free what ``fate`` says. Any -> IDLE."""
        is_after_forward = moment is Moment.AFTER_FORWARD
        for handle in self.handles:
            handle.show_sharded()
            if not is_after_forward:
                handle.grad_buffer.arrived.clear()
        self.enter(Phase.IDLE)
        if not is_after_forward:
            self._outstanding_inputs.clear()
        for handle in self.handles:
            fate, secondary = self.fate(handle, moment), handle.gather.secondary
            if fate is Fate.SNAPSHOT:
                handle.snapshot()
                continue
            if secondary is not None and not is_after_forward:
                secondary.end_backward()
            elif secondary is not None and fate is Fate.FREE:
                if self.backward_follows and handle.is_current:
                    secondary.cut(handle.buffer, handle.version)
            if fate is Fate.FREE:
                handle.reshard(though_held=moment is not Moment.AFTER_BACKWARD)
            else:
                # Finish the all-gather: the optimizer may write the shard next.
                handle.wait_unshard()

    # ------------------------------------------------------------ forward

    def begin_iteration(self) -> None:
        """Reset the counts of calls when an outermost forward begins."""
        self._calls_to_come, self._num_calls = self._num_calls or len(self.casts), 0
        self._outstanding_before += self.outstanding_backwards
        self.outstanding_backwards = 0
        # A backward under no_sync may have run on other ranks only, and resharded the unit there.
        # Reshard the unit here, too: otherwise the other ranks would all-gather without this rank
        # and wait forever.
        if self.sync is Sync.NONE and self.phase is Phase.IDLE:
            for handle in self.handles:
                if self.fate(handle, Moment.AFTER_BACKWARD) is Fate.FREE:
                    handle.reshard()

    def end_iteration(self) -> None:
        """Forget the calls of this iteration: the model's backward is over, or failed."""
        self.is_touched = False
        self.outstanding_backwards = self._outstanding_before = 0

    def end_call(self, *, backward_follows: bool) -> bool:
        """Count a finished call; returns whether no more calls are expected in this forward."""
        self.backward_follows = backward_follows
        self._num_calls += 1
        self._calls_to_come -= 1
        return not self.may_diverge and (len(self.casts) == 1 or self._calls_to_come <= 0)

    def end_forward(self, *, is_needed_soon: bool) -> None:
        """FORWARD -> IDLE: free the buffers that ``fate`` says, since no call is to come."""
        if self.phase is not Phase.FORWARD or self.running:
            return
        self.is_needed_soon = is_needed_soon
        self.reshard(Moment.AFTER_FORWARD)

    # ------------------------------------------------------------ backward

    def begin_model_backward(self) -> None:
        self._outstanding_inputs.clear()
        self._ends_unseen = False
        for handle in self.handles:
            if handle.is_aliased:  # `show_unsharded` checks the rest in each forward
                handle.check_places()
            handle.grad_publish.begin_backward()
            if handle.is_aliased:
                handle.grad_publish.hold_earlier()

    def begin_call_backward(self, call: Call) -> None:
        """Note that the backward of ``call`` begins: a gradient of an output has arrived."""
        if not call.has_begun:
            call.has_begun = True
            self.outstanding_backwards -= 1
        if call.num_inputs:
            self._outstanding_inputs[call] = call.num_inputs
        else:
            self._ends_unseen = True

    def receive_input_gradient(self, call: Call | None) -> bool:
        """Count a gradient of an input of ``call``; returns True for the last gradient."""
        outstanding = self._outstanding_inputs.pop(call, 0)
        if outstanding > 1:
            self._outstanding_inputs[call] = outstanding - 1
        return outstanding == 1

    @property
    def ends_backward(self) -> bool:
        """Whether no more computation of this backward can need the parameters."""
        trainable = self.num_trainable.items()
        return (
            self.phase is Phase.BACKWARD
            and not self.may_diverge
            and not self._outstanding_inputs
            and all(len(h.grad_buffer.arrived) >= n for h, n in trainable)
            # Frozen parameters may be needed after the last parameter gradient. Only the gradients
            # of inputs would show the end, and some call has no such input.
            and not (self._ends_unseen and any(n < len(h.params) for h, n in trainable))
        )

    def reset(self) -> None:
        """Return to IDLE after a failed step, and drop the step's gradients."""
        self.running.clear()
        self._sticky_version = -1  # no later backward uses the graph of a failed one
        self.end_iteration()
        for handle in self.handles:
            handle.drop_gradients()
        self.reshard()
