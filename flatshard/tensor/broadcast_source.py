"""``BroadcastSource``: rank 0 sends every rank just its part of each original parameter."""

from __future__ import annotations

from torch import Tensor

from flatshard.comm.exchange import transfer
from flatshard.comm.topology import Topology
from flatshard.plan.layout import FlatLayout, part_of


class BroadcastSource:
    """Hands rank 0's values out to the ranks of one topology."""

    def __init__(self, topology: Topology) -> None:
        """Find out who holds which part. Collective: all ranks of the world."""
        world = topology.world
        self._world, self._replicate = world, topology.replicate
        # A shard group of one is no group, and does not know its rank.
        mine = topology.shard.ranks if topology.shard.size > 1 else [world.global_rank]
        everyone = world.gather_objects((topology.index, tuple(mine)), op_name="meeting")
        first_group = everyone[0][1]
        # Of the ranks of the first shard group, by their place in the world: which part they hold.
        self._parts = {
            place: number
            for place, (rank, (number, _)) in enumerate(zip(world.ranks, everyone, strict=True))
            if rank in first_group
        }
        replicas = enumerate(self._replicate.ranks)
        self._origin = next((place for place, rank in replicas if rank in first_group), 0)

    def hand_out(self, layout: FlatLayout, index: int, value: Tensor | None, part: Tensor) -> None:
        """Fill ``part``, 1-D, with this rank's range of rank 0's ``value`` of parameter ``index``.

        Collective: all ranks. Replicas get theirs from ``replicate``.
        """
        span, world = layout.spans[index], self._world
        if world.rank != 0:
            if world.rank in self._parts and part.numel():
                transfer(world, part, source=0, to=world.rank, op_name=span.name)
            return
        assert value is not None, "rank 0 has the values"
        # In the ranks' order, one parameter at a time, as those that receive ask for them.
        for place, number in self._parts.items():
            theirs = part_of(value, span, layout.local_span(index, number))
            if place == 0:
                part.copy_(theirs)
            elif theirs.numel():
                wire = theirs.to(part.device, part.dtype).contiguous()
                transfer(world, wire, source=0, to=place, op_name=span.name)

    def replicate(self, shard: Tensor) -> None:
        """Give the replicas of a filled shard the same. Collective: all ranks."""
        self._replicate.broadcast(shard, op_name="starting weights", source=self._origin)
