"""``OrderCheck``: have all ranks all-gathered the same, where all-gathers match by order alone?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.deadlock.history import REMEDY, first_difference
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.engine.unit import Unit


class OrderCheck:
    """Compares digests in the exchange at the end of a backward."""

    def __init__(self, units: Sequence[Unit], world: Communicator) -> None:
        self._units, self._world = units, world
        # The ranks of all groups over which any rank all-gathers; known after the first backward.
        self._places: list[list[int]] = []

    def votes(self, device: torch.device | None) -> bytes:
        """Digests, each in the place of its group. Collective at the first call."""
        world = self._world
        if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
            return b""
        groups = self._groups()
        if not self._places:
            everyone = world.gather_objects([g.ranks for g in groups], op_name="groups")
            self._places = sorted({str(ranks): ranks for one in everyone for ranks in one}.values())
        digests = {str(group.ranks): group.members.history.to_compare() for group in groups}
        found = (digests.get(str(ranks)) for ranks in self._places)
        return b"".join(with_complements(one) if one else bytes(8) for one in found)

    @contextlib.contextmanager
    def unannounced(self) -> Iterator[None]:
        """Inside, no rank waits for others before it begins an all-gather; alike on all."""
        counters = [group.members.counter for group in self._groups()]
        for counter in counters:
            counter.announces = False
        try:
            yield
        finally:
            for counter in counters:
                counter.announces = True

    def _groups(self) -> list[Communicator]:
        found = [self._world]
        for topology in (unit.handles[0].topology for unit in self._units if unit.handles):
            found += topology.intra_group, topology.inter_group, topology.regather or self._world
        return [group for group in dict.fromkeys(found) if group.size > 1]

    def check(self, where: str, maxima: bytes) -> None:
        """Raise if what ranks voted differs. Collective then."""
        if not any(differ(maxima)):
            return
        recent = {str(group.ranks): group.members.history.recent() for group in self._groups()}
        said = self._world.gather_objects(recent, op_name="what was all-gathered")
        of_rank = dict(zip(self._world.ranks, said, strict=True))
        known = (first_difference({r: of_rank[r][str(one)] for r in one}) for one in self._places)
        raise RuntimeError(
            f"{where}: ranks have all-gathered different units, or asked for different norms and "
            "sums, and what they got may be of other parameters; "
            f"{next(filter(None, known), 'that is longer ago than was noted')}. {REMEDY} Start "
            "again from a checkpoint. [FS-DEADLOCK]"
        )
