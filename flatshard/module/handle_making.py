"""Makes, converts and copies ``FlatParamHandle``s: what is no part of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.work import RunLink
from flatshard.engine.gather import HandleOptions
from flatshard.engine.handle import FlatParamHandle
from flatshard.plan.layout import FlatLayout, memory_order, part_of, strides_of
from flatshard.plan.module_tree import ParamInfo, unit_text
from flatshard.tensor.flat_parameter import OriginalParam


def make_handle(
    owned: list[ParamInfo],
    unit_name: str,
    options: HandleOptions,
    *,
    layout: FlatLayout,
    device: torch.device,
    missing: Collection[int],
    source: Communicator | None,
) -> FlatParamHandle:
    """Keep this rank's part of ``owned``, and turn the originals into views of it.

    Collective with a ``source``, whose rank 0 broadcasts its values. ``missing`` are ids of
    parameters without values yet. The unit computes on ``device``.
    """
    by_name, dtype = {one.name: one for one in owned}, owned[0].param.dtype
    owned = [by_name[span.name] for span in layout.spans]
    link = RunLink(unit_name)
    handle = FlatParamHandle(owned, link, options, layout, dtype=dtype, device=device)
    with torch.inference_mode(False), torch.no_grad():
        handle.adopt(torch.zeros(layout.shard_numel, dtype=dtype, device=device))
        for param in handle.params:
            if id(param.sharded) not in missing:
                fill(handle, param, param.sharded, source)
        handle.show_shard()
    handle.make_buffer()
    return handle


def fill(
    handle: FlatParamHandle,
    param: OriginalParam,
    value: Tensor | None,
    source: Communicator | None,
) -> None:
    """Keep this rank's part of ``value``, all of ``param``.

    With ``source`` the value is that of rank 0 of ``source``; the other ranks may pass None.
    Collective with a ``source``: all its ranks.
    """
    part, span = handle.part(param), param.span
    if source is not None:
        # One parameter at a time, on rank 0 without a copy if possible: a unit fits in memory.
        if source.rank == 0:
            assert value is not None, "rank 0 has the values"
            whole = value.permute(span.order).reshape(-1).to(part.device, part.dtype)
        else:
            whole = torch.empty(span.numel, dtype=part.dtype, device=part.device)
        source.broadcast(whole, op_name=span.name)
        part.copy_(whole[param.local.offset : param.local.offset + part.numel()])
    else:
        assert value is not None, "every rank has the values"
        part.copy_(part_of(value, span, param.local))


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
