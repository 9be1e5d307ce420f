"""``flatshard.checkpoint`` saves and loads training checkpoints, and files with a full model."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from flatshard.checkpoint.folder import latest
from flatshard.checkpoint.safetensors import load_safetensors, save_safetensors
from flatshard.checkpoint.save_load import load, save
from flatshard.checkpoint.sources import convert
from flatshard.checkpoint.training import Optimizers, PendingSave
from flatshard.extras.model_shards import model_shards
from flatshard.optimizer.state_dicts import StateDict, copied
from flatshard.state.model_state import StateDictOptions
from flatshard.state.optim_state import OptimState

__all__ = ["PendingSave", "latest", "load", "save"]
__all__ += ["convert", "load_safetensors", "save_safetensors"]
__all__ += ["full_optim_state_dict", "full_state_dict"]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict on rank 0, in host memory, and an empty dict on other ranks.

    The tensors are copies, with the names and shapes of the unwrapped model: save them with
    ``torch.save``, and load them with ``load_state_dict`` into a wrapped or unwrapped model. Units
    are gathered one after another, so a device holds one unsharded unit at a time.

    Collective: all ranks call it.

    Example:
        ```python
        from flatshard import checkpoint

        state = checkpoint.full_state_dict(model)  # on all ranks
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
        ```

    Args:
        model: a wrapper, or a module that contains wrappers.

    Raises:
        RuntimeError: a forward or backward of the model is running.
    """
    shards = model_shards(model, "full_state_dict()")
    state = shards.state_dict(StateDictOptions(offload_to_cpu=True, rank0_only=True))
    if shards.units:
        return state
    return copied(state, torch.device("cpu")) if _is_first_rank() else {}


@overload
def full_optim_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | Mapping[str, Any]
) -> dict[str, Any]: ...


@overload
def full_optim_state_dict(
    model: nn.Module, optimizer: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]: ...


def full_optim_state_dict(model: nn.Module, optimizer: Optimizers) -> StateDict | list[StateDict]:
    """Return the full optimizer state on rank 0, in host memory; an empty dict on other ranks.

    For several optimizers, in a list, tuple or dict, returns a list or dict of their states.

    State is keyed by parameter name. ``ShardedWrapper.optim_state_dict_to_load`` loads the state on
    any number of ranks. Units are gathered one after another.

    Collective: all ranks call it.

    Example:
        ```python
        from flatshard import checkpoint

        state = checkpoint.full_optim_state_dict(model, optimizer)  # on all ranks
        if dist.get_rank() == 0:
            torch.save(state, "optimizer.pt")
        ```

    Args:
        model: a wrapper, or a module that contains wrappers.
        optimizer: an optimizer over the model's parameters, or several in a list, tuple or dict.

    Raises:
        ValueError: for the reasons that ``ShardedWrapper.optim_state_dict`` lists.
        RuntimeError: a forward or backward of the model is running.
    """
    one: Any = optimizer
    if isinstance(one, list | tuple):
        return [full_optim_state_dict(model, each) for each in one]
    if isinstance(one, Mapping):
        return {name: full_optim_state_dict(model, each) for name, each in one.items()}
    shards = model_shards(model, "full_optim_state_dict()")
    state = OptimState(model, one, shards.units).full(None, torch.device("cpu"), rank0_only=True)
    return state if shards.units or _is_first_rank() else {}


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
