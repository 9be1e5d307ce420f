"""The values that units start with: each rank's own, rank 0's, or none yet (the meta device).

Nothing here needs a whole model in one place: a unit takes its part of each original parameter on
its own, and where rank 0's values are wanted, rank 0 sends every rank just that part.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Checksum, checksum
from flatshard.comm.topology import Topology
from flatshard.plan.layout import FlatLayout
from flatshard.tensor.flat_parameter import part_of

NamedTensors = Sequence[tuple[str, Tensor]]


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
        # Ranks of the first shard group, by their place in the world, and their parts' numbers.
        self._parts = [
            (place, number)
            for place, (rank, (number, _)) in enumerate(zip(world.ranks, everyone, strict=True))
            if rank in first_group
        ]
        self._is_first = world.global_rank in first_group
        self._origin = next(
            (place for place, rank in enumerate(self._replicate.ranks) if rank in first_group), 0
        )

    def hand_out(self, layout: FlatLayout, index: int, value: Tensor | None, part: Tensor) -> None:
        """Fill ``part`` with this rank's range of rank 0's ``value``; replicas get theirs later.

        Collective: all ranks.

        Args:
            layout: where the parameter lies.
            index: its number in the layout.
            value: all of it; looked at on rank 0 only.
            part: ``(numel held here,)``; where it goes.
        """
        if self._world.rank != 0:
            if self._is_first and part.numel():
                self._world.receive(part, source=0, op_name=layout.spans[index].name)
            return
        assert value is not None, "rank 0 has the values"
        for place, number in self._parts:
            theirs = part_of(value, layout.spans[index], layout.local_span(index, number))
            if place == 0:
                part.copy_(theirs)
            elif theirs.numel():
                self._world.send(
                    theirs.to(part.device, part.dtype).contiguous(),
                    to=place,
                    op_name=layout.spans[index].name,
                )

    def replicate(self, shard: Tensor) -> None:
        """Give the replicas of a filled shard the same. Collective: all ranks."""
        self._replicate.broadcast(shard, op_name="starting weights", source=self._origin)


@dataclass
class InitialValues:
    """What the ranks agreed on before anything is sharded.

    Attributes:
        world: the ranks that train the model.
        sync: what the user said: True, False, or None.
        sends: whether every rank takes rank 0's values.
        missing: ids of the tensors that whoever gives the values has on the meta device.
        any_missing: whether some rank has to make values.
        buffers: ids of the buffers for which there are values.
        different: names of the tensors that differ between ranks.
    """

    world: Communicator
    sync: bool | None
    sends: bool
    missing: set[int]
    any_missing: bool
    buffers: set[int]
    different: list[str]
    _sources: dict[int, tuple[Topology, BroadcastSource]] = field(default_factory=dict)

    @property
    def initialises(self) -> bool:
        """Whether this rank makes values for what is missing."""
        return bool(self.missing) and (not self.sends or self.world.rank == 0)

    def source(self, topology: Topology) -> BroadcastSource | None:
        """Who hands out values; None: each rank has its own. Collective at the first call."""
        if not self.sends:
            return None
        if id(topology) not in self._sources:
            self._sources[id(topology)] = (topology, BroadcastSource(topology))
        return self._sources[id(topology)][1]

    def give_replicas(self, topology: Topology, shard: Tensor) -> None:
        """Give a filled shard to those that hold the same. Collective if anything is sent."""
        source = self.source(topology)
        if source is not None:
            source.replicate(shard)

    def take_differences(self, different: list[str]) -> bool:
        """Note tensors that were found to differ; whether all must now take rank 0's."""
        self.different = different
        self.sends = bool(different) and self.sync is None
        return self.sends

    def warn(self) -> None:
        """Say, on rank 0, which tensors differed; after the last collective.

        Where warnings are errors, no other rank is left waiting then.
        """
        if self.different and self.world.rank == 0:
            _warn_of_difference(self.different, self.sync)


def compare_values(named: NamedTensors, sync: bool | None, world: Communicator) -> InitialValues:
    """Find out whose values count, and which of them are still to be made.

    Collective: all ranks of ``world``.

    Args:
        named: parameters and buffers with their names; those on the meta device have no values.
        sync: True: rank 0's count. None: they do if a checksum finds a difference. False: each
            rank's own.
        world: the ranks that train the model.
    """
    tensors = [tensor.detach() for _, tensor in named]
    # Of values that are sent anyway nobody needs a checksum.
    mine = [
        None if tensor.is_meta else (0, 0) if sync is True else checksum(tensor)
        for tensor in tensors
    ]
    everyone = world.gather_objects(mine, op_name="comparing weights")
    different = names_of_different([name for name, _ in named], everyone)
    sends = world.size > 1 and (sync is True or (sync is None and bool(different)))
    source = everyone[0] if sends else mine
    missing = {
        id(tensor) for (_, tensor), value in zip(named, source, strict=True) if value is None
    }
    any_missing = any(None in values for values in ([source] if sends else everyone))
    buffers = {id(t) for _, t in named if not isinstance(t, nn.Parameter)} - missing
    different = [] if sync is True else different
    return InitialValues(world, sync, sends, missing, any_missing, buffers, different)


def names_of_different(
    names: Sequence[str], everyone: Sequence[Sequence[Checksum | None]]
) -> list[str]:
    """The names whose checksums are not the same on every rank."""
    columns = zip(*everyone, strict=True)
    return [n for n, values in zip(names, columns, strict=True) if len(set(values)) > 1]


def give_out(tensor: Tensor, name: str, world: Communicator) -> None:
    """Overwrite a tensor of any strides with rank 0's. Collective."""
    with torch.no_grad():
        contiguous = tensor.detach().contiguous()
        world.broadcast(contiguous, op_name=name)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)


def _warn_of_difference(names: list[str], sync: bool | None) -> None:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    outcome = (
        "Every rank now takes rank 0's. Seed all ranks alike, or pass sync_module_states=True to "
        "say that this is meant."
        if sync is None
        else "Each keeps its own part, as sync_module_states=False asks: the result is a mixture "
        "of different models."
    )
    warnings.warn(
        f"ShardedWrapper: the ranks start from different weights ({names[0]!r}{others}). {outcome}",
        stacklevel=4,
    )
