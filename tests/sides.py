"""`wrap` and `full_state`: flatshard and torch's wrappers behind one interface, for registries."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper


def wrap(
    module: nn.Module, side: str, units: tuple[type[nn.Module], ...] = (), policies: Any = None
) -> Any:
    """The module under a wrapper: "ddp", "fsdp1", "fsdp2", or flatshard with a strategy.

    ``policies`` are flatshard's and FSDP1's wrap policies; by default each module of ``units`` is a
    unit. Under HYBRID strategies, the ranks make two nodes.
    """
    if side == "ddp":
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    if side == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for one in reversed(list(module.modules())):
            if one is not module and isinstance(one, units):
                fully_shard(one, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    if side == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, wrap

        policy = policies[1] if policies else wrap.ModuleWrapPolicy(set(units))
        return FullyShardedDataParallel(
            module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    from flatshard.wrap import ModuleWrapPolicy

    if side.startswith("HYBRID"):
        os.environ["LOCAL_WORLD_SIZE"] = str(max(1, dist.get_world_size() // 2))
    policy = policies[0] if policies else ModuleWrapPolicy(units)
    # Without coalescing, because coalescing would make a small model a single unit.
    keywords = {"auto_wrap_policy": policy, "coalesce_bytes": 0}
    return ShardedWrapper(module, sharding_strategy=side, **keywords)


def full_state(wrapped: Any, side: str) -> dict[str, Tensor]:
    """The full state dict under the names of the unwrapped model."""
    if side == "fsdp1":
        from torch.distributed.fsdp import FullStateDictConfig, StateDictType

        config = FullStateDictConfig(rank0_only=False)
        with type(wrapped).state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, config):
            return wrapped.state_dict()
    state = (wrapped.module if side == "ddp" else wrapped).state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
