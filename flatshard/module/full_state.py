"""Full state dicts on one rank, in host memory; and a warning before they fill every rank's."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard.memory.free import free_bytes
from flatshard.module.sharding import handles_in, state_dicts_in, units_between_steps
from flatshard.state import model_state, optim_state

_ON_RANK_0 = model_state.StateDictOptions(offload_to_cpu=True, rank0_only=True)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The full state dict in rank 0's host memory, to save with ``torch.save``; elsewhere ``{}``.

    Gathered unit by unit: a device holds one unsharded unit at a time. Copies, under the unwrapped
    model's names and with its shapes; ``load_state_dict`` of any model takes it.

    Collective: all ranks, as ``state_dict()``.

    Args:
        model: a wrapper, or a module that contains some.

    Raises:
        RuntimeError: a forward or backward of the model is running.
    """
    if units_between_steps(model, "full_state_dict()"):
        with model_state.options_set(state_dicts_in(model), _ON_RANK_0):
            return model.state_dict()
    if _first_rank() > 0:
        return {}
    state = model.state_dict()
    return {k: v.to("cpu", copy=True) if torch.is_tensor(v) else v for k, v in state.items()}


def full_optim_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's full state, by parameter name, in rank 0's host memory; elsewhere ``{}``.

    ``ShardedWrapper.optim_state_dict_to_load`` loads it on any number of ranks. Gathered unit by
    unit.

    Collective: all ranks.

    Args:
        model: a wrapper, or a module that contains some.
        optimizer: an optimizer over its parameters.

    Raises:
        ValueError: as ``ShardedWrapper.optim_state_dict``.
        RuntimeError: a forward or backward of the model is running.
    """
    units = units_between_steps(model, "full_optim_state_dict()")
    state = optim_state.full_state(
        model, optimizer, units, None, rank0_only=True, offload_to_cpu=True
    )
    return state if units or _first_rank() == 0 else {}


def _first_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def warn_of_size(model: nn.Module) -> None:
    """Warn on rank 0 if a ``state_dict()`` will put more on each device than is free there."""
    parts, handles = state_dicts_in(model), [h for h in handles_in(model) if not h.is_whole]
    if not handles:
        return
    options, world = parts[0].requested(), handles[0].topology.world
    if options.is_sharded or options.rank0_only or not options.gathers or world.rank > 0:
        return
    device = torch.device("cpu") if options.offload_to_cpu else handles[0].device
    needed = sum(handle.layout.numel * handle.shard.element_size() for handle in handles)
    # All ranks of a host share its memory.
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    copies = min(on_host, world.size) if device.type == "cpu" else 1
    free = free_bytes(device)
    if free is not None and copies * needed > free:
        warnings.warn(
            f"state_dict() gathers the full model on every rank: {copies} x {needed:,} bytes on "
            f"{device}, where {free:,} are free. flatshard.checkpoint.full_state_dict(model) puts "
            "it on rank 0's host alone, flatshard.checkpoint.save_safetensors(model, path) and "
            "model.sharded_state_dict() gather nothing. [FS-SAVE-OOM]",
            stacklevel=3,
        )
