"""``Unit``: a wrapped module, or several, with the parameters it owns, and its ``Phase``.

It is unsharded and resharded as one, and knows nothing of the step around it: ``forward`` and
``backward`` hold the order of calls.

[Note: several modules]
Small neighbours are one unit (``coalescing``), whose forward is that of each of its modules. It is
unsharded for the first that is called, and resharded after as many calls as there were in the last
forward, or at the end of the outermost one: whatever the order of calls is on a rank, all ranks
all-gather equally often. In backward it is resharded when nothing can need it, as any unit.
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
from flatshard.precision.casts import UnitCasts

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Their backward needs the indices alone; other uses of their parameters unshard them then."""


class Phase(enum.Enum):
    """Where a unit is in a step. Moves only in ``Unit.enter``."""

    IDLE = "IDLE"
    FORWARD = "FORWARD"
    BACKWARD = "BACKWARD"


_MOVES = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    # BACKWARD: one that runs inside a forward, for forces say.
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    # No FORWARD: one that runs inside a backward is a recomputation, and stays in this phase.
    Phase.BACKWARD: {Phase.IDLE},
}


class Moment(enum.Enum):
    """When somebody asks what becomes of unsharded buffers; see ``Unit.fate``."""

    AFTER_FORWARD = "no call of the unit is to come in this forward"
    AFTER_BACKWARD = "nothing of the backward under way needs the parameters any more"
    STEP_LEFT = "nobody needs them: a step failed, or a prefetched unit did not run"


class Fate(enum.Enum):
    """What becomes of an unsharded buffer."""

    FREE = "its memory is given back, and the next use all-gathers again"
    KEEP = "it stays, and is all-gathered again if the shards were written until its next use"
    SNAPSHOT = "it stays with its present values, also where it shows memory of other ranks"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """One call of a unit's module, which a backward belongs to."""

    num_inputs: int = 0  # that have a gradient; when all have come, backward is through
    has_begun: bool = False  # the backward


class Unit:
    def __init__(
        self,
        modules: Mapping[nn.Module, UnitCasts],
        names: Sequence[str],
        *,
        placement: Placement,
        topology: Topology,
    ) -> None:
        # Of each module, which keeps its own class and forward, how its inputs are cast.
        self.casts = dict(modules)
        # In the unwrapped model; `name` is all of them in one.
        self.names, self.name = list(names), name_of(names)
        # One per dtype and `requires_grad`, and one for each large parameter of the root; or none.
        self.handles: list[FlatParamHandle] = []
        self.for_backward: list[FlatParamHandle] = []  # without what lookups alone use
        # Of each, how many gradients a full backward brings.
        self.num_trainable: dict[FlatParamHandle, int] = {}
        self.index, self.phase = -1, Phase.IDLE
        self.placement, self.topology = placement, topology
        self.is_root, self.is_summoned = True, False
        self.may_diverge = False  # whether ranks may skip it, or run it in another order
        self.num_loads = 0  # of state dicts; alike on all ranks
        self.sync = Sync.ALL  # what the backward of the forward begun last does with gradients
        self.running: list[Call] = []  # the innermost last
        # Forward calls in the last iteration whose backward has not started. Same on all ranks,
        # also where an earlier forward failed on some.
        self.outstanding_backwards = 0
        self._outstanding_before = 0  # of iterations before the last
        self._ends_unseen = False  # whether a backward of it has no input that tells its end
        self._num_calls = 0  # in the outermost forward under way, or last
        self._calls_to_come = 0  # in it, if it is like the one before
        self.backward_follows = False  # after the last call, or use
        self.is_needed_soon = False  # backward, or the rest of the forward, begins with it
        self.is_touched = False  # parameters were used outside of its forward, in this iteration
        self._outstanding_inputs: dict[Call | None, int] = {}
        self._sticky_version = -1  # of the parameters that a differentiable backward uses

    def copy_into(self, memo: dict[int, Any], twin: Unit) -> None:
        """Make ``twin`` a unit like this one, of copied modules, that owns nothing yet."""
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
        """Look again which parameters require a gradient: users may freeze some between steps."""
        self.num_trainable = {
            h: sum([p.full.requires_grad for p in h.params]) for h in self.handles
        }

    def plan_sync(self, wanted: Sync) -> None:
        """Do with gradients what ``wanted`` means for the groups of this unit."""
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
        """Whether all its parameters are unsharded, as the shards are now."""
        return all(handle.is_current for handle in self.handles)

    @property
    def is_prefetched(self) -> bool:
        """Whether an all-gather was started that nobody waited for."""
        return any(handle.state is ShardState.UNSHARDING for handle in self.handles)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is unsharded, on its way, or kept for backward."""
        return self.phase is Phase.IDLE and not any(
            handle.state is not ShardState.SHARDED
            or (handle.gather.secondary is not None and handle.gather.secondary.waits_for_backward)
            for handle in self.handles
        )

    @property
    def is_done(self) -> bool:
        """Whether no forward since the last backward is expected to need the parameters yet."""
        return (
            self.phase is Phase.IDLE
            and self.outstanding_backwards + self._outstanding_before <= 0
            and not (self._ends_unseen or self.is_touched)
            and not self._is_sticky
        )

    def stick(self) -> None:
        """Keep the buffers until the parameters change."""
        # With create_graph, nodes that backward itself makes save views that nothing packs.
        self._sticky_version = sum(handle.version for handle in self.handles)

    @property
    def _is_sticky(self) -> bool:
        version = self._sticky_version
        return version >= 0 and version == sum(handle.version for handle in self.handles)

    # ------------------------------------------------------------ unshard and reshard

    def unshard(self, purpose: str, *, everything: bool = False) -> list[FlatParamHandle]:
        """Start to all-gather what is needed for "forward" or "backward". Collective.

        Returns the flat parameters whose all-gather was started; the others are there.
        """
        needs_all = everything or purpose == "forward"
        handles = self.handles if needs_all else self.for_backward
        return [handle for handle in handles if handle.unshard(purpose)]

    def wait_unshard(self) -> None:
        """Wait for what ``unshard`` started, and let the modules hold unsharded parameters."""
        for handle in self.handles:
            handle.wait_unshard()
        # All, also what backward does without: recomputed forwards look at the modules.
        for handle in self.handles:
            handle.show_unsharded()

    def fate(self, handle: FlatParamHandle, moment: Moment) -> Fate:
        """What becomes of the unsharded buffer of ``handle`` now. Decided here and nowhere else."""
        if moment is Moment.STEP_LEFT:
            return Fate.FREE
        if self._is_sticky:  # something saved outside our reach may need it
            return Fate.SNAPSHOT
        shows_shards = handle.memory.shows_shards
        if moment is Moment.AFTER_BACKWARD:
            # A rank that holds everything saves nothing by keeping it, and sees no edits made
            # through `p.data`.
            is_alone = self.topology.shard.size == 1
            frees = self.placement.reshard_after_backward or is_alone or shows_shards
            return Fate.FREE if frees else Fate.KEEP
        # Where backward begins with this unit, to reshard it would cost an all-gather.
        stays = self.is_needed_soon or not self.placement.reshard_after_forward
        if not (stays and self.backward_follows):
            return Fate.FREE
        if self.sync is Sync.NONE:
            # Under ``no_sync`` a backward may run on this rank alone. The backward must not need an
            # all-gather, and must not see values that other ranks write into mapped shards.
            return Fate.SNAPSHOT
        return Fate.FREE if shows_shards or self._is_spare(handle) else Fate.KEEP

    def _is_spare(self, handle: FlatParamHandle) -> bool:
        """Whether ``handle`` is freed after forward as backward does without it."""
        reshards = self.placement.reshard_after_forward or handle.memory.shows_shards
        return reshards and handle not in self.for_backward

    def copies_saved(self, handle: FlatParamHandle) -> bool:
        """Whether autograd saves values instead of a place that is unsharded again."""
        # In the root, any rank may use a parameter as it likes: backward must not need an
        # all-gather that the other ranks do without.
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
                # The optimizer may write the shard next, so it must not be on its way.
                handle.wait_unshard()

    # ------------------------------------------------------------ forward

    def begin_iteration(self) -> None:
        """An outermost forward begins."""
        self._calls_to_come, self._num_calls = self._num_calls or len(self.casts), 0
        self._outstanding_before += self.outstanding_backwards
        self.outstanding_backwards = 0
        # A backward that reduces nothing may have run on other ranks alone. What it
        # resharded there must not stay here: they would wait for an all-gather without this rank.
        if self.sync is Sync.NONE and self.phase is Phase.IDLE:
            for handle in self.handles:
                if self.fate(handle, Moment.AFTER_BACKWARD) is Fate.FREE:
                    handle.reshard()

    def end_iteration(self) -> None:
        """A backward of the model is over, or failed."""
        self.is_touched = False
        self.outstanding_backwards = self._outstanding_before = 0

    def end_call(self, *, backward_follows: bool) -> bool:
        """A call is over; returns whether no other one is expected in this forward."""
        self.backward_follows = backward_follows
        self._num_calls += 1
        self._calls_to_come -= 1
        return not self.may_diverge and (len(self.casts) == 1 or self._calls_to_come <= 0)

    def end_forward(self, *, is_needed_soon: bool) -> None:
        """FORWARD -> IDLE: free what ``fate`` says, as no call is to come."""
        if self.phase is not Phase.FORWARD or self.running:
            return
        self.is_needed_soon = is_needed_soon
        self.reshard(Moment.AFTER_FORWARD)

    # ------------------------------------------------------------ backward

    def begin_model_backward(self) -> None:
        self._outstanding_inputs.clear()
        self._ends_unseen = False
        for handle in self.handles:
            if handle.is_aliased:  # else each forward puts other parameters there, and looks
                handle.check_places()
            handle.grad_publish.begin_backward()
            if handle.is_aliased:
                handle.grad_publish.hold_earlier()

    def begin_call_backward(self, call: Call) -> None:
        """A gradient of an output of ``call`` has come."""
        if not call.has_begun:
            call.has_begun = True
            self.outstanding_backwards -= 1
        if call.num_inputs:
            self._outstanding_inputs[call] = call.num_inputs
        else:
            self._ends_unseen = True

    def receive_input_gradient(self, call: Call | None) -> bool:
        """A gradient of an input of ``call`` has come; returns whether it was the last one."""
        outstanding = self._outstanding_inputs.pop(call, 0)
        if outstanding > 1:
            self._outstanding_inputs[call] = outstanding - 1
        return outstanding == 1

    @property
    def ends_backward(self) -> bool:
        """Whether nothing of the backward under way can need the parameters any more."""
        trainable = self.num_trainable.items()
        return (
            self.phase is Phase.BACKWARD
            and not self.may_diverge
            and not self._outstanding_inputs
            and all(len(h.grad_buffer.arrived) >= n for h, n in trainable)
            # Frozen ones may be needed after the last gradient, of which only inputs would tell.
            and not (self._ends_unseen and any(n < len(h.params) for h, n in trainable))
        )

    def reset(self) -> None:
        """Return to IDLE after a step that failed; drops its gradients."""
        self.running.clear()
        self._sticky_version = -1  # no backward uses what a failed one saved
        self.end_iteration()
        for handle in self.handles:
            handle.drop_gradients()
        self.reshard()
