"""``Communicator``: the collectives of one group; each tensor moves by the best transport.

``Topology``: the communicators over which one unit shares its parameters and gradients.

[Note: sums]
All transports except the native transport add gradients in flatshard's code, in rank order and at
least in fp32, even if gradients are sent in a narrower dtype. A backend adds in its own order, in
the dtype of the gradients. If a fixed order is requested, the backend only exchanges the gradients,
and flatshard adds them. An all-reduce in a fixed order, or of gradients narrower than fp32,
consists of two collectives: a reduce-scatter in flatshard's code, then an all-gather of the
averages.
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
# Number of elements up to which `_reduce_on_stream` copies a tensor, to send the tensor and the
# marks in one message.
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
    """Context in which models are copied; see ``Communicator.new_tag``."""
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
    """The collectives of one process group. A group of one rank sends nothing."""

    def __init__(self, group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> None:
        """Find the transports that the ranks can use.

        Collective if ``group`` has several ranks.

        Args:
            group: the process group. None: a group of only this rank.
            mode: the user's choice of transport.

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
        # Reductions whose second stage will use this group, in the order in which all ranks begin
        # the second stages.
        self.second_stages: deque[Any] = deque()
        self._num_tags = [0, 0]  # the second number counts tags inside `copying`
        self._num_models = 0
        # Device of the small values that the host exchanges.
        self.control_device = HOST
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
        # The transports make their own groups on gloo: flatshard's aborts and tags must not affect
        # collectives that the user starts on `group`.
        is_apart = self.is_gloo and self.options.collectives is not Collectives.NATIVE
        # Collectives on one group match by order. Reductions start when gradients are complete,
        # and all-gathers start when parameters are needed. On each rank all-gathers and reductions
        # may alternate differently, so each kind has its own group.
        with named(self.meeting):
            self.gather_group = new_group(group) if is_apart else group
            self.reduce_group = new_group(group)
            # Exchange small values on a separate group. gloo ends the process if two ranks send
            # different sizes in one collective, and the native transport begins usual all-gathers
            # without comparing names first. So its gather group must carry no other collectives.
            control = new_group(group) if self.is_gloo and not is_apart else self.gather_group
            control_group, self.control_device = control_of(control)
        self.host = HostExchange(control_group, self.control_device, self.reduce_group.group_name)
        # ``connect`` may communicate, so every rank calls ``connect`` of all classes in this order.
        found = [kind.connect(self) for kind in transport_kinds()]
        self.transports = [one for one in found if isinstance(one, Transport)]
        reasons = [one for one in found if isinstance(one, str) and one]
        self.transport_reason = "; ".join(reasons) or self.transport_for().reason

    @cached_property
    def apart(self) -> Communicator:
        """A second communicator of the same ranks, for small exchanges in the middle of a backward.

        Its collectives do not affect the order of the other collectives. Collective at the first
        use.
        """
        if self.group is None or self.size == 1:
            return self
        # Let all ranks meet first: `new_group` waits for the other ranks in torch's store, and
        # deadlock detection cannot end a wait in the store.
        self.host.meet("meeting for numbers in the middle of backward")
        with named(self.meeting):
            group = new_group(self.group, on_host=True)
        return Communicator(group, mode=TransportOptions(Collectives.NATIVE))

    def new_tag(self) -> int:
        """Return a number that is returned only once; the same on all ranks.

        All ranks request tags in the same order.
        """
        # Count the tags of copied models separately. Perhaps only one rank copies a model, and then
        # the copy must not change the next tags of models that all ranks make.
        self._num_tags[_is_copying] += 1
        return 2 * self._num_tags[_is_copying] + _is_copying

    def new_model(self) -> int:
        """Return a number below 256 for a new model. All ranks build models in the same order."""
        self._num_models += 1
        return self._num_models % 256

    # ------------------------------------------------------------ parameters and gradients

    def transport_for(self, device: torch.device = HOST, tag: int = 0) -> Transport:
        """Return the transport for tensors on ``device`` of the flat parameter with this tag."""
        # Choose without regard to the tensor's size: no transport is faster for small tensors and
        # slower for large tensors (1 MB takes 0.4 ms with each transport).
        return next(one for one in self.transports if one.accepts(device, tag))

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Return memory for an unsharded buffer."""
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
                f"{unit_text(request.unit_fqn)}: all-gathering {shard.numel()} elements from each "
                f"of {self.size} ranks does not fill a buffer of {out.numel()} elements."
            )
        action = f"all-gathering parameters for {request.purpose}"
        if request.reduced:
            action = "all-reducing gradients in backward"
        else:  # for a `reduced` request, `reduce_scatter` has noted the whole all-reduce already
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
        """Record that this rank begins a collective of the gather group other than a ``Gather``."""
        what = compared_name(op_name) if self.transport_for().is_ordered else ""
        return self.begin(self.gather_group, what=what)

    def maxima(self, values: bytes, *, op_name: str) -> bytes:
        """Return the maximum over the ranks for each byte of ``values``.

        Collective: all ranks of the group, in the same order of calls. If the order differs, all
        ranks raise.
        """
        self.note("scalars", op_name, len(values))
        return self.host.maxima(values, op_name)

    def reduce_scalars(self, values: Tensor, op: str, *, op_name: str) -> Tensor:
        """Combine a few numbers over the ranks, in place, and wait for the result.

        If ranks call this method with different names, all ranks raise if the host waits. If a
        stream waits, the ranks get NaN (integers: -1), and the next backward raises.

        Collective: all ranks of the group, in the same order of calls.

        Args:
            values: the numbers; the result overwrites them.
            op: name of a member of ``torch.distributed.ReduceOp``.
            op_name: the operation, for errors.
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
        # Ranks must notice if their names differ. Comparing names on the host would make the host
        # wait for the stream. So numbers computed from the name (marks) are reduced together with
        # the values, and the device overwrites the result if the marks differ between ranks.
        dtype = torch.float64 if values.is_floating_point() else torch.int64
        numbers = _marks(op_name, op)
        marks = torch.cat([values.new_full((1,), number, dtype=dtype) for number in numbers])
        expected = marks * self.size if op == "SUM" else marks.clone()
        # Copy only small tensors. For a large tensor, reduce the marks separately, before the
        # tensor.
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

        ``tensor`` is contiguous. Collective: all ranks of the group, in the same order of calls. If
        the order differs, all ranks raise.
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
        """Begin an all-to-all of bytes.

        Collective: all ranks of the group, in the same order of calls.

        Args:
            sent: the bytes for all ranks, in rank order.
            lengths: number of bytes for each rank.
            expected: number of bytes from each rank.
            op_name: the operation, for errors.

        Returns:
            The work, and the tensor that the work fills with the received bytes, in rank order.
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
    """Return four numbers whose reduction shows whether the name is the same on all ranks."""
    # SUM: if n ranks send the same x and x**2, the sums are n * x and n * x**2 on every rank. If
    # numbers differ, every rank sees a sum that is not n times its own number (Cauchy-Schwarz).
    # float64 holds the sums exactly, because x has 16 bits. MAX, MIN: each rank's results for x and
    # -x equal the rank's own x and -x only if all ranks send the same x.
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

    A flat parameter is divided into ``shard.size`` parts, and this rank holds part ``index``.
    Parameters are all-gathered over ``intra_group``. Gradients are first reduced over
    ``intra_group``. Then they are reduce-scattered over ``inter_group``, or all-reduced over
    ``replicate``, if that group has several ranks.
    """

    world: Communicator  # every rank that trains the model
    shard: Communicator  # the ranks that split the flat parameter
    replicate: Communicator  # the ranks that hold the same shard
    # The ranks that all-gather parameters: `shard`, or with HYBRID_SHARD_OP the ranks of one node.
    intra_group: Communicator
    # With HYBRID_SHARD_OP one rank of each node: these ranks divide the gradients that were reduced
    # over `intra_group`.
    inter_group: Communicator = ALONE
    # The ranks that all-gather in backward, if `reshard_after_forward=k` keeps secondary shards.
    regather: Communicator | None = None

    @property
    def index(self) -> int:
        """Index of this rank's shard."""
        return self.intra_group.rank * self.inter_group.size + self.inter_group.rank

    @property
    def across(self) -> Communicator:
        """The group of the second stage of a reduction; a group of one rank if there is none."""
        return self.inter_group if self.inter_group.size > 1 else self.replicate

    def connect(self, device: torch.device, *, fixed_order: bool) -> None:
        """Open connections for reductions on ``device``, if a stream waits for the reductions.

        Collective. With ``fixed_order`` the backend only exchanges gradients, and flatshard adds
        them.
        """
        for group in (self.intra_group, self.inter_group, self.replicate):
            transport, replicas = group.transport_for(device), group is self.replicate
            if transport.stream_waits(device):
                with named(group.meeting):
                    transport.warm_up(device, fixed_order=fixed_order, replicas=replicas)

    @property
    def transport(self) -> str:
        """Names of the transports that move the unit's parameters and gradients."""
        groups = (self.intra_group, self.inter_group)
        ways = [group.transport_for().name for group in groups if group.size > 1]
        if self.replicate.size > 1:
            ways.append(self.replicate.transports[-1].name)  # all-reduces
        return " + ".join(dict.fromkeys(ways)) or ALONE.transport_for().name

    @property
    def transport_reason(self) -> str:
        """The reason why the unit uses these transports and no faster one; may be empty."""
        reasons = [group.transport_reason for group in (self.intra_group, self.inter_group)]
        return "; ".join(dict.fromkeys(filter(None, reasons)))
