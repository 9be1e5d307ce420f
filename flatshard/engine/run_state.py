"""``RunState``: state shared by forward, backward and prefetch of one model.

``RunContext`` extends ``RunState`` and connects these parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import PendingSends
from flatshard.engine.buffer_sync import BufferSync
from flatshard.engine.events import Kind, Observers, StepExtension
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.unit import Unit
from flatshard.options.extras import EXTRAS


class RunState:
    def __init__(self, units: Sequence[Unit], world: Communicator, number: int) -> None:
        self.units, self.root = list(units), units[-1]  # the outermost unit comes last
        self.handles = [(unit, handle) for unit in self.units for handle in unit.handles]
        self.world = world  # the ranks that train the model
        self.number = number  # identifies the model, below 256; the same on all ranks
        self.has_run = False  # whether a forward has begun
        self.observers = Observers()
        self.extensions: tuple[StepExtension, ...] = ()  # in the order of `EXTRAS`
        self.buffers: BufferSync | None = None  # None: buffers are not broadcast
        self.pending_sends = PendingSends()  # memory that other ranks may still be reading
        # Device of the collectives. None: the model needs no communication.
        self.device: torch.device | None = None
        # Per unit, how backward reduces its gradients. Read when a forward begins.
        self.syncs = [Sync.ALL] * len(self.units)
        # `under_no_sync`: whether forwards that begin now are under `no_sync`, whether gradients
        # accumulate unreduced or reduced within the intra group. `accumulates`: the value of
        # `under_no_sync` when the last forward with gradients began.
        self.under_no_sync = self.accumulates = False
        self.lacks_ranks = False  # whether some rank computes no gradients (`join`)
        self.depth = 0  # number of nested units' forwards under way
        self.expects_backward = False  # whether the outermost forward began with gradients enabled
        # Whether autograd ran another graph inside the present backward.
        self.has_inner_backward = False

    @property
    def is_accumulating(self) -> bool:
        """Whether forwards that begin now are under ``no_sync``."""
        return any(sync is not Sync.ALL for sync in self.syncs)

    def plan_syncs(self) -> None:
        """Decide, as a forward with gradients begins, how its backward reduces gradients."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.plan_sync(sync)
        self.accumulates = self.under_no_sync

    def start_unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start all-gathers of a unit for "forward" or "backward". Collective."""
        with self.observers.span(Kind.STARTING, unit, purpose=purpose):
            started = unit.unshard(purpose, everything=everything)
            # Inside the span: messages from extensions to other ranks count as part of the start.
            for extension in self.extensions:
                extension.gathering(started, purpose)

    def unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start all-gathers of a unit, and wait for them. Collective."""
        self.start_unshard(unit, purpose, everything=everything)
        with self.observers.span(Kind.GATHER_WAIT, unit):
            unit.wait_unshard()

    def extend(self, extension: StepExtension) -> None:
        """Let ``extension`` act in each step from now on."""
        found, places = (*self.extensions, extension), list(EXTRAS)
        self.extensions = tuple(sorted(found, key=lambda one: places.index(one.name)))

    def drop(self, extension: StepExtension) -> None:
        """Stop calling ``extension`` in steps."""
        self.extensions = tuple(one for one in self.extensions if one is not extension)

    def extension(self, name: str) -> Any:
        """The extension of the extra ``name``; None if the run has none."""
        return next((one for one in self.extensions if one.name == name), None)
