"""An error of ``torch.optim.Muon``'s constructor names the parameters that it is about."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flatshard.tensor.sharded_tensor import FlatShardTensor


@functools.cache
def install() -> None:
    """Wrap Muon's constructor, once in a process; what it does and what it raises stay the same."""
    # torch calls nothing of ours there, and its message has the parameter's shape alone.
    construct = torch.optim.Muon.__init__

    @functools.wraps(construct)
    def __init__(self: torch.optim.Muon, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValueError as error:
            groups: list[dict[str, Any]] = getattr(self, "param_groups", [])
            params = (param for group in groups for param in group["params"])
            sharded = (param for param in params if isinstance(param, FlatShardTensor))
            if names := [repr(param.spec.name) for param in sharded if param.ndim != 2]:
                error.add_note(
                    f"Not 2-D: {', '.join(names)}. Give them to another optimizer, such as AdamW."
                )
            raise

    torch.optim.Muon.__init__ = __init__  # type: ignore[method-assign]
