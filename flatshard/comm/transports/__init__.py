"""``Transport``: one way to move flat parameters and gradients between the ranks of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.host_exchange import HOST, HostExchange
from flatshard.comm.process_groups import backend_for, control_of, is_fake, new_group, ranks_text
from flatshard.comm.work import AsyncWork, named
from flatshard.memory import AllocatedBuffer, BufferMemory, OffloadTarget
from flatshard.options import Collectives, TransportOptions


class Members:
    """The ranks of one process group, and the process groups that flatshard makes from these ranks.

    ``rank`` and ``peers`` are ranks in the group; ``ranks`` are ranks in the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: TransportOptions) -> None:
        """Make the process groups. Collective: all ranks of ``group``."""
        self.group, self.options = group, options
        self.rank, self.global_rank = 0, 0
        self.ranks: tuple[int, ...] = (0,)
        if group is not None:
            self.rank, self.global_rank = dist.get_rank(group), dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size = len(self.ranks)
        # The first peer is the next rank, so that not all ranks send to rank 0 first.
        self.peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.ranks_text = ranks_text(self.ranks)  # the ranks as a text, for messages
        self.connecting = f"ShardedWrapper, rank {self.global_rank}: connecting to the other ranks"
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
        # Sockets must not send messages in the user's `group`: an error would abort the group, and
        # tags could match the tags of the user's messages.
        for_sockets = self.is_gloo and self.options.collectives is not Collectives.NATIVE
        # Reductions get their own group. In one group, collectives match only by order, but ranks
        # may start a reduction between different all-gathers.
        with named(self.connecting):
            self.gather_group = new_group(group) if for_sockets else group
            self.reduce_group = new_group(group)
            # If gloo runs the all-gathers, small values get their own group, too. Otherwise gloo
            # could match an all-gather with another rank's small value, and end the process.
            control = new_group(group) if self.is_gloo and not for_sockets else self.gather_group
            self.host = HostExchange(*control_of(control), self.reduce_group.group_name)
        self.history, self.is_fake = self.host.history, is_fake(self.gather_group)


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Average the rows (one per rank) into ``out``, in rank order and in the dtype of ``out``.

    The first row may be ``out`` itself.
    """
    # Add row by row. A kernel that adds all rows at once would choose an order by the tensors'
    # sizes, and rounding depends on the order.
    if rows[0].data_ptr() != out.data_ptr():
        out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out``, which may be ``total`` itself, with ``total / number``."""
    if number & (number - 1) == 0 and not total.is_complex():
        # For a power of two, the product is bitwise equal to the quotient, and takes half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)


class Gather(NamedTuple):
    """Arguments of an all-gather: of parameters, or of averages from a ``ReduceScatter``."""

    # This rank's part, (shard_numel,). Must not be written until all ranks have received the part.
    shard: Tensor
    out: Tensor  # receives the parts of all ranks, (shard_numel * size,), same dtype and device
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    purpose: str  # purpose of the all-gather, such as "forward", for error messages

    # The memory of ``out``, if ``out`` is an unsharded buffer.
    memory: BufferMemory | None = None
    exact: bool = False  # whether the values are sent unrounded, even with a ``wire_dtype``
    reduced: bool = False  # whether this is the second half of an all-reduce of gradients


class ReduceScatter(NamedTuple):
    """Arguments of a reduce-scatter: each rank gets the average of one shard of the gradients."""

    # This rank's gradients, (shard_numel * size,). The transport may overwrite the gradients.
    full: Tensor
    # Receives this rank's shard of the averages, (shard_numel,). Gradients are added in the dtype
    # of ``out``, which may be wider than the dtype of ``full``.
    out: Tensor
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    fixed_order: bool = False  # whether gradients must be added in rank order

    kind: str = "reduce"  # or "all_reduce": the first half of an all-reduce of gradients


class BufferRequest(NamedTuple):
    """Arguments of ``allocate_unsharded``: a host buffer, for shards sent without a cast."""

    numel: int  # number of elements of the buffer, which holds the shards of all ranks
    dtype: torch.dtype  # dtype of the buffer and of the shards
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    shard_target: OffloadTarget  # where this rank's shard is stored (memory or disk)


class Transport:
    """A way for the ranks of one group to all-gather parameters and average gradients.

    This base class serves groups of one rank, and sends nothing.
    """

    name = "nothing"  # name of the transport, for reports and messages
    reason = ""  # why the group uses this transport, for ``unit_report``; may be empty

    host_only = False  # whether the transport moves only tensors in host memory
    max_tag: float = math.inf  # the transport moves only flat parameters with a smaller tag
    is_ordered = False  # whether collectives of ranks match by order, not by the parameter's tag
    adds_here = True  # whether flatshard adds gradients ([Note: sums] in `communicator.py`)
    gathers_in_background = False  # whether all-gathers progress while the host computes

    @classmethod
    def connect(cls, members: Members) -> Transport | str:
        """Return a transport for the group, or a text that says why the group cannot use the class.

        The text is for ``unit_report``, and empty if the user's options exclude the transport.
        Collective: either all ranks return a transport, or all ranks return a text.
        """
        return ""

    def forget(self, tag: int) -> None:
        """Drop all records about a tag, because its flat parameter was freed."""

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order. Collective."""
        request.out.copy_(request.shard)
        return AsyncWork([], op_name)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """Begin averaging gradients; each rank gets its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls.
        """
        raise NotImplementedError("internal error: a reduce-scatter in a group of one rank")

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Return memory for an unsharded buffer, which may include memory for this rank's shard."""
        return AllocatedBuffer(request.numel, request.dtype, HOST)

    def stream_waits(self, device: torch.device) -> bool:
        """Whether a wait for other ranks blocks a stream of ``device``, and not the host."""
        return device.type == "cuda"

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        """Return the dtype in which a reduce-scatter of ``dtype`` adds: the dtype of ``out``."""
        is_narrow = dtype.is_floating_point and dtype.itemsize < 4
        return torch.float32 if is_narrow and (fixed_order or self.adds_here) else dtype
