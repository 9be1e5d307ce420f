"""``refuse_foreign_wrapper``: none of torch's wrappers may be around a sharded model.

Nor may its parameters become DTensors.
"""

from __future__ import annotations

import sys
from types import CodeType

# By module and function what makes one of torch's wrappers, or runs it.
_MAKERS = {
    ("torch.nn.parallel.distributed", "__init__"): "DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "forward"): "DataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "__init__"): "FullyShardedDataParallel",
    ("torch.distributed._composable.contract", "wrapper"): "",  # of whatever it decorates
    ("torch.distributed.tensor._api", "distribute_tensor"): "distribute_tensor",
    ("torch.distributed.tensor.parallel.api", "parallelize_module"): "parallelize_module",
}
_NAMES = {name for _, name in _MAKERS}


def refuse_foreign_wrapper(end: CodeType | None = None) -> None:
    """Raise ValueError while one of torch's wrappers is made around what the caller is part of.

    Callers of ``end`` are not looked at.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        if frame.f_code.co_name in _NAMES:
            place = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            made = _MAKERS.get(place) or getattr(frame.f_locals.get("func"), "__name__", "")
            if place in _MAKERS and made in ("distribute_tensor", "parallelize_module"):
                raise ValueError(
                    f"{made}() after ShardedWrapper: a rank holds its range of sharded parameters "
                    "alone. First parallelize_module(model, mesh['tp'], plan) or "
                    "distribute_module(), then ShardedWrapper(model, device_mesh=mesh['dp'])."
                )
            if place in _MAKERS and made in (*_MAKERS.values(), "fully_shard", "replicate"):
                raise ValueError(
                    f"{made} around a ShardedWrapper: both would shard or average the same "
                    f"gradients. ShardedWrapper does it alone: leave {made} out, or wrap the "
                    "model in it instead." + _HINT * ("accelerate" in sys.modules)
                )
        frame = frame.f_back  # type: ignore[assignment]


_HINT = (
    " Accelerate, Trainer and Lightning put it there: use theirs of flatshard.integrations instead."
)
