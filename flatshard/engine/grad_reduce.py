"""``GradReduce``: reduces the gradients of one flat parameter, in up to three stages.

[Note: stages]
In the first stage, gradients are averaged within the intra group, and each rank keeps its part. If
there are more ranks, the second stage goes across: the parts are split further over the inter
group, or averaged over replicas. The second stage can wait for a later backward (``Sync.INTRA``):
then the results of first stages are added up in ``GradientBuffer``. Both stages send the reduce
dtype. Sums may be in a wider dtype (``communicator``), and are rounded only before the second
stage. If this package adds up the replicas' averages itself, a third stage all-gathers the parts.
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
    """A user's function in place of the usual reduction of a flat parameter."""

    # Dtype in which gradients are reduced. None: the same as without a hook.
    reduce_dtype: torch.dtype | None = None
    # A function of the unsharded gradients, `(padded_numel,)` in the reduce dtype, and of the
    # unit's name. It returns the average over all ranks, only this rank's `(shard_numel,)`, in any
    # dtype. It is collective and returns only when it is done. None: the usual reduction.
    reduce: Callable[[Tensor, str], Tensor] | None = None


@dataclass
class ReducePlan:
    """How the gradients of one flat parameter are reduced."""

    link: RunLink
    layout: FlatLayout
    topology: Topology
    reduce_dtype: torch.dtype
    device: torch.device
    tags: tuple[int, int, int]  # of the intra, the inter and the replicate group
    fixed_order: bool  # add in rank order, also if the backend could add
    hook: Callable[[Tensor, str], Tensor] | None  # the user's reduction, see `CommHook`
    # Keeps the memory of published gradients that users have dropped, to reuse it for the next
    # gradients. None: reduced gradients are copied to another memory, so no reuse is needed.
    output: BufferCache | None
    # Number of elements that this rank has after the first stage, and their first index in the flat
    # parameter.
    intra_numel: int = field(init=False)
    intra_start: int = field(init=False)
    full_bytes: int = field(init=False)  # size of the unsharded gradients
    bytes_in_flight: int = field(init=False)  # bytes held by an unfinished reduction
    adds_replicas: bool = field(init=False)  # whether ranks add up the replicas' averages in parts
    across: Communicator = field(init=False)  # the group of the second stage
    # Dtypes in which the first and the second stage add up.
    intra_sum_dtype: torch.dtype = field(init=False)
    across_sum_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        intra_group, replicate = self.topology.intra_group, self.topology.replicate
        self.intra_numel = self.layout.padded_numel // intra_group.size
        self.intra_start = intra_group.rank * self.intra_numel
        self.full_bytes = self.layout.padded_numel * self.reduce_dtype.itemsize
        # A reduction holds memory to send and memory to receive, unless the backend adds up as it
        # receives. So an accelerator's backend has two units in flight; with fewer, the host would
        # not run far enough ahead of the accelerator.
        waits = intra_group.transport_for(self.device).stream_waits(self.device)
        self.bytes_in_flight = self.full_bytes * (1 if waits and not self.fixed_order else 2)
        self.across = self.topology.across
        self.intra_sum_dtype = self._sum_dtype(intra_group)
        self.across_sum_dtype = self._sum_dtype(self.across)
        sums_wider = self._sum_dtype(replicate) is not self.reduce_dtype
        self.adds_replicas = replicate.size > 1 and (self.fixed_order or sums_wider)

    @property
    def min_chunk_bytes(self) -> int | None:
        """Size from which the transport reads a gradient in place. None: only from one buffer."""
        if self.hook is not None:
            return None
        transport = self.topology.intra_group.transport_for(tag=self.tags[0])
        return transport.min_chunk_bytes(self.reduce_dtype)

    @property
    def is_unordered(self) -> bool:
        """Whether ranks may start reductions of several models in different orders."""
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
        # Only published gradients, which users may hold on to, need the cache; inputs of a later
        # stage do not.
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
            # Zero the padding: a hook may have put noise into it.
            return self.zero_padding(self.hook(buffer, self.link.unit_name), self.topology.index)


class GradReduce:
    """The reduction of one flat parameter's gradients in one backward; see the note."""

    def __init__(
        self,
        plan: ReducePlan,
        chunks: FlatChunks,  # must not be changed until the reduction is finished
        *,
        hold: bool,  # stop after the first stage; its result waits for a later backward
        held: Tensor | None,  # sum of earlier first stages, added before the second
    ) -> None:
        """Start the first stage. Collective: all ranks of the unit, in the same order of calls."""
        self.hold, self.is_finished = hold, False
        self._plan, self._held = plan, held
        self._computed: torch.Event | None = None
        if plan.device.type == "cuda":
            self._computed = torch.Event(plan.device)
            self._computed.record()  # on the current stream of the device
        intra_group, across = plan.topology.intra_group, plan.across
        self._work = AsyncWork([], plan.link.unit_name)
        # Stages after the first, in order. Second stages of all models start in one common order
        # (`_turns`).
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
            # First stages may finish in different orders on different ranks, so second stages take
            # turns in the order of their first stages.
            self._turns.append(self)
            # Only if streams wait: gloo sends an accelerator's tensors as well, but makes the host
            # wait.
            device = self._out.device
            if across.transport_for(device).stream_waits(device):
                self._cross_behind(chunks)
            elif intra_group.size == 1:  # there is no first stage to wait for
                self.cross()

    def _new_intra_part(self, chunks: FlatChunks) -> Tensor:
        """Memory for this rank's result of the first stage; only the padding is filled in."""
        plan, intra_group = self._plan, self._plan.topology.intra_group
        is_last = plan.topology.inter_group.size == 1 and not plan.adds_replicas
        part = plan.new_output(plan.intra_numel, plan.intra_sum_dtype, is_last=is_last)
        if chunks.ranges != [(0, chunks.numel)]:
            plan.zero_padding(part, intra_group.rank)  # no chunk covers the padding
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
        """Queue all later stages behind the first now, on a stream that never blocks the host."""
        # Keep references until `finish`. The collectives that read this memory are ordered on the
        # side stream. The stream that would reuse the memory waits for them only in `finish`.
        self._read_behind = [chunks, self._held, *self._work.kept]
        with torch.cuda.stream(_side_stream(self._out)):
            self.cross()
            self._read_behind += self._work.kept
            while self.to_come:
                self._begin_next()

    def cross(self) -> None:
        """Wait for the first stage and start the second, if any, after earlier second stages."""
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
            # Add before the cast: `held` is in the accumulation dtype, which may be wider.
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
        """Start the stages whose turn has come; returns False while the second must wait."""
        with torch.no_grad():
            while self in self._turns and self._turns[0]._work.done():
                self._turns[0]._begin_next()
            # Start the third stage early only if the second reports its end. Otherwise ranks see
            # the end at different times, and would start the backend's collectives in different
            # orders.
            has_crossed = self not in self._turns
            if has_crossed and self.to_come and self._work.reports_end and self._work.done():
                self._begin_next()
        return has_crossed

    def done(self) -> bool:
        return not self.to_come and self._work.done()

    def tells_when_done(self) -> bool:
        """Whether ``done`` can become true before a wait."""
        return self._work.reports_end

    def is_computed(self) -> bool:
        """Whether the device has computed the gradients, and not only queued their kernels."""
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
        self._read_behind = []  # the current stream has waited, so the memory may be reused
        out = self._out
        del self._out  # free device memory of gradients that are copied to the host now
        return out

    def abandon(self) -> None:
        """Wait until no collective writes to the gradients, after a backward that failed."""
        if not self.is_finished:
            # The error that made the backward fail was raised before.
            with contextlib.suppress(CollectiveError):
                self.finish()

    @property
    def nbytes(self) -> int:
        kept = [one for work in self._begun for one in work.kept]
        return storage_bytes(kept if self.is_finished else [self._out, *kept])


def _padded(values: Tensor, size: int) -> Tensor:
    """Append zeros until the number of values is a multiple of ``size``."""
    missing = -values.numel() % size
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(tensor: Tensor) -> torch.cuda.Stream:
    """A side stream for later stages: it waits for the first stage in place of compute."""
    if tensor.device not in _side_streams:
        _side_streams[tensor.device] = torch.cuda.Stream(tensor.device)
    side = _side_streams[tensor.device]
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    return side
