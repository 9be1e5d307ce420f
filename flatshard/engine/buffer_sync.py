"""``broadcast_buffers``: every rank gets rank 0's module buffers before a forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.communicator import Communicator


def broadcast_buffers(buffers: Sequence[Tensor], world: Communicator, op_name: str) -> None:
    """Give every rank rank 0's, in one message per dtype and device. Collective."""
    if world.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for alike in kinds.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
            world.broadcast(flat, op_name=op_name)
            if world.rank == 0:
                continue
            pieces = flat.split([buffer.numel() for buffer in alike])
            theirs = [piece.view(buffer.shape) for piece, buffer in zip(pieces, alike, strict=True)]
            # Not an edit for autograd: rank 0's graph sees none either.
            with _unsafe_preserve_version_counter(tuple(alike)):
                torch._foreach_copy_(alike, theirs)
