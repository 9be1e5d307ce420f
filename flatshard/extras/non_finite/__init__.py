"""Extra: warns of the first gradient that is inf or NaN, and names its parameter and rank.

The extra checks the gradients that autograd gives each rank. The average over the ranks would be
non-finite on all ranks, and would not tell on which rank the value arose. The extra only watches,
as a ``StepObserver``.

Without this folder, ``ShardedWrapper.warn_non_finite()`` raises an error that names it.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from flatshard.engine.events import Observers, StepObserver
from flatshard.engine.unit import Unit
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.flat_parameter import OriginalParam

__all__ = ["watch_non_finite"]


class NonFiniteWatch(StepObserver):
    """Checks this rank's gradients in every backward, until one is not finite."""

    def __init__(self, rank: int, observers: Observers) -> None:
        self._rank, self._observers = rank, observers
        # Of each gradient: the unit and the name of its parameter, and the largest magnitude.
        self._checked: list[tuple[str, str, Tensor]] = []

    def begin_backward(self) -> None:
        self._checked.clear()  # those of a backward that failed

    def on_grad(self, unit: Unit, param: OriginalParam, grad: Tensor) -> None:
        values = grad.detach() if grad.layout is torch.strided else grad._values()
        if values.numel():
            # The largest magnitude is NaN if a value is NaN. It is computed in one pass, without a
            # temporary of the gradient's size. It stays on the device: the host must not wait
            # before the end of backward.
            largest = torch.linalg.vector_norm(values, math.inf)
            self._checked.append((unit.name, param.name, largest))

    def end_backward(self) -> None:
        """Warn, and look no more, if a gradient was not finite. Waits for the device."""
        checked, self._checked = self._checked, []
        if not checked:
            return
        magnitudes = torch.stack([largest.double() for *_, largest in checked]).tolist()
        for (unit, name, _), largest in zip(checked, magnitudes, strict=True):
            if not math.isfinite(largest):
                self._observers.remove(self)
                warnings.warn(
                    f"{unit_text(unit)}, rank {self._rank}: the gradient of parameter {name!r} "
                    f"holds {abs(largest)}, as autograd gave it on this rank, before "
                    "any average over ranks; it is the first one of this backward. "
                    "torch.autograd.detect_anomaly() finds the operation; what overflows in fp16 "
                    "is for torch.amp.GradScaler. This is said once: warn_non_finite() looks on.",
                    stacklevel=4,
                )
                return


def watch_non_finite(observers: Observers, rank: int | None) -> None:
    """See ``ShardedWrapper.warn_non_finite``. ``rank`` None: stop checking."""
    before = observers.find(NonFiniteWatch)
    if before is not None:
        observers.remove(before)
    if rank is not None:
        observers.add(NonFiniteWatch(rank, observers))
