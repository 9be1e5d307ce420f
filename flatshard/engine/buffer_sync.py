"""``SyncedBuffers``: the modules' buffers, of which every rank gets rank 0's before a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.communicator import Communicator


class SyncedBuffers:
    """Of one model."""

    def __init__(self, find: Callable[[], Iterable[Tensor]]) -> None:
        """``find`` lists them."""
        self._find = find
        self.refresh()

    def refresh(self) -> None:
        """Look for them again, after they were made anew.

        The objects of now, as DistributedDataParallel does: a buffer that some forward replaces
        may then have another size on each rank.
        """
        self._buffers = list(self._find())

    def broadcast(self, world: Communicator, op_name: str) -> None:
        """Give every rank rank 0's, in one message per dtype and device. Collective.

        Args:
            world: all ranks.
            op_name: whose, in errors.
        """
        if world.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in self._buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for buffers in kinds.values():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
                world.broadcast(flat, op_name=op_name)
                if world.rank != 0:
                    _spread(flat, buffers)


def _spread(flat: Tensor, buffers: list[Tensor]) -> None:
    pieces = flat.split([buffer.numel() for buffer in buffers])
    theirs = [piece.view(buffer.shape) for piece, buffer in zip(pieces, buffers, strict=True)]
    # Not an edit for autograd: rank 0's graph sees none either.
    with _unsafe_preserve_version_counter(tuple(buffers)):
        torch._foreach_copy_(buffers, theirs)
