"""``Transport``: one way to move flat parameters and gradients between the ranks of a group.

[Note: scattered gradients]
``FlatChunks`` describes values of a flat parameter that lie in several tensors. With ``FlatChunks``
gradients are sent directly from the tensors that autograd made. Copying all gradients to one buffer
first would take as long as a fast network needs to send them. Only small gradients are copied into
a common tensor; ``ChunkPlan`` chooses these.

This module also computes sums over ranks, in rank order and at least in fp32, so that the sums are
the same in every run and on every transport.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
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
from flatshard.plan.layout import FlatLayout


class Members:
    """The part of a ``Communicator`` that transports use: the ranks and the process groups."""

    rank: int  # rank of this process within the group
    ranks: tuple[int, ...]  # global ranks of the members
    gather_group: dist.ProcessGroup
    # A group of the same ranks for reductions, so that the order of reductions is independent of
    # the order of all-gathers.
    reduce_group: dist.ProcessGroup
    host: HostExchange  # exchanges small values between the ranks
    options: TransportOptions
    is_gloo: bool  # whether gloo is the backend for tensors in host memory

    @property
    def history(self) -> History:
        """The history of this rank's collectives."""
        return self.host.history

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_fake(self) -> bool:
        """Whether no other ranks exist (torch's "fake" backend)."""
        return is_fake(self.gather_group)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks, beginning with the next rank, so that ranks send to different peers."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def begin(
        self, group: dist.ProcessGroup, kind: Hashable = None, *, what: str = ""
    ) -> WaitCondition | None:
        """Record that this rank begins a collective, and return the condition that ends the wait.

        Args:
            group: the group of the collective.
            kind: key that is the same for this collective on all ranks. None: the collectives of
                the group match by the order in which each rank begins them.
            what: description of the collective, equal on all ranks.

        Returns:
            The condition that ends the wait for the collective; None if the host does not wait.
        """
        kind = group.group_name if kind is None else kind
        if self.is_gloo:
            return self.history.begin(kind, what, partial(abort, group))
        self.history.begin(kind, what)
        return None  # a stream waits instead of the host

    def announce(self, what: str) -> None:
        """Raise CollectiveError on all ranks if ranks are about to begin different collectives."""
        # gloo ends the process with SIGABRT if it receives more data than expected. So a rank that
        # is about to leave the usual order of collectives first waits here for all ranks, and
        # `meet` compares the names. If the other ranks have begun the usual collective instead,
        # all ranks wait for each other, and deadlock detection ends the waits.
        is_safe = not self.is_gloo or not self.history.announces or self.history.is_usual(what)
        if what and not is_safe:
            self.host.meet(what)
            self.history.learn(what)


class Chunk(NamedTuple):
    """A range of elements of one part."""

    part: int  # index of the part
    offset: int  # where the elements begin in the part
    start: int  # range [start, end) of the elements in the flat parameter
    end: int
    values: Tensor | None  # None: zeros


@dataclass(frozen=True)
class FlatChunks:
    """Values for all elements of a flat parameter, for example gradients, in several tensors."""

    # Contiguous tensors of one dtype, one per range, each (end - start,). None: zeros.
    parts: Sequence[Tensor | None]
    ranges: Sequence[tuple[int, int]]  # [start, end) of each part; ascending, the same on all ranks
    numel: int  # number of all elements, padding included
    dtype: torch.dtype

    @classmethod
    def of(cls, buffer: Tensor) -> FlatChunks:
        """The values of one buffer, ``(numel,)``."""
        return cls([buffer], [(0, buffer.numel())], buffer.numel(), buffer.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """The parts that are tensors; parts of zeros have no tensor."""
        return [part for part in self.parts if part is not None]

    def cut(self, begin: int, end: int, numel: int | None = None) -> Iterator[Chunk]:
        """Yield the chunks of the range ``[begin, end)``, each with at most ``numel`` elements."""
        for index, (first, last) in enumerate(self.ranges):
            start, stop = max(first, begin), min(last, end)
            part = self.parts[index]
            step = numel or max(stop - start, 1)
            for at in range(start, stop, step):
                until = min(at + step, stop)
                values = None if part is None else part[at - first : until - first]
                yield Chunk(index, at - first, at, until, values)


class ChunkPlan:
    """Decides which gradients share a part of a ``FlatChunks``.

    A gradient of at least ``min_bytes`` becomes a part without a copy. Smaller gradients that are
    neighbours in the flat parameter are copied into a common part.
    """

    def __init__(self, layout: FlatLayout, min_bytes: int, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._runs: list[list[int]] = []
        # Ranks may have gradients of different parameters, but the ranges must be the same on all
        # ranks. So the ranges depend only on the layout.
        joins = False
        for index, span in enumerate(layout.spans):
            is_small = (span.end - span.start) * dtype.itemsize < min_bytes
            if joins and is_small:
                self._runs[-1].append(index)
            else:
                self._runs.append([index])
            joins = is_small

    def chunks(self, gradients: dict[int, Tensor]) -> FlatChunks:
        """Make chunks of gradients. Missing gradients count as zeros.

        ``gradients``: keyed by the parameter's index; elements in memory order, in any dtype. A
        gradient that is a part by itself is removed from ``gradients``.
        """
        spans = self._layout.spans
        ranges = [(spans[run[0]].start, spans[run[-1]].end) for run in self._runs]
        parts = [self._part(run, gradients) for run in self._runs]
        return FlatChunks(parts, ranges, self._layout.padded_numel, self._dtype)

    def _part(self, run: list[int], gradients: dict[int, Tensor]) -> Tensor | None:
        there = [index for index in run if index in gradients]
        if not there:
            return None
        if len(run) == 1:
            return gradients.pop(run[0]).to(self._dtype)  # no copy if the dtypes are equal
        spans, device = self._layout.spans, gradients[there[0]].device
        first = spans[run[0]].start
        part = torch.zeros(spans[run[-1]].end - first, dtype=self._dtype, device=device)
        places = [part[spans[i].start - first : spans[i].end - first] for i in there]
        torch._foreach_copy_(places, [gradients[index] for index in there])
        return part


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which values that were sent in ``dtype`` are added."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Average the rows (one per rank) into ``out``, in rank order and in the dtype of ``out``."""
    # Add one row after another: a kernel that adds all rows at once would choose an order that
    # depends on the sizes.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``. Same dtype; ``out`` may be the same tensor."""
    if number & (number - 1) == 0 and not total.is_complex():
        # For a power of two the product is bitwise equal to the quotient, and takes half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)


class Gather(NamedTuple):
    """An all-gather of parameters, or of the result of a ``ReduceScatter``."""

    shard: Tensor  # (shard_numel,); must not be written until the other ranks have received it
    out: Tensor  # (shard_numel * size,), same dtype and device
    unit_fqn: str
    tag: int  # tag of the flat parameter, from ``Communicator.new_tag``
    purpose: str  # purpose of the all-gather, for error messages
    # The result of ``allocate_unsharded`` if ``out`` lies in it; otherwise None.
    memory: BufferMemory | None = None
    exact: bool = False  # whether to send the values unrounded, even with a wire dtype
    # Whether this all-gather is the second half of an all-reduce. If so, its order among reductions
    # counts, and not its order among all-gathers.
    reduced: bool = False

    @property
    def what(self) -> str:
        """Description of the all-gather, equal on all ranks; "" if ranks need not compare it."""
        # The description leaves out the purpose, because all-gathers of one flat parameter match
        # even if ranks begin them for different purposes.
        if self.reduced:
            return ""
        return f"all-gather of {self.unit_fqn or 'the root unit'!r}, flat parameter {self.tag}"


class ReduceScatter(NamedTuple):
    """An average over the ranks; each rank gets one part."""

    # ``shard_numel * size`` elements: one part, or several parts if ``min_chunk_bytes`` is not
    # None. The values of a single part are undefined afterwards; several parts are not written.
    chunks: FlatChunks
    # (shard_numel,), in the dtype of the sum. Elements outside of the ranges of ``chunks`` are not
    # written.
    out: Tensor
    unit_fqn: str
    tag: int
    fixed_order: bool = False  # add in rank order, also on backends that add in another order
    # "all_reduce": this is the first half of an all-reduce; a ``Gather`` with ``reduced`` follows.
    kind: str = "reduce"


class BufferRequest(NamedTuple):
    """A request for the memory of an unsharded buffer."""

    numel: int  # number of elements over all ranks
    dtype: torch.dtype  # dtype of the buffer and of the all-gather
    device: torch.device
    tag: int  # tag of the flat parameter
    # Offload target of this rank's shard, if the buffer may map the shard's memory. Then
    # all-gathers need not copy the shard into the buffer.
    shard_target: OffloadTarget | None = None


class Transport(abc.ABC):
    """A way for the ranks of one group to all-gather parameters and average gradients.

    A new transport is a subclass in its own file and an entry in ``transport_kinds``.
    """

    name: str  # for reports and messages
    reason = ""  # why the group uses this transport
    # Whether collectives of different ranks match by the order in which they begin. False: by tag.
    is_ordered = False
    # Whether flatshard adds gradients, in rank order and at least in fp32. False: the backend adds.
    adds_here = True
    # Whether an all-gather makes progress on the network while the host computes. If so, starting
    # all-gathers early saves time.
    gathers_in_background = False

    @classmethod
    @abc.abstractmethod
    def connect(cls, members: Members) -> Transport | str:
        """Return a transport for the group, or the reason why the group cannot use this class.

        The reason is "" if the user's options exclude the transport. Collective: either all ranks
        return a transport or all ranks return a reason.
        """

    @abc.abstractmethod
    def accepts(self, device: torch.device, tag: int) -> bool:
        """Whether the transport moves the flat parameter with this tag, on ``device``.

        All ranks return the same.
        """

    @abc.abstractmethod
    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group. ``op_name`` names the all-gather in errors.
        """

    @abc.abstractmethod
    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """Begin averaging over the ranks; each rank receives its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls.
        """

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Only the native transport overrides this method.
        """
        raise NotImplementedError(f"the transport {self.name} has no all-reduce.")

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Return memory for an unsharded buffer, which ``gather`` will fill."""
        return allocate(request.numel, request.dtype, request.device)

    def stream_waits(self, device: torch.device) -> bool:
        """Whether a stream of ``device``, instead of the host, waits for the other ranks."""
        return False

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        """Return the dtype in which reduce-scatters add values of ``dtype``, and of the result."""
        return sum_dtype(dtype) if fixed_order or self.adds_here else dtype

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        """Return the minimum size in bytes of gradients that are cheaper to send than to copy.

        Smaller gradients are copied together before they are sent. None: ``reduce_scatter`` accepts
        only chunks with one part.
        """
        # A subclass whose `reduce_scatter` can send several parts overrides this method.
        return None

    def warm_up(  # noqa: B027 (nothing to open)
        self, device: torch.device, *, fixed_order: bool, replicas: bool
    ) -> None:
        """Open connections for reductions of tensors on ``device``, once. Collective.

        Args:
            device: device of the gradients.
            fixed_order: the backend only exchanges gradients, and flatshard adds them.
            replicas: the reductions are all-reduces instead of reduce-scatters.
        """


class LocalTransport(Transport):
    """Transport of a single rank: copies on the current stream, and sends nothing."""

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
        raise NotImplementedError("a group of one rank needs no reduce-scatter.")

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        return AsyncWork([], op_name, [buffer])
