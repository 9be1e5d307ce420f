"""``NonFiniteWatch``: finds the first gradient that is not finite, and whose it is.

An average over ranks is not finite on all of them, and says nothing of where that came from: what
is looked at are the gradients that autograd gives each rank.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flatshard.engine.events import Observers, StepObserver
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit


class NonFiniteWatch(StepObserver):
    """Looks at this rank's gradients of one backward after the other, until one is not finite."""

    def __init__(self, rank: int, observers: Observers) -> None:
        """``rank`` is this rank's number, for the warning; after it, ``observers`` let this go."""
        self._rank, self._observers = rank, observers
        self._looked_at: list[tuple[str, str, Tensor]] = []

    def begin_backward(self) -> None:
        """Forget what a backward left that failed."""
        self._looked_at.clear()

    def on_grad(self, unit: Unit, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """Look at a gradient; the host does not wait for the answer."""
        values = grad.detach() if grad.layout is torch.strided else grad._values()
        if values.is_complex():
            values = torch.view_as_real(values)
        if values.numel():
            # One pass and no temporary of the gradient's size; NaN is both extremes.
            extremes = torch.stack(torch.aminmax(values))
            answer = torch.stack([extremes.isfinite().all().logical_not(), extremes.isnan().any()])
            name = handle.params.specs[index].name
            self._looked_at.append((unit.name, name, answer))

    def end_backward(self) -> None:
        """Warn if something was not finite. Waits for the device."""
        looked_at, self._looked_at = self._looked_at, []
        if not looked_at:
            return
        answers = torch.stack([answer for *_, answer in looked_at]).tolist()
        for (unit, name, _), (is_bad, is_nan) in zip(looked_at, answers, strict=True):
            if is_bad:
                self._observers.remove(self)
                self._warn(unit, name, "nan" if is_nan else "inf")
                return

    def _warn(self, unit: str, name: str, what: str) -> None:
        where = f"unit {unit!r}" if unit else "the root unit"
        warnings.warn(
            f"{where}, rank {self._rank}: the gradient of parameter {name!r} holds {what}, as "
            "autograd gave it on this rank, before any average over ranks; it is the first one of "
            "this backward. torch.autograd.detect_anomaly() finds the operation; what overflows in "
            "fp16 is for torch.amp.GradScaler. This is said once: warn_non_finite() looks on.",
            stacklevel=5,
        )


def watch_non_finite(observers: Observers, rank: int | None) -> None:
    """See ``ShardedWrapper.warn_non_finite``; ``rank`` None: no more."""
    before = observers.find(NonFiniteWatch)
    if before is not None:
        observers.remove(before)
    if rank is not None:
        observers.add(NonFiniteWatch(rank, observers))
