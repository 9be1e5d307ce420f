"""``Ranks``: the ranks that train a model, and the groups for each sharding strategy."""

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from flatshard.comm.communicator import ALONE, AUTO, Communicator, Topology
from flatshard.comm.process_groups import abort, come_to_rest, made_here, new_group, ranks_text
from flatshard.comm.work import named
from flatshard.options import Placement, TransportOptions


@dataclass(frozen=True)
class Ranks:
    """The ranks that train a model, and how HYBRID strategies divide them into groups."""

    world: Communicator  # all ranks that train the model

    # The user's shard group and replicate group. None: HYBRID strategies shard within a node.
    grid: tuple[Communicator, Communicator] | None
    ranks_per_node: int | None  # number of ranks on each node; None: unknown
    mode: TransportOptions  # the user's choice of transport

    # Results of `resolve`, keyed by the properties of the strategy.
    _known: dict[Placement, Topology] = field(default_factory=dict, repr=False)

    def describe(self) -> str:
        """Return a text about the division into groups, for ranks to compare."""
        if self.grid is None:
            return f"{self.ranks_per_node} ranks per node"
        shard, replicate = self.grid
        return f"{shard.size} ranks share a copy, {replicate.size} copies"

    def resolve(self, placement: Placement) -> Topology:
        """Return the groups of ranks for a sharding strategy with the properties ``placement``.

        Collective at the first call for each placement, which makes the groups: all ranks.
        """
        if placement not in self._known:
            found = self._resolve(placement)
            wire_dtype = self.mode.wire_dtype
            if wire_dtype is not None and found.replicate.size > 1:
                raise ValueError(
                    f"wire_dtype={wire_dtype}: gradients are averaged over "
                    f"{found.replicate.size} replicas by the backend, which cannot round them. "
                    "Use a strategy that shards over all ranks (FULL_SHARD, "
                    "HYBRID_SHARD_OP), or wire_dtype=None."
                )
            self._known[placement] = found
        return self._known[placement]

    def _resolve(self, placement: Placement) -> Topology:
        world = self.world
        # NO_SHARD: every rank holds all parameters. Gradients are all-reduced over all ranks.
        shard, replicate = (world, ALONE) if placement.sharded else (ALONE, world)
        if placement.hybrid:
            shard, replicate = self.grid or self._by_node()
        group = _post_forward_group(shard, placement)
        if placement.over_all:
            # HYBRID_SHARD_OP: reduce-scatter among the ranks of a node, then among the nodes.
            return Topology(world, world, ALONE, shard, replicate, group)
        return Topology(world, shard, replicate, intra_group=shard, post_forward_group=group)

    def _by_node(self) -> tuple[Communicator, Communicator]:
        """Return the shard group (this node's ranks) and the replicate group. Collective."""
        size = self.ranks_per_node
        if self.world.size == 1:
            return self.world, ALONE
        if size is None:
            raise ValueError(
                "ShardedWrapper: a HYBRID strategy shards within each node, but LOCAL_WORLD_SIZE "
                "is not set, so the nodes are not known. Launch with torchrun, give srun "
                "--ntasks-per-node, or pass "
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
        me = self.world.global_rank
        node = nodes[me // size]
        column = [ranks[node.index(me)] for ranks in nodes.values()]
        return subgroup(self.world, node), subgroup(self.world, column)


def _post_forward_group(shard: Communicator, placement: Placement) -> Communicator | None:
    size = placement.regather_size
    if size is None or size == shard.size:
        return None
    if shard.size % size:
        raise ValueError(
            f"reshard_after_forward={size}: expected a divisor of {shard.size}, the number of "
            "ranks that share the parameters. Pass True, False or a divisor."
        )
    start = shard.rank // size * size
    return subgroup(shard, shard.ranks[start : start + size])


# ---------------------------------------------------------------- communicators of groups

# Communicators, keyed by process group and transport options. All models on a group share them.
_communicators: dict[tuple[dist.ProcessGroup, TransportOptions], Communicator] = {}


def communicator(group: dist.ProcessGroup, *, mode: TransportOptions = AUTO) -> Communicator:
    """Return the communicator of a process group. The first call is collective."""
    if (group, mode) not in _communicators:
        # Free the communicators of destroyed groups, because their transports have threads. A
        # program may make and destroy process groups many times.
        forget_destroyed()
        _communicators[group, mode] = Communicator(group, mode=mode)
    return _communicators[group, mode]


def forget_destroyed() -> None:
    """Drop the communicators of destroyed process groups, so that the transports' threads end."""
    for group, mode in list(_communicators):
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):
            one = _communicators.pop((group, mode))
            if one.size == 1:
                continue
            # Abort first: after an error, another rank may never begin a collective that this rank
            # has begun, and the destructor of a gloo group would wait for it until the timeout.
            for part in {one.gather_group, one.reduce_group, one.host.group} & made_here():
                abort(part)


@atexit.register
def _end() -> None:
    groups = made_here()
    for one in _communicators.values():
        if one.size > 1 and one.reduce_group in groups:
            groups.add(one.gather_group)  # missing in `made_here()` if the user made the group
    come_to_rest(groups)


def subgroup(parent: Communicator, ranks: Sequence[int]) -> Communicator:
    """Return a communicator of some ranks of ``parent``, with the parent's backend and options.

    ``ranks`` are ranks in the default group, this rank among them. Collective at the first call
    with these ``ranks``, which makes the group: all ``ranks``.
    """
    if len(ranks) == 1:
        return ALONE
    if tuple(ranks) == parent.ranks:
        return parent
    known = parent.subgroups
    if tuple(ranks) not in known:
        assert parent.group is not None, "a group of several ranks"
        with named(f"ShardedWrapper, rank {parent.global_rank}: connecting to {ranks_text(ranks)}"):
            group = new_group(parent.group, ranks)
        known[tuple(ranks)] = communicator(group, mode=parent.options)
    return known[tuple(ranks)]
