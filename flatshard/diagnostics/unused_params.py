"""``UnusedParams``: says once which originals of flat parameters a backward left out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from flatshard.engine.grad_buffer import Sync
from flatshard.engine.unit import Unit

_NAMED = 5


class UnusedParams:
    """Looks at the backwards of one model until one leaves out a part of a flat parameter."""

    def __init__(self) -> None:
        """Nothing was said."""
        self._is_said = False

    def end_backward(self, units: Sequence[Unit], used: Sequence[Sequence[list[bool]]]) -> None:
        """Warn, on all ranks alike, if that is so for the first time; after all communication.

        Args:
            units: of the model.
            used: per unit, flat parameter and original, whether any rank used it.
        """
        if self._is_said:
            return
        names = [
            handle.params.specs[index].name
            for unit, flags_of_unit in zip(units, used, strict=False)
            for handle, flags in zip(unit.handles, flags_of_unit, strict=True)
            if unit.sync is Sync.ALL and not handle.params.use_orig_params and any(flags)
            for index, was_used in enumerate(flags)
            if not was_used
        ]
        if names:
            self._is_said = True
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            warnings.warn(
                f"use_orig_params=False: this backward left out {', '.join(names[:_NAMED])}{more}, "
                "and used others of the same flat parameter. Their gradients are zeros, where an "
                "unwrapped model has None: momentum and weight decay go on for them. Use "
                "use_orig_params=True. This is said once.",
                stacklevel=5,
            )
