"""Checkpoints of a training, files of a whole model, and options of state dicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard.checkpoint import loading, model_files
from flatshard.checkpoint.converting import convert
from flatshard.checkpoint.folder import latest
from flatshard.checkpoint.host_ranks import HostRanks
from flatshard.checkpoint.saving import PendingSave, Save, Snapshot, generators
from flatshard.module.sharding import model_shards
from flatshard.state.model_shards import ModelShards
from flatshard.state.model_state import (
    StateDictOptions,
    options_of,
    options_set,
    without_ddp_prefix,
)
from flatshard.wrapper import ShardedWrapper

__all__ = [
    "PendingSave",
    "convert",
    "full_optim_state_dict",
    "full_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "options_of",
    "options_set",
    "save",
    "save_safetensors",
    "without_ddp_prefix",
]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    extra: dict[str, Any] | None = None,
    async_: bool = False,
    keep: int | None = None,
) -> PendingSave | None:
    """Save a training in the folder ``path``, which any number of ranks can ``load``.

    Each rank writes what it holds; no tensor is sent. The folder appears under its name when all
    is on the disk, so that a kill at any moment leaves the one saved before. It is a folder of
    ``torch.distributed.checkpoint`` (DCP), with keys ``model`` and ``optimizer`` as from torch's
    ``get_state_dict``. Random number generators of each rank are saved as well.

    Collective: all ranks that train ``model``, between steps. The hosts share the file system.

    Args:
        path: the checkpoint's folder, such as ``"runs/step-00001000"``. A name is used once.
        model: a wrapper, a module that contains some, or an unwrapped model (under
            DistributedDataParallel, or the same on all ranks).
        optimizer: an optimizer over its parameters.
        scheduler: has ``state_dict()``, the same on all ranks.
        extra: what else to keep (the step, the position in the data), the same on all ranks:
            numbers, strings, tensors, lists and dicts of them. ``extra["step"]`` names the
            step where the checkpoint is listed.
        async_: copy to host memory and return; a thread writes. The next save or load waits for
            it, and the end of the program. Call ``wait()`` on the result before the process group
            is destroyed.
        keep: delete older checkpoints beside ``path`` whose names differ in their number alone,
            but for this many.

    Returns:
        With ``async_`` what to wait for. Its errors are raised by ``wait()``, else by the next
        save or load, else at the end of the program.

    Raises:
        OSError: on all ranks: no space left, no permission, ``path`` exists (FileExistsError). No
            checkpoint has changed.
        TypeError: on all ranks: ``extra`` holds what loads only by running code.
        ValueError: on all ranks: ranks pass different arguments.
        NotImplementedError: on all ranks: a unit trains on some of the ranks alone.
        CollectiveError: another rank has ended. No checkpoint has changed.
    """

    def take() -> Snapshot:
        tensors: dict[str, Any] = {"model": _model_state(model, shards)}
        if optimizer is not None:
            tensors["optimizer"] = _optim_state(model, optimizer)
        states = None if scheduler is None else scheduler.state_dict()
        return Snapshot(tensors, generators(_device_of(model)), states, dict(extra or {}))

    shards, ranks = _shards_and_ranks(model, optimizer, "checkpoint.save()")
    return Save(Path(path), ranks, keep).run(take, async_=async_)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Continue a training that ``save`` has saved, on any number of ranks; returns its ``extra``.

    Each rank reads its own part into the memory of its shards; no tensor is sent, and no rank
    holds the full model. As many ranks as saved continue their random number generators. Of
    others, rank r continues rank r's if there was one, and is else seeded by rank 0's and r.

    Collective: all ranks that train ``model``, between steps.

    Args:
        path: the checkpoint's folder; see ``latest``.
        model: may have other units, another strategy, and may have been wrapped on the meta device.
        optimizer: gets the saved state and options. Without it, those are not read.
        scheduler: has ``load_state_dict()``.
        verify: compare checksums of the files, of which each rank reads some, before anything is
            overwritten.

    Raises:
        FileNotFoundError: on all ranks: there is no complete checkpoint; names the last one.
        ValueError: on all ranks, before anything is overwritten: names and shapes that are
            missing, unexpected or different, all of them; a corrupted or truncated file; a folder
            of another format.
    """

    def take() -> loading.Wanted:
        states = _model_state(model, shards)
        optim = None if optimizer is None else _optim_state(model, optimizer)
        return loading.Wanted(states, optim, scheduler is not None)

    shards, ranks = _shards_and_ranks(model, optimizer, "checkpoint.load()")
    loaded = loading.load(Path(path), take, ranks, verify=verify)
    _unwrapped(model).load_state_dict(loaded.model)
    if optimizer is not None:
        ShardedWrapper.optim_state_dict_to_load(
            _unwrapped(model), optimizer, loaded.optimizer, load_directly=True
        )
    if scheduler is not None:
        scheduler.load_state_dict(loaded.first["scheduler"])
    if loaded.rng is None:
        loading.seed_generators(ranks.rank, loaded.first["rng"])
    else:
        loading.restore_generators(loaded.rng, _device_of(model))
    return loaded.first["extra"]  # type: ignore[no-any-return]


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
    shards, ranks = _sharded(model, "save_safetensors()")
    model_files.save(shards, ranks, os.fspath(path), max_shard_size, metadata, dtype)


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
    shards, ranks = _sharded(model, "load_safetensors()")
    return model_files.load(shards, ranks, os.fspath(path), strict=strict)


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
    shards = model_shards(model, "full_state_dict()")
    if shards is not None:
        with options_set(shards.parts, StateDictOptions(offload_to_cpu=True, rank0_only=True)):
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
    shards = model_shards(model, "full_optim_state_dict()")
    with ShardedWrapper.state_dict_type(model, "FULL_STATE_DICT"):
        state = ShardedWrapper.optim_state_dict(
            model, optimizer, rank0_only=True, offload_to_cpu=True
        )
    return state if shards is not None or _first_rank() == 0 else {}


def _first_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _shards_and_ranks(
    model: nn.Module, optimizer: object, caller: str
) -> tuple[ModelShards | None, HostRanks]:
    """Check the arguments' types, and wait for the ranks that train ``model``. Collective."""
    for value, kind in ((model, nn.Module), (optimizer, torch.optim.Optimizer | None)):
        if not isinstance(value, kind):
            raise TypeError(
                f"{caller}: expected one model and its optimizer, got a {type(value).__name__}. "
                "Save and load each model in a folder of its own, with one call per model."
            )
    shards = model_shards(model, caller)
    if shards is not None:
        shards.refuse_dtensors(caller)
        return shards, HostRanks(shards.world.group)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return None, HostRanks(model.process_group)
    return None, HostRanks(dist.group.WORLD if dist.is_initialized() else None)


def _sharded(model: nn.Module, caller: str) -> tuple[ModelShards, HostRanks]:
    shards, ranks = _shards_and_ranks(model, None, caller)
    if shards is None:
        raise ValueError(
            f"{caller}: expected a ShardedWrapper or a module that contains some, got an unwrapped "
            f"{type(model).__name__}: safetensors.torch does this for those"
        )
    return shards, ranks


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model whose names are the unwrapped model's."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _model_state(model: nn.Module, shards: ModelShards | None) -> dict[str, Any]:
    return _unwrapped(model).state_dict() if shards is None else shards.state_dict()


def _optim_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with ShardedWrapper.state_dict_type(model, "SHARDED_STATE_DICT"):
        return ShardedWrapper.optim_state_dict(_unwrapped(model), optimizer, offload_to_cpu=False)


def _device_of(model: nn.Module) -> torch.device:
    return next((param.device for param in model.parameters()), torch.device("cpu"))
