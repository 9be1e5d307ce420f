"""Extra: gradients averaged over counts, such as tokens, instead of over ranks.

Without this folder, ``ShardedWrapper.average_over()`` raises ``MissingExtraError``.

All ranks exchange a few bytes at the end of each backward. The counts are part of this exchange: 8
bytes per rank. Then each rank multiplies the reduced gradients, which are averages over ranks, by
the number of ranks divided by the sum of the counts.
"""

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
# Number that a rank sends if it ran a backward without a count. No program passes this number.
_MISSING = -math.ulp(0.0)


def count(state: RunState, number: float | Tensor) -> None:
    """Implement ``ShardedWrapper.average_over``."""
    given = torch.as_tensor(number).detach()
    if given.numel() != 1 or given.is_complex():
        raise TypeError(f"{_NAME}: expected an int, a float or a 0-d tensor, got {number!r}.")
    if state.extension("average_over") is None:
        state.extend(AverageOver(state))
    # Queue the copy to the host now, before the kernels of backward. Then the end of backward waits
    # only for the copy. A copy queued at the end would wait for the whole backward. Because of
    # `non_blocking`, torch copies into pinned memory, and this line does not wait.
    host = given.to("cpu", torch.float64, non_blocking=True)
    event = torch.cuda.current_stream(given.device).record_event() if given.is_cuda else None
    state.extension("average_over").given = host, event


class AverageOver(StepExtension):
    """Divides summed gradients by the sum of the counts of all ranks and micro-batches."""

    name = "average_over"
    exchange_name = " and counts of average_over"

    def __init__(self, state: RunState) -> None:
        self._state = state
        # A count is a pair: a tensor on the host, and the CUDA event after which the tensor is
        # complete (None for a number on the CPU). A missing count is None.
        self.given: Any = None  # the count for the next backward
        self._present: Any = None  # the count of the running backward
        self._earlier: list[Any] = []  # counts of earlier backwards that accumulated gradients
        self._before: list[Any] = []  # `_accumulated()` before the running backward

    def begin_backward(self) -> None:
        self._present, self.given, self._before = self.given, None, self._accumulated()
        for extension in self._state.extensions if self._present else ():
            extension.needs_gradients(_NAME)

    def _accumulated(self) -> list[tuple[int, int]]:
        """Return values that change if a backward accumulates gradients."""
        slots = (slot for one in self._state.handles for slot in one.grads.slots.values())
        return [(id(slot), slot._version) for slot in slots]

    def _counts(self) -> list[Any]:
        """Return the counts of this backward, and of earlier backwards whose gradients remain."""
        backward = self._state.backward
        earlier = self._earlier if backward.had_accumulated else []
        return earlier if backward.is_empty else [*earlier, self._present]

    def votes(self) -> bytes:
        """Return this rank's sum of counts, for an exchange that takes the maximum of each byte.

        The first byte says whether the program has passed any count on this rank. Then there are 8
        bytes for each rank: the sum of this rank's counts at this rank's position, and zeros at all
        other positions. If a count is negative or not finite, this count is sent, not the sum.
        """
        counts, world = self._counts(), self._state.world
        for _, event in filter(None, counts):
            if event is not None:
                event.synchronize()
        numbers = [_MISSING if one is None else one[0].item() for one in counts]
        wrong = (number for number in numbers if not 0 <= number < math.inf)
        mine = struct.pack(">d", next(wrong, sum(numbers)))
        return bytes([any(counts)]) + (bytes(8 * world.rank) + mine).ljust(8 * world.size, b"\0")

    def tally(self, maxima: bytes) -> None:
        """Set the factor for reduced gradients. Raises on all ranks if a count is wrong."""
        state = self._state
        if all(unit.sync is not GradSync.FULL for unit in state.units):
            return
        counts: dict[int, float] = {}
        if maxima[0]:
            numbers = struct.unpack(f">{state.world.size}d", maxima[1:])
            counts = dict(zip(state.world.ranks, numbers, strict=True))
            self._check(counts)
        elif state.lacks_ranks:  # `join` has set the scale
            return
        # Some units train only on some of the ranks. If the counts of these ranks add up to 0, the
        # unit's gradients are zero and need no scale. This rank must not raise then, because other
        # ranks do not compute this total.
        worlds = {handle.topology.world for handle in state.handles}
        totals = {one: math.fsum(counts.get(rank, 0) for rank in one.ranks) for one in worlds}
        for handle in state.handles:
            world = handle.topology.world
            handle.grads.scale = world.size / (totals[world] or world.size)

    def _check(self, counts: dict[int, float]) -> None:
        """Raise if gradients cannot be divided by the sum of ``counts`` (keyed by rank)."""
        state = self._state
        problems = [
            f"rank {rank} passed " + ("no count" if one == _MISSING else f"the count {one}")
            for rank, one in counts.items()
            if not 0 <= one < math.inf
        ]
        if not any(counts.values()):
            problems.append("the counts of all ranks add up to 0")
        if not state.is_reducing:
            problems.append("this backward reduces only some units; use no_sync() with no argument")
        if any(handle.grads.plan.comm_hook is not None for handle in state.handles):
            problems.append("a communication hook is registered, which may not average over ranks")
        if problems:
            raise RuntimeError(
                f"{_NAME}, {unit_text(state.root.name)}: {problems[0]}. On each rank, pass the "
                "rank's number of tokens before each backward, and average all units without hooks."
            )

    def end_backward(self, has_gradients: bool) -> None:
        """Keep the count (of tokens, for example) until this backward's gradients are reduced."""
        if has_gradients or self._accumulated() != self._before:
            self._earlier = [] if self._state.is_reducing else self._counts()
        else:  # no parameter got a gradient: keep the count for the next backward
            self.given = self._present
