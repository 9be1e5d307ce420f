"""Optimizer state per element as sharded tensors, which checkpoints can save and reshard."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from flatshard.optimizer.buckets import ONE_PER_PARAMETER
from flatshard.options.torch_request import TorchRequest
from flatshard.tensor.flat_parameter import FlatParameter
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range
from flatshard.tensor.state_shard import state_shard

StateDict = dict[str, Any]


def to_torch(
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    asked: TorchRequest,
    alike: Collection[FlatShardTensor],
) -> None:
    """Give torch's ``get_state_dict`` sharded tensors, or full ones, for this rank's parts.

    What is not per element is the same on all ranks for the parameters in ``alike``.

    Collective if it asked for full ones: all ranks of the shard group.
    """
    for param, state in _by_parameter(optimizer, state_dict):
        for key, value in sorted(state.items()):  # in one order on all ranks
            if not is_part(param, key, value):
                if param not in alike:
                    _check_one_value(param, key, value)
                continue
            shown = state_shard(local_range(value), param.spec)
            if asked.full and isinstance(shown, FlatShardTensor):
                shown = shown.full_tensor()
                if asked.rank0_only and param.spec.comm.global_rank > 0:
                    shown = shown.new_empty(0)
            state[key] = shown.cpu() if asked.to_cpu else shown


def from_torch(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, asked: TorchRequest
) -> StateDict:
    """The same with this rank's part for each sharded or full tensor of state per element."""
    state_dict = {**state_dict, "state": {k: dict(s) for k, s in state_dict["state"].items()}}
    for param, state in _by_parameter(optimizer, state_dict):
        spec = param.spec
        asked.check_order(spec.name, spec.order)
        for key, value in state.items():
            if isinstance(value, FlatShardTensor):
                if value.spec.place != spec.place:
                    raise ValueError(
                        f"optimizer state {key!r} of parameter {spec.name!r} is sharded in another "
                        "way. Load it through torch.distributed.checkpoint into the state that "
                        "this model has."
                    )
                state[key] = FlatShardTensor(value.local, spec)
            elif isinstance(value, Tensor) and key not in ONE_PER_PARAMETER:
                # What steps element by element takes the 1-D part of it in the next step.
                is_full = tuple(value.shape) == spec.shape
                state[key] = FlatShardTensor(spec.slice(value).clone(), spec) if is_full else value
    return state_dict


def is_part(param: FlatShardTensor, key: str, value: Any) -> bool:
    """Whether a value of the parameter's state has one element per element held here."""
    if isinstance(value, FlatShardTensor):
        return True
    is_tensor = isinstance(value, Tensor) and key not in ONE_PER_PARAMETER
    return is_tensor and value.shape == param.local.shape


def _check_one_value(param: FlatShardTensor, key: str, value: Any) -> None:
    """Raise for what no rank can make a part of, and ranks may have different values of."""
    if isinstance(value, Tensor) and value.numel() > 1 and value.shape != param.shape:
        raise ValueError(
            f"optimizer state {key!r} of parameter {param.spec.name!r} has shape "
            f"{tuple(value.shape)}: only numbers, and tensors with one value per element of the "
            "parameter, can be saved from the ranks' parts."
        )


def _by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: StateDict
) -> Iterator[tuple[FlatShardTensor, StateDict]]:
    """The sharded parameters and their state in a state dict, whose keys may be names."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, param in zip(keys, params, strict=False):
        if isinstance(param, FlatParameter):
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict needs a parameter for each name, and "
                f"{param!r} holds several. Wrap with use_orig_params=True, or call "
                "ShardedWrapper.optim_state_dict(model, optimizer)."
            )
        if isinstance(param, FlatShardTensor) and key in state_dict["state"]:
            yield param, state_dict["state"][key]
