"""``GradReduce``: reduces the gradients of one flat parameter, in up to three stages.

[Note: stages]
1.  A reduce-scatter averages the gradients within the intra group: all ranks that share one copy of
    the parameters, or with ``HYBRID_SHARD_OP`` the ranks of one node. Each rank keeps a part.
2.  If the model trains on more ranks, this part is averaged over a second group. With
    ``HYBRID_SHARD_OP``, this is the inter group (one rank of each node), and a reduce-scatter
    splits the part further. Otherwise it is the replicate group (the ranks with the same part),
    which runs an all-reduce, because every rank of the group needs the whole part.
3.  If flatshard itself must add up gradients (in rank order, or in a wider dtype), it cannot use
    the backend's all-reduce. Then stage 2 is a reduce-scatter over the replicate group, and stage 3
    all-gathers the result.

Under ``GradSync.SHARD_ONLY``, a backward runs only stage 1, ``Gradients`` adds up the results, and
a later backward runs the rest. Stages 1 and 2 send gradients in the reduce dtype. The sums may have
a wider dtype (``Transport.sum_dtype``), and are rounded before stage 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.transports import Gather, ReduceScatter
from flatshard.comm.work import AsyncWork
from flatshard.memory import BufferCache, on_side_stream, storage_bytes
from flatshard.tensor.flat_parameter import FlatParamPlan


@dataclass(frozen=True)
class CommHook:
    """A user's communication hook: a function that replaces the reduction of a flat parameter."""

    # Dtype in which gradients are reduced. None: the same dtype as without a hook.
    reduce_dtype: torch.dtype | None = None
    # A function with two arguments: the unsharded gradients, `(padded_numel,)` in the reduce dtype,
    # and the plan of the flat parameter. The function waits, and returns this rank's shard of the
    # average over all ranks, `(shard_numel,)` in any dtype, with zeros in the padding. Collective.
    # None: reduce the gradients as usual.
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
        """Plan the reductions of the flat parameter ``flat``.

        ``dtype``: dtype of the shard. ``device``: device of the gradients that autograd computes.
        ``tags``: numbers by which transports match the flat parameter's messages between ranks, for
        the intra, the inter and the replicate group. ``hook``: the user's communication hook.
        """
        self.flat, self.device, self.tags = flat, device, tags
        self.comm_hook = hook
        reduce_dtype, self.hook = (hook.reduce_dtype, hook.reduce) if hook else (None, None)
        self.dtypes = dtypes = flat.precision.grad_dtypes(dtype, reduce_dtype)
        # Memory of earlier results, to be reused once users have dropped the gradients. None:
        # gradients are offloaded.
        self.output = BufferCache() if flat.targets.gradient.is_device else None
        # Whether flatshard, not the backend, adds gradients, in rank order.
        self.fixed_order = flat.precision.fixed_order
        intra_group, replicate = flat.topology.intra_group, flat.topology.replicate
        # This rank's part after the first stage: the number of elements, and the index of the first
        # element in the flat parameter.
        self.intra_numel = flat.layout.padded_numel // intra_group.size
        self.intra_start = intra_group.rank * self.intra_numel
        # Size of the unsharded gradients.
        self.full_bytes = flat.layout.padded_numel * dtypes.reduce_dtype.itemsize
        # Memory of an unfinished reduction. Usually the gradients count twice: the sent and the
        # received values. Backends for which a stream waits, not the host (NCCL), add values as
        # they arrive. Then the gradients count once, unless flatshard adds the values
        # (`fixed_order`).
        waits = intra_group.transport_for(device).stream_waits(device)
        self.bytes_in_flight = self.full_bytes * (1 if waits and not self.fixed_order else 2)
        self.second_group = flat.topology.second_group  # the group of the second stage
        # Dtypes in which the first and the second stage add gradients.
        self.intra_sum_dtype = self._sum_dtype(intra_group)
        self.second_sum_dtype = self._sum_dtype(self.second_group)
        # Whether flatshard, not the backend, adds gradients over the replicate group. Then the
        # reduction has a third stage ([Note: stages]).
        sums_wider = self._sum_dtype(replicate) is not dtypes.reduce_dtype
        self.adds_replicas = replicate.size > 1 and (self.fixed_order or sums_wider)

    @property
    def is_unordered(self) -> bool:
        """Whether ranks may start reductions in different orders.

        True if there is no communication hook, and transports match all messages by tag.
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
        # Only the last stage's result becomes a gradient, so only this result uses the cache.
        if self.output is None or not is_last:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self.output.take(numel, dtype, self.device)


class GradReduce:
    """The reduction of one flat parameter's gradients in one backward; see [Note: stages]."""

    # Event that completes once the device has computed the gradients, because the host may run
    # ahead of the device. None: the gradients are computed already.
    computed: torch.Event | None = None
    # Functions that start the remaining stages.
    later_stages: Sequence[Callable[[], AsyncWork]] = ()
    _earlier_works: Sequence[AsyncWork] = ()  # the collectives of the stages that are over
    # Queue of the reductions, of all models, that have not started their second stage in the same
    # group. The order is that of their first stages. Empty if this reduction has no second stage.
    _second_stages: Any = ()
    _read_on_side_stream: Sequence[object] = ()  # tensors kept alive (`_queue_later_stages`)

    def __init__(
        self,
        plan: ReducePlan,
        full: Tensor,  # the gradients, (padded_numel,); no other code may use the memory
        intra_reduced: Tensor | None,  # sum of first-stage results of earlier backwards
        *,
        is_intra_only: bool,  # whether to stop after the first stage (`GradSync.SHARD_ONLY`)
    ) -> None:
        """Start the first stage. Collective: all ranks of the unit, in the same order of calls."""
        self.is_intra_only, self.is_finished = is_intra_only, False
        self._plan, self._intra_reduced = plan, intra_reduced
        if plan.device.type == "cuda":
            self.computed = torch.Event(plan.device)
            self.computed.record()  # on the current stream of the device
        intra_group, second = plan.flat.topology.intra_group, plan.second_group
        if intra_group.size > 1:
            is_last = plan.flat.topology.inter_group.size == 1 and not plan.adds_replicas
            self._out = plan.new_output(plan.intra_numel, plan.intra_sum_dtype, is_last=is_last)
            self.work = self._reduce_scatter(intra_group, full, plan.tags[0])
        else:
            self._out, self.work = full, AsyncWork([], plan.flat.unit_name)
        if second.size == 1 or is_intra_only:
            return
        self._second_stages, self.later_stages = second.second_stages, [self._second_stage]
        if second is plan.flat.topology.replicate and plan.adds_replicas:
            self.later_stages.append(self._gather_replicas)
        # Second stages start in the order of this queue, which is the same on all ranks. First
        # stages may end in another order on each rank.
        self._second_stages.append(self)
        # If a stream waits for collectives (NCCL), queue all stages now. Ask the transport, not the
        # device: with gloo, the host would wait here, even for tensors on an accelerator.
        device = self._out.device
        if second.transport_for(device).stream_waits(device):
            self._queue_later_stages(full)
        elif intra_group.size == 1:  # there is no first stage to wait for
            self.start_second_stage()

    def _reduce_scatter(
        self, comm: Communicator, full: Tensor, tag: int, kind: str = "reduce"
    ) -> AsyncWork:
        """Start a reduce-scatter over ``comm`` that fills ``_out`` with this rank's average."""
        unit_fqn, fixed_order = self._plan.flat.unit_name, self._plan.fixed_order
        return comm.reduce_scatter(ReduceScatter(full, self._out, unit_fqn, tag, fixed_order, kind))

    def _queue_later_stages(self, full: Tensor) -> None:
        """Queue all later stages now, on a side stream that waits for the first stage."""
        # Keep references to the tensors that the side stream reads: the current stream does not
        # wait for the side stream before `finish`, and could reuse freed memory too early.
        self._read_on_side_stream = [full, self._intra_reduced, *self.work.kept]
        with on_side_stream(self._out.device, "later stages"):
            self.start_second_stage()
            self._read_on_side_stream = [*self._read_on_side_stream, *self.work.kept]
            while self.later_stages:
                self._start_next_stage()

    def start_second_stage(self) -> None:
        """Wait for the first stage, and start the second stage, if it has not started.

        First starts the second stages of earlier reductions, so that all ranks start second stages
        in the same order.
        """
        while self in self._second_stages:
            self._second_stages[0]._start_next_stage()

    def _start_next_stage(self) -> None:
        """Wait for the present stage, and start the next stage."""
        self.work.wait(self._plan.flat.pending_sends)
        begin, *self.later_stages = self.later_stages
        self._earlier_works = [*self._earlier_works, self.work]
        self.work = begin()

    def _second_stage(self) -> AsyncWork:
        """Start the second stage: average over the ranks of the group ``second_group``.

        The stage is an all-reduce if the backend adds gradients over the replicate group. Otherwise
        the stage is a reduce-scatter.
        """
        plan, second = self._plan, self._plan.second_group
        self._second_stages.popleft()
        if self._intra_reduced is not None:
            # Add before the cast to the reduce dtype: both summands may have a wider dtype.
            self._out.add_(self._intra_reduced)
            self._intra_reduced = None
        self._out = values = self._out.to(plan.dtypes.reduce_dtype)
        if second is plan.flat.topology.replicate and not plan.adds_replicas:
            return second.all_reduce(values, unit_fqn=plan.flat.unit_name)
        if missing := -values.numel() % second.size:
            values = torch.cat([values, values.new_zeros(missing)])
        self._out = values.new_empty(values.numel() // second.size, dtype=plan.second_sum_dtype)
        if second is plan.flat.topology.replicate:
            return self._reduce_scatter(second, values, plan.tags[2], "all_reduce")
        return self._reduce_scatter(second, values, plan.tags[1])

    def _gather_replicas(self) -> AsyncWork:
        """Start the third stage: all-gather the averages over the replicate group."""
        plan, replicate, part = self._plan, self._plan.flat.topology.replicate, self._out
        full = plan.new_output(part.numel() * replicate.size, part.dtype)
        self._out = full[: plan.intra_numel]  # without the zeros that `_second_stage` appends
        return replicate.all_gather(
            Gather(part, full, plan.flat.unit_name, plan.tags[2], "", exact=True, reduced=True)
        )

    def advance(self) -> bool:
        """Start the stages that can start without a wait.

        Returns False if the second stage cannot start yet, because the first stage of this or of an
        earlier reduction is not over.
        """
        while self in self._second_stages and self._second_stages[0].work.done():
            self._second_stages[0]._start_next_stage()
        # The third stage uses the same group as second stages of other reductions. gloo matches
        # collectives of a group by order, but ranks see the end of a second stage at different
        # times. So with gloo (`reports_end` is False), `finish` starts the third stage.
        second_has_begun = self not in self._second_stages
        if second_has_begun and self.later_stages and self.work.reports_end and self.work.done():
            self._start_next_stage()
        return second_has_begun

    def done(self) -> bool:
        return not self.later_stages and self.work.done()

    def finish(self) -> Tensor:
        """Wait for the last stage, and return the result of the reduction.

        Starts the remaining stages. Collective: all ranks finish reductions in the same order.
        """
        self.is_finished = True
        if self.later_stages:
            self.start_second_stage()
            while self.later_stages:
                self._start_next_stage()
        self.work.wait(self._plan.flat.pending_sends)
        # The side stream's tensors are not needed any more: the current stream has waited.
        out, self._read_on_side_stream = self._out, ()
        del self._out  # so that the caller can free the memory after an offload
        return out

    @property
    def nbytes(self) -> int:
        kept = [one for work in (*self._earlier_works, self.work) for one in work.kept]
        return storage_bytes(kept if self.is_finished else [self._out, *kept])


def zero(pieces: list[Tensor]) -> None:
    """Zero all ``pieces``, with a single kernel on an accelerator."""
    if pieces:
        torch._foreach_zero_(pieces)
