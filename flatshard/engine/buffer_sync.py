"""``BufferSync``: broadcasts module buffers (``register_buffer``) of rank 0 before a forward."""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flatshard.comm.communicator import Communicator
from flatshard.comm.host_exchange import differ, with_complements
from flatshard.engine.events import Kind

# Buffers, keyed by the module and the attribute name.
Buffers = dict[tuple[nn.Module, str], Tensor]
Span = Callable[[Kind], AbstractContextManager[object]]


class BufferSync:
    """Broadcasts the same buffers as DistributedDataParallel, before the same forwards.

    [Note: buffers that are replaced]
    A forward or a user may replace a buffer by another tensor, which is then broadcast. All ranks
    must know the size of the message, but an exchange of sizes in every forward would be slow. So
    the exchange at the end of each backward (``end_of_backward.py``) compares the buffers' dtypes,
    shapes and devices. If ranks differ, later broadcasts have the sizes on which all ranks agreed
    last, and leave out buffers with another shape. An example is a position table that each rank
    extends for its own batches.
    """

    def __init__(
        self, world: Communicator, span: Span, buffers: Callable[[], Buffers], number: int
    ) -> None:
        """Prepare to broadcast the buffers of one model. The first forward broadcasts.

        Args:
            world: the ranks that train the model.
            span: ``RunState.span``, which marks the time of a broadcast in reports.
            buffers: function that returns the modules' present buffers.
            number: number of the model, the same on all ranks.
        """
        self._world, self._span, self._buffers = world, span, buffers
        # Ranks compare the name of the broadcast. If one rank calls a teacher and another rank
        # calls a student, the names differ by the number of the model, and all ranks raise.
        self._op_name = f"the model's buffers, model {number}"
        self.is_due = True  # whether the next forward broadcasts
        self.source = 0  # source rank of the broadcast

        # The buffers for which all ranks last had the same dtypes, shapes and devices. Broadcasts
        # have the sizes of these buffers.
        self._agreed = buffers()
        # The buffers that ranks compared last, the buffers' kinds, and a digest of the kinds.
        self._compared, self._compared_kinds, self._digest = self._agreed, _kinds(self._agreed), b""
        # Whether a forward ran since the ranks last compared their buffers. If no forward ran and a
        # buffer was replaced, the user's program replaced it, on all ranks.
        self._has_run = False

    def before_forward(self, under_no_sync: bool, of_wrapper: bool) -> None:
        """Broadcast the buffers before a forward of the model, if ``is_due``. Collective.

        Nothing is broadcast if the previous forward ran without gradients or under ``no_sync``.

        Args:
            under_no_sync: whether this forward runs under ``no_sync``.
            of_wrapper: whether the program called the wrapper. As in DistributedDataParallel, a
                call of the wrapped module (``model.module(x)``) neither broadcasts nor changes
                whether the next call broadcasts.
        """
        if of_wrapper and self.is_due and self._world.size > 1:
            with self._span(Kind.RANKS_WAIT):
                self.broadcast(self._op_name)
        self._has_run = True
        # As in DistributedDataParallel, broadcast before the next forward only if a reduction of
        # gradients follows this forward.
        if of_wrapper:
            self.is_due = torch.is_grad_enabled() and not under_no_sync

    def broadcast(self, op_name: str) -> None:
        """Overwrite the buffers of every rank with the buffers of rank ``source``. Collective."""
        world, present = self._world, self._buffers()
        if not self._has_run and _kinds(present) != self._compared_kinds:
            # No forward has run, so the program itself has replaced buffers since the last
            # comparison. All ranks run the same program, so all ranks come here, and can compare
            # whether their new buffers have the same dtypes, shapes and devices.
            self.tally(world.maxima(self.votes(), op_name=op_name))
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for place, before in self._agreed.items():
            buffer = present.get(place, before)
            buffer = buffer if _kind(buffer) == _kind(before) else before
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for group in groups.values():  # send one message per dtype and device
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in group])
                world.broadcast(flat, op_name=op_name, source=self.source)
                if world.rank == self.source:
                    continue
                pieces = zip(flat.split([buffer.numel() for buffer in group]), group, strict=True)
                theirs = [piece.view(buffer.shape) for piece, buffer in pieces]
                # Keep the version counters: otherwise autograd would see an in-place edit of
                # tensors saved for backward, and raise.
                with _unsafe_preserve_version_counter(tuple(group)):
                    torch._foreach_copy_(group, theirs)

    def votes(self) -> bytes:
        """Return a digest of the buffers' dtypes, shapes and devices, to compare between ranks."""
        self._compared = self._buffers()
        kinds = _kinds(self._compared)
        if kinds != self._compared_kinds or not self._digest:
            self._compared_kinds, self._digest = kinds, zlib.crc32(repr(kinds).encode()).to_bytes(4)
        return with_complements(self._digest)

    def tally(self, maxima: bytes) -> None:
        """Use the present buffers' sizes for later broadcasts, if the sizes are equal on all ranks.

        ``maxima``: the maximum over the ranks for each byte of ``votes``.
        """
        if not any(differ(maxima)):
            self._agreed = self._compared
        self._has_run = False


def _kind(buffer: Tensor) -> Any:
    return buffer.dtype, buffer.shape, buffer.device.type


def _kinds(buffers: Buffers) -> list[Any]:
    return [_kind(buffer) for buffer in buffers.values()]
