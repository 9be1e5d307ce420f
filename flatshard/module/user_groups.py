"""Reads the arguments ``process_group`` and ``device_mesh``, and compares them between ranks."""

import os
from collections.abc import Iterable, Sequence, Set
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.comm.consistency import agreed
from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.process_groups import control_of, ranks_text
from flatshard.comm.ranks import Ranks, communicator, subgroup
from flatshard.options import TransportOptions

_Group = tuple[int, ...]  # the members of a group, as ranks in the default group


def read_ranks(process_group: Any, device_mesh: Any, *, mode: TransportOptions) -> Ranks:
    """Return the ranks that train a model, from the arguments of ``ShardedWrapper``.

    If ``process_group`` and ``device_mesh`` are both None, only this rank trains the model.
    Otherwise collective: all ranks of the groups.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise ValueError("ShardedWrapper: pass either process_group or device_mesh, not both.")
        process_group = _groups_of_mesh(device_mesh)
    groups = _as_groups(process_group)
    rows = _compare(groups, mode)
    comms = [communicator(group, mode=mode) for group in groups]
    if len(comms) < 2:
        return Ranks(comms[0] if comms else ALONE, None, _ranks_per_node(), mode)
    shard, replicate = comms
    return Ranks(_world_of(shard, replicate, rows), (shard, replicate), _ranks_per_node(), mode)


def _as_groups(process_group: Any) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups in the user's argument ``process_group``: zero, one or two groups."""
    if process_group is None:
        return ()
    is_pair = isinstance(process_group, tuple | list)
    groups = tuple(process_group) if is_pair else (process_group,)
    # `dist.new_group` returns NON_GROUP_MEMBER on ranks that are not members.
    if dist.GroupMember.NON_GROUP_MEMBER in groups:
        text = f"process_group: rank {dist.get_rank()} is not in this group."
        raise ValueError(f"{text} Call ShardedWrapper only on ranks of the group.")
    are_groups = all(isinstance(group, dist.ProcessGroup) for group in groups)
    if not are_groups or (is_pair and len(groups) != 2):
        raise TypeError(
            "process_group: expected a ProcessGroup, or a pair (shard group, replicate group), "
            f"got {process_group!r}. Pass a list of devices, DistributedDataParallel's second "
            "argument, as device_ids=[...]."
        )
    return groups


def _groups_of_mesh(mesh: Any) -> Any:
    """Return the group of a 1-D mesh, or the pair (shard group, replicate group) of a 2-D mesh."""
    if not (hasattr(mesh, "ndim") and hasattr(mesh, "get_group")):
        raise TypeError(f"device_mesh: expected a DeviceMesh of torch.distributed, got {mesh!r}.")
    if mesh.ndim == 1:
        return mesh.get_group()
    # If the dimensions have no names, assume the order of torch's FSDP: (replicate, shard). Refuse
    # dimensions with other names: with tensor parallelism, for example, the ranks of a dimension
    # have different parameters.
    names = mesh.mesh_dim_names or ("replicate", "shard")
    kinds = [[kind for kind in ("replica", "shard") if kind in name] for name in names]
    if mesh.ndim != 2 or kinds not in ([["replica"], ["shard"]], [["shard"], ["replica"]]):
        raise ValueError(
            'device_mesh: expected 1 dimension, or 2 dimensions whose names contain "replicate" '
            f'and "shard" (such as dp_shard), got {mesh.ndim} named {mesh.mesh_dim_names}. Pass '
            "only the dimensions over which the model's inputs are split, such as "
            'mesh["dp"], or process_group=(shard_group, replicate_group).'
        )
    shard_dim = kinds.index(["shard"])
    return mesh.get_group(shard_dim), mesh.get_group(1 - shard_dim)


def _ranks_per_node() -> int | None:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    # Use SLURM's variables only if srun has started the ranks: then SLURM_NTASKS is the world size.
    # In a job's shell, SLURM sets the variables, too, but torchrun may start more or fewer ranks.
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if not value and os.environ.get("SLURM_NTASKS") == str(world_size):
        value = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    return torch.accelerator.device_count() or None  # 0 without an accelerator


def _world_of(shard: Communicator, replicate: Communicator, rows: Iterable[_Group]) -> Communicator:
    """Return the communicator of all ranks of the user's groups, which form a grid. Collective."""
    size = shard.size * replicate.size
    for group in (shard, replicate):
        if group.size == size:
            return group
    if size == dist.get_world_size():
        return communicator(dist.group.WORLD, mode=shard.options)  # type: ignore[arg-type]
    return subgroup(shard, sorted(chain.from_iterable(rows)))


# ---------------------------------------------------------------- comparison between ranks

_COMPARING = "ShardedWrapper: comparing process groups"
_PAIR = "process_group=(shard_group, replicate_group)"


def _compare(groups: Sequence[dist.ProcessGroup], mode: TransportOptions) -> Set[_Group]:
    """Check that all ranks passed the same options, and that the ranks' groups form a grid.

    Each rank sends the members of its replicate group to its shard group, and the members of its
    shard group to its replicate group. Then each rank checks all groups that it knows, and returns
    the shard groups that it knows. Collective: all ranks of the groups.
    """
    members = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    several = ((place, group) for place, group in enumerate(groups) if group.size() > 1)
    hosts = {place: HostExchange(*control_of(group)) for place, group in several}
    # Compare the transport options before making communicators: with different options, some ranks
    # would make fewer process groups, and the other ranks would wait forever.
    facts = {
        "collectives": mode.collectives.value,
        "wire_dtype": str(mode.wire_dtype),
        "the number of process groups": str(len(groups)),
    }
    remedy = "Pass the same collectives, wire_dtype and process_group on every rank."
    agreed(lambda: (True, facts), hosts.values(), _COMPARING, remedy)
    rows, columns = known = (set(members[:1]), set(members[1:]))
    for place, host in hosts.items() if len(groups) == 2 else ():
        for their_place, their_crossing in host.gather((place, members[1 - place]), _COMPARING):
            known[their_place].add(members[place])
            known[1 - their_place].add(their_crossing)
    return agreed(lambda: (_check_grid(rows, columns), {}), hosts.values(), _COMPARING, "")


def _check_grid(rows: Set[_Group], columns: Set[_Group]) -> Set[_Group]:
    """Return the shard groups ``rows``, or raise ValueError if the groups are not a grid."""
    remedy = (
        "Every rank must be in one shard group and one replicate group, all shard groups equally "
        "large, each replicate group with one rank of every shard group."
    )
    for kind, groups in (("shard", rows), ("replicate", columns)):
        by_size = {len(group): group for group in groups}
        if len(by_size) > 1:
            first, second, *_ = (f"({ranks_text(by_size[size])})" for size in sorted(by_size))
            text = f"{_PAIR}: {kind} groups {first} and {second} have different sizes. {remedy}"
            raise ValueError(text)
    # Convert each group to a set only once: `product` returns each group many times.
    for row, column in product(map(frozenset, sorted(rows)), map(frozenset, sorted(columns))):
        if len(row & column) != 1:
            raise ValueError(
                f"{_PAIR}: shard group ({ranks_text(sorted(row))}) and replicate group "
                f"({ranks_text(sorted(column))}) share {len(row & column)} ranks, expected 1. "
                f"{remedy}"
            )
    return rows
