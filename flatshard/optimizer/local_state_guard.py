"""Keeps one rank's optimizer state from being loaded on another rank, or for another layout.

``optimizer.state_dict()`` holds this rank's parts alone, so its first group carries a stamp: the
rank, and a digest of the layout.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from typing import Any

import torch

from flatshard.optimizer import sharded_state
from flatshard.optimizer.buckets import all_params, shown
from flatshard.optimizer.stepper import shared_state
from flatshard.options.torch_request import torch_request
from flatshard.tensor.sharded_tensor import FlatShardTensor

# A key of the first group. Not at the top, because torch keeps the keys of groups that it loads: if
# that happens before the optimizer's first step, when it has no hook of ours, that step finds it.
STAMP = "flatshard"

_ONE_RANKS = (
    "optimizer.state_dict() holds this rank's parts of sharded parameters alone, and loads nowhere "
    "else. flatshard.checkpoint.full_optim_state_dict(model, optimizer), called on every rank, is "
    "the state to save. [FS-OPTIM-STATE]"
)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise, before a step, for loaded state of another rank or another layout."""
    watch(optimizer)
    for group in optimizer.param_groups:
        if STAMP in group:
            _check_stamp(optimizer, group[STAMP])
            del group[STAMP]  # a check that failed raises the next time, too


def watch(optimizer: torch.optim.Optimizer) -> None:
    """Stamp the optimizer's plain state dicts from now on, and check those that it loads."""
    saving: Any = optimizer._optimizer_state_dict_post_hooks
    loading: Any = optimizer._optimizer_load_state_dict_pre_hooks
    if _add_stamp not in saving.values():
        optimizer.register_state_dict_post_hook(_add_stamp)
    if unstamped not in loading.values():
        optimizer.register_load_state_dict_pre_hook(unstamped)


def _add_stamp(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {key: shown(state) for key, state in state_dict["state"].items()}
    stamp = _stamp(optimizer)
    if stamp is not None and state_dict["state"]:
        asked = torch_request()
        if asked is not None:
            shared = shared_state(optimizer)
            state_dict["state"] = sharded_state.with_shared(optimizer, state_dict, shared)["state"]
            sharded_state.to_torch(optimizer, state_dict, asked, shared)
            return
        state_dict["param_groups"][0][STAMP] = stamp
        if stamp["rank"] == 0:
            # Otherwise users find out when they load it, and the other ranks' parts are lost.
            warnings.warn(_ONE_RANKS, stacklevel=5)  # the caller of state_dict()


def parts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` without the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(_ONE_RANKS))
        return optimizer.state_dict()


def is_stamped(state_dict: dict[str, Any]) -> bool:
    return any(STAMP in group for group in state_dict["param_groups"])


def unstamped(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A plain state dict without its stamp, which is checked first; copies no tensor.

    Of a state dict that torch's ``set_state_dict`` passes, this rank's part.
    """
    if not is_stamped(state_dict):
        asked = torch_request()
        return sharded_state.from_torch(optimizer, state_dict, asked) if asked else state_dict
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        if STAMP in group:
            _check_stamp(optimizer, group.pop(STAMP))
    return {**state_dict, "param_groups": groups}


def _check_stamp(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    own = _stamp(optimizer)
    if own is not None and own["layout"] == saved["layout"]:
        return
    where = "parameters that are not sharded"
    if own is not None:
        where = f"rank {own['rank']} of {own['world_size']}, which holds other parts"
    raise RuntimeError(
        f"optimizer.state_dict() of rank {saved['rank']} of {saved['world_size']} holds that "
        f"rank's parts alone, and was loaded for {where}. Save "
        "flatshard.checkpoint.full_optim_state_dict(model, optimizer), which loads anywhere."
    )


def _stamp(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Rank and layout of the parts that the state holds; None: nothing is sharded."""
    places: list[Any] = []
    rank = None
    for param in all_params(optimizer):
        if isinstance(param, FlatShardTensor):
            rank, size = param.spec.comm.rank, param.spec.comm.size
            places.append(param.spec.place)
    if rank is None:
        return None
    digest = hashlib.sha256(repr(places).encode()).hexdigest()
    return {"rank": rank, "world_size": size, "layout": digest}
