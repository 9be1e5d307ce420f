"""``NativeTransport``: runs the collectives of the process group's backend, for example NCCL."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from flatshard.comm.process_groups import all_gather_single, backend_for
from flatshard.comm.transports import Gather, Members, ReduceScatter, Transport, average
from flatshard.comm.work import AsyncWork
from flatshard.units.layout import as_bytes, as_real

# All backends gather these dtypes. Tensors of other dtypes are sent as bytes.
_USUAL = {torch.float32, torch.float64}

# Number of elements at which every backend uses its algorithm for large tensors. `warm_up` reduces
# a tensor of this size.
_LARGE_NUMEL = 1 << 20


def _reduce_scatter_single(
    out: Tensor, whole: Tensor, *, op: Any, group: Any, async_op: bool = False
) -> Any:
    """Call the backend's reduce-scatter. Check no arguments."""
    work = group._reduce_scatter_base(out, whole, _reduce_options(op))
    return work if async_op else work.wait()


@cache
def _reduce_options(op: Any) -> Any:
    options = _distributed_c10d.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


class NativeTransport(Transport):
    """Moves tensors by the backend's collectives, on every device that the backend supports.

    In reductions, the backend adds gradients, in its own order and in the dtype of the tensors. If
    the user requests a fixed order, flatshard adds the gradients instead.
    """

    is_ordered = True
    adds_here = False

    def __init__(self, members: Members) -> None:
        self._members = members
        self.name = str(dist.get_backend(members.gather_group))
        group = members.reduce_group
        types = (device.type for device in group._device_types)
        self._on_gloo = {one for one in types if backend_for(group, one) == "gloo"}
        self._warmed_up: set[tuple[torch.device, bool, bool]] = set()

    @classmethod
    def connect(cls, members: Members) -> NativeTransport:
        return cls(members)

    def accepts(self, device: torch.device, tag: int) -> bool:
        return True

    def stream_waits(self, device: torch.device) -> bool:
        return device.type == "cuda" and "cuda" not in self._on_gloo

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        shard, out, what = request.shard, request.out, ""
        is_gloo = shard.device.type in self._on_gloo
        group = self._members.reduce_group
        if not request.reduced:
            group = self._members.gather_group
            # Ranks compare this description, to notice different all-gathers. The purpose is not
            # part of the description: if one rank unshards a unit for forward and another rank
            # unshards the same unit for backward, both take part in the same all-gather.
            unit = request.unit_fqn or "the root unit"
            what = f"all-gather of {unit!r}, flat parameter {request.tag}"
        if is_gloo:
            self._members.announce(what)
        need = self._members.begin(group, what=what)
        if out.dtype not in _USUAL:
            out, shard = as_bytes(out), as_bytes(shard)
        work = all_gather_single(out, shard, group=group, async_op=True)
        reports_end = not (request.reduced and is_gloo)
        return self._under_way(work, op_name, shard, out, need=need, reports_end=reports_end)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        buffer, then = request.full, None
        group, kept = self._members.reduce_group, [buffer, request.out]
        need = self._members.begin(group)
        if request.fixed_order:
            # The backend fills `arrived` after this method has returned. So add `arrived` to the
            # tensors that the returned `AsyncWork` keeps alive.
            arrived = torch.empty_like(buffer)
            work = dist.all_to_all_single(
                as_bytes(arrived), as_bytes(buffer), group=group, async_op=True
            )
            kept.append(arrived)
            then = partial(average, arrived.chunk(self._members.size), request.out)
        else:
            into, op = as_real(request.out), dist.ReduceOp.AVG
            work = _reduce_scatter_single(into, as_real(buffer), op=op, group=group, async_op=True)
        # The handle of gloo's reduce-scatter reports completion only after a wait. So tell callers
        # not to poll the handle.
        reports_end = buffer.device.type not in self._on_gloo
        return self._under_way(work, op_name, *kept, need=need, then=then, reports_end=reports_end)

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        group = self._members.reduce_group
        need = self._members.begin(group)
        work = dist.all_reduce(as_real(buffer), op=dist.ReduceOp.AVG, group=group, async_op=True)
        return self._under_way(work, op_name, buffer, need=need)

    def _under_way(self, work: Any, op_name: str, *kept: Tensor, **more: Any) -> AsyncWork:
        # Torch's "fake" backend moves nothing, so there is nothing to wait for. Its handles never
        # report completion, so do not keep the handle.
        return AsyncWork([] if self._members.is_fake else [work], op_name, kept, **more)

    def warm_up(self, device: torch.device, *, fixed_order: bool, replicas: bool) -> None:
        # Open connections now, because a backend that opens connections in its first reduction
        # blocks the host until all ranks have started this reduction. In a backward, rank 0 could
        # be blocked in the first reduction while rank 1 waits for an all-gather that rank 0 has not
        # started yet: a deadlock.
        kind = device, fixed_order, replicas
        if self._members.is_fake or kind in self._warmed_up:
            return
        self._warmed_up.add(kind)
        group, size, op = self._members.reduce_group, self._members.size, dist.ReduceOp.AVG
        # Run a small and a large reduction: backends have several algorithms, and each algorithm
        # opens its own connections.
        for numel in (1, -(-_LARGE_NUMEL // size)):
            full = torch.zeros(numel * size, device=device)
            part = torch.zeros(numel, device=device)
            if fixed_order:
                dist.all_to_all_single(torch.empty_like(full), full, group=group)
            elif not replicas:
                _reduce_scatter_single(part, full, op=op, group=group)
            if fixed_order and replicas:
                all_gather_single(full, part, group=group)
            elif replicas:
                dist.all_reduce(full, op=op, group=group)
