"""``FrameworkPrecision``: warns where Accelerate's mixed precision does not reach the model.

In the core, not in ``flatshard.integrations``: the integrations prepare models so that autocast is
on. The warning is for programs that wrap a model themselves and pass it to Accelerate or to
``transformers.Trainer``. Programs that have not imported Accelerate get no observer.
"""

from __future__ import annotations

import sys
import warnings

import torch

from flatshard.engine.events import Observers, StepObserver


class FrameworkPrecision(StepObserver):
    """Compares the first training forward of an uncast model with Accelerate's setting."""

    def __init__(self, observers: Observers, device_type: str) -> None:
        self._observers, self._device_type = observers, device_type

    @classmethod
    def attach(cls, observers: Observers, device_type: str) -> None:
        """Watch a model, if the program has imported Accelerate."""
        if "accelerate.state" in sys.modules:
            observers.add(cls(observers, device_type))

    def begin_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._observers.remove(self)
        state = getattr(sys.modules["accelerate.state"], "AcceleratorState", None)
        asked = getattr(state, "_shared_state", {}).get("_mixed_precision")
        if asked in ("bf16", "fp16") and not torch.is_autocast_enabled(self._device_type):
            # Only `prepare()` turns autocast on, and must not add DistributedDataParallel.
            warnings.warn(
                f"Accelerate's mixed_precision={asked!r} does not reach this model: its forward "
                "runs without autocast. Call model = accelerator.prepare_model(model, "
                "evaluation_mode=True), or wrap with "
                "mixed_precision=MixedPrecision(param_dtype=...).",
                stacklevel=2,
            )
