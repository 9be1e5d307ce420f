"""``NativeTransport``: runs the collectives of the process group's backend, for example NCCL."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from flatshard.comm.process_groups import backend_for
from flatshard.comm.transports import Gather, Members, ReduceScatter, Transport, average
from flatshard.comm.work import AsyncWork
from flatshard.units.layout import as_bytes, as_real

# Dtypes that gloo and NCCL can all-gather. Tensors of other dtypes are sent as bytes.
_USUAL = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_LARGE_NUMEL = 1 << 20  # from this size on, backends use an algorithm for large tensors

# The methods of process groups save time: they check no arguments, unlike torch.distributed's
# functions `all_gather_single` and `reduce_scatter_single`.
_GATHER_OPTIONS = _distributed_c10d.AllgatherOptions()
_REDUCE_OPTIONS = _distributed_c10d.ReduceScatterOptions()
_REDUCE_OPTIONS.reduceOp = dist.ReduceOp.AVG
_GATHER_OPTIONS.asyncOp = _REDUCE_OPTIONS.asyncOp = True


class NativeTransport(Transport):
    """Moves tensors by the backend's collectives, on every device that the backend supports."""

    is_ordered, adds_here = True, False

    def __init__(self, members: Members) -> None:
        self._members = members
        self.name = str(dist.get_backend(members.gather_group))
        group = members.reduce_group
        types = (device.type for device in group._device_types)
        self._on_gloo = {one for one in types if backend_for(group, one) == "gloo"}
        self._warmed_up: set[tuple[torch.device, bool, bool]] = set()

    def stream_waits(self, device: torch.device) -> bool:
        return device.type == "cuda" and "cuda" not in self._on_gloo

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        shard, out, members, what = request.shard, request.out, self._members, ""
        group = members.reduce_group if request.reduced else members.gather_group
        is_gloo = shard.device.type in self._on_gloo
        if not request.reduced:
            # Compare descriptions without the purpose: one rank may unshard the unit for forward,
            # and another rank for backward, in the same all-gather.
            what = f"all-gather of {request.unit_fqn or 'the root'!r}, flat parameter {request.tag}"
            if is_gloo:
                members.host.announce(what)
        need = members.history.begin(group, what=what)
        if out.dtype not in _USUAL:
            out, shard = as_bytes(out), as_bytes(shard)
        work = group._allgather_base(out, shard, _GATHER_OPTIONS)
        # torch's "fake" backend moves nothing, and its handles never report completion.
        works = [] if members.is_fake else [work]
        reports_end = not (request.reduced and is_gloo)
        return AsyncWork(works, op_name, [shard, out], reports_end=reports_end, condition=need)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        buffer, then = request.full, None
        group, kept = self._members.reduce_group, [buffer, request.out]
        need = self._members.history.begin(group)
        if request.fixed_order:
            # Keep `arrived` alive, because the backend fills it after this method has returned.
            arrived = torch.empty_like(buffer)
            target, source = as_bytes(arrived), as_bytes(buffer)
            work = dist.all_to_all_single(target, source, group=group, async_op=True)
            kept.append(arrived)
            then = partial(average, arrived.chunk(self._members.size), request.out)
        else:
            out = as_real(request.out)
            work = group._reduce_scatter_base(out, as_real(buffer), _REDUCE_OPTIONS)
        works = [] if self._members.is_fake else [work]
        # gloo's handle reports completion only after a wait, so callers must not poll it.
        reports_end = buffer.device.type not in self._on_gloo
        return AsyncWork(works, op_name, kept, then=then, reports_end=reports_end, condition=need)

    def all_reduce(self, buffer: Tensor, op_name: str) -> AsyncWork:
        group = self._members.reduce_group
        need = self._members.history.begin(group)
        work = dist.all_reduce(as_real(buffer), op=dist.ReduceOp.AVG, group=group, async_op=True)
        return AsyncWork([] if self._members.is_fake else [work], op_name, [buffer], condition=need)

    def warm_up(self, device: torch.device, *, fixed_order: bool, replicas: bool) -> None:
        # Run each kind of reduction once, so that the backend opens connections now. Opening
        # connections blocks the host until all ranks have started the same reduction. In a
        # backward, this could be a deadlock: another rank may first wait for an all-gather that
        # this rank has not started yet.
        kind = device, fixed_order, replicas
        if self._members.is_fake or kind in self._warmed_up:
            return
        self._warmed_up.add(kind)
        group, size = self._members.reduce_group, self._members.size
        # Backends have different connections for small and large tensors.
        for numel in (1, -(-_LARGE_NUMEL // size)):
            full = torch.zeros(numel * size, device=device)
            part = torch.zeros(numel, device=device)
            if fixed_order:
                dist.all_to_all_single(torch.empty_like(full), full, group=group)
            elif not replicas:
                group._reduce_scatter_base(part, full, _REDUCE_OPTIONS).wait()
            if fixed_order and replicas:
                group._allgather_base(full, part, _GATHER_OPTIONS).wait()
            elif replicas:
                dist.all_reduce(full, op=dist.ReduceOp.AVG, group=group)
