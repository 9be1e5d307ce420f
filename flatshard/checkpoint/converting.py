"""``convert``: converts files with a model's weights from one format into another."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.checkpoint.ranges import OpenFiles, Progress, write_range
from flatshard.checkpoint.safetensors import as_saved, plan_files
from flatshard.checkpoint.sources import open_source

FORMATS = ("safetensors", "torch", "dcp")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Convert a model's weights between the files of several libraries, on one process.

    The source may be a file of ``torch.save`` (also of a DistributedDataParallel model, and with
    the model nested in a dictionary), a folder of ``torch.distributed.checkpoint`` (flatshard,
    FSDP1, FSDP2), a folder of DeepSpeed (ZeRO-1, 2, 3), or safetensors. Tensors are read and
    written one at a time.

    Example:
        ```python
        from flatshard import checkpoint

        checkpoint.save("runs/step-1", model, optimizer)
        if dist.get_rank() == 0:
            checkpoint.convert("runs/step-1", "model.safetensors", dtype=torch.bfloat16)
        ```

    Args:
        source: a file or a folder.
        destination: a file whose name ends with ``.safetensors`` or ``.pt``, or a folder. It must
            not exist.
        to: the format to write: "safetensors", "torch" or "dcp". None: "torch" if the destination's
            name ends with ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``, otherwise "safetensors".
        key: the entry of a nested checkpoint that contains the model ("app.model", for example).
            None: the entry that is called model, module, state_dict or model_state_dict.
        dtype: dtype in which floating point tensors are written. None: as in the source.
        max_shard_size: largest size of a safetensors file in a folder.

    Raises:
        ValueError: the source has an unknown format, is incomplete or corrupt, or ``destination``
            exists.
        OSError: a file cannot be read or written.
    """
    final = Path(destination)
    to = to or ("torch" if final.suffix in _TORCH_SUFFIXES else "safetensors")
    if to not in FORMATS:
        raise ValueError(f"to={to!r}: expected one of {', '.join(FORMATS)}.")
    if max_shard_size is not None and to != "safetensors":
        raise ValueError(f"max_shard_size is only for safetensors, got to={to!r}. Leave it out.")
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
    write_safetensors = partial(_write_safetensors, max_shard_size)
    write: Any = {"safetensors": write_safetensors, "torch": _write_torch, "dcp": _write_dcp}[to]
    num_bytes = sum(one.nbytes for one in like.values())
    progress = Progress("converting", num_bytes, is_shown=True)

    def read(name: str) -> Tensor:
        kept = ties.get(name, name)
        progress.advance(like[kept].nbytes)
        return found.read(model[kept]).to(like[kept].dtype)

    write(final, like, ties, read)
    progress.end(final, num_bytes)


Read = Callable[[str], Tensor]


def _write_safetensors(
    size: int | str | None, final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read
) -> None:
    plan = plan_files(like, final, size, ties)
    try:
        plan.create()
        with OpenFiles(os.O_WRONLY) as files:
            for name, place in plan.places.items():
                value = read(name).reshape(-1)
                write_range(files[place.path], place, value, range(len(place.shape)), 0)
            files.sync()
        plan.commit()
    finally:
        plan.discard()


@contextlib.contextmanager
def _replacing(final: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``final``, for the caller to write a file or folder there.

    At the end of the context, the temporary path is renamed to ``final``. After an error, the
    temporary path is deleted.
    """
    beside = final.with_name(f"{final.name}.incomplete")
    _remove(beside)  # a run that was killed may have left this path
    try:
        yield beside
        beside.replace(final)
    except BaseException:
        _remove(beside)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()


def _write_torch(final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read) -> None:
    # Never hold all values in memory. Under `skip_data`, torch.save writes a file with room for the
    # values of these empty tensors. Then the loop below writes the values, one tensor at a time,
    # through a mapping of the file.
    state = {name: torch.empty_like(one, device="cpu") for name, one in like.items()}
    state |= {alias: state[kept] for alias, kept in ties.items()}
    with _replacing(final) as beside:
        beside.touch()  # unlike torch.save, raises OSError if the path cannot be written
        with torch.serialization.skip_data():
            torch.save(state, beside)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            state = torch.load(beside, mmap=True, weights_only=True)
        for name in like:
            state[name].copy_(read(name))
        del state
        with open(beside, "rb") as file:
            os.fsync(file.fileno())


def _write_dcp(final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read) -> None:
    # Import here, because torch.distributed.checkpoint loads slowly.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Tensor:
            return read(index.fqn)

    state = like | {alias: like[kept] for alias, kept in ties.items()}
    # torch.distributed.checkpoint (DCP) warns if it runs in a single process. Here a single process
    # is intended.
    no_warning = warnings.catch_warnings(action="ignore", category=UserWarning)
    with no_warning, _replacing(final) as beside:
        # DCP keeps all tensors of a file in memory until the file is written. So write one file per
        # tensor.
        writer = FileSystemWriter(beside, single_file_per_rank=False)
        try:
            save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from error  # keyed by rank: this process is rank 0
