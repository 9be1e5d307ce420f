"""The only file that issues collectives. Takes tensors and groups, knows no parameter.

[Note: transports]
What moves gathered parameters and gradients, unless the user says it:

    nothing        a group of one.
    peer memory    gloo, tensors in host memory, all ranks on one host and allowed to read one
                   another's: one says where a part lies, the others copy it from there, or add it
                   up piece by piece, and say that they have. Each byte is copied once. Shards from
                   1 MiB on are not even copied: see ``mapped_shards``.
    sockets        gloo, tensors in host memory, else; or a wire dtype. gloo's own ``all_gather``
                   fills a temporary, its ``reduce_scatter`` is an all-reduce and a copy, and its
                   all-to-all sends before it can receive, so that both directions of a slow link
                   take turns (see ``wire``). Sends and receives have a tag per flat parameter and
                   so do not depend on the order in which ranks start them.
    the backend    NCCL and others, tensors on an accelerator: their own collectives, in place. Also
                   all-reduces over replicas.

No transport is better for small tensors and worse for large ones (1 MB: 0.4 ms by any), so the size
decides only how many pieces an average has, and whether shards are mapped.

[Note: sums]
All but the last add here, in rank order and in no less than fp32, whatever the gradients travel in:
the average is the same in every run. A backend adds as it likes, in the dtype that it is given.
Where a fixed order is asked for, it only exchanges the parts, by an all-to-all, and they are added
here. An all-reduce, in a fixed order or of gradients narrower than fp32, is such an average of one
part per rank and then a gather of the parts.

[Note: groups]
Collectives on one group match by order. Reductions start when gradients are there, gathers when
parameters are needed, and the two may interleave differently on each rank: each kind has a group
of its own. What ranks say to one another at the end of backward shares the gathers' group, where
the order is that of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections import deque
from collections.abc import Hashable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flatshard.comm.deadlock.detector import CollectiveCounter, WaitCondition
from flatshard.comm.flat_chunks import FlatChunks
from flatshard.comm.process_groups import (
    abort,
    backend_for,
    control_of,
    cpu_backend,
    host_backend,
    is_fake,
    named,
    new_group,
    sibling,
    timeout_of,
)
from flatshard.comm.rank_order import average, sum_dtype
from flatshard.comm.tags import Tags
from flatshard.comm.transports import peer_memory
from flatshard.comm.transports.mapped_shards import MappedShards
from flatshard.comm.transports.peer_memory import Mailbox
from flatshard.comm.transports.shared_memory import SharedMemoryTransport
from flatshard.comm.transports.sockets import SENT_IN_PLACE_BYTES, SocketTransport
from flatshard.comm.work import AsyncWork
from flatshard.memory import mapped_files
from flatshard.memory.mapped_files import Files
from flatshard.memory.page_pool import PooledBuffer
from flatshard.options.collectives import Collectives, TransportOptions

# Newer names of the same collectives; some versions warn of the older ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Event(NamedTuple):
    """One started collective.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"scalars"``,
            ``"broadcast"`` or ``"send"``.
        unit_fqn: names the unit; where there is none, the purpose.
        nbytes: bytes of the whole: of a gather's result, of what every rank puts into a reduction;
            of an all-reduce in two stages the mean of both, whose dtypes may differ.
        ranks: who takes part, by their numbers in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


_LARGE_NUMEL = 1 << 20
"""Elements of a reduction that no backend takes for a small one."""

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
    """The ranks that share something, and how they move tensors. A group of one never sends.

    Attributes:
        group: the process group; None: this rank alone.
        rank: this rank within the group.
        size: ranks in the group.
        ranks: the group's members by their numbers in the default group.
        global_rank: this rank's number there, for messages.
        transport_reason: why ``transport`` is what it is, where ranks find that out.
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
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.ranks: list[int] = dist.get_process_group_ranks(group) if group is not None else [0]
        self._members = ", ".join(map(str, self.ranks))
        self.global_rank = dist.get_rank() if group is not None else 0
        self._mode = mode
        self._subgroups: dict[tuple[int, ...], Communicator] = {}
        self._apart_group: dist.ProcessGroup | None = None
        self._connected: set[tuple[torch.device, bool, bool]] = set()
        self._on_host: SharedMemoryTransport | None = None
        self.transport_reason = ""
        self.second_stages: deque[Any] = deque()
        self.control_device = torch.device("cpu")
        if group is None or self.size == 1:
            return
        self._is_gloo = cpu_backend(group) == "gloo"
        self._is_fake = is_fake(group)
        if not self._is_gloo:
            mode.check_without_gloo(self.backend, self.global_rank)
        self._sends_cpu_directly = self._is_gloo and mode.collectives is not Collectives.NATIVE
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            self._gather_group = sibling(group) if self._sends_cpu_directly else group
            self._reduce_group = sibling(group)
            self._control_group = self._gather_group
            if cpu_backend(group) is None:
                self._control_group, self.control_device = control_of(group)
        self._progress = CollectiveCounter(
            self._reduce_group.group_name, self.ranks, self.global_rank
        )
        if self._sends_cpu_directly:
            self._sockets = SocketTransport(self._gather_group, self._reduce_group, mode.wire_dtype)
        # With a wire dtype, results are the same wherever the ranks are.
        if self._sends_cpu_directly and mode == AUTO:
            self._on_host = self._meet_on_host()
        elif self._sends_cpu_directly:
            self.transport_reason = "collectives= or wire_dtype= asks for it"

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group that moves what lies where ``tensor`` does."""
        return self._control_group if tensor.device.type == "cpu" else self._gather_group

    def connect(self, device: torch.device, *, fixed_order: bool, replicas: bool) -> None:
        """Let ranks find one another for reductions of what lies on ``device``.

        A backend that does so at the first of them holds up the host in it. In a backward a rank
        may come there alone, with others waiting for its gathers.

        Collective at the first call for a device and a kind of reduction.

        Args:
            device: where the gradients are.
            fixed_order: whether they are only exchanged, and added here.
            replicas: whether each rank needs the average of all.
        """
        if self.size == 1 or self._is_fake or not self.is_stream_ordered(device):
            return
        kind = device, fixed_order, replicas
        if kind in self._connected:
            return
        self._connected.add(kind)
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            # A small and a large one: backends have several ways, each with its connections.
            for numel in (1, -(-_LARGE_NUMEL // self.size)):
                whole = torch.zeros(numel * self.size, device=device)
                part = torch.zeros(numel, device=device)
                group, average = self._reduce_group, dist.ReduceOp.AVG
                if fixed_order:
                    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
                elif not replicas:
                    _reduce_scatter_single(part, whole, op=average, group=group)
                if fixed_order and replicas:
                    _all_gather_single(whole, part, group=group)
                elif replicas:
                    dist.all_reduce(whole, op=average, group=group)

    def set_apart(self) -> None:
        """Make a group for what ranks say to one another in the midst of a backward.

        Collective at the first call.
        """
        if self.group is None or self.size == 1 or self._apart_group is not None:
            return
        in_host_memory = not self._is_gloo and dist.is_gloo_available()
        with named(f"ShardedWrapper, rank {self.global_rank}: meeting the other ranks"):
            self._apart_group = new_group(
                self.group, self.ranks, backend=host_backend(self.group) if in_host_memory else None
            )

    def _meet_on_host(self) -> SharedMemoryTransport | None:
        """The ranks as readers of one another's memory, if all are on one host and may be."""
        mailbox = Mailbox()
        memory, self.transport_reason = peer_memory.meet(
            mailbox,
            partial(self.gather_objects, op_name="meeting on one host"),
            self.ranks,
            (timeout_of(self._gather_group) or timedelta(minutes=30)).total_seconds(),
        )
        if memory is None:
            return None
        return SharedMemoryTransport(memory, mailbox, self.rank, self.ranks, self._progress)

    def _begins(self, group: dist.ProcessGroup, kind: Hashable = None) -> WaitCondition | None:
        """Count a collective that this rank begins now; what its end needs of the others.

        Args:
            group: what moves it.
            kind: what it matches on other ranks; None: their next one on the group.
        """
        is_control = group is self._control_group or group is self._apart_group
        # Waits for others are not the host's.
        is_gloo = self._is_gloo or (is_control and dist.is_gloo_available())
        need = self._progress.begin(
            group.group_name if kind is None else kind,
            abort=partial(abort, group) if is_gloo else None,
        )
        return need if is_gloo else None

    @property
    def backend(self) -> str:
        """The name of the group's backend, or of several."""
        assert self.group is not None, "a group of one has none"
        return str(dist.get_backend(self.group))

    @property
    def transport(self) -> str:
        """What gathers and reduces tensors in host memory, in words; see the note on transports."""
        if not self._sends_cpu_directly:
            return self.backend
        if self._on_host is not None:
            return "peer memory"
        wire_dtype = self._mode.wire_dtype
        narrow = "" if wire_dtype is None else f", {wire_dtype}".replace("torch.", "")
        return f"sockets{narrow}"

    @property
    def uses_sockets(self) -> bool:
        """Whether the gathers of tensors in host memory pass sockets, in the background."""
        return self.size > 1 and self._sends_cpu_directly and self._on_host is None

    def map_shards(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        tag: int,
        map_tag: int,
        files: Files = mapped_files,
    ) -> MappedShards | PooledBuffer | None:
        """Memory for a flat parameter from which gathers need not copy, where that can be.

        Args:
            numel: elements of a shard.
            dtype: of the elements, in which they are gathered too.
            tag: the flat parameter's number from ``new_tag``.
            map_tag: another one.
            files: makes the file of this rank's part: in memory, or on a disk.
        """
        if not MappedShards.fits(numel, dtype):
            return None
        if self._on_host is not None and SharedMemoryTransport.takes(max(tag, map_tag)):
            return MappedShards(self._on_host, numel, dtype, tag=tag, map_tag=map_tag, files=files)
        # Rounded for the wire, it is not the shard that all ranks compute with.
        if self.uses_sockets and not self._sockets.narrows(dtype):
            own = range(self.rank * numel, (self.rank + 1) * numel)
            with contextlib.suppress(OSError):  # no addresses left
                return PooledBuffer(self.size * numel, dtype, own=own, files=files)
        return None

    def all_gather(
        self,
        shard: Tensor,
        out: Tensor,
        *,
        unit_fqn: str,
        tag: int,
        purpose: str,
        mapped: MappedShards | PooledBuffer | None = None,
        exact: bool = False,
    ) -> AsyncWork:
        """Begin filling ``out`` with every rank's shard, in rank order.

        Collective: all ranks of the group.

        Args:
            shard: this rank's part, ``(shard_numel,)``; must not be written before the wait.
            out: ``(shard_numel * size,)``, same dtype and device.
            unit_fqn: names the unit in errors and recordings.
            tag: the flat parameter's number from ``new_tag``.
            purpose: what for, in errors.
            mapped: has both, if it was made by ``map_shards``.
            exact: whether not to round, whatever the wire dtype.

        Raises:
            ValueError: the two lengths do not fit the group size.
        """
        if out.numel() != shard.numel() * self.size:
            raise ValueError(
                f"{unit_fqn}: gathering {shard.numel()} elements from {self.size} ranks does not "
                f"fill {out.numel()}"
            )
        what = self._what(unit_fqn, f"gathering parameters for {purpose}")
        if self.size == 1:
            out.copy_(shard)
            return AsyncWork([], what)
        self._note("gather", unit_fqn, out)
        with named(what):
            if isinstance(mapped, MappedShards):
                return mapped.begin(what)
            if self._direct(shard):
                if self._on_host is not None and SharedMemoryTransport.takes(tag):
                    return self._on_host.all_gather(_as_real(shard), _as_real(out), tag, what)
                is_there = mapped is not None and mapped.shard is not None
                return self._exchange(shard, out, tag, what, exact=exact, is_there=is_there)
            need = self._begins(self._gather_group)
            # As bytes: not every backend knows every dtype.
            work = _all_gather_single(
                _as_bytes(out), _as_bytes(shard), group=self._gather_group, async_op=True
            )
        return AsyncWork(self._under_way(work), what, shard, out, need=need)

    def _note(self, kind: str, unit_fqn: str, tensor: Tensor) -> None:
        self._note_bytes(kind, unit_fqn, tensor.numel() * tensor.element_size())

    def _note_bytes(self, kind: str, unit_fqn: str, nbytes: int) -> None:
        for events in _recorders:
            events.append(Event(kind, unit_fqn, nbytes, tuple(self.ranks)))

    def _what(self, unit_fqn: str, action: str) -> str:
        unit = f"unit {unit_fqn!r}" if unit_fqn else "the root unit"
        return f"{unit}, rank {self.global_rank}: {action} over ranks {self._members}"

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Whether it is a stream that waits for what moves tensors there, and not the host."""
        return device.type == "cuda" and not self._moved_by_gloo(device)

    def _moved_by_gloo(self, device: torch.device) -> bool:
        return self.group is not None and backend_for(self.group, device.type) == "gloo"

    def _under_way(self, work: Any) -> list[Any]:
        """What a collective's end is told by; simulated ones are over, and do not say so."""
        return [] if self._is_fake else [work]

    def part_bytes(self, tag: int, dtype: torch.dtype) -> int | None:
        """From how many bytes on reductions on the CPU take a gradient from where it is.

        Cheaper than to copy it to its neighbours, that is. None: they want all in one piece.
        """
        if self._on_host is not None and SharedMemoryTransport.takes(tag):
            return 0
        if self.size > 1 and self._sends_cpu_directly and not self._sockets.narrows(dtype):
            return SENT_IN_PLACE_BYTES
        return None

    def sum_dtype(
        self, dtype: torch.dtype, device: torch.device, *, fixed_order: bool
    ) -> torch.dtype:
        """In which reduce-scatters add up, and give, what they get in ``dtype``."""
        if self.size == 1:
            return dtype
        adds_here = fixed_order or (self._sends_cpu_directly and device.type == "cpu")
        return sum_dtype(dtype) if adds_here else dtype

    def is_unordered(self, device: torch.device) -> bool:
        """Whether gathers and reduce-scatters meet those of the same flat parameter in any order.

        Else they meet by the order in which they begin.
        """
        return self.size == 1 or (self._sends_cpu_directly and device.type == "cpu")

    def num_in_order(self, device: torch.device) -> int:
        """How many collectives this rank has begun that meet the others' by their order; or 0.

        Alike on all ranks at the same place of the program, or they have met wrongly.
        """
        if self.is_unordered(device):
            return 0
        return self._progress.begun.get(self._gather_group.group_name, 0)

    def adds_all_reduces(
        self, dtype: torch.dtype, device: torch.device, *, fixed_order: bool
    ) -> bool:
        """Whether an all-reduce is a ``reduce_scatter`` and ``gather_reduced``; see the notes."""
        return self.size > 1 and (
            fixed_order or self.sum_dtype(dtype, device, fixed_order=False) is not dtype
        )

    def reduce_scatter(
        self,
        whole: FlatChunks,
        out: Tensor,
        *,
        unit_fqn: str,
        tag: int,
        fixed_order: bool = False,
        kind: str = "reduce",
    ) -> AsyncWork:
        """Begin averaging over the ranks, each receiving its part in ``out``.

        Collective: all ranks of the group, in the same order of calls.

        Args:
            whole: ``shard_numel * size`` elements, in one part unless ``part_bytes`` allows more;
                one part is used up: what is in it afterwards is undefined.
            out: ``(shard_numel,)``, on the same device, in the dtype that ``sum_dtype`` says; valid
                after the wait. What ``whole`` has no range for is left as it is.
            unit_fqn: names the unit in errors and recordings.
            tag: the flat parameter's number from ``new_tag``.
            fixed_order: whether to add in rank order also where the backend would add.
            kind: "all_reduce" where ``gather_reduced`` follows.
        """
        nbytes = out.numel() * self.size * whole.dtype.itemsize
        action = "reduce-scattering"
        if kind == "all_reduce":
            nbytes = (nbytes + out.numel() * self.size * out.element_size()) // 2
            action = "all-reducing"
        self._note_bytes(kind, unit_fqn, nbytes)
        what = self._what(unit_fqn, f"{action} gradients in backward")
        with named(what):
            if self._direct(out) and self._on_host is not None and SharedMemoryTransport.takes(tag):
                return self._on_host.reduce_scatter(whole, out, tag, what)
            if self._direct(out):
                need = self._begins(self._reduce_group, ("average", tag))
                averaged, sent = self._sockets.average(whole, out, tag)
                return AsyncWork(
                    [averaged],
                    what,
                    *whole.tensors,
                    out,
                    trailing=[sent],
                    need=need,
                    trailing_need=need,
                )
            (buffer,) = whole.parts
            assert buffer is not None, "gradients in one piece"
            if fixed_order:
                return self._reduce_in_order(buffer, out, what)
            need = self._begins(self._reduce_group)
            work = _reduce_scatter_single(
                _as_real(out),
                _as_real(buffer),
                op=dist.ReduceOp.AVG,
                group=self._reduce_group,
                async_op=True,
            )
        # gloo's own reduce-scatter never says that it is over.
        tells = not self._moved_by_gloo(buffer.device)
        return AsyncWork(self._under_way(work), what, buffer, out, tells=tells, need=need)

    def _reduce_in_order(self, buffer: Tensor, out: Tensor, what: str) -> AsyncWork:
        """Have the backend exchange the parts only, and add them up."""
        came = torch.empty_like(buffer)
        need = self._begins(self._reduce_group)
        # As bytes: not every backend knows every dtype.
        work = dist.all_to_all_single(
            _as_bytes(came), _as_bytes(buffer), group=self._reduce_group, async_op=True
        )
        add = partial(average, came.chunk(self.size), out)
        tells, works = not self._moved_by_gloo(buffer.device), self._under_way(work)
        return AsyncWork(works, what, buffer, came, out, then=add, tells=tells, need=need)

    def gather_reduced(self, part: Tensor, out: Tensor, *, unit_fqn: str, tag: int) -> AsyncWork:
        """Begin the second half of an all-reduce, whose first was a ``reduce_scatter``.

        Collective: all ranks of the group; among reductions in the same order of calls, where the
        backend moves the tensors.

        Args:
            part: what that gave, ``(shard_numel,)``; must not be written before the wait.
            out: ``(shard_numel * size,)``, same dtype and device.
            unit_fqn: as in ``reduce_scatter``.
            tag: likewise.
        """
        what = self._what(unit_fqn, "all-reducing gradients in backward")
        with named(what):
            if self._direct(part):
                if self._on_host is not None and SharedMemoryTransport.takes(tag):
                    return self._on_host.all_gather(_as_real(part), _as_real(out), tag, what)
                return self._exchange(part, out, tag, what, exact=True)
            need = self._begins(self._reduce_group)
            work = _all_gather_single(
                _as_real(out), _as_real(part), group=self._reduce_group, async_op=True
            )
        tells = not self._moved_by_gloo(part.device)
        return AsyncWork(self._under_way(work), what, part, out, tells=tells, need=need)

    def all_reduce(self, buffer: Tensor, *, unit_fqn: str) -> AsyncWork:
        """Begin averaging ``buffer`` over the ranks, in place.

        Collective: all ranks of the group, in the same order of calls.
        """
        self._note("all_reduce", unit_fqn, buffer)
        what = self._what(unit_fqn, "all-reducing gradients in backward")
        with named(what):
            need = self._begins(self._reduce_group)
            work = dist.all_reduce(
                _as_real(buffer), op=dist.ReduceOp.AVG, group=self._reduce_group, async_op=True
            )
        return AsyncWork(self._under_way(work), what, buffer, need=need)

    def reduce_scalars(
        self, values: Tensor, op: str, *, op_name: str, apart: bool = False
    ) -> Tensor:
        """Combine a few numbers over the ranks, in place, and wait; ``op`` as in ``ReduceOp``.

        Collective: all ranks of the group, in the same order of calls, where those that are
        ``apart``, after ``set_apart``, have an order of their own.
        """
        if self.size == 1:
            return values
        self._note("scalars", op_name, values)
        group = self._apart_group if apart else self._group_for(values)
        assert group is not None, "set_apart() comes first"
        what = f"{op_name!r}, rank {self.global_rank}: combining values over ranks {self._members}"
        with named(what, self._begins(group)):
            dist.all_reduce(values, op=getattr(dist.ReduceOp, op), group=group)
        return values

    def broadcast(self, tensor: Tensor, *, op_name: str, source: int = 0) -> None:
        """Overwrite ``tensor`` with that of rank ``source`` of the group, and wait.

        Collective: all ranks of the group, in the same order of calls.
        """
        if self.size == 1:
            return
        self._note("broadcast", op_name, tensor)
        src = self.ranks[source]
        group = self._group_for(tensor)
        need = self._begins(group)
        if need is not None:
            need = need._replace(ranks=self._told_first(source) if self.rank == source else (src,))
        with named(f"{op_name!r}, rank {self.global_rank}: broadcasting from rank {src}", need):
            dist.broadcast(_as_bytes(tensor), src=src, group=group)

    def _told_first(self, source: int) -> tuple[int, ...]:
        """The ranks that gloo's broadcast tells itself, a power of two behind; they tell others."""
        distances = (1 << power for power in range((self.size - 1).bit_length()))
        return tuple(self.ranks[(source + distance) % self.size] for distance in distances)

    def send(self, tensor: Tensor, *, to: int, op_name: str) -> None:
        """Send a contiguous tensor to rank ``to`` of the group, which ``receive``s it; waits."""
        self._note("send", op_name, tensor)
        with named(f"{op_name!r}, rank {self.global_rank}: sending to rank {self.ranks[to]}"):
            wire = self._on_wire(tensor)
            self._group_for(wire).send([wire], to, 0).wait()

    def receive(self, tensor: Tensor, *, source: int, op_name: str) -> None:
        """Overwrite a contiguous tensor with what rank ``source`` of the group sends, and wait."""
        wire = self._on_wire(tensor)
        what = f"{op_name!r}, rank {self.global_rank}: receiving from rank {self.ranks[source]}"
        with named(what):
            self._group_for(wire).recv([wire], source, 0).wait()
        if wire.device != tensor.device:
            _as_bytes(tensor).copy_(wire)

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor where point-to-point messages can take them from."""
        data = _as_bytes(tensor)
        if self._is_gloo:
            return data.to("cpu")
        # An offloaded shard's. The current device may be another rank's.
        return data.to(self.control_device) if data.device.type == "cpu" else data

    def gather_objects(self, value: Any, *, op_name: str) -> list[Any]:
        """Every rank's ``value`` (picklable), in rank order, on every rank.

        Collective: all ranks of the group, in the same order of calls.
        """
        if self.size == 1:
            return [value]
        with named(f"{op_name}, rank {self.global_rank}", self._begins(self._control_group)):
            return _gather_objects(value, self._control_group, self.control_device)

    def _direct(self, tensor: Tensor) -> bool:
        return self._sends_cpu_directly and tensor.device.type == "cpu"

    def _exchange(
        self,
        shard: Tensor,
        out: Tensor,
        tag: int,
        what: str,
        *,
        exact: bool,
        is_there: bool = False,
    ) -> AsyncWork:
        need = self._begins(self._gather_group, ("gather", tag))
        gathering = self._sockets.gather(shard, out, tag, exact=exact, is_there=is_there)
        return AsyncWork(
            list(gathering.receives.values()),
            what,
            gathering.source,
            out,
            peers=[self.ranks[peer] for peer in gathering.receives],
            then=gathering.finish,
            trailing=gathering.sends,
            need=need,
            trailing_need=need,
        )


def _gather_objects(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Not ``all_gather_object``, which needs numpy."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    _all_gather_single(lengths, torch.tensor([data.numel()], device=device), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everything = torch.zeros(group.size() * longest, dtype=torch.uint8, device=device)
    _all_gather_single(everything, padded, group=group)
    rows = everything.cpu().view(group.size(), longest)
    return [
        pickle.loads(ctypes.string_at(row.data_ptr(), length))
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def gather_before(group: dist.ProcessGroup, value: Any, *, op_name: str) -> list[Any]:
    """Every rank's ``value`` (picklable) over a group that has no communicator yet, perhaps.

    Collective: all ranks of the group.
    """
    if group.size() == 1:
        return [value]
    with named(f"{op_name}, rank {dist.get_rank()}"):
        if cpu_backend(group) is None:
            return _gather_objects(value, *control_of(group))
        return _gather_objects(value, group, torch.device("cpu"))


ALONE = Communicator(None)
"""The group of one."""


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    return _as_real(tensor).view(-1).view(torch.uint8)
