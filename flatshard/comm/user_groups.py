"""``process_group`` and ``device_mesh``: the ranks that a user names, checked on all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flatshard.comm.communicator import Communicator, gather_before
from flatshard.comm.topology import Ranks, communicator, subgroup
from flatshard.options.collectives import TransportOptions


class _Claim(NamedTuple):
    """What a rank was given."""

    rank: int
    mode: str
    groups: list[list[int]]  # global ranks: of all, or of the shard and the replicate group


def read_ranks(process_group: Any, device_mesh: Any, *, mode: TransportOptions) -> Ranks:
    """Read ``process_group`` and ``device_mesh``; without either this rank is alone.

    Collective if there is a group.

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
    groups = _as_groups(process_group)
    claims = _compare(groups, mode)
    comms = [communicator(group, mode=mode) for group in groups]
    if len(comms) < 2:
        world = comms[0] if comms else communicator(None)
        return Ranks(world, None, _ranks_per_node(), mode)
    shard, replicate = comms
    ranks = sorted({claim.rank for claim in claims})
    return Ranks(_world_of(shard, replicate, ranks), (shard, replicate), _ranks_per_node(), mode)


def _as_groups(process_group: Any) -> tuple[dist.ProcessGroup, ...]:
    """None, one group, or a pair."""
    if process_group is None:
        return ()
    if not isinstance(process_group, tuple | list):
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup, got {process_group!r}")
        return (process_group,)
    groups = tuple(process_group)
    if len(groups) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise TypeError(
            f"process_group: expected one group or a pair (shard group, replicate group), "
            f"got {process_group!r}"
        )
    return groups


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


def _ranks_per_node() -> int | None:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return count or None


def _world_of(shard: Communicator, replicate: Communicator, ranks: list[int]) -> Communicator:
    """The communicator of all ``ranks`` of a grid. Collective."""
    for group in (shard, replicate):
        if group.ranks == ranks:
            return group
    if dist.get_process_group_ranks(dist.group.WORLD) == ranks:
        return communicator(dist.group.WORLD, mode=shard.options)
    return subgroup(shard, ranks)


# ---------------------------------------------------------------- what other ranks were given


def _compare(groups: Sequence[dist.ProcessGroup], mode: TransportOptions) -> list[_Claim]:
    """What all ranks were given, if that fits together. Collective: all that groups reach.

    Raises:
        ValueError: on every rank that the groups reach, where it does not.
    """
    if not groups:
        return []
    members = [dist.get_process_group_ranks(group) for group in groups]
    # Before a communicator is made: modes decide which groups ranks make for it.
    claims = _through(groups, _Claim(dist.get_rank(), mode.describe(), members))
    # What is wrong may show only on some ranks, and the others would wait for them.
    problem = next(filter(None, _through(groups, _problem(claims, members))), None)
    if problem is not None:
        raise ValueError(f"ShardedWrapper: {problem}")
    return claims


def _through(groups: Sequence[dist.ProcessGroup], value: Any) -> list[Any]:
    """The values of all ranks in this rank's row and, through them, in their columns."""
    values = [value]
    for group in groups:
        gathered = gather_before(group, values, op_name="ShardedWrapper: comparing process groups")
        values = list(chain.from_iterable(gathered))
    return values


def _problem(claims: list[_Claim], members: list[list[int]]) -> str | None:
    for claim in claims:
        if claim.mode != claims[0].mode:
            return (
                f"rank {claims[0].rank} has {claims[0].mode}; rank {claim.rank} has {claim.mode}. "
                "Pass the same collectives and wire_dtype on every rank."
            )
    if len(members) == 1:
        return None
    row, column = members
    problem = _grid_problem(row, column, [claim.groups for claim in claims])
    return problem and (
        f"process_group=(shard_group, replicate_group): {problem}. Every rank must be in one shard "
        "group and one replicate group, all shard groups equally large, each replicate group with "
        "one rank of every shard group."
    )


def _grid_problem(row: list[int], column: list[int], others: list[list[list[int]]]) -> str | None:
    """Compare this rank's shard and replicate group with those of the ranks that it reaches."""
    if len(set(row) & set(column)) != 1:
        return f"shard group {row} and replicate group {column} share several ranks"
    for other_row, other_column in others:
        groups = f"shard groups {row} and {other_row}, replicate groups {column} and {other_column}"
        if len(other_row) != len(row) or len(other_column) != len(column):
            return f"groups of different sizes: {groups}"
        if len(set(other_row) & set(column)) != 1 or len(set(other_column) & set(row)) != 1:
            return f"{groups} overlap"
    return None
