"""``RunState``: what the parts of one model's step share. ``RunContext`` puts them together."""

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
        self.number = number  # below 256, tells models apart; the same on all ranks
        self.has_run = False  # whether a forward has begun
        self.observers = Observers()
        self.extensions: tuple[StepExtension, ...] = ()  # in the order of `EXTRAS`
        self.buffers: BufferSync | None = None  # None: each rank keeps its own buffers
        self.pending_sends = PendingSends()  # what other ranks may still be reading from this one
        # Where something is all-gathered or reduced; None: a forward is only kernels.
        self.device: torch.device | None = None
        # Per unit, what backward does with its gradients; read when a forward begins.
        self.syncs = [Sync.ALL] * len(self.units)
        # Whether forwards that begin now only accumulate, wherever that is; whether the last
        # forward with gradients began so.
        self.under_no_sync = self.accumulates = False
        self.lacks_ranks = False  # some rank computes no gradients (`join`)
        self.depth = 0  # how many units' forwards are under way, inside one another
        self.expects_backward = False  # the outermost forward began with gradients enabled
        # Whether autograd has run another graph inside the backward that is under way.
        self.has_inner_backward = False

    @property
    def is_accumulating(self) -> bool:
        """Whether forwards that begin now are under ``no_sync``."""
        return any(sync is not Sync.ALL for sync in self.syncs)

    def plan_syncs(self) -> None:
        """A forward with gradients begins: decide what its backward does with them."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.plan_sync(sync)
        self.accumulates = self.under_no_sync

    def start_unshard(self, unit: Unit, purpose: str, *, everything: bool = False) -> None:
        """Start all-gathers of a unit for "forward" or "backward". Collective."""
        with self.observers.span(Kind.STARTING, unit, purpose=purpose):
            started = unit.unshard(purpose, everything=everything)
            # Inside: what extensions tell other ranks is part of the start.
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
        """Let ``extension`` act no more."""
        self.extensions = tuple(one for one in self.extensions if one is not extension)

    def extension(self, name: str) -> Any:
        """The extension of the extra ``name``; None if the run has none."""
        return next((one for one in self.extensions if one.name == name), None)
