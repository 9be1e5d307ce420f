"""Extra: gradients averaged over counts, such as tokens, instead of over ranks.

Without this folder, ``ShardedWrapper.average_over()`` raises ``MissingExtraError``.

The counts of all ranks travel in the exchange at the end of a backward, in 8 bytes per rank. Then
each rank multiplies the reduced gradients, which are averages over ranks, by the number of ranks
divided by the sum of the counts.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from flatshard.engine.events import StepExtension
from flatshard.engine.gradients import GradSync
from flatshard.engine.run_state import RunState
from flatshard.units.module_tree import unit_text

_NAME = "average_over()"
_BYTES = 8  # number of bytes of a count in the exchange: a float64
# Bytes of a rank that ran a backward without a count, which are NaN as float64, and of a rank that
# ran no backward, which are -0.0.
_MISSING, _ABSENT = b"\xff" * _BYTES, struct.pack(">d", -0.0)


def count(state: RunState, number: float | Tensor) -> None:
    """Implement ``ShardedWrapper.average_over``."""
    is_number = isinstance(number, int | float | Tensor) and not isinstance(number, bool)
    if not is_number or torch.as_tensor(number).numel() != 1:
        raise TypeError(
            f"{_NAME}: expected an int, a float or a tensor with one element, got {number!r}."
        )
    if state.extension("average_over") is None:
        state.extend(AverageOver(state))
    state.extension("average_over").give(torch.as_tensor(number))


class AverageOver(StepExtension):
    """Divides summed gradients by the sum of the counts of all ranks and micro-batches."""

    name = "average_over"
    exchange_name = " and counts of average_over"

    def __init__(self, state: RunState) -> None:
        self._state = state
        # One element per count: a tensor on the host, and the CUDA event after which the tensor is
        # complete (None for a CPU number). None in place of the pair: there is no count.
        self._given: Any = None  # the count that the program passed since the last backward began
        self._counts: list[Any] = []  # counts of earlier backwards that accumulated gradients

    def give(self, number: Tensor) -> None:
        """Keep ``number`` for the next backward. It replaces a count that no backward has used."""
        # Queue the copy to the host now, before the backward's kernels. The end of backward then
        # waits only for this copy. A copy queued there would wait for the whole backward. Torch
        # allocates pinned memory for a copy that does not block.
        host = number.detach().to("cpu", torch.float64, non_blocking=True)
        event = torch.cuda.current_stream(number.device).record_event() if number.is_cuda else None
        self._given = host, event

    def begin_backward(self) -> None:
        if self._given is None:
            return
        for extension in self._state.extensions:
            extension.needs_gradients(_NAME)
        if any(handle.comm_hook is not None for handle in self._state.handles):
            raise RuntimeError(
                f"{_NAME}: a communication hook is registered, whose result may not be the average "
                "over ranks that average_over() expects. Divide by the counts in the hook, or "
                "train without the hook."
            )

    def _take(self) -> list[Any]:
        """Return the counts of this backward, and of earlier ones whose gradients still exist."""
        backward, given = self._state.backward, self._given
        self._given = None
        counts = self._counts if backward.had_accumulated else []
        return counts if backward.is_empty else [*counts, given]

    def votes(self) -> bytes:
        """Return this rank's count, at this rank's place among zeros."""
        world = self._state.world
        mine = _encoded(self._take()) if self._state.is_reducing else b""
        return (bytes(world.rank * _BYTES) + mine).ljust(world.size * _BYTES, b"\0")

    def tally(self, maxima: bytes) -> None:
        """Set the scale of the published gradients. Raises on all ranks if a count is wrong."""
        state = self._state
        syncs = {unit.sync for unit in state.units}
        if GradSync.FULL not in syncs:
            return
        if len(syncs) > 1:
            raise RuntimeError(
                f"{_NAME}: this backward reduces the gradients of only some units, so the units "
                "would be averaged over different counts. Use no_sync() without arguments."
            )
        pieces = [maxima[place : place + _BYTES] for place in range(0, len(maxima), _BYTES)]
        counts: dict[int, float] = {}
        if any(piece not in (_MISSING, _ABSENT) for piece in pieces):  # else: average over ranks
            counts = {r: _checked(r, p) for r, p in zip(state.world.ranks, pieces, strict=True)}
            if not any(counts.values()):
                raise RuntimeError(
                    f"{_NAME}, {unit_text(state.root.name)}: the counts of all ranks add up to 0. "
                    "Expected at least one token. Skip the step."
                )
        worlds = {handle.topology.world for handle in state.handles}
        totals = {one: math.fsum(counts.get(rank, 0) for rank in one.ranks) for one in worlds}
        for handle in state.handles:
            # Some units train only on a part of the ranks. If none of these ranks has a token, the
            # unit's gradients are zero, and need no scale. Other ranks do not see this total, so
            # this rank must not raise.
            world = handle.topology.world
            handle.grads.scale = world.size / (totals[world] or world.size)

    def end_backward(self, has_gradients: bool) -> None:
        self._counts = [] if self._state.is_reducing else self._take()


def _encoded(counts: list[Any]) -> bytes:
    """Return this rank's count for the exchange, in 8 bytes.

    The result is the sum of ``counts``, or the first count that is negative or not finite. It is
    ``_ABSENT`` if this rank ran no backward, and ``_MISSING`` if a backward had no count.
    """
    if not counts or None in counts:
        return _MISSING if counts else _ABSENT
    for _, event in counts:
        if event is not None:
            event.synchronize()
    numbers = [host.item() for host, _ in counts]
    wrong = (number for number in numbers if not 0 <= number < math.inf)
    return struct.pack(">d", next(wrong, math.fsum(numbers)))


def _checked(rank: int, piece: bytes) -> float:
    """Return the count that ``rank`` has sent. Raises RuntimeError if the count is wrong."""
    (number,) = struct.unpack(">d", piece)
    if 0 <= number < math.inf:
        return float(number)
    problem = f"passed the count {number}"
    if piece == _MISSING:
        problem = "ran a backward without a call of average_over(), which other ranks made"
    raise RuntimeError(
        f"{_NAME}, rank {rank}: this rank {problem}. Expected on each rank, before each backward, "
        "the number of tokens (finite, at least 0) in this rank's loss, which is a sum."
    )
