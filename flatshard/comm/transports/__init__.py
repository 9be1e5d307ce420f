"""``Transport``: one way to move flat parameters and gradients between the ranks of a group.

[Note: scattered gradients]
``FlatChunks`` are values of a flat parameter, scattered over several tensors. Gradients can be
averaged from the tensors in which autograd made them: copying them to one buffer first costs as
much time as a fast network needs to send them. ``ChunkPlan`` decides which small gradients are
copied together all the same.

Sums over ranks are made here too, in rank order and in no less than fp32: they are the same in
every run and on every transport.
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
    """The ranks of one group, as a transport knows them; the group's ``Communicator``."""

    rank: int  # this one's, within the group
    ranks: tuple[int, ...]  # the members by their ranks in the default group
    gather_group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup  # the same ranks; reductions have an order of their own
    host: HostExchange  # exchanges small values between the ranks
    options: TransportOptions
    is_gloo: bool  # the backend for tensors in host memory

    @property
    def history(self) -> History:
        """The collectives that this rank has begun."""
        return self.host.history

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_fake(self) -> bool:
        """Whether there are no other ranks (torch's "fake" backend)."""
        return is_fake(self.gather_group)

    @cached_property
    def peers(self) -> list[int]:
        """The other ranks of the group; the next one first, so that all links are used at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def begin(
        self, group: dist.ProcessGroup, kind: Hashable = None, *, what: str = ""
    ) -> WaitCondition | None:
        """Count a collective that this rank begins now; returns what ends the host's wait for it.

        ``kind``: what it matches on other ranks; None: their next one on the group, ``what``, alike
        on all.
        """
        kind = group.group_name if kind is None else kind
        if self.is_gloo:
            return self.history.begin(kind, what, partial(abort, group))
        self.history.begin(kind, what)
        return None  # a stream waits, and not the host

    def announce(self, what: str) -> None:
        """Raise CollectiveError, on all ranks, where they are about to begin different things."""
        # gloo ends the process, with SIGABRT, where it receives more than was expected. A rank that
        # leaves the usual order waits here, the others in the usual: deadlock detection ends both.
        is_safe = not self.is_gloo or not self.history.announces or self.history.is_usual(what)
        if what and not is_safe:
            self.host.meet(what)
            self.history.learn(what)


class Chunk(NamedTuple):
    """Elements of one part."""

    part: int  # its number
    offset: int  # where they begin in it
    start: int  # where they begin and end in the flat parameter
    end: int
    values: Tensor | None  # None: zeros


@dataclass(frozen=True)
class FlatChunks:
    """Values over the full length of a flat parameter, gradients for example, on each rank."""

    parts: Sequence[Tensor | None]  # (end - start,) each, contiguous, of one dtype; None: zeros
    ranges: Sequence[tuple[int, int]]  # their [start, end); ascending, the same on all ranks
    numel: int  # of all, padding included
    dtype: torch.dtype

    @classmethod
    def of(cls, buffer: Tensor) -> FlatChunks:
        """One piece of memory, ``(numel,)``."""
        return cls([buffer], [(0, buffer.numel())], buffer.numel(), buffer.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """The parts that are not zeros."""
        return [part for part in self.parts if part is not None]

    def cut(self, begin: int, end: int, numel: int | None = None) -> Iterator[Chunk]:
        """What there is in ``[begin, end)``, at most ``numel`` elements at a time."""
        for index, (first, last) in enumerate(self.ranges):
            start, stop = max(first, begin), min(last, end)
            part = self.parts[index]
            step = numel or max(stop - start, 1)
            for at in range(start, stop, step):
                until = min(at + step, stop)
                values = None if part is None else part[at - first : until - first]
                yield Chunk(index, at - first, at, until, values)


class ChunkPlan:
    """Which gradients share a part of a ``FlatChunks``.

    Those of ``min_bytes`` or more are a part each, without a copy; small neighbours are copied
    into one.
    """

    def __init__(self, layout: FlatLayout, min_bytes: int, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._runs: list[list[int]] = []
        # Ranges depend on the layout alone, not on which gradients exist: the same on all ranks.
        joins = False
        for index, span in enumerate(layout.spans):
            is_small = (span.end - span.start) * dtype.itemsize < min_bytes
            if joins and is_small:
                self._runs[-1].append(index)
            else:
                self._runs.append([index])
            joins = is_small

    def chunks(self, gradients: dict[int, Tensor]) -> FlatChunks:
        """Take gradients by original parameter, in memory order, any dtype; others are zero."""
        spans = self._layout.spans
        ranges = [(spans[run[0]].start, spans[run[-1]].end) for run in self._runs]
        parts = [self._part(run, gradients) for run in self._runs]
        return FlatChunks(parts, ranges, self._layout.padded_numel, self._dtype)

    def _part(self, run: list[int], gradients: dict[int, Tensor]) -> Tensor | None:
        there = [index for index in run if index in gradients]
        if not there:
            return None
        if len(run) == 1:
            return gradients.pop(run[0]).to(self._dtype)  # no copy if it has that dtype
        spans, device = self._layout.spans, gradients[there[0]].device
        first = spans[run[0]].start
        part = torch.zeros(spans[run[-1]].end - first, dtype=self._dtype, device=device)
        places = [part[spans[i].start - first : spans[i].end - first] for i in there]
        torch._foreach_copy_(places, [gradients[index] for index in there])
        return part


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values that come in ``dtype`` are added up."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Fill ``out``, in the dtype to add in, with the average of each rank's row, in rank order."""
    # One after the other: a kernel's own sum over ranks would choose an order by the sizes.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``, elements of the same dtype; may be the same tensor."""
    if number & (number - 1) == 0 and not total.is_complex():
        # To the bit the same for a power of two, in half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)


class Gather(NamedTuple):
    """An all-gather of parameters, or of what a ``ReduceScatter`` gave."""

    shard: Tensor  # (shard_numel,); must not be written before it is sent
    out: Tensor  # (shard_numel * size,), same dtype and device
    unit_fqn: str
    tag: int  # the flat parameter's, from ``Communicator.new_tag``
    purpose: str  # why the shards are gathered, for error messages
    memory: BufferMemory | None = None  # of ``allocate_unsharded``, if ``out`` is its buffer
    exact: bool = False  # do not round, whatever the wire dtype
    reduced: bool = False  # the second half of an all-reduce; in the order of reductions

    @property
    def what(self) -> str:
        """Which one it is, alike on all ranks; "": they may begin it in another order."""
        # The name leaves out the purpose: all-gathers of one flat parameter match, for whatever
        # purpose each rank began its own.
        if self.reduced:
            return ""
        return f"all-gather of {self.unit_fqn or 'the root unit'!r}, flat parameter {self.tag}"


class ReduceScatter(NamedTuple):
    """An average over the ranks, of which each gets its part."""

    # ``shard_numel * size`` elements, in one chunk unless ``min_chunk_bytes`` allows more. A single
    # chunk is undefined afterwards; of several none is written.
    chunks: FlatChunks
    # (shard_numel,), in the dtype to add in. What no range of ``chunks`` covers is left as it is.
    out: Tensor
    unit_fqn: str
    tag: int
    fixed_order: bool = False  # add in rank order also where the backend would add
    # "all_reduce": the first half of an all-reduce; the second is a ``Gather`` with ``reduced``.
    kind: str = "reduce"


class BufferRequest(NamedTuple):
    """Memory that an unsharded buffer needs."""

    numel: int  # over all ranks
    dtype: torch.dtype  # also while it is all-gathered
    device: torch.device
    tag: int  # the flat parameter's
    # Makes the file of this rank's shard, if the shard may live in the memory too, so that
    # all-gathers need not copy the shard.
    shard_target: OffloadTarget | None = None


class Transport(abc.ABC):
    """How the ranks of one group all-gather parameters and average gradients.

    A new transport is a subclass in a file of its own and an entry in ``transport_kinds``.
    """

    name: str  # for reports and messages
    reason = ""  # why the group has it
    # Collectives match those of other ranks by the order in which they begin, else by their tag.
    is_ordered = False
    adds_here = True  # reductions add in rank order, in no less than fp32, on this host
    # An all-gather makes progress on the network while the host computes: starting early pays.
    gathers_in_background = False

    @classmethod
    @abc.abstractmethod
    def connect(cls, members: Members) -> Transport | str:
        """The transport for a group, or why the group cannot have it; "" if nobody asked for it.

        Collective, and of the same kind on all ranks: decide by what all of them know.
        """

    @abc.abstractmethod
    def accepts(self, device: torch.device, tag: int) -> bool:
        """Whether it moves tensors on ``device`` with this tag; the same on all ranks."""

    @abc.abstractmethod
    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group. ``op_name`` names it in errors.
        """

    @abc.abstractmethod
    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """Begin averaging over the ranks, each receiving its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls.
        """

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place; only the native one has it."""
        raise NotImplementedError(f"{self.name} has no all-reduce")

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Memory for an unsharded buffer, which ``gather`` fills."""
        return allocate(request.numel, request.dtype, request.device)

    def stream_waits(self, device: torch.device) -> bool:
        """Whether a stream of ``device`` waits for the others, and not the host."""
        return False

    def sum_dtype(self, dtype: torch.dtype, *, fixed_order: bool) -> torch.dtype:
        """The dtype in which reduce-scatters of ``dtype`` add up, and of their result."""
        return sum_dtype(dtype) if fixed_order or self.adds_here else dtype

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        """Smallest gradient, in bytes, that is cheaper to send from where it is than to copy."""
        # ``reduce_scatter`` accepts one chunk only.
        return None

    def warm_up(  # noqa: B027 (nothing to open)
        self, device: torch.device, *, fixed_order: bool, replicas: bool
    ) -> None:
        """Open connections for reductions of tensors on ``device``, once. Collective.

        ``fixed_order``: they are only exchanged, and added here. ``replicas``: each rank needs the
        average of all.
        """


class LocalTransport(Transport):
    """A rank that is alone: copies on the current stream, and sends nothing."""

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
        raise NotImplementedError("one rank's gradients are their average")

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        return AsyncWork([], op_name, [buffer])
