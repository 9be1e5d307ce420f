"""``convert``: converts files with a model's weights from one format into another."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.checkpoint.folder import log_speed, sync, zip_stream
from flatshard.checkpoint.safetensors import as_saved, plan_files, write_whole
from flatshard.checkpoint.sources import open_source

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Convert a model's weights between the files of several libraries, on one process.

    The source may be a file of ``torch.save`` (also of a DistributedDataParallel model, and with
    the model nested in a dictionary), a folder of ``torch.distributed.checkpoint`` (flatshard,
    FSDP1, FSDP2), or safetensors. Tensors are read and written one at a time.

    Example:
        ```python
        from flatshard import checkpoint

        checkpoint.save("runs/step-1", model, optimizer)
        if dist.get_rank() == 0:
            checkpoint.convert("runs/step-1", "model.safetensors", dtype=torch.bfloat16)
        ```

    Args:
        source: a file or a folder.
        destination: a file, or a folder for safetensors files. It must not exist. If its name ends
            with ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, ``torch.save`` writes the file.
        key: the entry of a nested checkpoint that contains the model ("app.model", for example).
            None: an entry called model, module, state_dict or model_state_dict, if there is one.
        dtype: dtype in which floating point tensors are written. None: as in the source.
        max_shard_size: largest size of a safetensors file in a folder, in bytes or as a text such
            as "5GB".

    Raises:
        ValueError: the source has an unknown format, is incomplete or corrupt, or ``destination``
            exists.
        OSError: a file cannot be read or written.
    """
    final = Path(destination)
    is_torchs = final.suffix in _TORCH_SUFFIXES
    if max_shard_size is not None and is_torchs:
        raise ValueError(
            f"max_shard_size is only for safetensors files, but the destination is {final.name}. "
            "Leave max_shard_size out."
        )
    if final.exists():
        raise ValueError(f"{final} already exists. Choose another name, or delete the old file.")
    found = open_source(source)
    try:
        model = found.model(key)
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: {error}") from error
    like: dict[str, Tensor] = {}
    ties = {alias: kept for alias, kept in found.ties.items() if kept in model}
    first: dict[Any, str] = {}
    for name, names in model.items():
        one = found.tensors[names]
        # In a file of torch.save, tied tensors share memory. Convert only the first tensor.
        place = name if one.is_meta or not one.numel() else (one.data_ptr(), one.shape)
        if first.setdefault(place, name) != name:
            ties[name] = first[place]
            continue
        like[name] = as_saved(one, dtype)
    begun = time.monotonic()
    write = _write_torch if is_torchs else partial(_write_safetensors, max_shard_size)

    def read(name: str) -> Tensor:
        kept = ties.get(name, name)
        return found.read(model[kept]).to(like[kept].dtype)

    write(final, like, ties, read)
    log_speed("converted", final, sum(one.nbytes for one in like.values()), begun)


Read = Callable[[str], Tensor]


def _write_safetensors(
    size: int | str | None, final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read
) -> None:
    plan = plan_files(like, final, size, ties)
    try:
        plan.create()
        write_whole(plan, ((name, read(name)) for name in plan.places))
        plan.commit()
    finally:
        plan.discard()


def _write_torch(final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read) -> None:
    # Never hold all values in memory. Under `skip_data`, torch.save leaves room for the values of
    # these empty tensors, and the loop below writes them one by one, through a mapping of the file.
    state = {name: torch.empty_like(one, device="cpu") for name, one in like.items()}
    state |= {alias: state[kept] for alias, kept in ties.items()}
    beside = final.with_name(f"{final.name}.incomplete")
    try:
        with torch.serialization.skip_data(), zip_stream(beside) as stream:
            torch.save(state, stream)
            # Allocate disk space first: otherwise the file has a hole here, and on a full disk, a
            # write to a mapped hole ends the process by SIGBUS.
            os.posix_fallocate(stream.fileno(), 0, stream.tell())
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            state = torch.load(beside, mmap=True, weights_only=True)
        for name in like:
            state[name].copy_(read(name))
        del state
        sync(beside)
        beside.replace(final)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
