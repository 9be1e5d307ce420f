"""Makes, converts and copies ``FlatParamHandle``s: what is no part of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Topology
from flatshard.comm.work import RunLink
from flatshard.engine.gather import HandleOptions
from flatshard.engine.handle import FlatParamHandle
from flatshard.plan.layout import FlatLayout, memory_order, part_of, strides_of
from flatshard.plan.module_tree import ParamInfo, unit_text
from flatshard.tensor.flat_parameter import OriginalParam


class BroadcastSource:
    """Hands rank 0's values out to the ranks of one topology."""

    def __init__(self, topology: Topology) -> None:
        """Find out who holds which part. Collective: all ranks of the world."""
        world = topology.world
        self._world, self._replicate = world, topology.replicate
        # A shard group of one is no group, and does not know its rank.
        first = topology.shard.ranks[0] if topology.shard.size > 1 else world.global_rank
        everyone = world.host.gather((topology.index, first), "meeting")
        # Keys are parts, values are places in the world: the holders in the shard group of rank 0.
        # In a simulated world all ranks answer as rank 0, so the first answer counts.
        self._places = {
            number: place
            for place, (number, theirs) in reversed([*enumerate(everyone)])
            if theirs == everyone[0][1]
        }
        self._receives = first == everyone[0][1]
        sources = {world.ranks[place] for place in self._places.values()}
        replicas = enumerate(self._replicate.ranks)
        self._origin = next((place for place, rank in replicas if rank in sources), 0)

    def hand_out(self, layout: FlatLayout, index: int, value: Tensor | None, part: Tensor) -> None:
        """Fill ``part``, 1-D, with this rank's range of rank 0's ``value`` of parameter ``index``.

        Collective: all ranks. Replicas get theirs from ``replicate``.
        """
        span, world, places = layout.spans[index], self._world, self._places
        if world.rank != 0:
            if self._receives and part.numel():
                world.transfer(part, source=0, to=world.rank, op_name=span.name)
            return
        assert value is not None, "rank 0 has the values"
        # One parameter at a time: receivers ask for parts in the order of parameters.
        for number in layout.holders(index):
            theirs = part_of(value, span, layout.local_span(index, number))
            place = places.get(number)
            if place == 0:
                part.copy_(theirs)
            elif place is not None:
                wire = theirs.to(part.device, part.dtype).contiguous()
                world.transfer(wire, source=0, to=place, op_name=span.name)

    def replicate(self, shard: Tensor) -> None:
        """Give the replicas of a filled shard the same. Collective: all ranks."""
        self._replicate.broadcast(shard, op_name="starting weights", source=self._origin)


def make_handle(
    owned: list[ParamInfo],
    unit_name: str,
    options: HandleOptions,
    *,
    layout: FlatLayout,
    device: torch.device,
    missing: Collection[int],
    source: BroadcastSource | None,
) -> FlatParamHandle:
    """Keep this rank's part of ``owned``, and turn the originals into views of it.

    Collective with a ``source``, which hands rank 0's values out. ``missing`` are ids of parameters
    without values yet. The unit computes on ``device``.
    """
    by_name, dtype = {one.name: one for one in owned}, owned[0].param.dtype
    owned = [by_name[span.name] for span in layout.spans]
    link = RunLink(unit_name)
    handle = FlatParamHandle(owned, link, options, layout, dtype=dtype, device=device)
    with torch.inference_mode(False), torch.no_grad():
        handle.adopt(torch.zeros(layout.shard_numel, dtype=dtype, device=device))
        handle.unfilled = {param for param in handle.params if id(param.sharded) in missing}
        for param in handle.params:
            if param not in handle.unfilled:
                fill(handle, param, param.sharded, source)
        handle.show_shard()
    handle.make_buffer()
    return handle


def fill(
    handle: FlatParamHandle,
    param: OriginalParam,
    value: Tensor | None,
    source: BroadcastSource | None,
) -> None:
    """Keep this rank's part of ``value``, all of ``param``; with a ``source`` of rank 0's.

    Collective with a ``source``: all ranks.
    """
    if source is not None:
        source.hand_out(handle.layout, param.index, value, handle.part(param))
    else:
        assert value is not None, "every rank has the values"
        handle.part(param).copy_(part_of(value, param.span, param.local))
    handle.unfilled.discard(param)


def copied(handle: FlatParamHandle, memo: dict[int, Any]) -> FlatParamHandle:
    """The same for modules that were deep-copied, as the finished copy's ``memo`` knows them.

    Gradients that wait for a reduction stay with the original.
    """
    handle.absorb_replaced()
    twin = FlatParamHandle(
        [param.copied(memo) for param in handle.params],
        RunLink(handle.unit_name),
        handle.options,
        handle.layout,
        dtype=handle.flat_param.dtype,
        device=handle.device,
    )
    for param in handle.params:
        copy = twin.params[param.index]
        copy.spec.name = param.spec.name  # that of the layout is relative to the first root
        if param in handle.unfilled:
            twin.unfilled.add(copy)
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        twin.adopt(handle.flat_param.detach().clone())
        twin.show_shard()
    twin.make_buffer()
    return twin


def convert(handle: FlatParamHandle, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``module._apply``'s function to the shard and re-point everything at the result."""
    handle.reshard()
    # Other ranks may still be reading the shard's present memory.
    if handle.gather.secondary is not None:
        handle.gather.secondary.finish_refresh()
    handle.absorb_replaced()
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        before = handle.flat_param.data_ptr()
        converted = fn(handle.flat_param)
        if converted is handle.flat_param and converted.data_ptr() == before:
            return
        if converted.device.type == "meta":
            raise RuntimeError(
                f"{unit_text(handle.unit_name)}: moving a sharded model to the meta device would "
                "lose its weights"
            )
        if converted.device != handle.flat_param.device:
            handle.device = converted.device
        handle.gather.move_to(handle.device, converted.dtype)
        grads = handle.grad_publish.take_off()
        handle.adopt(converted)
        handle.show_shard()
        take_in = handle.options.targets.gradient.take_in
        handle.grad_publish.put_back(grads, lambda grad: take_in(fn(grad)))
    handle.make_buffer()
    handle.replan_gradients()


def check_keeps_order(handle: FlatParamHandle, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError if ``module._apply``'s function changes a parameter's memory format."""
    # Optimizer state lies in the order of the shard, and nobody would rearrange it.
    after: dict[tuple[int, ...], tuple[int, ...]] = {}
    for param in handle.params:
        span = param.span
        if span.order not in after:
            # As many dimensions in the same order, but small: the shape takes no part.
            sizes = (2,) * len(span.order)
            strides = strides_of(sizes, span.order)
            probe = fn(handle.flat_param.new_zeros(2 ** len(sizes)).as_strided(sizes, strides))
            after[span.order] = memory_order(probe.shape, probe.stride())
        asked = strides_of(span.shape, after[span.order])
        if asked != span.strides:
            raise RuntimeError(
                f"{param.where}: the memory format "
                f"cannot be changed after wrapping: strides are {span.strides}, {asked} are asked "
                "for. Call model.to(memory_format=...) before ShardedWrapper(model)."
            )
