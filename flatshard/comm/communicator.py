"""``Communicator``: the ranks of a group; picks the transport that moves a tensor between them.

[Note: transports]
The first of ``transports.TRANSPORTS`` that a group has and that accepts a tensor moves it. None is
better for small tensors and worse for large ones (1 MB: 0.4 ms by any), so the size decides only
how many pieces an average has, and whether shards are mapped.

[Note: sums]
All transports but the native one add here, in rank order and in no less than fp32, whatever dtype
the gradients travel in: the average is the same in every run. A backend adds as it likes, in the
dtype that it is given. Where a fixed order is asked for, it only exchanges the parts, by an
all-to-all, and they are added here. An all-reduce in a fixed order, or of gradients narrower than
fp32, is such a reduce-scatter and then an all-gather of the parts.

[Note: groups]
Ordered collectives on one group match by order. Reductions start when gradients are there,
all-gathers when parameters are needed, and the two may interleave differently on each rank: each
kind has a group of its own. What ranks agree on at the end of backward shares the all-gathers'
group, where the order is that of the program.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.deadlock.detector import CollectiveCounter, WaitCondition
from flatshard.comm.flat_chunks import as_bytes, sum_dtype
from flatshard.comm.process_groups import (
    Tags,
    backend_for,
    control_of,
    host_backend,
    is_fake,
    named,
    new_group,
    sibling,
)
from flatshard.comm.requests import BufferRequest, Gather, ReduceScatter
from flatshard.comm.transports import TRANSPORTS, Members, Transport, native
from flatshard.comm.work import AsyncWork
from flatshard.memory.buffers import BufferMemory
from flatshard.memory.page_pool import allocate
from flatshard.options.collectives import Collectives, TransportOptions


class Event(NamedTuple):
    """One started collective.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"scalars"``,
            ``"broadcast"`` or ``"send"``.
        unit_fqn: names the unit; where there is none, the purpose.
        nbytes: of an all-gather's result, or of every rank's input to a reduction; of an
            all-reduce in two stages the mean of both, whose dtypes may differ.
        ranks: the participants, by their ranks in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


AUTO = TransportOptions()
"""What fits best; see the note on transports."""

_recorders: list[list[Event]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """List the collectives that this rank starts inside the context, in order."""
    events: list[Event] = []
    _recorders.append(events)
    try:
        yield events
    finally:
        # By identity: nested ones may have listed the same.
        _recorders[:] = [one for one in _recorders if one is not events]


class Communicator(Tags):
    """The ranks of one process group, and how they move tensors. A group of one never sends.

    Attributes:
        group: the process group; None: this rank alone.
        rank: this rank within the group.
        size: ranks in the group.
        ranks: the group's members by their ranks in the default group.
        global_rank: this rank there, for messages.
        options: how the user wants tensors moved.
        transports: those that the group has, in order of preference.
        transport_reason: why the group has this transport, or "".
        subgroups: communicators of some of the ranks, by these.
        second_stages: reductions in two stages whose second one is to cross this group, in the
            order in which all ranks begin them.
        control_device: where a few numbers must lie to be sent; "cpu" unless the group has none.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, mode: TransportOptions = AUTO) -> None:
        """Find out how the ranks can talk.

        Collective when ``group`` has several ranks: makes the groups of the note above.

        Args:
            group: the ranks; None is this rank alone.
            mode: how to move tensors.

        Raises:
            ValueError: what ``mode`` asks for cannot be had with the group's backend.
        """
        super().__init__()
        self.group, self.options = group, mode
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.ranks: list[int] = dist.get_process_group_ranks(group) if group is not None else [0]
        self.global_rank = dist.get_rank() if group is not None else 0
        self._rank_list = ", ".join(map(str, self.ranks))
        self.transports: list[Transport] = []
        self.transport_reason = ""
        self.subgroups: dict[tuple[int, ...], Communicator] = {}
        self._apart_group: dist.ProcessGroup | None = None
        self._warmed_up: set[tuple[torch.device, bool, bool]] = set()
        self.second_stages: deque[Any] = deque()
        self.control_device = torch.device("cpu")
        if group is not None and self.size > 1:
            self._meet(group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        is_gloo = backend_for(group, "cpu") == "gloo"
        if not is_gloo:
            self.options.check_without_gloo(self.backend, self.global_rank)
        # Their aborts and tags must not touch collectives of the user's.
        is_apart = is_gloo and self.options.collectives is not Collectives.NATIVE
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            gather_group = sibling(group) if is_apart else group
            reduce_group = sibling(group)
            self._control_group = gather_group
            if backend_for(group, "cpu") is None:
                self._control_group, self.control_device = control_of(group)
        self.counter = CollectiveCounter(reduce_group.group_name, self.ranks, self.global_rank)
        self.members = Members(
            self.rank,
            self.ranks,
            gather_group,
            reduce_group,
            self.counter,
            self.options,
            is_gloo,
            is_fake(group),
            lambda value: self.gather_objects(value, op_name="meeting on one host"),
        )
        # Every rank asks every class, in the same order: ``connect`` may communicate.
        reasons = []
        for kind in TRANSPORTS:
            found = kind.connect(self.members)
            if isinstance(found, Transport):
                self.transports.append(found)
            elif found:
                reasons.append(found)
        chosen = self.transport_for(torch.device("cpu"))
        self.transport_reason = "; ".join(reasons) or chosen.reason

    # ------------------------------------------------------------ what moves tensors

    def transport_for(self, device: torch.device, tag: int = 0) -> Transport:
        """The transport for tensors on ``device``; the group has several ranks."""
        return next(one for one in self.transports if one.accepts(device, tag))

    @property
    def backend(self) -> str:
        """The name of the group's backend, or of several."""
        assert self.group is not None, "a group of one has none"
        return str(dist.get_backend(self.group))

    @property
    def transport(self) -> str:
        """Name of the transport for tensors in host memory; see the note on transports."""
        return self.transport_for(torch.device("cpu")).name

    @property
    def gathers_in_background(self) -> bool:
        """Whether all-gathers in host memory make progress on a network while the host computes."""
        return self.size > 1 and self.transport_for(torch.device("cpu")).gathers_in_background

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Whether a stream, and not the host, waits for collectives on ``device``."""
        if self.size == 1:
            return device.type == "cuda"
        return self.transport_for(device).stream_waits(device)

    def is_unordered(self, device: torch.device) -> bool:
        """Whether all-gathers and reduce-scatters match by flat parameter, in any order.

        Otherwise they match by the order in which they begin.
        """
        return self.size == 1 or not self.transport_for(device).is_ordered

    def num_in_order(self, device: torch.device) -> int:
        """Number of collectives begun that match the others' by order; 0 if they match by tag.

        Equal on all ranks at the same place of the program, unless collectives were mismatched.
        """
        if self.is_unordered(device):
            return 0
        return self.counter.begun.get(self.members.gather_group.group_name, 0)

    def min_chunk_bytes(self, tag: int, dtype: torch.dtype) -> int | None:
        """Smallest gradient on the CPU that is cheaper to send from where it is than to copy.

        None: reduce-scatters accept one chunk only.
        """
        if self.size == 1:
            return None
        return self.transport_for(torch.device("cpu"), tag).min_chunk_bytes(dtype)

    def sum_dtype(
        self, dtype: torch.dtype, device: torch.device, *, fixed_order: bool
    ) -> torch.dtype:
        """The dtype in which reduce-scatters of ``dtype`` add up, and of their result."""
        if self.size == 1:
            return dtype
        adds_here = fixed_order or self.transport_for(device).adds_here
        return sum_dtype(dtype) if adds_here else dtype

    def adds_all_reduces(
        self, dtype: torch.dtype, device: torch.device, *, fixed_order: bool
    ) -> bool:
        """Whether an all-reduce is a reduce-scatter and a ``reduced`` all-gather; see the notes."""
        return self.size > 1 and (
            fixed_order or self.sum_dtype(dtype, device, fixed_order=False) is not dtype
        )

    def connect(self, device: torch.device, *, fixed_order: bool, replicas: bool) -> None:
        """Open connections for reductions of tensors on ``device``, where streams wait for them.

        Collective at the first call for a device and a kind of reduction.

        Args:
            device: where the gradients are.
            fixed_order: whether they are only exchanged, and added here.
            replicas: whether each rank needs the average of all.
        """
        kind = device, fixed_order, replicas
        if self.size == 1 or kind in self._warmed_up or not self.is_stream_ordered(device):
            return
        self._warmed_up.add(kind)
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            self.transport_for(device).warm_up(device, fixed_order=fixed_order, replicas=replicas)

    def set_apart(self) -> None:
        """Make a group for numbers that ranks exchange in the middle of a backward.

        Collective at the first call.
        """
        if self.group is None or self.size == 1 or self._apart_group is not None:
            return
        in_host_memory = not self.members.is_gloo and dist.is_gloo_available()
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            self._apart_group = new_group(
                self.group, self.ranks, backend=host_backend(self.group) if in_host_memory else None
            )

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """Memory for an unsharded buffer; see ``Transport.allocate_unsharded``."""
        if self.size == 1:
            return allocate(request.numel, request.dtype, request.device)
        return self.transport_for(request.device, request.tag).allocate_unsharded(request)

    # ------------------------------------------------------------ parameters and gradients

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
        op_name = self._op_name(request.unit_fqn, action)
        if self.size == 1:
            out.copy_(shard)
            return AsyncWork([], op_name)
        if not request.reduced:  # else its first half was noted
            self._note("gather", request.unit_fqn, out.nbytes)
        with named(op_name):
            return self.transport_for(shard.device, request.tag).gather(request, op_name)

    def reduce_scatter(self, request: ReduceScatter) -> AsyncWork:
        """Begin averaging over the ranks; see ``Transport.reduce_scatter``.

        Collective: all ranks of the group, in the same order of calls.
        """
        out = request.out
        nbytes = out.numel() * self.size * request.chunks.dtype.itemsize
        action = "reduce-scattering"
        if request.kind == "all_reduce":
            nbytes = (nbytes + out.nbytes * self.size) // 2
            action = "all-reducing"
        self._note(request.kind, request.unit_fqn, nbytes)
        op_name = self._op_name(request.unit_fqn, f"{action} gradients in backward")
        with named(op_name):
            return self.transport_for(out.device, request.tag).reduce_scatter(request, op_name)

    def all_reduce(self, buffer: Tensor, *, unit_fqn: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Collective: all ranks of the group, in the same order of calls.
        """
        op_name = self._op_name(unit_fqn, "all-reducing gradients in backward")
        if self.size == 1:
            return AsyncWork([], op_name, buffer)
        self._note("all_reduce", unit_fqn, buffer.nbytes)
        # Not every transport has one; the native one, which comes last, has.
        able = (one for one in self.transports if one.can_all_reduce)
        transport = next(one for one in able if one.accepts(buffer.device, 0))
        with named(op_name):
            return transport.all_reduce(buffer, op_name)

    def _note(self, kind: str, unit_fqn: str, nbytes: int) -> None:
        for events in _recorders:
            events.append(Event(kind, unit_fqn, nbytes, tuple(self.ranks)))

    def _op_name(self, unit_fqn: str, action: str) -> str:
        unit = f"unit {unit_fqn!r}" if unit_fqn else "the root unit"
        return f"{unit}, rank {self.global_rank}: {action} over ranks {self._rank_list}"

    # ------------------------------------------------------------ small things, at once

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group that moves tensors of this device."""
        on_host = tensor.device.type == "cpu"
        return self._control_group if on_host else self.members.gather_group

    def _begin(self, group: dist.ProcessGroup) -> WaitCondition | None:
        is_control = group is self._control_group or group is self._apart_group
        # On a stream it is not the host that waits.
        on_host = self.members.is_gloo or (is_control and dist.is_gloo_available())
        return self.members.begin(group, on_host=on_host)

    def reduce_scalars(
        self, values: Tensor, op: str, *, op_name: str, apart: bool = False
    ) -> Tensor:
        """Combine a few numbers over the ranks, in place, and wait; ``op`` as in ``ReduceOp``.

        Collective: all ranks of the group, in the same order of calls, where those that are
        ``apart``, after ``set_apart``, have an order of their own.
        """
        if self.size == 1:
            return values
        self._note("scalars", op_name, values.nbytes)
        group = self._apart_group if apart else self._group_for(values)
        assert group is not None, "set_apart() comes first"
        description = (
            f"{op_name!r}, rank {self.global_rank}: combining values over ranks {self._rank_list}"
        )
        with named(description, self._begin(group)):
            dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=group)
        return values

    def broadcast(self, tensor: Tensor, *, op_name: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with that of rank ``source`` of the group, and wait.

        Collective: all ranks of the group, in the same order of calls.
        """
        if self.size == 1:
            return
        self._note("broadcast", op_name, tensor.nbytes)
        src = self.ranks[source]
        group = self._group_for(tensor)
        need = self._begin(group)
        if need is not None:
            # A broadcast needs not every rank: receivers need the source, the source its receivers.
            need = need._replace(
                ranks=self._first_receivers(source) if self.rank == source else (src,)
            )
        with named(f"{op_name!r}, rank {self.global_rank}: broadcasting from rank {src}", need):
            dist.broadcast(as_bytes(tensor), src=src, group=group)

    def _first_receivers(self, source: int) -> tuple[int, ...]:
        """To whom the source itself sends in gloo's broadcast: ranks a power of two behind."""
        distances = (1 << power for power in range((self.size - 1).bit_length()))
        return tuple(self.ranks[(source + distance) % self.size] for distance in distances)

    def send(self, tensor: Tensor, *, to: int, op_name: str) -> None:
        """Send a contiguous tensor to rank ``to`` of the group, which ``receive``s it; waits."""
        self._note("send", op_name, tensor.nbytes)
        with named(f"{op_name!r}, rank {self.global_rank}: sending to rank {self.ranks[to]}"):
            wire = self._on_wire(tensor)
            # No WaitCondition: point-to-point messages are not counted, so no deadlock is proved.
            self._group_for(wire).send([wire], to, 0).wait()

    def receive(self, tensor: Tensor, *, source: int, op_name: str) -> None:
        """Overwrite a contiguous tensor with what rank ``source`` of the group sends, and wait."""
        wire = self._on_wire(tensor)
        description = (
            f"{op_name!r}, rank {self.global_rank}: receiving from rank {self.ranks[source]}"
        )
        with named(description):
            self._group_for(wire).recv([wire], source, 0).wait()
        if wire.device != tensor.device:
            as_bytes(tensor).copy_(wire)

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor where point-to-point messages can take them from."""
        data = as_bytes(tensor)
        if self.members.is_gloo:
            return data.to("cpu")
        # An offloaded shard's. The current device may be another rank's.
        return data.to(self.control_device) if data.device.type == "cpu" else data

    def gather_objects(self, value: Any, *, op_name: str) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order, on every rank.

        Collective: all ranks of the group, in the same order of calls.
        """
        if self.size == 1:
            return [value]
        with named(f"{op_name}, rank {self.global_rank}", self._begin(self._control_group)):
            return native.gather_objects(value, self._control_group, self.control_device)


def gather_before(group: dist.ProcessGroup, value: Any, *, op_name: str) -> list[Any]:
    """Every rank's ``value`` (picklable) over a group that has no communicator yet, perhaps.

    Collective: all ranks of the group.
    """
    if group.size() == 1:
        return [value]
    with named(f"{op_name}, rank {dist.get_rank()}"):
        if backend_for(group, "cpu") is None:
            return native.gather_objects(value, *control_of(group))
        return native.gather_objects(value, group, torch.device("cpu"))


ALONE = Communicator(None)
"""The group of one."""
