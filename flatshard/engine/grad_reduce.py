"""``GradReduce``: reduces the gradients of one flat parameter, in up to three stages.

[Note: stages]
1.  A reduce-scatter averages the gradients within the intra group. Each rank keeps a part.
2.  If the model trains on more ranks, a second group averages the parts: an inter group by a
    reduce-scatter, which splits the parts further; a replicate group by an all-reduce, because
    every replica needs the whole part.
3.  In the all-reduce, the backend adds up the gradients. If flatshard must add them itself (in rank
    order, or in a wider dtype), stage 2 is a reduce-scatter over the replicate group instead, and
    stage 3 all-gathers the result.

Under ``GradSync.SHARD_ONLY``, a backward runs only the first stage, ``Gradients`` adds up the
results, and a later backward runs the rest. The first two stages send gradients in the reduce
dtype. Sums may have a wider dtype (``Transport.sum_dtype``), and are rounded before the second
stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.transports import Gather, ReduceScatter
from flatshard.comm.work import AsyncWork
from flatshard.memory import BufferCache, storage_bytes
from flatshard.tensor.flat_parameter import FlatParamPlan


@dataclass(frozen=True)
class CommHook:
    """A user's communication hook: a function that replaces the reduction of a flat parameter."""

    # Dtype in which gradients are reduced. None: the same dtype as without a hook.
    reduce_dtype: torch.dtype | None = None
    # Called with the unsharded gradients, `(padded_numel,)` in the reduce dtype, and the plan of
    # the flat parameter. Returns this rank's shard of the average over all ranks,
    # `(shard_numel,)` in any dtype, once it is complete. The padding must be zero. Collective.
    # None: the usual reduction.
    reduce: Callable[[Tensor, FlatParamPlan], Tensor] | None = None


class ReducePlan:
    """The groups, dtypes and memory with which the gradients of one flat parameter are reduced."""

    def __init__(
        self,
        flat: FlatParamPlan,
        dtype: torch.dtype,
        device: torch.device,
        tags: tuple[int, int, int],
        hook: CommHook | None,
    ) -> None:
        """Plan the reductions of one flat parameter.

        Args:
            flat: the flat parameter.
            dtype: dtype of the shard.
            device: device of the gradients that autograd computes.
            tags: tags for collectives of the intra, inter and replicate group.
            hook: the user's communication hook, if any.
        """
        self.flat, self.device, self.tags = flat, device, tags
        self.comm_hook = hook
        reduce_dtype, self.hook = (hook.reduce_dtype, hook.reduce) if hook else (None, None)
        self.dtypes = dtypes = flat.precision.grad_dtypes(dtype, reduce_dtype)
        # Reuses the memory of published gradients once users have dropped them. None: published
        # gradients are offloaded.
        self.output = BufferCache() if flat.targets.gradient.is_device else None
        # whether flatshard itself adds, in rank order
        self.fixed_order = flat.precision.fixed_order
        intra_group, replicate = flat.topology.intra_group, flat.topology.replicate
        # Number of elements that this rank has after the first stage, and the first element's index
        # in the flat parameter.
        self.intra_numel = flat.layout.padded_numel // intra_group.size
        self.intra_start = intra_group.rank * self.intra_numel
        # Size of the unsharded gradients.
        self.full_bytes = flat.layout.padded_numel * dtypes.reduce_dtype.itemsize
        # Memory of an unfinished reduction. Usually the gradients count twice: one copy to send,
        # and one copy to receive. NCCL (like every backend for which a stream waits, not the host)
        # adds each part on arrival, so there the gradients count once. With `fixed_order`, NCCL
        # receives all parts before it adds, so the gradients count twice again. If they count once,
        # two reductions of the largest bucket stay below `ReduceQueue.max_bytes_in_flight`, and may
        # run at once.
        waits = intra_group.transport_for(device).stream_waits(device)
        self.bytes_in_flight = self.full_bytes * (1 if waits and not self.fixed_order else 2)
        self.second_group = flat.topology.second_group  # the group of the second stage
        # Dtypes of the sums in the first and in the second stage.
        self.intra_sum_dtype = self._sum_dtype(intra_group)
        self.second_sum_dtype = self._sum_dtype(self.second_group)
        # Whether flatshard, and not the backend, averages over the replicate group. Then the
        # reduction has the third stage of [Note: stages].
        sums_wider = self._sum_dtype(replicate) is not dtypes.reduce_dtype
        self.adds_replicas = replicate.size > 1 and (self.fixed_order or sums_wider)

    @property
    def is_unordered(self) -> bool:
        """Whether ranks may start reductions in different orders.

        True if there is no communication hook, and transports match all collectives by tag.
        """
        topology = self.flat.topology
        groups = topology.intra_group, topology.inter_group, topology.replicate
        return (
            self.hook is None
            and not any(group.transport_for(self.device).is_ordered for group in groups)
            and (topology.replicate.size == 1 or self.adds_replicas)
        )

    def _sum_dtype(self, comm: Communicator) -> torch.dtype:
        transport = comm.transport_for(self.device)
        return transport.sum_dtype(self.dtypes.reduce_dtype, fixed_order=self.fixed_order)

    def new_output(self, numel: int, dtype: torch.dtype, *, is_last: bool = True) -> Tensor:
        # Take only the last stage's result from the cache: only this result is published.
        if self.output is None or not is_last:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self.output.take(numel, dtype, self.device)


class GradReduce:
    """The reduction of one flat parameter's gradients in one backward; see [Note: stages]."""

    def __init__(
        self,
        plan: ReducePlan,
        full: Tensor,  # the gradients, (padded_numel,); nothing else may use the memory
        *,
        is_intra_only: bool,  # whether to stop after the first stage (`GradSync.SHARD_ONLY`)
        intra_reduced: Tensor | None,  # sum of first-stage results of earlier backwards
    ) -> None:
        """Start the first stage. Collective: all ranks of the unit, in the same order of calls."""
        self.is_intra_only, self.is_finished = is_intra_only, False
        self._plan, self._intra_reduced = plan, intra_reduced
        # The device has computed the gradients once this event has passed. The host may only have
        # queued kernels. None: they are computed.
        self.computed: torch.Event | None = None
        if plan.device.type == "cuda":
            self.computed = torch.Event(plan.device)
            self.computed.record()  # on the current stream of the device
        intra_group, second = plan.flat.topology.intra_group, plan.second_group
        # `to_come`: functions that start the stages that have not started yet. `_turns`: the
        # reductions, also of other models, whose second stage uses the same group and has not
        # started, in the order of start.
        self.to_come: deque[Callable[[], AsyncWork]] = deque()
        self._turns = second.second_stages
        self._read_on_side_stream: list[object] = []
        if intra_group.size > 1:
            is_last = plan.flat.topology.inter_group.size == 1 and not plan.adds_replicas
            self._out = plan.new_output(plan.intra_numel, plan.intra_sum_dtype, is_last=is_last)
            self.work = self._reduce_scatter(intra_group, full, plan.tags[0])
        else:
            self._out, self.work = full, AsyncWork([], plan.flat.unit_name)
        self._works = [self.work]
        if second.size == 1 or is_intra_only:
            return
        self.to_come.append(self._second_stage)
        if second is plan.flat.topology.replicate and plan.adds_replicas:
            self.to_come.append(self._gather_replicas)
        # First stages may finish in different orders on different ranks, so second stages start in
        # the order of the first, which is the same on all ranks.
        self._turns.append(self)
        # Queue all stages now if a stream waits for the collectives. The transport decides this,
        # not the device: with gloo, the host would wait here for an accelerator's tensors, too.
        device = self._out.device
        if second.transport_for(device).stream_waits(device):
            self._cross_behind(full)
        elif intra_group.size == 1:  # there is no first stage to wait for
            self.cross()

    def _reduce_scatter(
        self, comm: Communicator, full: Tensor, tag: int, kind: str = "reduce"
    ) -> AsyncWork:
        """Start a reduce-scatter over ``comm`` that fills ``_out`` with this rank's average."""
        unit_fqn, fixed_order = self._plan.flat.unit_name, self._plan.fixed_order
        return comm.reduce_scatter(ReduceScatter(full, self._out, unit_fqn, tag, fixed_order, kind))

    def _cross_behind(self, full: Tensor) -> None:
        """Queue all later stages now, on a side stream that waits for the first stage."""
        # Keep references to these tensors: the current stream does not wait for the side stream
        # before `finish`, so freed memory could be reused too early.
        self._read_on_side_stream = [full, self._intra_reduced, *self.work.kept]
        with torch.cuda.stream(_side_stream(self._out)):
            self.cross()
            self._read_on_side_stream += self.work.kept
            while self.to_come:
                self._begin_next()

    def cross(self) -> None:
        """Wait for the first stage and start the second stage, if there is one.

        Starts the second stages of earlier reductions first, so that the order is the same on all
        ranks.
        """
        while self in self._turns:
            self._turns[0]._begin_next()

    def _begin_next(self) -> None:
        """Wait for the stage under way, and start the next stage."""
        self.work.wait(self._plan.flat.pending_sends)
        begin = self.to_come.popleft()
        self.work = begin()
        self._works.append(self.work)

    def _second_stage(self) -> AsyncWork:
        """Start the second stage: average over the ranks of the group ``second_group``.

        An all-reduce if the backend adds up the replicas, otherwise a reduce-scatter.
        """
        plan, second = self._plan, self._plan.second_group
        self._turns.popleft()
        if self._intra_reduced is not None:
            # Add before the cast: both may have a wider dtype than the reduce dtype.
            self._out.add_(self._intra_reduced)
            self._intra_reduced = None
        self._out = values = self._out.to(plan.dtypes.reduce_dtype)
        if second is plan.flat.topology.replicate and not plan.adds_replicas:
            return second.all_reduce(values, unit_fqn=plan.flat.unit_name)
        values = _padded(values, second.size)
        self._out = values.new_empty(values.numel() // second.size, dtype=plan.second_sum_dtype)
        if second is plan.flat.topology.replicate:
            return self._reduce_scatter(second, values, plan.tags[2], "all_reduce")
        return self._reduce_scatter(second, values, plan.tags[1])

    def _gather_replicas(self) -> AsyncWork:
        """Start the third stage: all-gather the parts of the average over the replicas."""
        plan, replicate, part = self._plan, self._plan.flat.topology.replicate, self._out
        full = plan.new_output(part.numel() * replicate.size, part.dtype)
        self._out = full[: plan.intra_numel]  # leaves out the zeros that `_padded` appended
        return replicate.all_gather(
            Gather(part, full, plan.flat.unit_name, plan.tags[2], "", exact=True, reduced=True)
        )

    def advance(self) -> bool:
        """Start the later stages that can start now, without a wait.

        Returns False if the reduction has a second stage that cannot start yet.
        """
        while self in self._turns and self._turns[0].work.done():
            self._turns[0]._begin_next()
        # Second stages of other reductions use the same group, and gloo matches collectives by
        # order, but ranks see the end of a second stage at different times. So with gloo
        # (`reports_end` is False), the third stage starts in `finish`, in the same order on all
        # ranks.
        has_crossed = self not in self._turns
        if has_crossed and self.to_come and self.work.reports_end and self.work.done():
            self._begin_next()
        return has_crossed

    def done(self) -> bool:
        return not self.to_come and self.work.done()

    def finish(self) -> Tensor:
        """Wait for the last stage, and return the result of the reduction.

        Starts the remaining stages. Collective: all ranks finish reductions in the same order.
        """
        self.is_finished = True
        if self.to_come:
            self.cross()
            while self.to_come:
                self._begin_next()
        self.work.wait(self._plan.flat.pending_sends)
        self._read_on_side_stream = []  # no longer needed, because the current stream has waited
        out = self._out
        del self._out  # so that the caller can free this memory, after a copy to the host
        return out

    @property
    def nbytes(self) -> int:
        kept = [one for work in self._works for one in work.kept]
        return storage_bytes(kept if self.is_finished else [self._out, *kept])


def zero(pieces: list[Tensor]) -> None:
    """Zero all ``pieces``, with a single kernel on an accelerator."""
    if pieces:
        torch._foreach_zero_(pieces)


def _padded(values: Tensor, size: int) -> Tensor:
    """Return ``values`` with zeros appended, so that the length is a multiple of ``size``."""
    missing = -values.numel() % size
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(tensor: Tensor) -> torch.cuda.Stream:
    """Return a stream that waits for the current stream of ``tensor``'s device.

    On this stream, later stages wait for the first stage, while the compute stream continues.
    """
    if tensor.device not in _side_streams:
        _side_streams[tensor.device] = torch.cuda.Stream(tensor.device)
    side = _side_streams[tensor.device]
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    return side
