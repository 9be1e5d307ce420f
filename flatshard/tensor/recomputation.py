"""Non-reentrant checkpoints count what autograd saves, and count again when they recompute.

Then a unit may be unsharded whose parameters are sharded in the first pass: both times as many
tensors of the same shapes must be saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flatshard.tensor.shard_spec import ShardSpec

# What torch's names for ``p.grad`` and the like are: nothing is computed.
ATTRIBUTES = frozenset({"__get__", "__set__"})


def is_counted() -> bool:
    """Whether what autograd saves now goes to torch's non-reentrant checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def refuse_counted(func: Callable[..., Any], spec: ShardSpec) -> None:
    """Raise NeedsFullTensor in a forward: an attempt on the shard would save tensors, and fail."""
    name = func.__name__
    changes = name == "__setitem__" or (name[-1] == "_" != name[-2])
    if not changes and spec.owner.is_in_forward:
        spec.refuse(name)
