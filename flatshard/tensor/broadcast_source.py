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
        first = topology.shard.ranks[0] if topology.shard.size > 1 else world.global_rank
        everyone = world.gather_objects((topology.index, first), op_name="meeting")
        # Keys are parts, values are places in the world: the holders in the shard group of rank 0.
        # In a simulated world all ranks answer as rank 0, so the first answer counts.
        self._places = {
            number: place
            for place, (number, theirs) in reversed([*enumerate(everyone)])
            if theirs == everyone[0][1]
        }
        self._receives = first == everyone[0][1]
        sources = {world.ranks[place] for place in self._places.values()}
        replicas = enumerate(self._replicate.ranks)
        self._origin = next((place for place, rank in replicas if rank in sources), 0)

    def hand_out(self, layout: FlatLayout, index: int, value: Tensor | None, part: Tensor) -> None:
        """Fill ``part``, 1-D, with this rank's range of rank 0's ``value`` of parameter ``index``.

        Collective: all ranks. Replicas get theirs from ``replicate``.
        """
        span, world, places = layout.spans[index], self._world, self._places
        if world.rank != 0:
            if self._receives and part.numel():
                transfer(world, part, source=0, to=world.rank, op_name=span.name)
            return
        assert value is not None, "rank 0 has the values"
        # One parameter at a time: receivers ask for parts in the order of parameters.
        for number in layout.holders(index):
            theirs = part_of(value, span, layout.local_span(index, number))
            place = places.get(number)
            if place == 0:
                part.copy_(theirs)
            elif place is not None:
                wire = theirs.to(part.device, part.dtype).contiguous()
                transfer(world, wire, source=0, to=place, op_name=span.name)

    def replicate(self, shard: Tensor) -> None:
        """Give the replicas of a filled shard the same. Collective: all ranks."""
        self._replicate.broadcast(shard, op_name="starting weights", source=self._origin)
