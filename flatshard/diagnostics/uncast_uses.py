"""``UncastUses``: says more where torch raises because two tensors' dtypes differ."""

from __future__ import annotations

import sys

from flatshard.engine.events import StepObserver


class UncastUses(StepObserver):
    """For replicated parameters (NO_SHARD): no operation on them is seen, nor casts them."""

    def end_computing(self, failed: bool) -> None:
        error = sys.exc_info()[1]
        if failed and isinstance(error, RuntimeError) and "dtype" in str(error):
            error.add_note(
                "Under NO_SHARD with mixed precision, a parameter that is used outside of its "
                "unit's forward (a parent reads a child's weight) is not cast to param_dtype. Let "
                "the module that uses it be the unit (auto_wrap_policy), or cast there: "
                "weight.to(x.dtype)."
            )
