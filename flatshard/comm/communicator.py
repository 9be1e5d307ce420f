"""``Communicator``: the ranks of a group; chooses the transport that moves a tensor.

``Topology``: the communicators over which one unit shares its parameters and gradients.

[Note: sums]
All transports except the native one add gradients in flatshard's code, in rank order and at least
in fp32, in whatever dtype the gradients are sent. A backend adds in its own order, in the dtype of
the gradients. If a fixed order is requested, the backend only exchanges the parts, and flatshard
adds them. An all-reduce in a fixed order, or of gradients narrower than fp32, consists of such a
reduce-scatter and an all-gather of the parts.
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
# A tensor with at most so many elements is copied to a wider dtype, to share a message with the
# marks.
_FEW = 1 << 12

LISTENERS: list[Callable[[str, str, int, tuple[int, ...]], object]] = []
"""Functions that are called for each collective that this rank starts.

Arguments: the kind of collective, the name of the unit or the purpose, the number of bytes, and the
ranks in the default group.
"""


def transport_kinds() -> list[type[Transport]]:
    """Transport classes in order of preference: the first to accept a tensor moves the tensor."""
    shared_memory = default_extra("shared_memory")
    first = [] if shared_memory is None else [shared_memory.SharedMemoryTransport]
    return [*first, SocketTransport, NativeTransport]


_is_copying = False


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Mark a block that copies models. Perhaps only one rank copies, and never uses the copy."""
    global _is_copying
    before, _is_copying = _is_copying, True
    try:
        yield
    finally:
        _is_copying = before


@cache  # called for every all-gather and reduction in every step
def _op_name(unit_fqn: str, action: str, rank: int, ranks_text: str) -> str:
    return f"{unit_text(unit_fqn)}, rank {rank}: {action} over ranks {ranks_text}"


class Communicator(Members):
    """The ranks of one process group, and their transports. A single rank never sends."""

    def __init__(self, group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> None:
        """Find out which transports the ranks can use. ``group=None`` means only this rank.

        Collective when ``group`` has several ranks.

        Raises:
            ValueError: the group's backend does not support the requested ``mode``.
        """
        self.group, self.options = group, mode
        self.rank, self.global_rank = 0, 0
        # Ranks of the members in the default group. Recorded events keep this tuple.
        self.ranks: tuple[int, ...] = (0,)
        if group is not None:
            self.rank, self.global_rank = dist.get_rank(group), dist.get_rank()
            self.ranks = tuple(dist.get_process_group_ranks(group))
        self.ranks_text = ranks_text(self.ranks)  # the ranks in words, for messages
        self.meeting = f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"
        self.transports: list[Transport] = [LocalTransport()]  # in order of preference
        self.transport_reason = ""
        self.subgroups: dict[tuple[int, ...], Communicator] = {}
        # Two-stage reductions whose second stage will use this group, in the order in which all
        # ranks begin the stages.
        self.second_stages: deque[Any] = deque()
        self._num_tags = [0, 0]  # the second number counts tags inside `copying`
        self._num_models = 0
        # Device from which small values can be sent.
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
        # The transports need a separate group, so that aborts and tags do not affect the user's
        # collectives.
        is_apart = self.is_gloo and self.options.collectives is not Collectives.NATIVE
        # Ordered collectives on one group match by order. Reductions start when gradients are
        # complete, and all-gathers start when parameters are needed. The two may interleave
        # differently on each rank, so each kind has its own group.
        with named(self.meeting):
            self.gather_group = new_group(group) if is_apart else group
            self.reduce_group = new_group(group)
            # gloo ends the process if two ranks send different sizes in one collective. Therefore
            # unannounced all-gathers share their group with no other collective.
            control = new_group(group) if self.is_gloo and not is_apart else self.gather_group
            control_group, self.control_device = control_of(control)
        self.host = HostExchange(control_group, self.control_device, self.reduce_group.group_name)
        # Every rank calls ``connect`` of every class in the same order, because ``connect`` may
        # communicate.
        found = [kind.connect(self) for kind in transport_kinds()]
        self.transports = [one for one in found if isinstance(one, Transport)]
        reasons = [one for one in found if isinstance(one, str) and one]
        self.transport_reason = "; ".join(reasons) or self.transport_for().reason

    @cached_property
    def apart(self) -> Communicator:
        """The same ranks with a separate order, to exchange numbers in the middle of a backward.

        Collective at the first use.
        """
        if self.group is None or self.size == 1:
            return self
        # `new_group` waits in the store, and nothing can end a wait in the store. So ranks meet
        # before.
        self.host.meet("meeting for numbers in the middle of backward")
        with named(self.meeting):
            group = new_group(self.group, on_host=True)
        return Communicator(group, mode=TransportOptions(Collectives.NATIVE))

    def new_tag(self) -> int:
        """A number that no other user of this communicator gets; the same on all ranks.

        All ranks request tags in the same order.
        """
        # Copies may be made on one rank only. Count the tags of copies separately: copies must not
        # shift the tags of the models, which all ranks make.
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """A number below 256 that identifies a model. Ranks construct models in the same order."""
        self._num_models += 1
        return self._num_models % 256

    # ------------------------------------------------------------ parameters and gradients

    def transport_for(self, device: torch.device = HOST, tag: int = 0) -> Transport:
        """The transport for tensors on ``device`` of the flat parameter with this tag."""
        # The size is not needed: no transport is better for small tensors and worse for large ones
        # (1 MB takes 0.4 ms with each transport).
        return next(one for one in self.transports if one.accepts(device, tag))

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Memory for an unsharded buffer."""
        return self.transport_for(request.device, request.tag).allocate_unsharded(request)

    def all_gather(self, request: Gather) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group. A ``reduced`` request counts as a reduction: if the
        transport is ordered, the order of calls must be the same on all ranks.

        Raises:
            ValueError: ``out`` is not as long as the shards of all ranks together.
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
        else:  # for an all-reduce the first half is noted
            self.note("gather", request.unit_fqn, out.nbytes)
        op_name = _op_name(request.unit_fqn, action, self.global_rank, self.ranks_text)
        with named(op_name):
            return self.transport_for(shard.device, request.tag).gather(request, op_name)

    def reduce_scatter(self, request: ReduceScatter) -> AsyncWork:
        """Begin averaging over the ranks; each rank receives its part in ``request.out``.

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
            # Only the native transport has an all-reduce. It is the last transport, and accepts
            # every tensor.
            return self.transports[-1].all_reduce(buffer, op_name)

    def note(self, kind: str, unit_fqn: str, nbytes: int) -> None:
        """Call ``LISTENERS`` for a collective that this rank starts."""
        if self.size > 1:  # a group of one rank only copies
            for listen in LISTENERS:
                listen(kind, unit_fqn, nbytes, self.ranks)

    # ------------------------------------------------------------ small things, at once

    def _begin_small(self, op_name: str) -> WaitCondition | None:
        """Count a collective of the gather group that is not an all-gather of parameters."""
        what = compared_name(op_name) if self.transport_for().is_ordered else ""
        return self.begin(self.gather_group, what=what)

    def maxima(self, values: bytes, *, op_name: str) -> bytes:
        """The maximum of each byte over the ranks.

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
        # Large tensors are not copied: a separate reduction before the tensor's reduction carries
        # the marks.
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
        """Overwrite ``tensor`` with the tensor of rank ``source`` of the group, and wait.

        ``tensor`` is contiguous. Collective: all ranks of the group, in the same order of calls;
        otherwise all raise.
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
        """Begin to send bytes ``sent``: to each rank, in order, the next ``lengths[rank]`` bytes.

        Returns the work, and the bytes that the work fills: ``expected[rank]`` bytes from each
        rank.

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
    """Four numbers whose reduction shows whether the name is the same on all ranks."""
    # SUM: if n ranks send the same x and x**2, the sums are n * x and n * x**2 on every rank. If
    # numbers differ, every rank sees a sum that is not n times its own number (Cauchy-Schwarz). x
    # has 16 bits, so that float64 holds the sums exactly. MAX, MIN: the results for x and -x are
    # every rank's own x and -x only if all ranks send the same x.
    digest = digest_of(f"{op} {compared_name(op_name)}")
    first, second = (int.from_bytes(digest[start : start + 2], "big") for start in (0, 2))
    if op == "SUM":
        return [first, first**2, second, second**2]
    return [first, -first, second, -second]


# A communicator of only this rank.
ALONE = Communicator(None)


@dataclass(frozen=True)
class Topology:
    """The groups of one unit.

    The flat parameter has ``shard.size`` parts, and this rank holds part ``index``. Parameters are
    all-gathered over ``intra_group``. Gradients are reduced first over ``intra_group``, and then
    over ``inter_group`` (which divides the parts further) or ``replicate`` (which keeps the parts).
    """

    world: Communicator  # every rank that trains the model
    shard: Communicator  # the ranks that split the flat parameter
    replicate: Communicator  # the ranks that hold the same shard
    # `shard` itself, unless only gradients and optimizer state are divided among all ranks of
    # `shard`.
    intra_group: Communicator
    # One rank of each `intra_group` in `shard`. The ranks of `inter_group` divide the part of the
    # `intra_group` further.
    inter_group: Communicator = ALONE
    # Group for all-gathers in backward of the parts that `reshard_after_forward=n` kept.
    regather: Communicator | None = None

    @property
    def index(self) -> int:
        """Index of this rank's shard."""
        return self.intra_group.rank * self.inter_group.size + self.inter_group.rank

    @property
    def across(self) -> Communicator:
        """The ranks over which gradients are reduced after ``intra_group``; possibly only one."""
        return self.inter_group if self.inter_group.size > 1 else self.replicate

    def connect(self, device: torch.device, *, fixed_order: bool) -> None:
        """Open connections for reductions on ``device``, if streams wait for these. Collective.

        With ``fixed_order`` the backend only exchanges gradients, and flatshard adds them.
        """
        for group in (self.intra_group, self.inter_group, self.replicate):
            transport, replicas = group.transport_for(device), group is self.replicate
            if transport.stream_waits(device):
                with named(group.meeting):
                    transport.warm_up(device, fixed_order=fixed_order, replicas=replicas)

    @property
    def transport(self) -> str:
        """The transports for the unit's parameters and gradients, in words."""
        groups = (self.intra_group, self.inter_group)
        ways = [group.transport_for().name for group in groups if group.size > 1]
        if self.replicate.size > 1:
            ways.append(self.replicate.transports[-1].name)  # all-reduces
        return " + ".join(dict.fromkeys(ways)) or ALONE.transport_for().name

    @property
    def transport_reason(self) -> str:
        """Why the unit uses ``transport``, if the ranks found a reason."""
        reasons = [group.transport_reason for group in (self.intra_group, self.inter_group)]
        return "; ".join(dict.fromkeys(filter(None, reasons)))
