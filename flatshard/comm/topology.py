"""Who shares with whom: what the user says of ranks, and a placement, become communicators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flatshard.comm.communicator import ALONE, AUTO, Communicator, gather_before
from flatshard.comm.process_groups import exists, named, new_group
from flatshard.options.collectives import TransportOptions
from flatshard.options.strategy import Placement


@dataclass(frozen=True)
class Topology:
    """The groups of one unit.

    Every rank holds one part of the flat parameter in ``shard.size``, number ``index``. Parameters
    are all-gathered over ``intra_group``, and gradients reduced over it first, then over
    ``inter_group`` (parts become smaller) or ``replicate`` (parts stay).

    Attributes:
        world: every rank that trains the model.
        shard: the ranks that split the flat parameter.
        replicate: the ranks that hold the same shard.
        intra_group: the ranks that all-gather parameters; ``shard`` itself unless only
            gradients and optimizer state are split over all of it.
        inter_group: one rank of each ``intra_group`` of ``shard``; they split its part further.
        regather: the ranks over which backward all-gathers what ``reshard_after_forward=n`` left.
    """

    world: Communicator
    shard: Communicator
    replicate: Communicator
    intra_group: Communicator
    inter_group: Communicator = ALONE
    regather: Communicator | None = None

    @property
    def index(self) -> int:
        """Which shard this rank holds."""
        return self.intra_group.rank * self.inter_group.size + self.inter_group.rank

    def connect(self, device: torch.device, *, fixed_order: bool) -> None:
        """Let the ranks find one another for reductions. Collective, see ``Communicator``."""
        for group in (self.intra_group, self.inter_group):
            group.connect(device, fixed_order=fixed_order, replicas=False)
        self.replicate.connect(device, fixed_order=fixed_order, replicas=True)

    @property
    def crosses(self) -> bool:
        """Whether gradients are reduced beyond ``intra_group``."""
        return self.inter_group.size > 1 or self.replicate.size > 1

    @property
    def grid(self) -> tuple[list[int], list[int]]:
        """The ranks that it is sharded over first, and those across."""
        across = self.inter_group if self.inter_group.size > 1 else self.replicate
        return self.intra_group.ranks, across.ranks

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
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model, as the user named them.

    Attributes:
        world: all of them.
        grid: the ranks that share one copy, and those that hold the same part of theirs, where
            the user said which; None: placements that need to know go by nodes.
        ranks_per_node: how many ranks a node has, for the same purpose; None if unknown.
        mode: how they move tensors.
    """

    world: Communicator
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
        """The groups for a placement.

        Collective at the first call for a placement.

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
            return Topology(world=world, shard=ALONE, replicate=world, intra_group=ALONE)
        if not placement.hybrid:
            regather = self._regather(world, placement)
            return Topology(
                world, shard=world, replicate=ALONE, intra_group=world, regather=regather
            )
        shard, replicate = self.grid or self._by_node()
        regather = self._regather(shard, placement)
        if placement.over_all:
            return Topology(
                world, world, ALONE, intra_group=shard, inter_group=replicate, regather=regather
            )
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
        sizes = {len(ranks) for ranks in nodes.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"ShardedWrapper: a HYBRID strategy needs equally many ranks on every node, but "
                f"with LOCAL_WORLD_SIZE={size} the {self.world.size} ranks divide into "
                f"{[len(ranks) for ranks in nodes.values()]}. Pass process_group=(shard_group, "
                "replicate_group) or a 2-D device_mesh."
            )
        return _rows_and_columns(self.world, list(nodes.values()))

    def _regather(self, shard: Communicator, placement: Placement) -> Communicator | None:
        size = placement.regather_size
        if size is None or size == shard.size:
            return None
        if shard.size % size:
            raise ValueError(
                f"reshard_after_forward={size}: must divide the {shard.size} ranks that share "
                "the parameters"
            )
        ranks = shard.ranks
        rows = [ranks[start : start + size] for start in range(0, len(ranks), size)]
        return _rows_and_columns(shard, rows)[0]


def _rows_and_columns(
    parent: Communicator, rows: Sequence[Sequence[int]]
) -> tuple[Communicator, Communicator]:
    """This rank's row and column of a grid of global ranks. Collective."""
    me = dist.get_rank()
    row = next(row for row in rows if me in row)
    column = [other[row.index(me)] for other in rows]
    return subgroup(parent, row), subgroup(parent, column)


# ---------------------------------------------------------------- what the user says


def read_ranks(process_group: Any, device_mesh: Any, *, mode: TransportOptions) -> Ranks:
    """Read ``process_group`` and ``device_mesh``; without either, the default group is meant.

    Collective at the first call for a process group, and whenever a pair or a 2-D mesh is given.

    Args:
        process_group: a group, a pair (shard group, replicate group), or None.
        device_mesh: a 1-D mesh; a 2-D mesh (replicate, shard), in the other order if its
            dimensions' names say so; or None.
        mode: how to move tensors.

    Raises:
        TypeError: something else was passed.
        ValueError: both, a mesh of other dimensions, or groups that are no grid of ranks.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("ShardedWrapper: pass either process_group or device_mesh, not both")
        process_group = _groups_of_mesh(device_mesh)
    per_node = _ranks_per_node()
    if not isinstance(process_group, tuple | list):
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup, got {process_group!r}")
        _check_same_mode([] if process_group is None else [process_group], mode)
        return Ranks(communicator(process_group, mode=mode), None, per_node, mode)
    groups = tuple(process_group)
    if len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise TypeError(
            f"process_group: expected one group or a pair (shard group, replicate group), "
            f"got {process_group!r}"
        )
    _check_same_mode(groups, mode)
    shard, replicate = (communicator(group, mode=mode) for group in groups)
    world = _world_of_grid(shard, replicate, mode)
    return Ranks(world, (shard, replicate), per_node, mode)


def _check_same_mode(groups: Sequence[dist.ProcessGroup], mode: TransportOptions) -> None:
    """Compare how ranks move tensors, which decides what groups they make for it.

    Collective: along the first groups, rows of a grid perhaps, then along the second.

    Raises:
        ValueError: on every rank that the groups reach, where they differ.
    """
    everyone = [(dist.get_rank() if groups else 0, mode.describe())]
    for group in groups:
        gathered = gather_before(group, everyone, op_name="ShardedWrapper: comparing collectives")
        everyone = [one for theirs in gathered for one in theirs]
    first, expected = everyone[0]
    for rank, theirs in everyone:
        if theirs != expected:
            raise ValueError(
                f"ShardedWrapper: rank {first} has {expected}; rank {rank} has {theirs}. Pass the "
                "same collectives and wire_dtype on every rank."
            )


def _ranks_per_node() -> int | None:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return count or None


def _groups_of_mesh(mesh: Any) -> Any:
    """The group of a 1-D mesh, or the (shard, replicate) pair of a 2-D one."""
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_group")):
        raise TypeError(f"device_mesh: expected a DeviceMesh, got {mesh!r}")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.ndim != 2:
        raise ValueError(
            f"device_mesh: expected 1 dimension, or 2 for (replicate, shard), got {mesh.ndim}. "
            "Pass the part of it over which this model's data are split, such as "
            'mesh["replicate", "shard"].'
        )
    names = mesh.mesh_dim_names or ("", "")
    # The order of torch's FSDP unless the names say the opposite.
    reverse = ("shard" in names[0] and "shard" not in names[1]) or "replica" in names[1]
    shard_dim = 0 if reverse else 1
    return mesh.get_group(shard_dim), mesh.get_group(1 - shard_dim)


def _world_of_grid(
    shard: Communicator, replicate: Communicator, mode: TransportOptions
) -> Communicator:
    """The ranks of a grid, of which every rank knows its row and its column.

    Collective: along rows and columns.

    Raises:
        ValueError: on every rank, when rows and columns do not make a grid.
    """
    op_name = "comparing process groups"
    mine = (tuple(shard.ranks), tuple(replicate.ranks))
    row = shard.gather_objects(mine, op_name=op_name)
    rows = replicate.gather_objects(row, op_name=op_name)
    everyone = [pair for one in rows for pair in one]
    # Wrong groups may show only on some ranks: all that can be reached hear it,
    # or some would raise and the others wait for them.
    problem = _what_is_wrong(mine, everyone)
    problems = shard.gather_objects(problem, op_name=op_name)
    reached = [p for some in replicate.gather_objects(problems, op_name=op_name) for p in some]
    problem = next((p for p in reached if p), None)
    if problem:
        raise ValueError(
            f"ShardedWrapper: process_group=(shard_group, replicate_group): {problem}. Every rank "
            "must be in one shard group and one replicate group, all shard groups equally "
            "large, each replicate group with one rank of every shard group."
        )
    ranks = sorted(rank for ranks, _ in everyone[:: shard.size] for rank in ranks)
    for group in (shard, replicate):
        if group.ranks == ranks:
            return group
    if dist.get_process_group_ranks(dist.group.WORLD) == ranks:
        return communicator(dist.group.WORLD, mode=mode)
    return subgroup(shard, ranks)


def _what_is_wrong(
    mine: tuple[tuple[int, ...], tuple[int, ...]],
    everyone: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> str | None:
    """Compare the (row, column) pairs of all ranks that this rank can reach."""
    row, column = mine
    if len(set(row) & set(column)) != 1:
        return f"shard group {list(row)} and replicate group {list(column)} share several ranks"
    for other_row, other_column in everyone:
        if len(other_row) != len(row) or len(other_column) != len(column):
            return (
                f"groups of different sizes: shard groups {list(row)} and {list(other_row)}, "
                f"replicate groups {list(column)} and {list(other_column)}"
            )
        if len(set(other_row) & set(column)) != 1 or len(set(other_column) & set(row)) != 1:
            return (
                f"shard groups {list(row)} and {list(other_row)}, replicate groups "
                f"{list(column)} and {list(other_column)} overlap"
            )
    return None


# ---------------------------------------------------------------- communicators of groups

_communicators: dict[dist.ProcessGroup, dict[TransportOptions, Communicator]] = {}
"""Kept as long as the group, also between models: the groups made for it live as long."""


def communicator(group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> Communicator:
    """The communicator of a process group, made at the first call; None gives ``ALONE``.

    Collective at the first call for a group and a value of ``mode``.
    """
    if group is None:
        return ALONE
    if group not in _communicators:
        # Destroyed groups would otherwise keep their transports' threads alive.
        forget_destroyed()
    known = _communicators.setdefault(group, {})
    if mode not in known:
        known[mode] = Communicator(group, mode=mode)
    return known[mode]


def forget_destroyed() -> None:
    """Let go of the groups that were destroyed, and so of their threads."""
    for destroyed in [one for one in _communicators if not exists(one)]:
        del _communicators[destroyed]


def subgroup(parent: Communicator, ranks: Sequence[int]) -> Communicator:
    """The communicator of some of the parent's ranks, of which this rank is one.

    Collective: these ranks, at the first call for them.

    Args:
        parent: what backend and timeout are taken from.
        ranks: numbers in the default group.
    """
    if len(ranks) == 1:
        return ALONE
    if list(ranks) == list(parent.ranks):
        return parent
    known = parent.subgroups
    if tuple(ranks) not in known:
        assert parent.group is not None
        with named(f"ShardedWrapper, rank {parent.global_rank}: meeting ranks {list(ranks)}"):
            group = new_group(parent.group, ranks)
        known[tuple(ranks)] = communicator(group, mode=parent.options)
    return known[tuple(ranks)]
