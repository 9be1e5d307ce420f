"""``Forward``: the order of a forward, from the outermost module's call to its return.

1.  ``begin``, for the outermost module only: the remains of a failed step are dropped, the model is
    checked, and its buffers are broadcast.
2.  ``enter``: the unit is unsharded, unless a prefetch has started its all-gather already, and its
    modules hold unsharded parameters. The all-gather of the next unit starts.
3.  The module computes.
4.  ``check``: the module has not edited its unsharded parameters.
5.  ``leave``: the modules hold sharded parameters again, and the unit is resharded if the strategy
    reshards after forward.
6.  ``end``, for the outermost module only: this rank waits until no message of it is under way.

Observers are told of each step and change nothing. Extensions (``StepExtension``) may act in the
places that call them.

[Note: recomputation]
Checkpointing runs forwards inside backward. Such a forward unshards, but reshards nothing and
records no order, because backward then uses the tensors that this forward saved. Non-reentrant
checkpointing stops such a forward early, with an exception. So the forward starts no prefetch,
unless a reentrant checkpoint recomputes the full model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from flatshard.comm.work import CollectiveError
from flatshard.engine.backward import Backward
from flatshard.engine.buffer_sync import Buffers
from flatshard.engine.events import Kind
from flatshard.engine.forward_edits import ForwardEdits
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.run_state import RunState
from flatshard.engine.saved_tensors import SavedTensors
from flatshard.engine.unit import Call, Phase, Unit
from flatshard.memory.buffers import POOL


class RootModule(Protocol):
    """The outermost wrapped module, as far as a forward uses the module itself."""

    def recover(self) -> None:
        """Undo a failed optimizer step; take over users' writes to parameters."""

    def check(self) -> None:
        """Raise, on all ranks, if the module cannot be trained as it is now."""

    def shared_buffers(self) -> Buffers:
        """The present module buffers shared by the ranks."""


class Forward:
    def __init__(
        self, state: RunState, backward: Backward, prefetch: Prefetch, root_module: RootModule
    ) -> None:
        self._state, self._observers = state, state.observers
        self._backward, self._prefetch = backward, prefetch
        self._root_module, self._edits = root_module, ForwardEdits()
        # Units unsharded for operations outside of their own forward, each with the depth of the
        # forward around the operation; the innermost comes last.
        self._touched: list[tuple[int, Unit]] = []

    def refresh(self) -> None:
        """Recompute cached storages and lists after the units' buffers were reallocated."""
        units, handles = self._state.units, self._state.handles
        self.saved = SavedTensors(handles, self._backward)
        self._of_several = [unit for unit in units if len(unit.modules) > 1]
        self._crossing = [h for _, h in handles if h.topology.inter_group.size > 1]

    def recover(self) -> None:
        """Reset the model's state after a step that was left by an exception."""
        # First restore parameters: a failed optimizer step may have replaced them.
        self._root_module.recover()
        for extension in self._state.extensions:
            extension.recover()
        self._backward.recover()

    def give_back(self) -> None:
        """Free memory that is cached for the next step."""
        for _, handle in self._state.handles:
            handle.reduce_plan.give_back()
        POOL.give_back()

    # ------------------------------------------------------------ the outermost forward begins

    def begin(self, unit: Unit | None = None) -> None:
        """Begin the outermost forward, in a module of ``unit``. Collective."""
        state = self._state
        self.recover()
        # Check before any communication. If these checks raise, they raise on all ranks.
        self._root_module.check()
        for extension in state.extensions:
            extension.begin_forward(of_root=unit is state.root)
        for observer in self._observers.all:
            observer.begin_forward()
        state.has_run = True  # after the checks, some of which look at the first forward only
        for unit in state.units:
            unit.begin_iteration()
        self._prefetch.order.begin_forward()
        state.expects_backward = torch.is_grad_enabled()
        if state.expects_backward:
            state.plan_syncs()
        else:
            # Evaluation needs no memory for gradients, and its batches are often larger.
            self.give_back()
        # All-gathers across nodes are slow: start those of all units now, to overlap with the
        # forward.
        with self._observers.span(Kind.STARTING, purpose="forward"):
            for handle in self._crossing:
                handle.gather.begin_refresh(handle.flat_param.detach(), handle.version)

    # ------------------------------------------------------------ a module's forward

    def enter(self, unit: Unit) -> Call:
        """Unshard the unit, and wait for it, before a module's forward. Collective."""
        state, backward = self._state, self._backward
        if state.depth == 0 and not backward.is_running:
            # A recomputation of the full model begins the model's backward here.
            self._prefetch.recomputes_whole = self.begins_recomputation()
            if not self._prefetch.recomputes_whole:
                self.begin(unit)
        recomputes = backward.is_running
        if state.buffers is not None and state.depth == 0 and unit is state.root:
            state.buffers.before_forward(unit.name, recomputes, state.under_no_sync)
        for observer in self._observers.all:
            observer.enter_forward(unit, recomputes)
        self.saved.push()
        state.depth += 1
        call = Call()
        unit.running.append(call)
        if recomputes:
            backward.unshard(unit)
            backward.unshard_again(unit)
            self._prefetch.in_recomputation(unit)
            return call
        unit.outstanding_backwards += state.expects_backward
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            if not unit.may_diverge:  # predictions would differ between ranks
                self._prefetch.order.record(unit.index)
            self.unshard(unit)
            if len(unit.running) == 1:
                self._edits.begin(unit)
            # Prefetch after the wait: this unit's all-gather gets the full bandwidth, and the next
            # all-gather overlaps with this unit's computation.
            self._prefetch.in_forward()
        return call

    def unshard(self, unit: Unit) -> None:
        """Unshard a unit for use in the forward under way, and wait for it. Collective."""
        self._state.unshard(unit, "forward")
        if unit.phase is Phase.BACKWARD:  # a backward inside the running forward failed
            unit.enter(Phase.IDLE)
        unit.enter(Phase.FORWARD)

    def touch(self, unit: Unit) -> None:
        """Unshard a unit for an operation outside of its forward, until the enclosing forward ends.

        Collective, unless the unit is unsharded.
        """
        if unit.phase is not Phase.FORWARD or not unit.is_current:
            if not unit.running:
                self._touched.append((self._state.depth, unit))
            self.unshard(unit)
            self._edits.begin(unit)

    def check(self, unit: Unit, module: nn.Module) -> None:
        """Raise if a module's finished forward edited unsharded parameters."""
        if unit.phase is not Phase.FORWARD or unit.running:
            return
        self._edits.check(unit, module)
        for depth, one in self._touched:
            # Check only units touched at this depth. All others are checked in their own forward.
            if depth == self._state.depth and one.phase is Phase.FORWARD and not one.running:
                for inner in one.modules:
                    self._edits.check(one, inner)

    def leave(self, unit: Unit, *, has_output: bool, failed: bool) -> None:
        """Reshard after a module's forward, even if it raised, as the strategy says."""
        state = self._state
        if unit.phase is Phase.FORWARD and not unit.running:
            # Under a reentrant checkpoint gradients are disabled here, although a backward follows.
            follows = has_output and (torch.is_grad_enabled() or state.expects_backward)
            if unit.end_call(backward_follows=follows) or not has_output:
                unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))
        if state.depth == 0:
            return
        state.depth -= 1
        self.saved.pop()
        self.reshard_touched()
        for observer in self._observers.all:
            observer.leave_forward(unit)
        if self._backward.is_running:
            self._prefetch.recomputes_whole &= state.depth > 0
            return
        if state.expects_backward and not failed:
            self._prefetch.after_forward()
        if state.depth == 0:
            self.end(failed)

    def reshard_touched(self) -> None:
        """Reshard units that operations of the finished forward unsharded."""
        while self._touched and self._touched[-1][0] > self._state.depth:
            _, unit = self._touched.pop()
            unit.backward_follows = self._state.expects_backward
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))

    def begins_recomputation(self) -> bool:
        """Whether a reentrant checkpoint around the full model starts to recompute the model."""
        # If so, no part of the model's backward has run yet, and the model's own forward ran
        # without gradients.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:
            return False
        self._state.plan_syncs()
        return self._backward.begin()

    # ------------------------------------------------------------ the outermost forward is over

    def end(self, failed: bool) -> None:
        """End the outermost forward. Collective."""
        for extension in self._state.extensions:
            extension.end_forward(failed)
        for unit in self._of_several:
            unit.end_forward(is_needed_soon=self._prefetch.needs_soon(unit))
        # If the forward ran in the recorded order, an all-gather under way is for the first units
        # of backward: keep it.
        if failed or not self._prefetch.order.is_complete:
            self._drop_prefetched(failed)
        # Wait until no other rank reads this rank's shards: the optimizer may write them next.
        with self._observers.span(Kind.RANKS_WAIT):
            for handle in self._crossing:
                if handle.gather.secondary is not None:
                    handle.gather.secondary.finish_refresh()
            if not failed:  # otherwise this error would hide the first one
                self._state.pending_sends.wait_sends()
        for observer in self._observers.all:
            observer.end_forward()

    def _drop_prefetched(self, failed: bool) -> None:
        """Wait for all-gathers of units that did not run, and reshard these units."""
        for unit in self._state.units:
            while unit.is_prefetched:
                try:
                    with self._observers.span(Kind.GATHER_WAIT, unit):
                        unit.reshard()
                except CollectiveError:
                    if not failed:  # otherwise this error would hide the first one
                        raise
