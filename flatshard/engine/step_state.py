"""``StepState``: what both halves of a model's step share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import PendingSends
from flatshard.engine.events import Observers
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.order_check import OrderCheck
from flatshard.engine.unit import Unit


class StepState:
    def __init__(self, units: Sequence[Unit], world: Communicator, number: int) -> None:
        self.units, self.root = list(units), units[-1]  # the outermost unit comes last
        self.world = world  # the ranks that train the model
        self.order_check = OrderCheck(self.units, world)
        self.number = number  # below 256, tells models apart; alike on all ranks
        self.has_run = False  # whether a forward has begun
        self.observers = Observers()
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

    @property
    def handles(self) -> list[tuple[Unit, FlatParamHandle]]:
        return [(unit, handle) for unit in self.units for handle in unit.handles]

    @property
    def is_accumulating(self) -> bool:
        """Whether forwards that begin now are under ``no_sync``."""
        return any(sync is not Sync.ALL for sync in self.syncs)

    def plan_syncs(self) -> None:
        """A forward with gradients begins: decide what its backward does with them."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.plan_sync(sync)
        self.accumulates = self.under_no_sync
