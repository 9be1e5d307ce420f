"""``convert``: a model's tensors from files of one library to those of another, one at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.checkpoint.ranges import OpenFiles, Progress, write_range
from flatshard.checkpoint.safetensors import plan_files
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

    ``source``: a file of ``torch.save`` (also of DistributedDataParallel, and nested in a
    dictionary), a folder of ``torch.distributed.checkpoint`` (flatshard, FSDP1, FSDP2), a folder of
    DeepSpeed (ZeRO-1, 2, 3), or safetensors. Tensors are read and written one at a time.

    Example:
        ```python
        from flatshard import checkpoint

        checkpoint.save("runs/step-1", model, optimizer)
        if dist.get_rank() == 0:
            checkpoint.convert("runs/step-1", "model.safetensors", dtype=torch.bfloat16)
        ```

    Args:
        source: a file or a folder.
        destination: a file that ends with ``.safetensors`` or ``.pt``, or a folder; must not exist.
        to: "safetensors", "torch" or "dcp"; None: by the destination's name, for folders
            safetensors.
        key: which entry of a nested checkpoint is the model ("app.model", say); None: the one that
            is called model, module, state_dict or model_state_dict.
        dtype: for floating point tensors.
        max_shard_size: of safetensors files in a folder.

    Raises:
        ValueError: the source is of no known format, incomplete or corrupt; ``destination`` exists.
        OSError: a file cannot be read or written.
    """
    final = Path(destination)
    is_torch = final.suffix in _TORCH_SUFFIXES
    to = to or ("torch" if is_torch else "safetensors")
    if to not in FORMATS:
        raise ValueError(f"to: expected one of {', '.join(FORMATS)}, got {to!r}")
    if max_shard_size is not None and to != "safetensors":
        raise ValueError(f"max_shard_size is for safetensors, not for {to}. Leave it out")
    if final.exists():
        raise ValueError(f"{final}: it exists. Choose another name, or remove it")
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
        # In files of torch.save tied tensors share memory.
        place = name if one.is_meta or not one.numel() else (one.data_ptr(), one.shape)
        if first.setdefault(place, name) != name:
            ties[name] = first[place]
            continue
        wanted = dtype if dtype is not None and one.is_floating_point() else one.dtype
        like[name] = torch.empty(one.shape, dtype=wanted, device="meta")
    write = {"safetensors": _write_safetensors, "torch": _write_torch, "dcp": _write_dcp}[to]
    num_bytes = sum(one.nbytes for one in like.values())
    progress = Progress("converting", num_bytes, is_shown=True)

    def read(name: str) -> Tensor:
        kept = ties.get(name, name)
        progress.advance(like[kept].nbytes)
        return found.read(model[kept]).to(like[kept].dtype)

    write(final, like, ties, read, max_shard_size)
    progress.end(final, num_bytes)


Read = Callable[[str], Tensor]


def _write_safetensors(
    final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read, size: int | str | None
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
    """A path to write to, which becomes ``final`` when all went well, or else is removed."""
    beside = final.with_name(f"{final.name}.incomplete")
    _remove(beside)  # of a run that was killed
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


def _write_torch(
    final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read, _: object
) -> None:
    # Memory that nobody touches; the file has room for it, which is then filled.
    state = {name: torch.empty_like(one, device="cpu") for name, one in like.items()}
    state |= {alias: state[kept] for alias, kept in ties.items()}
    with _replacing(final) as beside:
        beside.touch()  # torch.save's own error is no OSError
        with torch.serialization.skip_data():
            torch.save(state, beside)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            state = torch.load(beside, mmap=True, weights_only=True)
        for name in like:
            state[name].copy_(read(name))
        del state
        with open(beside, "rb") as file:
            os.fsync(file.fileno())


def _write_dcp(
    final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Read, _: object
) -> None:
    # Here, as the package is slow to load.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from flatshard.checkpoint.dcp_files import without_warning

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Tensor:
            return read(index.fqn)

    state = like | {alias: like[kept] for alias, kept in ties.items()}
    with without_warning(), _replacing(final) as beside:
        # It holds all tensors of a file in memory until that is written: a file for each.
        writer = FileSystemWriter(beside, single_file_per_rank=False)
        try:
            save(state, storage_writer=writer, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from error  # what happened here, on "rank 0"
