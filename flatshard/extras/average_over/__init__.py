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
# Bytes of a rank that ran a backward without a count, and of a rank that ran no backward. As
# float64, both are NaN.
_MISSING, _ABSENT = b"\xff" * _BYTES, b"\xfe" * _BYTES


def count(state: RunState, number: float | Tensor) -> None:
    """Implement ``ShardedWrapper.average_over``."""
    is_number = isinstance(number, int | float | Tensor) and not isinstance(number, bool)
    if not is_number or (isinstance(number, Tensor) and number.numel() != 1):
        raise TypeError(
            f"{_NAME}: expected an int, a float or a tensor with one element, got {number!r}."
        )
    for extension in state.extensions:
        extension.needs_gradients(_NAME)
    if any(handle.comm_hook is not None for handle in state.handles):
        raise RuntimeError(
            f"{_NAME}: a communication hook is registered. Expected gradients that flatshard "
            "averages over ranks, because they are then rescaled; a hook may return another "
            "average. Divide by the counts in the hook and do not call average_over(), or train "
            "without the hook."
        )
    average = state.extension("average_over")
    if average is None:
        average = AverageOver(state)
        state.extend(average)
    average.give(number)


class AverageOver(StepExtension):
    """Scales reduced gradients to averages over the counts of all ranks and micro-batches."""

    name = "average_over"
    exchange_name = " and counts of average_over"

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._given: Any = None  # the count that the program passed since the last backward began
        # Counts of the backward that runs, and of earlier backwards that accumulated gradients.
        self._counts: list[Any] = []
        self._is_running = False  # whether a backward has begun, but has not ended

    def give(self, number: float | Tensor) -> None:
        """Keep ``number`` for the next backward. It replaces a count that no backward has used."""
        if not (isinstance(number, Tensor) and number.is_cuda):
            self._given = float(number), None
            return
        # Queue the copy to the host now, before the backward's kernels. The end of backward then
        # waits only for this copy. A copy queued there would wait for the whole backward.
        host = torch.empty((), dtype=torch.float64, pin_memory=True)
        host.copy_(number.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._given = host, event

    def begin_backward(self) -> None:
        if self._is_running:  # the last backward failed, and its gradients were dropped
            self._counts = []
        self._is_running = True

    def _take(self) -> list[Any]:
        """Return the counts of this backward, and of earlier ones whose gradients still exist."""
        backward, given = self._state.backward, self._given
        self._given = None
        counts = self._counts if backward.had_accumulated else []
        return counts if backward.is_empty else [*counts, given]

    def votes(self) -> bytes:
        """Return this rank's count, at this rank's place among zeros."""
        world, mine = self._state.world, b""
        if self._state.is_reducing:
            mine = _encoded(self._take())
        place = world.rank * _BYTES
        return (bytes(place) + mine).ljust(world.size * _BYTES, b"\0")

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
        said = dict(zip(state.world.ranks, pieces, strict=True))
        if all(piece in (_MISSING, _ABSENT) for piece in pieces):
            return  # no rank has passed a count: average over ranks
        counts = {rank: self._checked(rank, piece) for rank, piece in said.items()}
        if not any(counts.values()):
            raise RuntimeError(
                f"{_NAME}, {unit_text(state.root.name)}: the counts of all ranks add up to 0, and "
                "no gradient can be divided by 0. Expected at least one token. Skip the step."
            )
        totals = {
            unit: math.fsum(counts[rank] for rank in unit.topology.world.ranks)
            for unit in state.units
        }
        for handle in state.handles:
            # Some units train only on a part of the ranks. If none of these ranks has a token, the
            # unit's gradients are zero, and need no scale. Other ranks do not see this total, so
            # this rank must not raise.
            size = handle.topology.world.size
            handle.grads.scale = size / (totals[handle.unit] or size)

    def _checked(self, rank: int, piece: bytes) -> float:
        """Return the count that ``rank`` has sent. Raises RuntimeError if the count is wrong."""
        if piece == _ABSENT:
            return 0.0
        (number,) = struct.unpack(">d", piece)
        if 0 <= number < math.inf:
            return float(number)
        problem = f"passed the count {number}"
        if piece == _MISSING:
            problem = "ran a backward without a call of average_over(), which other ranks made"
        raise RuntimeError(
            f"{_NAME}, rank {rank}: this rank {problem}. Expected on each rank, before each "
            "backward, the number of tokens (finite, at least 0) in this rank's loss, which is a "
            "sum."
        )

    def end_backward(self, has_gradients: bool) -> None:
        self._is_running = False
        is_over = self._state.is_reducing
        self._counts = [] if is_over else self._take()
        for handle in self._state.handles if is_over else ():
            handle.grads.scale = 1.0


def _encoded(counts: list[Any]) -> bytes:
    """Return this rank's count for the exchange, in 8 bytes.

    The result is the sum of ``counts``, or the first count that is negative or not finite. It is
    ``_ABSENT`` if this rank ran no backward, and ``_MISSING`` if a backward had no count.

    ``counts``: one element per backward. None: the program passed no count. Otherwise a pair: the
    number, and the CUDA event after which the number is on the host (None for a CPU number).
    """
    if not counts:
        return _ABSENT
    if None in counts:
        return _MISSING
    for _, event in counts:
        if event is not None:
            event.synchronize()
    numbers = [float(number) for number, _ in counts]
    wrong = (number for number in numbers if not 0 <= number < math.inf)
    return struct.pack(">d", next(wrong, math.fsum(numbers)))
