"""``OrderCheck``: have all ranks all-gathered the same, where all-gathers match by order alone?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from flatshard.comm.communicator import Communicator
from flatshard.comm.deadlock.history import first_difference
from flatshard.engine.unit import Unit


def with_complements(numbers: Iterable[int]) -> list[int]:
    """Votes of bytes that are to be equal; see ``differ``."""
    return [value for number in numbers for value in (number, 255 - number)]


def differ(maxima: Sequence[int]) -> list[bool]:
    """Which numbers of ``with_complements`` differ between the ranks that have them."""
    # Numbers and complements that are equal add up to 255, and to 0 where no rank has any.
    return [sum(pair) not in (0, 255) for pair in zip(maxima[::2], maxima[1::2], strict=True)]


class OrderCheck:
    """Compares digests, in the exchange at the end of a backward; the same on all ranks."""

    def __init__(self, units: Sequence[Unit], world: Communicator) -> None:
        self._units, self._world = units, world
        # All groups over which any rank all-gathers, by their ranks; each rank is in some.
        self._places: list[tuple[int, ...]] | None = None

    def votes(self, device: torch.device | None) -> list[int]:
        """Digests, each in the place of its group. Collective, once, if there are any."""
        world, votes = self._world, list[int]()
        if world.size == 1 or device is None or not world.transport_for(device).is_ordered:
            return votes
        groups = self._groups()
        if self._places is None:
            everyone = world.gather_objects(list(groups), op_name="groups that all-gather")
            self._places = sorted(set(chain(*everyone)))
        for ranks in self._places:
            group = groups.get(ranks)
            votes += with_complements(group.history.to_compare()) if group else [0] * 8
        return votes

    def _groups(self) -> dict[tuple[int, ...], Communicator]:
        found = [self._world]
        for topology in (unit.handles[0].topology for unit in self._units if unit.handles):
            found += topology.intra_group, topology.inter_group, topology.regather or self._world
        return {tuple(group.ranks): group for group in found if group.size > 1}

    def check(self, where: str, maxima: Sequence[int]) -> None:
        """Raise if what ranks voted differs. Collective then."""
        if not any(differ(maxima)):
            return
        recent = {ranks: group.history.recent() for ranks, group in self._groups().items()}
        everyone = self._world.gather_objects(recent, op_name="what ranks have all-gathered")
        by_rank = dict(zip(self._world.ranks, everyone, strict=True))
        known = (
            first_difference(
                {rank: begun[ranks] for rank, begun in by_rank.items() if ranks in begun}
            )
            for ranks in self._places or ()
        )
        parted = next(filter(None, known), "They parted longer ago than was noted")
        raise RuntimeError(
            f"{where}: ranks have all-gathered different units, or asked for different norms and "
            f"sums, and what they got may be of other parameters. {parted}. With this backend all "
            "ranks must run the same units in the same order, forwards and backwards, and call "
            "state_dict(), summon_full_params() and the like together, not under `if rank == 0:`. "
            "Units that some ranks skip need allow_divergence (docs/recipes.md). Start again from "
            "a checkpoint."
        )
