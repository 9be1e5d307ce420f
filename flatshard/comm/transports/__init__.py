"""``Transport``: one way to move flat parameters and gradients between the ranks of a group.

This module also averages over ranks, in rank order and at least in fp32, so that the averages are
the same in every run and with every transport that adds in flatshard's code.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.host_exchange import HostExchange
from flatshard.comm.process_groups import abort, is_fake
from flatshard.comm.work import AsyncWork, History, WaitCondition
from flatshard.memory.buffers import BufferMemory, allocate
from flatshard.memory.offload_target import OffloadTarget
from flatshard.options.transport_options import TransportOptions


class Members:
    """The part of a ``Communicator`` that transports use: the ranks and the process groups."""

    rank: int  # rank of this process within the group
    ranks: tuple[int, ...]  # global ranks of the members
    gather_group: dist.ProcessGroup
    # A second group of the same ranks, for reductions. Collectives of one group match by order, but
    # reductions and all-gathers may alternate differently on each rank. So in a single group, one
    # rank's all-gather could match another rank's reduction.
    reduce_group: dist.ProcessGroup
    host: HostExchange  # exchanges small values between the ranks
    options: TransportOptions
    history: History  # record of the collectives that this rank has begun in the group
    is_gloo: bool  # whether gloo is the backend for tensors in host memory

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_fake(self) -> bool:
        """Whether no other ranks exist (torch's "fake" backend)."""
        return is_fake(self.gather_group)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks of the group, beginning with the rank after this rank.

        Each rank begins with a different peer, so that not all ranks send to rank 0 first.
        """
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def begin(
        self, group: dist.ProcessGroup, kind: Hashable = None, *, what: str = ""
    ) -> WaitCondition | None:
        """Record that this rank begins a collective, and return the condition that ends the wait.

        Args:
            group: the process group on which the collective runs.
            kind: key of the collective, such as ``("gather", tag)``. The n-th collective with this
                key on one rank matches the n-th on every other rank. None: the name of ``group``,
                because the backend matches all collectives of a group only by order.
            what: description of the collective, equal on all ranks. "": ranks need not compare the
                collective.

        Returns:
            The condition that ends the wait for the collective; None if the host does not wait.
        """
        kind = group.group_name if kind is None else kind
        if self.is_gloo:
            return self.history.begin(kind, what, partial(abort, group))
        self.history.begin(kind, what)
        return None  # the host does not wait, because a stream waits for the collective

    def announce(self, what: str) -> None:
        """On gloo, compare ``what`` between ranks before a collective, if the order is new.

        ``what`` describes the collective that this rank is about to begin. The method is collective
        unless ``what`` has always followed the last two collectives.

        Raises:
            CollectiveError: ranks are about to begin different collectives. All ranks raise.
        """
        # gloo ends the process with SIGABRT if it receives more data than expected. So a rank that
        # is about to leave the usual order of collectives first waits here for all ranks, and
        # `meet` compares their descriptions. If the other ranks follow the usual order instead,
        # these ranks wait in the usual collective and this rank waits here. Deadlock detection then
        # ends the waits.
        is_safe = not self.is_gloo or not self.history.announces or self.history.is_usual(what)
        if what and not is_safe:
            self.host.meet(what)
            self.history.learn(what)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which flatshard adds values of ``dtype``: at least fp32."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Average the rows (one per rank) into ``out``, in rank order and in the dtype of ``out``."""
    # Add the rows one by one, in rank order. A kernel that adds all rows at once would choose the
    # order by the sizes of the tensors, and rounding depends on the order.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``.

    ``out`` has the dtype of ``total``, and may be ``total`` itself.
    """
    if number & (number - 1) == 0 and not total.is_complex():
        # For a power of two the product is bitwise equal to the quotient, and takes half the time.
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
    purpose: str  # what the all-gather is for, such as "forward", for error messages

    # The ``BufferMemory`` whose ``buffer`` is ``out``, if ``out`` comes from
    # ``allocate_unsharded``. None: ``out`` was allocated in another way.
    memory: BufferMemory | None = None
    # Whether the values are sent unrounded, even if the user chose a narrower ``wire_dtype``.
    exact: bool = False
    # Whether this all-gather is the second half of an all-reduce of gradients. Then ranks begin the
    # all-gather in the order of their reductions, not in the order of their other all-gathers.
    reduced: bool = False


class ReduceScatter(NamedTuple):
    """Arguments of a reduce-scatter: each rank gets the average of one shard of the gradients."""

    # This rank's gradients, (shard_numel * size,). The transport may overwrite the gradients.
    full: Tensor
    # Receives this rank's shard of the averages, (shard_numel,), in the dtype in which the
    # transport adds.
    out: Tensor
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    fixed_order: bool = False  # whether to add in rank order, even if the backend would not

    # "reduce", or "all_reduce" if this reduce-scatter is the first half of an all-reduce. The
    # second half is a ``Gather`` with ``reduced``.
    kind: str = "reduce"


class BufferRequest(NamedTuple):
    """Arguments of ``allocate_unsharded``, which allocates the memory of an unsharded buffer."""

    numel: int  # number of elements of the buffer, which holds the shards of all ranks
    dtype: torch.dtype  # dtype of the buffer, and of the values that the all-gather sends
    device: torch.device
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``

    # If the memory of this rank's shard may be mapped into the buffer: the offload target (memory
    # or disk) in which this memory is made. All-gathers need not copy a mapped shard. None: do not
    # map.
    shard_target: OffloadTarget | None = None


class Transport(abc.ABC):
    """A way for the ranks of one group to all-gather parameters and average gradients.

    To add a transport, write a subclass in a new file, and add the class to ``transport_kinds``.
    """

    name: str  # name of the transport, for reports and messages
    reason = ""  # why the group uses this transport, for ``unit_report``; may be empty

    # How the transport matches the collectives of different ranks. True: by the order in which each
    # rank begins collectives, so all ranks must begin them in the same order. False: by the tag of
    # the flat parameter.
    is_ordered = False
    # Whether flatshard's code adds gradients, in rank order and at least in fp32. False: the
    # backend of the process group adds gradients.
    adds_here = True
    # Whether an all-gather makes progress on the network while the host computes. If so, starting
    # all-gathers early saves time.
    gathers_in_background = False

    @classmethod
    @abc.abstractmethod
    def connect(cls, members: Members) -> Transport | str:
        """Return a transport for the group, or the reason why the group cannot use this class.

        The reason is a text for ``unit_report``, or "" if the user's options exclude the transport.
        Collective: either all ranks return a transport or all ranks return a reason.
        """

    @abc.abstractmethod
    def accepts(self, device: torch.device, tag: int) -> bool:
        """Whether the transport can move the flat parameter with ``tag`` on ``device``.

        The result must be the same on all ranks.
        """

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

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Only ``NativeTransport`` and ``LocalTransport`` override this method: no other transport is
        used for an all-reduce.
        """
        raise NotImplementedError(f"the transport {self.name} has no all-reduce.")

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Return memory for an unsharded buffer, which later calls of ``gather`` fill."""
        return allocate(request.numel, request.dtype, request.device)

    def stream_waits(self, device: torch.device) -> bool:
        """Whether waits for other ranks block a stream of ``device`` instead of the host."""
        return False

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        """Return the dtype of sums in a reduce-scatter of values of ``dtype``.

        ``ReduceScatter.out`` must have this dtype. ``fixed_order``: the value of
        ``ReduceScatter.fixed_order``.
        """
        return sum_dtype(dtype) if fixed_order or self.adds_here else dtype

    def warm_up(  # noqa: B027 (nothing to open)
        self, device: torch.device, *, fixed_order: bool, replicas: bool
    ) -> None:
        """Open the connections that reductions of gradients on ``device`` will use.

        A second call with the same arguments does nothing. Collective: all ranks of the group.

        Args:
            device: device of the gradients.
            fixed_order: whether the backend only exchanges gradients, and flatshard adds the
                gradients in rank order.
            replicas: whether the reductions are all-reduces instead of reduce-scatters.
        """


class LocalTransport(Transport):
    """Transport of a group of one rank: copies on the current stream, and sends nothing."""

    name = "nothing"

    @classmethod
    def connect(cls, members: Members) -> LocalTransport:
        return cls()

    def accepts(self, device: torch.device, tag: int) -> bool:
        return True

    def stream_waits(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        return dtype  # nothing is added

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        request.out.copy_(request.shard)
        return AsyncWork([], op_name)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        raise NotImplementedError("internal error: a reduce-scatter in a group of one rank")

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        return AsyncWork([], op_name, [buffer])
