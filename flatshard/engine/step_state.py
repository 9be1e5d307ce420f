"""``StepState``: what both halves of a model's step share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import PendingSends
from flatshard.engine.events import Observers
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.unit import Unit


class StepState:
    """What both halves of a model's step share.

    Attributes:
        units: every unit, the root last.
        root: the outermost unit.
        world: the ranks that train the model.
        number: below 256, tells models apart; alike on all ranks.
        observers: hear what the run does.
        pending_sends: what other ranks may still be reading from this one.
        device: where something is all-gathered or reduced; None: a forward is only kernels.
        syncs: per unit, what backward does with its gradients; read when a forward begins.
        under_no_sync: whether forwards that begin now only accumulate, wherever that is.
        accumulates: whether the last forward with gradients began so.
        depth: how many units' forwards are under way, inside one another.
        expects_backward: whether the outermost forward began with gradients enabled.
    """

    def __init__(self, units: Sequence[Unit], world: Communicator, number: int) -> None:
        """Between steps; nobody listens."""
        self.units, self.root = list(units), units[-1]
        self.world, self.number = world, number
        self.observers = Observers()
        self.pending_sends = PendingSends()
        self.device: torch.device | None = None
        self.syncs = [Sync.ALL] * len(self.units)
        self.under_no_sync = self.accumulates = False
        self.depth = 0
        self.expects_backward = False

    def plan_syncs(self) -> None:
        """A forward with gradients begins: decide what its backward does with them."""
        for unit, sync in zip(self.units, self.syncs, strict=True):
            unit.plan_sync(sync)
        self.accumulates = self.under_no_sync
