"""Whole tensors of a flat parameter: gathered copies, and which original parameter one shows."""

from __future__ import annotations

import torch
from torch import Tensor

from flatshard.engine.handle import FlatParamHandle
from flatshard.memory import disk
from flatshard.tensor.flat_parameter import view_of
from flatshard.tensor.sharded_tensor import FlatShardTensor


def gather_full(
    handle: FlatParamHandle, device: torch.device, *, is_kept: bool = True
) -> list[Tensor]:
    """Copies of the original parameters, in the shard's own dtype.

    Collective: all ranks of the shard group, unless the buffer is current.

    Args:
        handle: whose parameters.
        device: where the copies lie.
        is_kept: False: this rank only helps the others, and gets nothing.

    Raises:
        RuntimeError: under a summon only rank 0 holds whole parameters, and this is another rank.
    """
    summoned = handle.summoned
    if summoned is not None and not summoned.is_held and not handle.is_whole:
        rank = handle.topology.world.global_rank
        raise RuntimeError(
            f"unit {handle.unit_name!r}, rank {rank}: whole tensors were asked for under "
            "summon_full_params(rank0_only=True), where only rank 0 has them and takes no "
            "part in another gather. Ask on rank 0 alone, or outside of the context."
        )
    with torch.inference_mode(False), torch.no_grad():
        flat = gather_flat(handle, handle.shard)
        return split(handle, flat, device) if is_kept else []


def gather_flat(handle: FlatParamHandle, shard: Tensor) -> Tensor:
    """All ranks' ``shard`` side by side, ``(padded_numel,)``; may be the handle's own memory.

    Collective: all ranks of the shard group, unless the buffer is current.

    Args:
        handle: whose parts these are.
        shard: its shard, or something of the same shape such as the shard's gradient.
    """
    if handle.is_whole:
        return shard.detach()
    if shard is handle.shard and handle.is_current and handle.compute_dtype == shard.dtype:
        return handle.buffer
    flat = torch.empty(handle.layout.padded_numel, dtype=shard.dtype, device=handle.device)
    handle.begin_gather_parts(shard.detach().to(handle.device), flat).finish()
    disk.release(shard)
    return flat


def split(handle: FlatParamHandle, flat: Tensor, device: torch.device) -> list[Tensor]:
    """Copies on ``device`` of every original's range of ``flat``, in the true shapes."""
    return [view_of(flat, span).to(device, copy=True) for span in handle.layout.spans]


def index_of(handle: FlatParamHandle, tensor: Tensor) -> int | None:
    """Which original parameter ``tensor`` shows, or None."""
    if isinstance(tensor, FlatShardTensor):
        return next((i for i, spec in enumerate(handle.params.specs) if spec is tensor.spec), None)
    storage = tensor.untyped_storage()._cdata
    if storage != handle.buffer.untyped_storage()._cdata:
        return None
    start = tensor.storage_offset()
    return next(
        (
            index
            for index, span in enumerate(handle.layout.spans)
            if span.start == start and span.shape == tuple(tensor.shape)
        ),
        None,
    )
