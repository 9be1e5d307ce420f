"""Who shares with whom: a strategy and a process group become two communicators."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from flatshard.collectives import ALONE, Communicator, communicator
from flatshard.config import Placement


@dataclass(frozen=True)
class Topology:
    """The groups of one model.

    Attributes:
        world: every rank that trains the model.
        shard: the ranks that split one copy of the parameters.
        replicate: the ranks that hold the same shard.
    """

    world: Communicator
    shard: Communicator
    replicate: Communicator


def resolve(
    placement: Placement, group: dist.ProcessGroup | None, *, native: bool = False
) -> Topology:
    """Find the groups. Without a process group every group is this rank alone.

    Collective at the first call for a process group.

    Args:
        placement: what is sharded.
        group: the ranks that train the model.
        native: use the backend's own collectives whatever it is.
    """
    world = communicator(group, native=native)
    if placement.sharded:
        return Topology(world=world, shard=world, replicate=ALONE)
    return Topology(world=world, shard=ALONE, replicate=world)
