"""``OrderCheck``: have all ranks all-gathered the same, where all-gathers match by order alone?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.deadlock.history import REMEDY, Begun, first_difference
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.engine.unit import Unit

_COMPARING = "comparing the order of all-gathers"


class OrderCheck:
    """Compares digests in the exchange at the end of a backward."""

    def __init__(self, units: Sequence[Unit], world: Communicator) -> None:
        self._units, self._world = units, world

    def votes(self, device: torch.device | None) -> bytes:
        """Bytes that tell the world whether ranks all-gathered the same units in the same order.

        Collective: in each group over which units all-gather.
        """
        world = self._world
        if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
            return b""
        # Each smaller group compares its own digest. In the world's exchange every group would need
        # a place, so the message would grow with the number of ranks.
        digests = {group: group.members.history.to_compare() for group in self._groups()}
        own = digests.pop(world)
        differs = [not one.host.all_equal(digest, _COMPARING) for one, digest in digests.items()]
        return bytes([any(differs)]) + with_complements(own)

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
        if not (any(maxima[:1]) or any(differ(maxima[1:]))):
            return
        mine = {one.members.counter.name: one.members.history.recent() for one in self._groups()}
        of_group: dict[str, dict[int, list[Begun]]] = {}
        said = self._world.gather_objects(mine, op_name="what was all-gathered")
        for rank, groups in zip(self._world.ranks, said, strict=True):
            for name, recent in groups.items():
                of_group.setdefault(name, {})[rank] = recent
        known = map(first_difference, of_group.values())
        raise RuntimeError(
            f"{where}: ranks have all-gathered different units, or asked for different norms and "
            "sums, and what they got may be of other parameters; "
            f"{next(filter(None, known), 'that is longer ago than was noted')}. {REMEDY} Start "
            "again from a checkpoint. [FS-DEADLOCK]"
        )
