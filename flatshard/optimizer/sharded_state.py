"""Optimizer state per element as sharded tensors, which checkpoints can save and reshard."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor

from flatshard.optimizer.buckets import ONE_PER_PARAMETER, all_params
from flatshard.options.torch_request import TorchRequest
from flatshard.plan.module_tree import unit_text
from flatshard.tensor.shard_spec import ShardSpec
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
    for param, state in _sharded_params(optimizer, state_dict):
        for key, value in sorted(state.items()):  # in one order on all ranks
            is_local = _is_per_element(value, key) and value.shape == param.local.shape
            if not (is_local or isinstance(value, FlatShardTensor)):
                if param not in alike:
                    _check_one_value(param, key, value)
                continue
            result = state_shard(local_range(value), param.spec, f"{key} of")
            if asked.full and isinstance(result, FlatShardTensor):
                result = result.full_tensor()
                if asked.rank0_only and param.spec.comm.global_rank > 0:
                    result = result.new_empty(0)
            state[key] = result.cpu() if asked.to_cpu else result


def from_torch(
    optimizer: torch.optim.Optimizer, state_dict: StateDict, asked: TorchRequest
) -> StateDict:
    """A copy of a state dict with this rank's part of each sharded or full state per element."""
    state_dict = {**state_dict, "state": {k: dict(s) for k, s in state_dict["state"].items()}}
    for param, state in _sharded_params(optimizer, state_dict):
        spec = param.spec
        asked.check_order(spec.name, spec.order)
        for key, value in state.items():
            if isinstance(value, FlatShardTensor):
                state[key] = FlatShardTensor(own_part(spec, value), spec).with_role(f"{key} of")
            elif _is_per_element(value, key) and tuple(value.shape) == spec.shape:
                # An element-wise optimizer takes the 1-D part of it in the next step.
                part = own_part(spec, value).clone()
                state[key] = FlatShardTensor(part, spec).with_role(f"{key} of")
    return state_dict


def own_part(spec: ShardSpec, value: Tensor) -> Tensor:
    """This rank's range of full or sharded state per element, 1-D.

    Raises:
        ValueError: it is sharded, and this rank's range of it is another one.
    """
    if not isinstance(value, FlatShardTensor):
        return spec.slice(value)
    if value.spec.place != spec.place:
        raise ValueError(
            f"sharded state of parameter {spec.name!r} ({unit_text(spec.unit)}) is of another "
            f"layout: expected elements [{spec.offset}, {spec.offset + spec.numel}), got "
            f"[{value.spec.offset}, {value.spec.offset + value.spec.numel}). Load it through "
            "torch.distributed.checkpoint into the state that this model has."
        )
    return value.local


def _is_per_element(value: Any, key: str) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and key not in ONE_PER_PARAMETER


def _check_one_value(param: FlatShardTensor, key: str, value: Any) -> None:
    """Raise for state that is not per element, and of which ranks may have different values."""
    if isinstance(value, Tensor) and value.numel() > 1 and value.shape != param.shape:
        raise ValueError(
            f"optimizer state {key!r} of parameter {param.spec.name!r} has shape "
            f"{tuple(value.shape)}: only numbers, and tensors with one value per element of the "
            "parameter, can be saved from the ranks' parts."
        )


def params_by_key(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> dict[Any, Any]:
    """The parameters by the keys (positions, or names) that a state dict has for them."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return dict(zip(keys, all_params(optimizer), strict=False))


def with_shared(
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    shared: dict[FlatShardTensor, StateDict],
) -> StateDict:
    """A state dict of the optimizer with ``shared`` state in place of this rank's own."""
    params = params_by_key(optimizer, state_dict)
    theirs = {key: shared[param] for key, param in params.items() if param in shared}
    state = {key: value for key, value in {**state_dict["state"], **theirs}.items() if value != {}}
    return {**state_dict, "state": state}


def _sharded_params(
    optimizer: torch.optim.Optimizer, state_dict: StateDict
) -> Iterator[tuple[FlatShardTensor, StateDict]]:
    """The sharded parameters that have state in a state dict, and that state."""
    for key, param in params_by_key(optimizer, state_dict).items():
        if isinstance(param, FlatShardTensor) and key in state_dict["state"]:
            yield param, state_dict["state"][key]
