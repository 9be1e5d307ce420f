"""``Topology``: the groups over which one unit shares its parameters and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flatshard.comm.communicator import ALONE, Communicator
from flatshard.comm.work import named


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
        """Open connections for reductions on ``device``, where streams wait for them. Collective.

        With ``fixed_order`` gradients are only exchanged, and added here.
        """
        for group in (self.intra_group, self.inter_group, self.replicate):
            transport, replicas = group.transport_for(device), group is self.replicate
            if transport.stream_waits(device):
                with named(group.meeting):
                    transport.warm_up(device, fixed_order=fixed_order, replicas=replicas)

    @property
    def transport(self) -> str:
        """What moves its parameters and gradients, in words."""
        groups = (self.intra_group, self.inter_group)
        ways = [group.transport_for().name for group in groups if group.size > 1]
        if self.replicate.size > 1:
            ways.append(self.replicate.transports[-1].name)  # all-reduces
        return " + ".join(dict.fromkeys(ways)) or ALONE.transport_for().name

    @property
    def transport_reason(self) -> str:
        """Why ``transport`` is what it is, where ranks found that out."""
        reasons = [group.transport_reason for group in (self.intra_group, self.inter_group)]
        return "; ".join(dict.fromkeys(filter(None, reasons)))
