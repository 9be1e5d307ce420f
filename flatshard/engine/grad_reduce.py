"""``GradReduce``: the gradients of one flat parameter on their way through its collectives.

[Note: two stages]
Gradients are averaged within the intra group, each rank keeping its part, and then, where there
are more ranks, across: split further over the inter group, or averaged over replicas. The second
stage can wait for a later backward (``Sync.INTRA``): then the result of the first is added up in
``GradientBuffer``. What either sends is in the reduce dtype, sums may be wider (``communicator``):
they are rounded only to cross. Where this package adds replicas' averages up itself, a third stage
all-gathers the parts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator, Topology
from flatshard.comm.transports import FlatChunks, Gather, ReduceScatter
from flatshard.comm.work import AsyncWork, CollectiveError, RunLink
from flatshard.engine.grad_buffer import zero
from flatshard.memory.buffers import BufferCache, storage_bytes
from flatshard.plan.layout import FlatLayout


@dataclass(frozen=True)
class CommHook:
    """What a user put in the place of the usual reduction of a flat parameter."""

    # In which gradients are reduced; None: as without a hook.
    reduce_dtype: torch.dtype | None = None
    # Called with unsharded gradients, `(padded_numel,)` in the reduce dtype, and the unit's name;
    # returns their average over all ranks, this rank's `(shard_numel,)`, in any dtype. Collective,
    # over when it returns. None: the usual reduction.
    reduce: Callable[[Tensor, str], Tensor] | None = None


@dataclass
class ReducePlan:
    """How the gradients of one flat parameter are reduced."""

    link: RunLink
    layout: FlatLayout
    topology: Topology
    reduce_dtype: torch.dtype
    device: torch.device
    tags: tuple[int, int, int]  # in the intra, the inter and the replicate group
    fixed_order: bool  # add in rank order also where the backend would add
    hook: Callable[[Tensor, str], Tensor] | None  # reduces instead, see `CommHook`
    # Memory of published gradients that users have dropped, for the next ones; None: what is
    # reduced is copied elsewhere, so any memory will do.
    output: BufferCache | None
    # Elements that this rank has after the first stage, and which of the flat parameter is first.
    intra_numel: int = field(init=False)
    intra_start: int = field(init=False)
    full_bytes: int = field(init=False)  # of the unsharded gradients
    bytes_in_flight: int = field(init=False)  # that a reduction holds until it is finished
    adds_replicas: bool = field(init=False)  # whether replicas' averages are added up in parts
    across: Communicator = field(init=False)  # the group of the second stage
    # In which the first and the second stage add up.
    intra_sum_dtype: torch.dtype = field(init=False)
    across_sum_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        intra_group, replicate = self.topology.intra_group, self.topology.replicate
        self.intra_numel = self.layout.padded_numel // intra_group.size
        self.intra_start = intra_group.rank * self.intra_numel
        self.full_bytes = self.layout.padded_numel * self.reduce_dtype.itemsize
        # To send and to receive, unless the backend adds up as it receives. An accelerator's then
        # has two units under way, without which its host would be too little ahead of it.
        waits = intra_group.transport_for(self.device).stream_waits(self.device)
        self.bytes_in_flight = self.full_bytes * (1 if waits and not self.fixed_order else 2)
        self.across = self.topology.across
        self.intra_sum_dtype = self._sum_dtype(intra_group)
        self.across_sum_dtype = self._sum_dtype(self.across)
        sums_wider = self._sum_dtype(replicate) is not self.reduce_dtype
        self.adds_replicas = replicate.size > 1 and (self.fixed_order or sums_wider)

    @property
    def min_chunk_bytes(self) -> int | None:
        """Size from which the transport reads a gradient where it is; None: from one buffer."""
        if self.hook is not None:
            return None
        transport = self.topology.intra_group.transport_for(tag=self.tags[0])
        return transport.min_chunk_bytes(self.reduce_dtype)

    @property
    def is_unordered(self) -> bool:
        """Whether reductions may begin in another order than other models' on other ranks."""
        topology = self.topology
        groups = topology.intra_group, topology.inter_group, topology.replicate
        return (
            self.hook is None
            and not any(group.transport_for(self.device).is_ordered for group in groups)
            and (topology.replicate.size == 1 or self.adds_replicas)
        )

    def _sum_dtype(self, comm: Communicator) -> torch.dtype:
        transport = comm.transport_for(self.device)
        return transport.sum_dtype(self.reduce_dtype, fixed_order=self.fixed_order)

    def give_back(self) -> None:
        if self.output is not None:
            self.output.give_back()

    def new_output(self, numel: int, dtype: torch.dtype, *, is_last: bool = True) -> Tensor:
        # Only what is published needs memory that users may hold on to, not what crosses.
        if self.output is None or not is_last:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self.output.take(numel, dtype, self.device)

    def zero_padding(self, part: Tensor, position: int) -> Tensor:
        """Zero the padding in part number ``position`` of the flat parameter; returns it."""
        first, numel = position * part.numel(), part.numel()
        inside = ([min(max(x - first, 0), numel) for x in gap] for gap in self.layout.gaps)
        zero([part[start:end] for start, end in inside if start < end])
        return part

    def reduce_by_hook(self, chunks: FlatChunks) -> Tensor:
        """Let the user's function reduce; returns ``(shard_numel,)``. Collective."""
        assert self.hook is not None, "there is one"
        (buffer,) = chunks.tensors
        with torch.no_grad():
            # A hook may have put noise into the padding.
            return self.zero_padding(self.hook(buffer, self.link.unit_name), self.topology.index)


class GradReduce:
    """One flat parameter's gradients on their way through the stages; see the note."""

    def __init__(
        self,
        plan: ReducePlan,
        chunks: FlatChunks,  # not to be touched until the end
        *,
        hold: bool,  # stop after the first stage, whose result waits for a later backward
        held: Tensor | None,  # what earlier first stages gave, to be added before the second
    ) -> None:
        """Start the first stage. Collective: all ranks of the unit, in the same order of calls."""
        self.hold, self.is_finished = hold, False
        self._plan, self._held = plan, held
        self._computed: torch.Event | None = None
        if plan.device.type == "cuda":
            self._computed = torch.Event(plan.device)
            self._computed.record()  # on the stream that is current on its device
        intra_group, across = plan.topology.intra_group, plan.across
        self._work = AsyncWork([], plan.link.unit_name)
        # Stages that follow the first, in order. `_across` has a turn among all models.
        self.to_come: deque[Callable[[], AsyncWork]] = deque()
        self._turns = across.second_stages
        self._read_behind: list[object] = []
        with torch.no_grad():
            if intra_group.size > 1:
                self._out = self._new_intra_part(chunks)
                self._work = self._reduce_scatter(intra_group, chunks, plan.tags[0])
            else:
                (self._out,) = chunks.tensors
            self._begun = [self._work]
            if across.size == 1 or hold:
                return
            self.to_come.append(self._across)
            if across is plan.topology.replicate and plan.adds_replicas:
                self.to_come.append(self._gather_replicas)
            # Which first stage is over first may differ between ranks.
            self._turns.append(self)
            # gloo moves an accelerator's tensors, too, but the host waits for it.
            device = self._out.device
            if across.transport_for(device).stream_waits(device):
                self._cross_behind(chunks)
            elif intra_group.size == 1:  # nothing to wait for
                self.cross()

    def _new_intra_part(self, chunks: FlatChunks) -> Tensor:
        """Where this rank's part of the first stage goes; only its padding has values."""
        plan, intra_group = self._plan, self._plan.topology.intra_group
        is_last = plan.topology.inter_group.size == 1 and not plan.adds_replicas
        part = plan.new_output(plan.intra_numel, plan.intra_sum_dtype, is_last=is_last)
        if chunks.ranges != [(0, chunks.numel)]:
            plan.zero_padding(part, intra_group.rank)  # no chunk covers it
        return part

    def _reduce_scatter(
        self, comm: Communicator, chunks: FlatChunks, tag: int, kind: str = "reduce"
    ) -> AsyncWork:
        """Start to fill ``_out`` with this rank's part of the average over ``comm``."""
        unit_fqn, fixed_order = self._plan.link.unit_name, self._plan.fixed_order
        return comm.reduce_scatter(
            ReduceScatter(chunks, self._out, unit_fqn, tag, fixed_order, kind)
        )

    def _cross_behind(self, chunks: FlatChunks) -> None:
        """Queue the later stages behind the first at once, as none holds up the host."""
        # A side stream waits for what reads these, the stream that they are freed on does not
        # before `finish`: until then their memory must not be reused.
        self._read_behind = [chunks, self._held, *self._work.kept]
        with torch.cuda.stream(_side_stream(self._out)):
            self.cross()
            self._read_behind += self._work.kept
            while self.to_come:
                self._begin_next()

    def cross(self) -> None:
        """Wait for the first stage and start the second, if there is one; earlier ones first.

        Collective: in the same order on all ranks.
        """
        while self in self._turns:
            self._turns[0]._begin_next()

    def _begin_next(self) -> None:
        """Wait for the stage under way, and start the next one."""
        self._work.wait(self._plan.link.pending_sends)
        begin = self.to_come.popleft()
        self._work = begin()
        self._begun.append(self._work)

    def _across(self) -> AsyncWork:
        """Second stage: split the average further, or average it over the replicas."""
        plan, across = self._plan, self._plan.across
        self._turns.popleft()
        if self._held is not None:
            # Before the cast: `held` is in the accumulation dtype, which may be wider.
            self._out.add_(self._held)
            self._held = None
        self._out = values = self._out.to(plan.reduce_dtype)
        if across is plan.topology.replicate and not plan.adds_replicas:
            return across.all_reduce(values, unit_fqn=plan.link.unit_name)
        chunks = FlatChunks.of(_padded(values, across.size))
        self._out = values.new_empty(chunks.numel // across.size, dtype=plan.across_sum_dtype)
        if across is plan.topology.replicate:
            return self._reduce_scatter(across, chunks, plan.tags[2], "all_reduce")
        return self._reduce_scatter(across, chunks, plan.tags[1])

    def _gather_replicas(self) -> AsyncWork:
        """Third stage: all-gather the parts of the replicas' average."""
        plan, replicate, part = self._plan, self._plan.topology.replicate, self._out
        full = plan.new_output(part.numel() * replicate.size, part.dtype)
        self._out = full[: plan.intra_numel]  # without the zeros of `_padded`
        return replicate.all_gather(
            Gather(part, full, plan.link.unit_name, plan.tags[2], "", exact=True, reduced=True)
        )

    def advance(self) -> bool:
        """Start the stages whose turn has come; False while the second must wait."""
        with torch.no_grad():
            while self in self._turns and self._turns[0]._work.done():
                self._turns[0]._begin_next()
            # Not where it is by chance that a rank sees that the second is over: the backend's own
            # collectives must start in one order.
            has_crossed = self not in self._turns
            if has_crossed and self.to_come and self._work.reports_end and self._work.done():
                self._begin_next()
        return has_crossed

    def done(self) -> bool:
        return not self.to_come and self._work.done()

    def tells_when_done(self) -> bool:
        """Whether ``done`` can become true by itself."""
        return self._work.reports_end

    def is_computed(self) -> bool:
        """Whether the gradients are there, and not only queued to be computed on a device."""
        return self._computed is None or self._computed.query()

    def finish(self) -> Tensor:
        """Wait for the last stage and return its result.

        Collective where a second stage was not started: in the same order on all ranks.
        """
        self.is_finished = True
        with torch.no_grad():
            self.cross()
            while self.to_come:
                self._begin_next()
            self._work.wait(self._plan.link.pending_sends)
        self._read_behind = []  # this stream has waited, so their memory may be used again
        out = self._out
        del self._out  # what is copied to the host must not stay on the device until the end
        return out

    def abandon(self) -> None:
        """Wait until nothing writes to its memory any more, after a backward that failed."""
        if not self.is_finished:
            # What makes it fail was raised already.
            with contextlib.suppress(CollectiveError):
                self.finish()

    @property
    def nbytes(self) -> int:
        kept = [one for work in self._begun for one in work.kept]
        return storage_bytes(kept if self.is_finished else [self._out, *kept])


def _padded(values: Tensor, size: int) -> Tensor:
    """With as many zeros behind them as make them divide by ``size``."""
    missing = -values.numel() % size
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(tensor: Tensor) -> torch.cuda.Stream:
    """A stream that waits for a first stage in place of the one that computes."""
    if tensor.device not in _side_streams:
        _side_streams[tensor.device] = torch.cuda.Stream(tensor.device)
    side = _side_streams[tensor.device]
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    return side
