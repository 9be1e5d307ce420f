"""Extra: warns of the first gradient with inf or NaN, and names the parameter and the rank.

The extra checks each rank's gradients before they are averaged over ranks, because the average
would not show which rank computed the first inf or NaN.

Without this folder, ``ShardedWrapper.warn_non_finite()`` raises ``MissingExtraError``.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from flatshard.engine.events import StepExtension
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.units.module_tree import unit_text


class NonFiniteWatch(StepExtension):
    """Checks this rank's gradients in every backward, until a gradient is not finite."""

    name = "non_finite"
    is_made_anew = watches = True

    def __init__(self, rank: int, state: RunState) -> None:
        self._rank, self._state = rank, state
        # For each gradient of this backward: the unit, the parameter, and the largest magnitude.
        self._checked: list[tuple[str, str, Tensor]] = []

    def begin_backward(self) -> None:
        self._checked.clear()  # a backward that failed may have left entries

    def on_grad(self, unit: Unit, param: OriginalParam, grad: Tensor) -> None:
        values = grad.detach() if grad.layout is torch.strided else grad._values()
        if values.numel():
            # The largest magnitude is NaN if a value is NaN. `vector_norm` allocates no temporary
            # of the gradient's size, and the result stays on the device, so the host does not wait.
            largest = torch.linalg.vector_norm(values, math.inf)
            self._checked.append((unit.name, param.name, largest))

    def end_backward(self, has_gradients: bool) -> None:
        """Warn and stop checking if a gradient was inf or NaN. Waits for the device."""
        checked, self._checked = self._checked, []
        if not checked:
            return
        magnitudes = torch.stack([largest.double() for *_, largest in checked]).tolist()
        for (unit, name, _), largest in zip(checked, magnitudes, strict=True):
            if not math.isfinite(largest):
                self._state.drop(self)
                warnings.warn(
                    f"{unit_text(unit)}, rank {self._rank}: the gradient of parameter {name!r} "
                    f"contains {abs(largest)} on this rank, before any average over "
                    "ranks. This is the first gradient of this backward with inf or NaN. "
                    "torch.autograd.detect_anomaly() finds the operation that made it. If fp16 "
                    "overflows, use torch.amp.GradScaler. Checking ends with this warning: call "
                    "warn_non_finite() to check again.",
                    stacklevel=4,
                )
                return


def watch_non_finite(state: RunState, rank: int | None) -> None:
    """Start to check gradients on rank ``rank``, or stop checking if ``rank`` is None."""
    before = state.extension(NonFiniteWatch.name)
    if before is not None:
        state.drop(before)
    if rank is not None:
        state.extend(NonFiniteWatch(rank, state))
