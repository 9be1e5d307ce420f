"""``RunContext``: the units of one model and the two halves of its step, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.engine.backward import Backward
from flatshard.engine.forward import Forward
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.hooks import UnitHooks
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.step_state import StepState
from flatshard.options.strategy import BackwardPrefetch


class RunContext:
    """One per tree of units.

    Attributes:
        units: every unit, the root last.
        root: the outermost unit.
        number: tells models apart; alike on all ranks.
        state: what both halves of a step share.
        observers: whom it tells what it does.
        is_converting: whether modules are under way to another dtype or device.
        last_report: what ``diagnostics.recording`` keeps of the last recorded step.
    """

    def __init__(
        self,
        hooks: Sequence[UnitHooks],
        world: Communicator,
        *,
        buffers: Callable[[], Iterable[Tensor]],
        number: int,
        forward_prefetch: bool,
        backward_prefetch: BackwardPrefetch | None,
    ) -> None:
        """Run these units from now on.

        Args:
            hooks: of every unit, the root last.
            world: the ranks that train the model.
            buffers: lists what rank 0 broadcasts before a forward.
            number: below 256, to tell models apart; alike on all ranks.
            forward_prefetch: whether to all-gather early in forward.
            backward_prefetch: when to all-gather in backward.
        """
        self.state = state = StepState([one.unit for one in hooks], world, number)
        self.observers = state.observers
        self.is_converting = False
        self.last_report: object = None
        for index, unit in enumerate(state.units):
            unit.index = index
            for handle in unit.handles:
                # One list for all: the end of a backward waits once for what others read.
                handle.share_pending_sends(state.pending_sends)
        self._prefetch = Prefetch(state, forward=forward_prefetch, backward=backward_prefetch)
        self._backward = Backward(state, self._prefetch)
        self._forward = Forward(state, self._backward, self._prefetch)
        for one in hooks:
            one.attach(self._forward, self._backward)
        self.units, self.root, self.number = state.units, state.root, number
        self._buffers = buffers
        self.refresh()

    def refresh(self) -> None:
        """Look at the units and the modules' buffers again, after they were made anew."""
        handles = [handle for unit in self.units for handle in unit.handles]
        self.state.device = next((h.device for h in handles if not h.is_local), None)
        # Prefetch and backward look at sizes, forward at storages that saved tensors lie in.
        self._prefetch.refresh()
        self._backward.queue.refresh()
        self._forward.refresh(list(self._buffers()))

    def recover(self) -> None:
        """Return to a state to start from, after a step that was left by an exception."""
        self._forward.recover()

    def give_back(self) -> None:
        """Free memory that is kept for the next step."""
        self._forward.give_back()

    @property
    def has_run(self) -> bool:
        """Whether a forward has begun."""
        return self._forward.has_run

    @property
    def is_running(self) -> bool:
        """Whether a forward of some unit, or the model's backward, is under way."""
        return self.state.depth > 0 or self._backward.is_running

    @property
    def is_reducing(self) -> bool:
        """Whether the last training forward began outside of ``no_sync``; alike on all ranks."""
        return all(unit.sync is Sync.ALL for unit in self.units)

    @property
    def is_accumulating(self) -> bool:
        """Whether forwards that begin now are under ``no_sync``."""
        return any(sync is not Sync.ALL for sync in self.state.syncs)

    def plan_accumulation(self, max_bytes: int | None, replicas_only: bool) -> list[Sync]:
        """What ``no_sync`` means for each unit; see ``ShardedWrapper.no_sync``."""
        rest = Sync.INTRA if replicas_only else Sync.ALL
        if max_bytes is None:
            return [Sync.INTRA if replicas_only else Sync.NONE] * len(self.units)
        syncs = [rest] * len(self.units)
        # Small ones first: for as many bytes kept unsharded, they save the most collectives.
        for unit in sorted(self.units, key=lambda unit: (unit.gradient_bytes, unit.index)):
            if unit.gradient_bytes <= max_bytes:
                max_bytes -= unit.gradient_bytes
                syncs[unit.index] = Sync.NONE
        return syncs
