"""``FrameworkPrecision``: warns where a framework's mixed precision does not reach the model."""

from __future__ import annotations

import sys
import warnings

import torch

from flatshard.engine.events import StepObserver
from flatshard.module.sharding import Sharding


class FrameworkPrecision(StepObserver):
    """Compares the first training forward with what Accelerate was told."""

    def __init__(self, root: Sharding) -> None:
        self._root = root

    def begin_forward(self) -> None:
        root = self._root
        if not torch.is_grad_enabled():
            return
        root.context.observers.remove(self)
        settings = root.settings
        # Not imported: whoever uses it has. `transformers.Trainer` does.
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        asked = getattr(state, "_shared_state", {}).get("_mixed_precision")
        if asked not in ("bf16", "fp16") or settings.ranks.world.rank != 0:
            return
        is_on = torch.is_autocast_enabled(settings.device.type)
        if not is_on and settings.precision.changes_nothing:
            # It does so in `prepare()` alone, which must not put DistributedDataParallel around.
            warnings.warn(
                f"Accelerate's mixed_precision={asked!r} does not reach this model: its forward "
                "runs without autocast. Call model = accelerator.prepare_model(model, "
                "evaluation_mode=True), or wrap with "
                "mixed_precision=MixedPrecision(param_dtype=...).",
                stacklevel=2,
            )
