"""``RunContext``: connects the units of one model with the model's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatshard.comm.communicator import Communicator
from flatshard.engine.backward import Backward
from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.forward import Forward
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.run_state import RunState
from flatshard.engine.touch import Touch
from flatshard.engine.unit import Unit
from flatshard.options.strategy import BackwardPrefetch


class RunContext(RunState):
    """The units of one model, with the forward, the backward and the prefetch of these units.

    Each outermost wrapper has a ``RunContext``.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        root_module: Any,  # `RootChecks` (`module.run`)
        world: Communicator,
        *,
        number: int,
        forward_prefetch: bool,
        backward_prefetch: BackwardPrefetch | None,
        broadcast_buffers: bool,
    ) -> None:
        """Connect ``units`` with a new forward and a new backward.

        Args:
            units: all units. The root comes last.
            root_module: checks the model when a forward begins, and lists the buffers to broadcast.
            world: all ranks that train the model.
            number: identifies the model; below 256, and the same on all ranks.
            forward_prefetch: whether a unit's forward starts the all-gather of the next unit.
            backward_prefetch: when to start all-gathers for backward. None: never early.
            broadcast_buffers: whether to broadcast module buffers before forwards.
        """
        super().__init__(units, world, number)
        # Whether a conversion of modules to another dtype or device is under way.
        self.is_converting = False
        for _, handle in self.handles:
            # Let all handles share one list of unfinished sends (memory of this rank that other
            # ranks may still read). Then a single wait at the end of a forward or backward covers
            # the whole model.
            handle.plan.pending_sends = self.pending_sends
        # As in DistributedDataParallel, a model that has no buffers when it is wrapped never
        # broadcasts buffers.
        if broadcast_buffers and root_module.shared_buffers():
            self.buffers = BufferSync(world, self.observers, root_module.shared_buffers, number)
        self._prefetch = Prefetch(self, forward=forward_prefetch, backward=backward_prefetch)
        self._backward = Backward(self, self._prefetch)
        self._forward = Forward(self, self._backward, self._prefetch, root_module)
        self._touch = Touch(self, self._forward, self._backward)
        self.recover, self.give_back = self._forward.recover, self._forward.give_back
        self.interrupt = self._forward.interrupt
        for index, unit in enumerate(self.units):
            unit.index, unit.forward, unit.backward = index, self._forward, self._backward
        self.refresh()

    def refresh(self) -> None:
        """Recompute sizes and storages cached from the units' buffers, after a reallocation."""
        # `device`: the device of the units that communicate. If the model trains on a single rank,
        # units without an unsharded buffer never communicate, so skip these units. None: no unit
        # communicates.
        is_alone = self.world.size == 1
        devices = (h.device for _, h in self.handles if h.buffer_bytes or not is_alone)
        self.device = next(devices, None)
        # `Prefetch` and `ReduceQueue` cache sizes of buffers. `Forward` caches the buffers'
        # storages, to recognise views of a buffer among the tensors that autograd saves.
        self._prefetch.refresh()
        self._backward.queue.refresh()
        self._forward.refresh()

    @property
    def is_running(self) -> bool:
        """Whether the forward of a unit, or the model's backward, is running."""
        return self.depth > 0 or self._backward.is_running

    @property
    def is_reducing(self) -> bool:
        """Whether the backward of the latest training forward reduces all gradients over all ranks.

        False after a forward under ``no_sync``. The result is the same on all ranks.
        """
        return all(unit.sync is Sync.ALL for unit in self.units)
