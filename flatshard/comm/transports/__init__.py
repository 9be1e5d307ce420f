"""``Transport``: one way to move flat parameters and gradients between the ranks of a group.

This module also averages over ranks, in rank order and at least in fp32: the averages are the same
in every run, with every transport that adds in flatshard's code.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.host_exchange import HOST, HostExchange
from flatshard.comm.process_groups import backend_for, control_of, is_fake, new_group, ranks_text
from flatshard.comm.work import AsyncWork, named
from flatshard.memory import BufferMemory, OffloadTarget, allocate
from flatshard.options import Collectives, TransportOptions


class Members:
    """The ranks of one process group, and the process groups that flatshard makes of these ranks.

    Attributes:
        rank: rank of this process within the group.
        ranks: ranks of the members in the default group.
        peers: the other ranks of the group, as ranks in the group.
        host: exchanges small values between the ranks.
        history: record of the collectives that this rank has begun in the group.
        is_gloo: whether gloo is the backend for tensors in host memory.
        is_fake: whether no other ranks exist (torch's "fake" backend).
    """

    def __init__(self, group: dist.ProcessGroup | None, options: TransportOptions) -> None:
        """Collective if ``group`` has several ranks: all ranks of ``group``.

        Raises:
            ValueError: the group's backend does not support the requested ``options``.
        """
        self.group, self.options = group, options
        self.rank, self.global_rank = 0, 0
        # A tuple and not a list, because recorded collectives keep a reference to the ranks.
        self.ranks: tuple[int, ...] = (0,)
        if group is not None:
            self.rank, self.global_rank = dist.get_rank(group), dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size = len(self.ranks)
        # Each rank begins with the rank after itself, so that not all ranks send to rank 0 first.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.ranks_text = ranks_text(self.ranks)  # the ranks as a text, for messages
        self.meeting = f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"
        self.host = HostExchange(None, HOST)
        if group is not None and self.size > 1:
            self._meet(group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        self.is_gloo = backend_for(group, "cpu") == "gloo"
        if not self.is_gloo and self.options.needs_gloo:
            raise ValueError(
                f"ShardedWrapper, rank {self.global_rank}: {self.options.needs_gloo} is for "
                "process groups whose backend is gloo, but the backend of this group is "
                f"{dist.get_backend(group)}. Leave the option out, or make the group with "
                'backend="gloo".'
            )
        # After an error flatshard aborts its groups, and the socket transport has its own tags.
        # Neither may affect the user's collectives on `group`.
        is_apart = self.is_gloo and self.options.collectives is not Collectives.NATIVE
        # The collectives of one group match only by order, and ranks may alternate all-gathers and
        # reductions differently: a reduction starts as soon as its gradients are complete. So use
        # two groups.
        with named(self.meeting):
            self.gather_group = new_group(group) if is_apart else group
            self.reduce_group = new_group(group)
            # The native transport begins all-gathers without comparing with the other ranks first.
            # If one rank exchanged a small value on the same group meanwhile, gloo would see two
            # sizes and end the process. So on gloo, small values get a third group.
            control = new_group(group) if self.is_gloo and not is_apart else self.gather_group
            self.host = HostExchange(*control_of(control), self.reduce_group.group_name)
        self.history, self.is_fake = self.host.history, is_fake(self.gather_group)


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Average the rows (one per rank) into ``out``, in rank order and in the dtype of ``out``."""
    # Add row by row: a kernel that adds all rows at once would choose the order by the sizes of the
    # tensors, and rounding depends on the order.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``.

    ``out`` has the dtype of ``total``, and may be ``total`` itself.
    """
    if number & (number - 1) == 0 and not total.is_complex():
        # The product is bitwise equal to the quotient, and takes half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)


class Gather(NamedTuple):
    """Arguments of an all-gather of parameters, or of averages from a ``ReduceScatter``."""

    # This rank's part, (shard_numel,). Must not be written until all ranks have received the part.
    shard: Tensor
    out: Tensor  # receives the parts of all ranks, (shard_numel * size,), same dtype and device
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    purpose: str  # purpose of the all-gather, such as "forward", for error messages

    # The ``BufferMemory`` of ``out``, if ``out`` comes from ``allocate_unsharded``.
    memory: BufferMemory | None = None
    # Whether the values are sent unrounded, even if the user chose a narrower ``wire_dtype``.
    exact: bool = False
    # Whether this is the second half of an all-reduce of gradients, in the order of the reductions.
    reduced: bool = False


class ReduceScatter(NamedTuple):
    """Arguments of a reduce-scatter: each rank gets the average of one shard of the gradients."""

    # This rank's gradients, (shard_numel * size,). The transport may overwrite the gradients.
    full: Tensor
    # Receives this rank's shard of the averages, (shard_numel,). The dtype of ``out`` is the dtype
    # in which gradients are added, and may be wider than the dtype of ``full``.
    out: Tensor
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    fixed_order: bool = False  # whether to add in rank order, even if the backend would not

    # "reduce"; or "all_reduce" if this reduce-scatter is the first half of an all-reduce, whose
    # second half is a ``Gather`` with ``reduced``.
    kind: str = "reduce"


class BufferRequest(NamedTuple):
    """Arguments of ``allocate_unsharded``, which allocates the memory of an unsharded buffer."""

    numel: int  # number of elements of the buffer, which holds the shards of all ranks
    dtype: torch.dtype  # dtype of the buffer, and of the values that the all-gather sends
    device: torch.device
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``

    # Offload target (memory or disk) for the shard's memory, if it may be mapped into the buffer:
    # all-gathers need not copy a mapped shard. None: do not map.
    shard_target: OffloadTarget | None = None


class Transport(abc.ABC):
    """A way for the ranks of one group to all-gather parameters and average gradients.

    To add a transport, write a subclass in a new file, and add the class to ``transport_kinds``.
    """

    name: str  # name of the transport, for reports and messages
    reason = ""  # why the group uses this transport, for ``unit_report``; may be empty

    # Whether the transport moves only tensors in host memory.
    host_only = True
    # The transport moves only flat parameters with smaller tags.
    max_tag: float = math.inf
    # Whether collectives of different ranks match by order, and not by the flat parameter's tag.
    is_ordered = False
    # Whether flatshard's code, and not the backend, adds gradients ([Note: sums]).
    adds_here = True
    # Whether an all-gather progresses while the host computes, so that an early start saves time.
    gathers_in_background = False

    @classmethod
    def connect(cls, members: Members) -> Transport | str:
        """Return a transport for the group, or the reason why the group cannot use this class.

        The reason is for ``unit_report``; "" if the user's options exclude the transport.
        Collective: all ranks return a transport, or all a reason.
        """
        return ""

    def forget(self, tag: int) -> None:  # noqa: B027 (only transports that match by tag keep any)
        """Drop what the transport keeps about a tag, because the flat parameter was freed."""

    @abc.abstractmethod
    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group. ``op_name`` names the all-gather in errors.
        """

    @abc.abstractmethod
    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """Begin averaging gradients over the ranks; each rank gets its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls. ``op_name`` names the
        reduce-scatter in errors.
        """

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Return memory for an unsharded buffer, which later calls of ``gather`` fill."""
        return allocate(request.numel, request.dtype, request.device)

    def stream_waits(self, device: torch.device) -> bool:
        """Whether waits for other ranks block a stream of ``device`` instead of the host."""
        return False

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        """Return the dtype in which a reduce-scatter of values of ``dtype`` adds.

        ``ReduceScatter.out`` must have this dtype.
        """
        is_narrow = dtype.is_floating_point and dtype.itemsize < 4
        return torch.float32 if is_narrow and (fixed_order or self.adds_here) else dtype


class LocalTransport(Transport):
    """Transport of a group of one rank: copies on the current stream, and sends nothing."""

    name, host_only = "nothing", False

    def stream_waits(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        request.out.copy_(request.shard)
        return AsyncWork([], op_name)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        raise NotImplementedError("internal error: a reduce-scatter in a group of one rank")
