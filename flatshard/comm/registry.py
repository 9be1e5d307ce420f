"""Which communicator the ranks of a process group have: one for each way to move tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from flatshard.comm.communicator import ALONE, AUTO, Communicator
from flatshard.comm.process_groups import exists, named, new_group
from flatshard.options.collectives import TransportOptions

_communicators: dict[dist.ProcessGroup, dict[TransportOptions, Communicator]] = {}
"""Kept as long as the group, also between models: the groups made for it live as long."""


def communicator(group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> Communicator:
    """The communicator of a process group, made at the first call; None gives ``ALONE``.

    Collective at the first call for a group and a value of ``mode``.
    """
    if group is None:
        return ALONE
    if group not in _communicators:
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
    known = parent._subgroups
    if tuple(ranks) not in known:
        assert parent.group is not None
        with named(f"ShardedWrapper, rank {parent.global_rank}: meeting ranks {list(ranks)}"):
            group = new_group(parent.group, ranks)
        known[tuple(ranks)] = communicator(group, mode=parent._mode)
    return known[tuple(ranks)]
