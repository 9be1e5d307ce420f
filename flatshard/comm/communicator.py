"""``Communicator``: the collectives of one process group.

[Note: sums]
In a reduce-scatter by shared memory or sockets, flatshard adds the gradients, in rank order and at
least in fp32, even if the gradients are sent in a narrower dtype. With the native transport, the
backend adds the gradients, in its own order and in their dtype. With ``ReduceMode.FIXED_ORDER``,
every backend only exchanges gradients, and flatshard adds them. The backend's all-reduce is used
only if the backend may add the gradients; otherwise a reduce-scatter and an all-gather replace it.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.host_exchange import HOST, compared_name, digest_of
from flatshard.comm.process_groups import new_group
from flatshard.comm.transports import Gather, Members, ReduceScatter, Transport
from flatshard.comm.transports.native import NativeTransport
from flatshard.comm.transports.sockets import SocketTransport
from flatshard.comm.work import AsyncWork, named
from flatshard.options import Collectives, TransportOptions
from flatshard.options.extras import default_extra
from flatshard.units.layout import as_bytes, as_real
from flatshard.units.module_tree import unit_text

AUTO = TransportOptions()
_FEW = 1 << 12  # up to this number of elements, `_reduce_on_stream` sends only one message

LISTENERS: list[Callable[[str, str, int, tuple[int, ...]], object]] = []
"""Functions to call for each collective that this rank starts, for reports.

Arguments: the kind of collective, the unit's name or the purpose, the number of bytes, the ranks.
"""


def transport_kinds() -> list[type[Transport]]:
    """Return the transport classes other than ``NativeTransport``, fastest first."""
    shared_memory = default_extra("shared_memory")
    first = [] if shared_memory is None else [shared_memory.SharedMemoryTransport]
    return [*first, SocketTransport]


_REDUCING = "reduce-scattering gradients in backward"
_ALL_REDUCING = "all-reducing gradients in backward"


@cache  # because each all-gather and reduction of each step needs such a context
def _beginning(unit_fqn: str, action: str, rank: int, ranks_text: str) -> named:
    return named(f"{unit_text(unit_fqn)}, rank {rank}: {action} over ranks {ranks_text}")


class Communicator(Members):
    """Runs the collectives of one process group. In a group of one rank, nothing is sent."""

    # Whether this process is copying a model (`copy.deepcopy`). Copies take tags from a separate
    # series: so if only one rank makes a copy, later models still have equal tags on all ranks.
    is_copying = False

    def __init__(self, group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> None:
        """Make the process groups for flatshard's collectives, and connect the transports.

        ``group``: None means only this rank. Raises ValueError if the group's backend does not
        support ``mode``, the user's ``collectives`` and ``wire_dtype``. Collective.
        """
        super().__init__(group, mode)
        self.transports: list[Transport] = [Transport()]  # in order of preference, best first
        self.transport_reason = ""  # why the group uses its transport, for `unit_report`
        self.subgroups: dict[tuple[int, ...], Communicator] = {}
        # Reductions (`GradReduce`) whose first stage has started, and whose second stage will use
        # this group, in the order in which all ranks start the second stages.
        self.second_stages: deque[Any] = deque()
        # The next tags of flat parameters: even tags in models, odd tags in deep copies of models.
        self._tags = count(2, 2), count(3, 2)
        # Returns a number for each new model. All ranks must make models in the same order, because
        # each backward compares the model's number between ranks.
        self.new_model = count(1).__next__
        if self.size > 1:
            found = [kind.connect(self) for kind in transport_kinds()]
            self.native = NativeTransport(self)
            self.transports = [*(one for one in found if isinstance(one, Transport)), self.native]
            reasons = [one for one in found if isinstance(one, str) and one]
            self.transport_reason = "; ".join(reasons) or self.transport_for().reason

    @cached_property
    def side_group(self) -> Communicator:
        """A second communicator of the same ranks, whose collectives have a separate order.

        Collective at the first access, which makes the process groups.
        """
        if self.group is None or self.size == 1:
            return self
        # First wait here until all ranks arrive: if one rank never arrives, deadlock detection can
        # end this wait, but not the wait inside of `new_group`, in torch's store.
        self.host.meet("connecting for small exchanges in the middle of backward")
        with named(self.connecting):
            group = new_group(self.group, on_host=True)
        return Communicator(group, mode=TransportOptions(Collectives.NATIVE))

    def new_tag(self, owner: object) -> int:
        """Return a new tag: a number that identifies a flat parameter in messages between ranks.

        All ranks must request tags in the same order. When ``owner`` is freed, transports drop
        their records about the tag.
        """
        tag = next(self._tags[self.is_copying])
        for transport in self.transports:
            weakref.finalize(owner, transport.forget, tag).atexit = False
        return tag

    # ------------------------------------------------------------ parameters and gradients

    def transport_for(self, device: torch.device = HOST, tag: int = 0) -> Transport:
        """Return the transport for tensors on ``device`` of the flat parameter with ``tag``."""
        # Do not choose by the tensor's size: 1 MB takes 0.4 ms with every transport.
        for transport in self.transports:
            if tag < transport.max_tag and (device.type == "cpu" or not transport.host_only):
                return transport
        raise AssertionError("the last transport moves every tensor")

    def all_gather(self, request: Gather) -> AsyncWork:
        """Begin filling ``request.out`` with every rank's shard, in rank order.

        Collective: all ranks of the group, in the same order of calls if the transport
        ``is_ordered``. All-gathers with ``reduced`` belong to the order of the reductions.
        """
        assert request.out.numel() == request.shard.numel() * self.size, "shards fill the buffer"
        gathers = f"all-gathering parameters for {request.purpose}"
        action = _ALL_REDUCING if request.reduced else gathers
        # For both halves of an all-reduce, `reduce_scatter` has already called the listeners.
        if LISTENERS and not request.reduced:
            self.note("gather", request.unit_fqn, request.out.nbytes)
        transport = self.transport_for(request.out.device, request.tag)
        with _beginning(request.unit_fqn, action, self.global_rank, self.ranks_text) as op_name:
            return transport.gather(request, op_name)

    def reduce_scatter(self, request: ReduceScatter) -> AsyncWork:
        """Begin averaging gradients over the ranks; each rank gets its part in ``request.out``.

        Collective: all ranks of the group, in the same order of calls.
        """
        if LISTENERS:
            nbytes = request.full.nbytes
            if request.kind == "all_reduce":
                # An all-reduce counts once: the mean of its reduce-scatter and its all-gather.
                nbytes = (nbytes + request.out.nbytes * self.size) // 2
            self.note(request.kind, request.unit_fqn, nbytes)
        action = _ALL_REDUCING if request.kind == "all_reduce" else _REDUCING
        transport = self.transport_for(request.out.device, request.tag)
        with _beginning(request.unit_fqn, action, self.global_rank, self.ranks_text) as op_name:
            return transport.reduce_scatter(request, op_name)

    def all_reduce(self, buffer: Tensor, *, unit_fqn: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Collective: all ranks of the group, in the same order of calls.
        """
        self.note("all_reduce", unit_fqn, buffer.nbytes)
        with _beginning(unit_fqn, _ALL_REDUCING, self.global_rank, self.ranks_text) as op_name:
            return self.native.all_reduce(buffer, op_name)

    def note(self, kind: str, unit_fqn: str, nbytes: int) -> None:
        if self.size > 1:  # a group of one rank sends nothing
            for listen in LISTENERS:
                listen(kind, unit_fqn, nbytes, self.ranks)

    # ------------------------------------------------------------ small values, with a wait

    def maxima(self, values: bytes, *, op_name: str) -> bytes:
        """Return the maximum over the ranks for each byte of ``values``. Collective.

        If ranks pass different ``op_name``, all ranks raise CollectiveError.
        """
        self.note("scalars", op_name, len(values))
        return self.host.maxima(values, op_name)

    def reduce_scalars(self, values: Tensor, op: str, *, op_name: str) -> Tensor:
        """All-reduce a few numbers, in place, and wait for the result.

        Ranks compare ``op_name``. If names differ, all ranks raise CollectiveError. But with NCCL,
        where a stream waits instead of the host, all ranks get NaN (-1 for integers), and the end
        of the next backward raises. ``op``: name of a member of ``torch.distributed.ReduceOp``.

        Collective: all ranks of the group, in the same order of calls.
        """
        if self.size == 1:
            return values
        self.note("scalars", op_name, values.nbytes)
        if self.transport_for(values.device).stream_waits(values.device):
            self._reduce_on_stream(as_real(values), op, op_name)
        else:
            collective = partial(dist.all_reduce, op=getattr(dist.ReduceOp, op))
            self.host.run(collective, values, f"{op} of {values.numel()} {values.dtype}", op_name)
        return values

    def _reduce_on_stream(self, values: Tensor, op: str, op_name: str) -> None:
        # Compare `op_name` between ranks on the device, so that the host need not wait: all-reduce
        # a few numbers made from the name (marks) besides the values. If the reduced marks show
        # that names differ, the device overwrites the result with NaN or -1.
        dtype = torch.float64 if values.is_floating_point() else torch.int64
        numbers = _marks(op_name, op)
        marks = torch.cat([values.new_full((1,), number, dtype=dtype) for number in numbers])
        expected = marks * self.size if op == "SUM" else marks.clone()
        # Send the marks of a large tensor separately: a concatenation would copy the tensor.
        are_few = values.numel() <= _FEW
        sent = torch.cat([values.reshape(-1).to(dtype), marks]) if are_few else values
        self.history.begin(self.gather_group, what=compared_name(op_name))
        with named(f"{op_name}, rank {self.global_rank}: exchanging values with the other ranks"):
            for one in (sent,) if are_few else (marks, sent):
                dist.all_reduce(one, getattr(dist.ReduceOp, op), self.gather_group)
        if are_few:
            sent, marks = sent[: values.numel()].view_as(values), sent[values.numel() :]
        spoiled = math.nan if values.is_floating_point() else -1
        values.copy_(sent.masked_fill((marks != expected).any(), spoiled))

    def broadcast(self, tensor: Tensor, *, op_name: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with the tensor of rank ``source`` of the group, and wait.

        ``tensor`` must be contiguous. Ranks compare ``op_name``, as in ``reduce_scalars``; with
        NCCL, all bytes of ``tensor`` become 255 (NaN, or -1) if names differ. Collective: all ranks
        of the group, in the same order of calls.
        """
        if self.size == 1:
            return
        self.note("broadcast", op_name, tensor.nbytes)
        if self.transport_for(tensor.device).stream_waits(tensor.device):
            # All ranks except the source send zeros, so the maximum of each byte is the source's.
            self._reduce_on_stream(as_bytes(tensor).mul_(self.rank == source), "MAX", op_name)
        else:
            collective = partial(dist.broadcast, src=self.ranks[source])
            kind = f"{tensor.nbytes} bytes of rank {source}"
            self.host.run(collective, as_bytes(tensor), kind, op_name)

    def exchange(
        self, sent: Tensor, lengths: list[int], expected: list[int], *, op_name: str
    ) -> tuple[AsyncWork, Tensor]:
        """Begin an all-to-all of bytes. The caller has compared ``op_name`` and lengths.

        Rank i receives ``lengths[i]`` bytes of ``sent``, and sends ``expected[i]`` bytes here.
        Returns the unfinished collective, and a tensor for the received bytes in rank order.

        Collective: all ranks of the group, in the same order of calls.
        """
        self.note("all_to_all", op_name, sent.nbytes)
        wire = sent.to(self.host.device) if self.is_gloo or sent.is_cpu else sent
        came = wire.new_empty(sum(expected))
        name = f"{op_name}, rank {self.global_rank}: exchanging values with the other ranks"
        group = self.host.group
        if wire.device.type != self.host.device.type:
            group = self.gather_group
            self.history.begin(group, what=compared_name(op_name))
        with named(name):
            work = dist.all_to_all_single(came, wire, expected, lengths, group=group, async_op=True)
        return AsyncWork([work], name, [wire, came]), came


def _marks(op_name: str, op: str) -> list[int]:
    """Return numbers whose reduction with ``op`` shows whether all ranks have ``op_name``."""
    # Take two numbers of 16 bits from a digest of the name, and make two marks of each number x.
    # For SUM, the marks are x and x**2. If all n ranks send the same x, the sums are n * x and
    # n * x**2. Otherwise, on every rank, one sum is not n times the rank's mark (Cauchy-Schwarz).
    # float64 holds the sums exactly. For MAX and MIN, the marks are x and -x: the results equal the
    # marks of every rank only if all ranks send the same x.
    digest = digest_of(f"{op} {compared_name(op_name)}".encode())
    first, second = (int.from_bytes(digest[start : start + 2], "big") for start in (0, 2))
    if op == "SUM":
        return [first, first**2, second, second**2]
    return [first, -first, second, -second]


# Communicator of a group with only this rank.
ALONE = Communicator(None)


@dataclass(frozen=True)
class Topology:
    """The groups of ranks over which one unit is sharded and reduced.

    A flat parameter is divided into ``shard.size`` shards, and this rank holds shard ``index``.
    Parameters are all-gathered over ``intra_group``. Gradients are reduce-scattered over
    ``intra_group``. If ``inter_group`` or ``replicate`` has several ranks, gradients are then
    reduce-scattered over ``inter_group``, or all-reduced over ``replicate``.
    """

    world: Communicator  # all ranks of the model
    shard: Communicator  # the ranks that split the flat parameter
    replicate: Communicator  # the ranks that hold the same shard

    intra_group: Communicator  # `shard`, or with HYBRID_SHARD_OP the ranks of one node
    inter_group: Communicator = ALONE  # with HYBRID_SHARD_OP, one rank of each node
    # With `reshard_after_forward=k`, the k ranks that all-gather parameters for backward.
    post_forward_group: Communicator | None = None

    @property
    def index(self) -> int:
        """Index of this rank's shard among the ``shard.size`` shards of a flat parameter."""
        return self.intra_group.rank * self.inter_group.size + self.inter_group.rank

    @cached_property
    def holders(self) -> list[int]:
        """For each shard, the rank of ``shard`` that holds it. The first access is collective."""
        if self.inter_group.size == 1:
            return [*range(self.shard.size)]
        indices = self.shard.host.gather(self.index, "which rank holds which shard")
        return sorted(range(self.shard.size), key=indices.__getitem__)

    @property
    def second_group(self) -> Communicator:
        """The group that reduces gradients after ``intra_group``. May have only one rank."""
        return self.inter_group if self.inter_group.size > 1 else self.replicate

    def connect(self, device: torch.device, *, fixed_order: bool) -> None:
        """Open the backend's connections for reductions of gradients on ``device``.

        Otherwise NCCL would open them in the first backward, where ranks could deadlock (see
        ``NativeTransport.warm_up``). Collective: all ranks of the unit's groups.
        """
        for group in (self.intra_group, self.inter_group, self.replicate):
            replicas = group is self.replicate
            if group.size > 1 and group.transport_for(device).stream_waits(device):
                with named(group.connecting):
                    group.native.warm_up(device, fixed_order=fixed_order, replicas=replicas)
