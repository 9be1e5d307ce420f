"""Who shares with whom: the ranks that train a model, and a placement, become communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from flatshard.comm.communicator import ALONE, AUTO, Communicator
from flatshard.comm.process_groups import exists, named, new_group
from flatshard.options.collectives import TransportOptions
from flatshard.options.strategy import Placement


@dataclass(frozen=True)
class Topology:
    """The groups of one unit.

    Every rank holds one part of the flat parameter in ``shard.size``, number ``index``. Parameters
    are all-gathered over ``intra_group``, and gradients reduced over it first, then over
    ``inter_group`` (parts become smaller) or ``replicate`` (parts stay).
    """

    world: Communicator  # every rank that trains the model
    shard: Communicator  # the ranks that split the flat parameter
    replicate: Communicator  # the ranks that hold the same shard
    # `shard` itself unless only gradients and optimizer state are split over all of it.
    intra_group: Communicator
    # One rank of each `intra_group` of `shard`; they split its part further.
    inter_group: Communicator = ALONE
    # Over which backward all-gathers what `reshard_after_forward=n` left.
    regather: Communicator | None = None

    @property
    def index(self) -> int:
        """Which shard this rank holds."""
        return self.intra_group.rank * self.inter_group.size + self.inter_group.rank

    @property
    def across(self) -> Communicator:
        """The ranks over which gradients are reduced after ``intra_group``; perhaps this alone."""
        return self.inter_group if self.inter_group.size > 1 else self.replicate

    def connect(self, device: torch.device, *, fixed_order: bool) -> None:
        """Let the ranks find one another for reductions. Collective, see ``Communicator``."""
        for group in (self.intra_group, self.inter_group, self.replicate):
            group.connect(device, fixed_order=fixed_order, replicas=group is self.replicate)

    @property
    def transport(self) -> str:
        """What moves its parameters and gradients, in words."""
        ways = [group.transport for group in (self.intra_group, self.inter_group) if group.size > 1]
        if self.replicate.size > 1:
            ways.append(self.replicate.backend)  # all-reduces
        return " + ".join(dict.fromkeys(ways)) or "nothing"

    @property
    def transport_reason(self) -> str:
        """Why ``transport`` is what it is, where ranks found that out."""
        reasons = [group.transport_reason for group in (self.intra_group, self.inter_group)]
        return "; ".join(dict.fromkeys(filter(None, reasons)))


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model, as the user named them; see ``user_groups``."""

    world: Communicator
    # The ranks that share one copy, and those that hold the same part of theirs. None: the user
    # did not say, and placements that need to know go by nodes.
    grid: tuple[Communicator, Communicator] | None
    ranks_per_node: int | None
    mode: TransportOptions
    _known: dict[Placement, Topology] = field(default_factory=dict, repr=False)

    def describe(self) -> str:
        """What must be the same on every rank."""
        if self.grid is None:
            return f"{self.ranks_per_node} ranks per node"
        shard, replicate = self.grid
        return f"{shard.size} ranks share a copy, {replicate.size} copies"

    def resolve(self, placement: Placement) -> Topology:
        """The groups for a placement. Collective at the first call for it.

        Raises:
            ValueError: the ranks do not divide as the placement asks, or it averages over
                replicas and there is a wire dtype.
        """
        if placement not in self._known:
            found = self._resolve(placement)
            if self.mode.wire_dtype is not None and found.replicate.size > 1:
                raise ValueError(
                    f"wire_dtype={self.mode.wire_dtype}: gradients are averaged over "
                    f"{found.replicate.size} replicas by the backend, which sends them as they "
                    "are. Use a strategy that shards over all ranks (FULL_SHARD, "
                    "HYBRID_SHARD_OP), or wire_dtype=None."
                )
            self._known[placement] = found
        return self._known[placement]

    def _resolve(self, placement: Placement) -> Topology:
        world = self.world
        if not placement.sharded:
            return Topology(world, shard=ALONE, replicate=world, intra_group=ALONE)
        if not placement.hybrid:
            regather = _regather(world, placement)
            return Topology(world, world, ALONE, intra_group=world, regather=regather)
        shard, replicate = self.grid or self._by_node()
        regather = _regather(shard, placement)
        if placement.over_all:
            return Topology(world, world, ALONE, shard, inter_group=replicate, regather=regather)
        return Topology(world, shard, replicate, intra_group=shard, regather=regather)

    def _by_node(self) -> tuple[Communicator, Communicator]:
        """Split the world by node."""
        size = self.ranks_per_node
        if self.world.size == 1:
            return self.world, ALONE
        if size is None:
            raise ValueError(
                "ShardedWrapper: a HYBRID strategy shards within each node, but LOCAL_WORLD_SIZE "
                "is not set, so the nodes are not known. Launch with torchrun, or pass "
                "process_group=(shard_group, replicate_group) or a 2-D device_mesh."
            )
        nodes: dict[int, list[int]] = {}
        for rank in self.world.ranks:
            nodes.setdefault(rank // size, []).append(rank)
        sizes = [len(ranks) for ranks in nodes.values()]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"ShardedWrapper: a HYBRID strategy needs equally many ranks on every node, but "
                f"with LOCAL_WORLD_SIZE={size} the {self.world.size} ranks divide into "
                f"{sizes}. Pass process_group=(shard_group, replicate_group) or a 2-D "
                "device_mesh."
            )
        return _rows_and_columns(self.world, list(nodes.values()))


def _regather(shard: Communicator, placement: Placement) -> Communicator | None:
    size = placement.regather_size
    if size is None or size == shard.size:
        return None
    if shard.size % size:
        raise ValueError(
            f"reshard_after_forward={size}: must divide the {shard.size} ranks that share "
            "the parameters"
        )
    starts = range(0, shard.size, size)
    return _rows_and_columns(shard, [shard.ranks[start : start + size] for start in starts])[0]


def _rows_and_columns(
    parent: Communicator, rows: Sequence[Sequence[int]]
) -> tuple[Communicator, Communicator]:
    """This rank's row and column of a grid of global ranks. Collective."""
    me = dist.get_rank()
    row = next(row for row in rows if me in row)
    column = [other[row.index(me)] for other in rows]
    return subgroup(parent, row), subgroup(parent, column)


# ---------------------------------------------------------------- communicators of groups

# Kept as long as the group, also between models: the groups made for it live as long.
_communicators: dict[tuple[dist.ProcessGroup, TransportOptions], Communicator] = {}


def communicator(group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> Communicator:
    """The communicator of a process group; None gives ``ALONE``.

    Collective at the first call for a group and a mode.
    """
    if group is None:
        return ALONE
    if (group, mode) not in _communicators:
        # Destroyed groups would otherwise keep their transports' threads alive.
        forget_destroyed()
        _communicators[group, mode] = Communicator(group, mode=mode)
    return _communicators[group, mode]


def forget_destroyed() -> None:
    """Let go of the groups that were destroyed, and so of their threads."""
    for key in [key for key in _communicators if not exists(key[0])]:
        del _communicators[key]


def subgroup(parent: Communicator, ranks: Sequence[int]) -> Communicator:
    """The communicator of some of the parent's global ``ranks``, of which this rank is one.

    Collective: these ranks, at the first call for them.
    """
    if len(ranks) == 1:
        return ALONE
    if list(ranks) == parent.ranks:
        return parent
    known = parent.subgroups
    if tuple(ranks) not in known:
        assert parent.group is not None, "a group of several ranks"
        with named(f"ShardedWrapper, rank {parent.global_rank}: meeting ranks {list(ranks)}"):
            group = new_group(parent.group, ranks)
        known[tuple(ranks)] = communicator(group, mode=parent.options)
    return known[tuple(ranks)]
