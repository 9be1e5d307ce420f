"""``Communicator``: the ranks of a group; picks the transport that moves a tensor between them.

``Topology``: the communicators over which one unit shares its parameters and gradients.

[Note: sums]
All transports but the native one add here, in rank order and in no less than fp32, whatever dtype
the gradients travel in. A backend adds as it likes, in the dtype that it is given; where a fixed
order is asked for, it only exchanges the parts, which are added here. An all-reduce in a fixed
order, or of gradients narrower than fp32, is such a reduce-scatter and an all-gather of the parts.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.host_exchange import HostExchange, compared_name, digest_of
from flatshard.comm.process_groups import (
    as_bytes,
    as_real,
    backend_for,
    control_of,
    new_group,
    ranks_text,
)
from flatshard.comm.transports import (
    BufferRequest,
    Gather,
    LocalTransport,
    Members,
    ReduceScatter,
    Transport,
)
from flatshard.comm.transports.native import NativeTransport
from flatshard.comm.transports.sockets import SocketTransport
from flatshard.comm.work import AsyncWork, WaitCondition, named
from flatshard.memory.buffers import BufferMemory
from flatshard.options.extras import default_extra
from flatshard.options.transport_options import Collectives, TransportOptions
from flatshard.plan.module_tree import unit_text

AUTO = TransportOptions()
HOST = torch.device("cpu")
# Up to this many elements, a tensor is copied to a wider dtype to share a message with the marks.
_FEW = 1 << 12

LISTENERS: list[Callable[[str, str, int, tuple[int, ...]], object]] = []
"""Called for each collective that this rank starts: the kind of collective, the name of the unit or
the purpose, bytes, and the ranks in the default group."""


def transport_kinds() -> list[type[Transport]]:
    """In order of preference: the first one that a group has and that accepts a tensor moves it."""
    shared_memory = default_extra("shared_memory")
    first = [] if shared_memory is None else [shared_memory.SharedMemoryTransport]
    return [*first, SocketTransport, NativeTransport]


_is_copying = False


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Inside, models are copied, perhaps on one rank alone, where the copy stays unused."""
    global _is_copying
    before, _is_copying = _is_copying, True
    try:
        yield
    finally:
        _is_copying = before


@cache  # every all-gather and reduction of every step asks
def _op_name(unit_fqn: str, action: str, rank: int, ranks_text: str) -> str:
    return f"{unit_text(unit_fqn)}, rank {rank}: {action} over ranks {ranks_text}"


class Communicator(Members):
    """The ranks of one process group, and how they move tensors. A group of one never sends."""

    def __init__(self, group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> None:
        """Find out how the ranks can talk; ``group`` None is this rank alone.

        Collective when ``group`` has several ranks.

        Raises:
            ValueError: what ``mode`` asks for cannot be had with the group's backend.
        """
        self.group, self.options = group, mode
        self.rank, self.global_rank = 0, 0
        # Ranks of the members in the default group. Recorded events keep this tuple.
        self.ranks: tuple[int, ...] = (0,)
        if group is not None:
            self.rank, self.global_rank = dist.get_rank(group), dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
        self.ranks_text = ranks_text(self.ranks)  # in words, for messages
        self.meeting = f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"
        self.transports: list[Transport] = [LocalTransport()]  # in order of preference
        self.transport_reason = ""
        self.subgroups: dict[tuple[int, ...], Communicator] = {}
        # Reductions in two stages whose second one is to cross this group, in the order in which
        # all ranks begin them.
        self.second_stages: deque[Any] = deque()
        self._num_tags = [0, 0]  # inside `copying`: the second
        self._num_models = 0
        # Where a few numbers must lie to be sent.
        self.control_device = HOST
        self.host = HostExchange(None, HOST)
        if group is not None and self.size > 1:
            self._meet(group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        self.is_gloo = backend_for(group, "cpu") == "gloo"
        if not self.is_gloo and self.options.needs_gloo:
            raise ValueError(
                f"ShardedWrapper, rank {self.global_rank}: {self.options.needs_gloo} is for "
                "process groups whose backend is gloo, this one's is "
                f'{dist.get_backend(group)}. Leave it out, or make the group with backend="gloo".'
            )
        # Their aborts and tags must not touch collectives of the user's.
        is_apart = self.is_gloo and self.options.collectives is not Collectives.NATIVE
        # Ordered collectives on one group match by order. Reductions start when gradients are
        # there, all-gathers when parameters are needed, and the two may interleave differently on
        # each rank: each kind has a group of its own.
        with named(self.meeting):
            self.gather_group = new_group(group) if is_apart else group
            self.reduce_group = new_group(group)
            # gloo ends the process where what two ranks send differs in size, so that all-gathers
            # which nobody announced share a group with nothing else.
            control = new_group(group) if self.is_gloo and not is_apart else self.gather_group
            control_group, self.control_device = control_of(control)
        self.host = HostExchange(control_group, self.control_device, self.reduce_group.group_name)
        # Every rank asks every class, in the same order: ``connect`` may communicate.
        found = [kind.connect(self) for kind in transport_kinds()]
        self.transports = [one for one in found if isinstance(one, Transport)]
        reasons = [one for one in found if isinstance(one, str) and one]
        self.transport_reason = "; ".join(reasons) or self.transport_for().reason

    @cached_property
    def apart(self) -> Communicator:
        """The same ranks with an order of their own, for numbers in the middle of a backward.

        Collective at the first use.
        """
        if self.group is None or self.size == 1:
            return self
        # `new_group` waits in the store, where nothing can end the wait. So ranks meet before.
        self.host.meet("meeting for numbers in the middle of backward")
        with named(self.meeting):
            group = new_group(self.group, on_host=True)
        return Communicator(group, mode=TransportOptions(Collectives.NATIVE))

    def new_tag(self) -> int:
        """A number that no other user of this communicator has; the same on all ranks.

        Ranks ask for tags in the same order.
        """
        # Copies made on one rank alone must not shift the tags of the models that all ranks make.
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """A number below 256 that tells a model from others; ranks construct them together."""
        self._num_models += 1
        return self._num_models % 256

    # ------------------------------------------------------------ parameters and gradients

    def transport_for(self, device: torch.device = HOST, tag: int = 0) -> Transport:
        """What moves the tensors on ``device`` of the flat parameter with this tag."""
        # None is better for small tensors and worse for large ones (1 MB: 0.4 ms by any), so this
        # needs not know the size.
        return next(one for one in self.transports if one.accepts(device, tag))

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Memory for an unsharded buffer."""
        return self.transport_for(request.device, request.tag).allocate_unsharded(request)

    def all_gather(self, request: Gather) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group; a ``reduced`` one in the same order of calls as
        reductions, where the transport is ordered.

        Raises:
            ValueError: the two lengths do not fit the group size.
        """
        shard, out = request.shard, request.out
        if out.numel() != shard.numel() * self.size:
            raise ValueError(
                f"{request.unit_fqn}: all-gathering {shard.numel()} elements from {self.size} "
                f"ranks does not fill {out.numel()}"
            )
        action = f"all-gathering parameters for {request.purpose}"
        if request.reduced:
            action = "all-reducing gradients in backward"
        else:  # of an all-reduce the first half was noted
            self.note("gather", request.unit_fqn, out.nbytes)
        op_name = _op_name(request.unit_fqn, action, self.global_rank, self.ranks_text)
        with named(op_name):
            return self.transport_for(shard.device, request.tag).gather(request, op_name)

    def reduce_scatter(self, request: ReduceScatter) -> AsyncWork:
        """Begin averaging over the ranks, each receiving its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls.
        """
        out = request.out
        nbytes = out.numel() * self.size * request.chunks.dtype.itemsize
        action = "reduce-scattering"
        if request.kind == "all_reduce":
            nbytes = (nbytes + out.nbytes * self.size) // 2
            action = "all-reducing"
        self.note(request.kind, request.unit_fqn, nbytes)
        op_name = _op_name(
            request.unit_fqn, f"{action} gradients in backward", self.global_rank, self.ranks_text
        )
        with named(op_name):
            return self.transport_for(out.device, request.tag).reduce_scatter(request, op_name)

    def all_reduce(self, buffer: Tensor, *, unit_fqn: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Collective: all ranks of the group, in the same order of calls.
        """
        self.note("all_reduce", unit_fqn, buffer.nbytes)
        op_name = _op_name(
            unit_fqn, "all-reducing gradients in backward", self.global_rank, self.ranks_text
        )
        with named(op_name):
            # Only the native one has it, which comes last and accepts everything.
            return self.transports[-1].all_reduce(buffer, op_name)

    def note(self, kind: str, unit_fqn: str, nbytes: int) -> None:
        """Tell ``LISTENERS`` of a collective that this rank starts."""
        if self.size > 1:  # one rank by itself only copies
            for listen in LISTENERS:
                listen(kind, unit_fqn, nbytes, self.ranks)

    # ------------------------------------------------------------ small things, at once

    def _begin_small(self, op_name: str) -> WaitCondition | None:
        """Count a collective of the gather group, which is no all-gather of parameters."""
        what = compared_name(op_name) if self.transport_for().is_ordered else ""
        return self.begin(self.gather_group, what=what)

    def maxima(self, values: bytes, *, op_name: str) -> bytes:
        """For each byte, the maximum over the ranks.

        Collective: all ranks of the group, in the same order of calls; otherwise all raise.
        """
        self.note("scalars", op_name, len(values))
        return self.host.maxima(values, op_name)

    def reduce_scalars(self, values: Tensor, op: str, *, op_name: str) -> Tensor:
        """Combine a few numbers over the ranks, in place, and wait; ``op`` as in ``ReduceOp``.

        On the host, ranks in reductions of different names raise. On a stream, such ranks get NaN
        (integers: -1), and their next backward raises.

        Collective: all ranks of the group, in the same order of calls; otherwise all raise.
        """
        if self.size == 1:
            return values
        self.note("scalars", op_name, values.nbytes)
        if self.transport_for(values.device).stream_waits(values.device):
            self._reduce_on_stream(as_real(values), op, op_name)
        else:
            on_host = values.to(self.control_device)
            self.host.reduce(on_host, op, op_name)
            if on_host is not values:
                values.copy_(on_host)
        return values

    def _reduce_on_stream(self, values: Tensor, op: str, op_name: str) -> None:
        # Comparing names on the host would make the host wait for the stream. So the reduction also
        # carries marks of the name, and the device overwrites the result if the marks differ.
        dtype = torch.float64 if values.is_floating_point() else torch.int64
        numbers = _marks(op_name, op)
        marks = torch.cat([values.new_full((1,), number, dtype=dtype) for number in numbers])
        expected = marks * self.size if op == "SUM" else marks.clone()
        # Large tensors are not copied: a reduction before theirs carries the marks.
        are_few = values.numel() <= _FEW
        sent = torch.cat([values.reshape(-1).to(dtype), marks]) if are_few else values
        with self._named_on_stream(op_name):
            for one in (sent,) if are_few else (marks, sent):
                dist.all_reduce(one, getattr(dist.ReduceOp, op), self.gather_group)
        if are_few:
            sent, marks = sent[: values.numel()].view_as(values), sent[values.numel() :]
        spoiled = math.nan if values.is_floating_point() else -1
        values.copy_(sent.masked_fill((marks != expected).any(), spoiled))

    def _named_on_stream(self, op_name: str) -> named:
        words = f"{op_name}, rank {self.global_rank}: exchanging values with the other ranks"
        return named(words, self._begin_small(op_name))

    def broadcast(self, tensor: Tensor, *, op_name: str, source: int = 0) -> None:
        """Overwrite ``tensor``, contiguous, with that of rank ``source`` of the group, and wait.

        Collective: all ranks of the group, in the same order of calls; otherwise all raise.
        """
        if self.size == 1:
            return
        self.note("broadcast", op_name, tensor.nbytes)
        if self.transport_for(tensor.device).stream_waits(tensor.device):
            with self._named_on_stream(op_name):
                group = self.gather_group
                dist.broadcast(as_bytes(tensor), src=self.ranks[source], group=group)
            return
        on_host = tensor.to(self.control_device)
        self.host.broadcast(on_host, source, op_name)
        if on_host is not tensor:
            tensor.copy_(on_host)

    def exchange(
        self, sent: Tensor, lengths: list[int], expected: list[int], *, op_name: str
    ) -> tuple[AsyncWork, Tensor]:
        """Begin to send each rank, in their order, so many ``lengths`` of the bytes ``sent``.

        Returns what fills the bytes that come from each rank, as many as ``expected``, and those.

        Collective: all ranks of the group, in the same order of calls.
        """
        self.note("all_to_all", op_name, sent.nbytes)
        wire = sent.cpu() if self.is_gloo else sent
        came = wire.new_empty(sum(expected))
        name = f"{op_name}, rank {self.global_rank}: exchanging values with the other ranks"
        if wire.device.type == self.control_device.type:
            group, need = self.host.group, None
            self.host.meet(op_name)
        else:
            group, need = self.gather_group, self._begin_small(op_name)
        with named(name, need):
            work = dist.all_to_all_single(came, wire, expected, lengths, group=group, async_op=True)
        return AsyncWork([work], name, [wire, came], need=need), came


def _marks(op_name: str, op: str) -> list[int]:
    """Four numbers whose reduction tells whether the name is the same on all ranks."""
    # SUM: if n ranks send the same x and x**2, the sums are n * x and n * x**2 on every rank. If
    # numbers differ, every rank sees a sum that is not n times its own number (Cauchy-Schwarz). x
    # has 16 bits, so that float64 holds the sums exactly. MAX, MIN: the results for x and -x are
    # every rank's own x and -x only if all ranks send the same x.
    digest = digest_of(f"{op} {compared_name(op_name)}")
    first, second = (int.from_bytes(digest[start : start + 2], "big") for start in (0, 2))
    if op == "SUM":
        return [first, first**2, second, second**2]
    return [first, -first, second, -second]


# The group of one.
ALONE = Communicator(None)


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
