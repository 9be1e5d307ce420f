"""``BufferSync``: broadcasts rank 0's module buffers to every rank before a forward."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.engine.events import Kind, Observers, Voter

# Buffers, keyed by the module and the attribute name.
Buffers = dict[tuple[nn.Module, str], Tensor]


class BufferSync(Voter):
    """Broadcasts the same buffers as DistributedDataParallel, before the same forwards.

    [Note: buffers that are replaced]
    The present buffers are broadcast, also if a forward or a user replaced some of them. Ranks must
    know the size of the message without an exchange in every forward. So the exchange at the end of
    each backward compares whether all ranks have buffers of the same shapes. Until the shapes
    agree, the message contains the buffers of the last exchange in which they agreed. A table that
    each rank makes as long as its batches need, for example, stays local.
    """

    def __init__(
        self, world: Communicator, observers: Observers, buffers: Callable[[], Buffers]
    ) -> None:
        """Keep ``buffers``, a function that lists the modules' present buffers."""
        self._world, self._observers, self._buffers = world, observers, buffers
        self.is_due = True
        self.source = 0  # source rank of the broadcast
        self._alike = buffers()  # buffers whose dtype, shape and device are the same on all ranks
        self._voted, self._voted_kinds, self._digest = self._alike, _kinds(self._alike), b""
        self._has_run = False  # whether a forward ran since the ranks last compared kinds

    def before_forward(self, name: str, recomputes: bool, under_no_sync: bool) -> None:
        """Broadcast the buffers, if they are due, before the forward of the root, ``name``.

        Collective, unless the forward ``recomputes`` an earlier one for a checkpoint.
        """
        if self.is_due and not recomputes and self._world.size > 1:
            with self._observers.span(Kind.RANKS_WAIT):
                self.broadcast(f"{name or 'the model'}'s buffers")
        self._has_run = True
        # As in DistributedDataParallel: if the backward of this forward leaves the ranks'
        # parameters unchanged, the next forward does not start from rank 0's buffers either.
        self.is_due = torch.is_grad_enabled() and not under_no_sync

    def broadcast(self, op_name: str) -> None:
        """Give every rank the buffers of rank ``source``. Collective."""
        world, present = self._world, self._buffers()
        if not self._has_run and _kinds(present) != self._voted_kinds:
            # The program replaced buffers between steps. All ranks run the same program, so all
            # ranks come here and compare kinds.
            self.tally(world.maxima(self.votes(), op_name=op_name))
        sent = []
        for place, before in self._alike.items():
            buffer = present.get(place)
            sent.append(before if buffer is None or _kind(buffer) != _kind(before) else buffer)
        broadcast_buffers(sent, world, op_name, self.source)

    def votes(self) -> bytes:
        """A digest of the buffers' kinds, to compare between ranks."""
        self._voted = self._buffers()
        kinds = _kinds(self._voted)
        if kinds != self._voted_kinds or not self._digest:
            self._voted_kinds, self._digest = kinds, zlib.crc32(repr(kinds).encode()).to_bytes(4)
        return with_complements(self._digest)

    def tally(self, maxima: bytes) -> None:
        if not any(differ(maxima)):
            self._alike = self._voted
        self._has_run = False


def _kind(buffer: Tensor) -> Any:
    return buffer.dtype, buffer.shape, buffer.device.type


def _kinds(buffers: Buffers) -> list[Any]:
    return [_kind(buffer) for buffer in buffers.values()]


def broadcast_buffers(
    buffers: Sequence[Tensor], world: Communicator, op_name: str, source: int
) -> None:
    """Give every rank rank ``source``'s buffers, one message per dtype and device. Collective."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for alike in kinds.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
            world.broadcast(flat, op_name=op_name, source=source)
            if world.rank == source:
                continue
            pieces = flat.split([buffer.numel() for buffer in alike])
            theirs = [piece.view(buffer.shape) for piece, buffer in zip(pieces, alike, strict=True)]
            # Autograd must not see the copy as an edit in place: on rank 0 no edit takes place.
            with _unsafe_preserve_version_counter(tuple(alike)):
                torch._foreach_copy_(alike, theirs)
