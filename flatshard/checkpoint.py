"""Files of a whole sharded model, and options of state dicts (``flatshard.state.model_state``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatshard.engine.unit import Unit
from flatshard.formats.convert import convert
from flatshard.module.full_state import full_optim_state_dict, full_state_dict
from flatshard.module.sharding import state_dicts_in, units_between_steps
from flatshard.state import safetensors
from flatshard.state.model_state import UnitStateDict, options_of, options_set, without_ddp_prefix

__all__ = [
    "convert",
    "full_optim_state_dict",
    "full_state_dict",
    "load_safetensors",
    "options_of",
    "options_set",
    "save_safetensors",
    "without_ddp_prefix",
]


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save the unwrapped model's state dict as safetensors; all ranks write into the same file.

    ``safetensors.torch.load_file``, ``from_pretrained`` and ``load_safetensors`` read it. Nothing
    is gathered: every rank writes the bytes that it owns, at their place, from at most 16 MB of
    extra memory. Of tied parameters the first name is in the file, the others are in its metadata,
    as ``safetensors.torch.save_model`` has it. Buffers and ignored parameters are rank 0's.

    Files are written under the name ``*.incomplete``, with room for all bytes reserved first, and
    renamed when their bytes are on the disk: where anything fails, the file of before is as it was.

    Collective: all ranks; no tensor is sent.

    Args:
        model: a wrapper, or a module that contains some.
        path: a file, if it ends with ``.safetensors``; else a folder, made if there is none, for
            ``model.safetensors``. On a file system that all ranks share.
        max_shard_size: bytes, or "5GB": a folder's files are at most so large, if no tensor is
            larger, and have the index ``model.safetensors.index.json``.
        metadata: strings for the file's header; ``{"format": "pt"}`` is added.
        dtype: to save floating point tensors in another dtype.

    Raises:
        ValueError: on all ranks: a dtype or an entry of the state dict that safetensors cannot
            hold; ranks pass different arguments or models.
        OSError: on all ranks: no room, no permission, a disk that fails, on any of them.
        NotImplementedError: a unit trains on some of the ranks alone.
        RuntimeError: a forward or backward of the model is running.
    """
    units, states = _units_of(model, "save_safetensors()")
    safetensors.save(model, units, states, os.fspath(path), max_shard_size, metadata, dtype)


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Load safetensors files of the unwrapped model; each rank reads only what it holds.

    Values are read straight into the shards, also into those that ``param_init_fn=leave_empty``
    left empty, and cast to their dtype; beside these a rank holds at most 16 MB. A tied parameter
    needs one of its names; DistributedDataParallel's ``module.`` prefix is accepted. Hooks and
    overrides of the modules' ``load_state_dict`` are not called.

    Collective: all ranks; no tensor is sent.

    Args:
        model: a wrapper, or a module that contains some.
        path: a file, the index of several, or a folder with either.
        strict: raise for tensors that the model or the files lack. Other shapes always raise.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

    Raises:
        ValueError: on all ranks, and before anything is loaded: all tensors that do not fit, by
            name; no safetensors file; a truncated, corrupt or missing one, by name.
        OSError: on all ranks: a file cannot be read.
        RuntimeError: a forward or backward of the model is running.
    """
    units, states = _units_of(model, "load_safetensors()")
    return safetensors.load(model, units, states, os.fspath(path), strict=strict)


def _units_of(model: nn.Module, caller: str) -> tuple[list[Unit], list[UnitStateDict]]:
    units = units_between_steps(model, caller)
    if not units:
        raise ValueError(
            f"{caller}: expected a ShardedWrapper or a module that contains some, got an unwrapped "
            f"{type(model).__name__}: safetensors.torch does this for those"
        )
    return units, state_dicts_in(model)
