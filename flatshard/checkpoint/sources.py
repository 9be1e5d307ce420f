"""``Source``: a checkpoint of any known library, whose tensors are read one at a time.

``convert`` writes the tensors of a source in another format.

Reading runs no code from the files: pickles are loaded with ``weights_only``.
"""

import contextlib
import mmap
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.checkpoint import folder as folders, safetensors

Names = tuple[str, ...]  # keys of a value in nested dictionaries, the outermost key first

_MODEL_KEYS = {"model", "module", "state_dict", "model_state_dict"}
_PROGRESS_KEYS = {"step", "global_step", "epoch", "iteration"}


@dataclass
class Source:
    """An opened checkpoint: the names of the tensors, and a function that reads one tensor."""

    path: Path
    kind: str  # name of the checkpoint's format, such as "safetensors"
    tensors: dict[Names, Tensor]  # on the meta device, if only shape and dtype are known
    read: Callable[[Names], Tensor]
    facts: dict[str, object] = field(default_factory=dict)  # other values, for `flatshard inspect`

    # Other names of tied tensors, mapped to the name under which `tensors` has the tensor.
    ties: dict[str, str] = field(default_factory=dict)
    # Names of tensors with values that the files lack.
    incomplete: list[str] = field(default_factory=list)

    def check_complete(self, parts: Collection[str] | None = None) -> None:
        """Raise ValueError if the files lack values of a tensor.

        ``parts``: outermost keys ("model", for example). Checks only the tensors under these keys.
        """
        lacking = [one for one in self.incomplete if not parts or one.partition(".")[0] in parts]
        if lacking:
            raise ValueError(
                f"{self.path} is incomplete: its files lack values of {', '.join(lacking):.300}. "
                "Use another checkpoint."
            )

    def model(self, key: str | None = None) -> dict[str, Names]:
        """Map the names of the model's tensors, including tied names, to keys in ``tensors``.

        ``key`` ("app.model", for example) is the entry of the checkpoint that contains the model.
        If None, the entry has one of the usual names (model, module, state_dict,
        model_state_dict), or the whole checkpoint is the model.
        """
        prefixes = {names[:depth] for names in self.tensors for depth in range(len(names))}
        found = [one for one in prefixes if one and one[-1] in _MODEL_KEYS]
        found = [one for one in found if not any(one[:depth] in found for depth in range(len(one)))]
        if key is not None:
            found = [one for one in prefixes if ".".join(one) == key]
        elif not found and prefixes <= {()}:
            found = [()]
        if len(found) != 1:
            known = ", ".join(sorted(".".join(one) for one in prefixes if one)) or "no tensors"
            wrong = f"key={key!r}: expected one entry that contains the model, got {len(found)}"
            raise ValueError(f"{self.path}: {wrong}. Pass the model's key, one of: {known}.")
        depth = len(found[0])
        model = {".".join(n[depth:]): n for n in self.tensors if n[:depth] == found[0]}
        model |= {alias: (kept,) for alias, kept in self.ties.items()}
        # DistributedDataParallel and torch.compile put these prefixes before all names.
        for prefix in ("module.", "_orig_mod."):
            if all(name.startswith(prefix) for name in model):
                model = {name.removeprefix(prefix): names for name, names in model.items()}
        flat = next((name for name in model if name.endswith("_flat_param")), None)
        if flat is not None:
            raise ValueError(
                f"{self.path}: {flat!r} is a flat parameter of FSDP1's LOCAL_STATE_DICT, which "
                "cannot be read without the wrapped model. Save the model again with "
                "SHARDED_STATE_DICT."
            )
        return model


def open_source(path: str | os.PathLike[str]) -> Source:
    """Recognize the format of a file or folder, and list its tensors."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file or folder. Check the path.")
    if path.name.endswith(".incomplete"):  # a save, or the deletion of a checkpoint, has not ended
        raise ValueError(f"{path} is incomplete: its save did not finish. Use another checkpoint.")
    if path.is_dir():
        if (path / ".metadata").exists():
            return _dcp(path)
        if any(path.glob("*_model_states.pt")) or any(path.glob("*/*_model_states.pt")):
            raise ValueError(
                f"{path}: DeepSpeed wrote this folder, and flatshard does not read it. Run "
                "DeepSpeed's script zero_to_fp32.py, which is beside the checkpoint, with "
                "--safe_serialization, and convert the files that it writes."
            )
    if path.is_dir() or path.suffix in (".safetensors", ".json"):
        return _safetensors(path)
    return _torch(path)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _safetensors(path: Path) -> Source:
    places, metadata = safetensors.find_tensors(path)

    def read(names: Names) -> Tensor:
        place = places[names[0]]
        value = torch.empty(place.shape, dtype=place.dtype)
        safetensors.move(place, safetensors.whole(value), to_file=False)
        return value

    tensors: dict[Names, Tensor] = {(n,): _meta(p.shape, p.dtype) for n, p in places.items()}
    ties = {name: kept for name, kept in metadata.items() if kept in places and name not in places}
    facts = {name: value for name, value in metadata.items() if name not in ties}
    return Source(path, "safetensors", tensors, read, dict(facts), ties=ties)


# ---------------------------------------------------------------- torch.save


def _torch(path: Path) -> Source:
    source = Source(path, "torch.save", {}, lambda names: source.tensors[names])
    # Tensors in zip files are mapped into memory, not read.
    for names, value in leaves(load_safely(path, path, mmap=zipfile.is_zipfile(path))):
        if isinstance(value, Tensor):
            source.tensors[names] = value
        elif names and names[-1] in _PROGRESS_KEYS:
            source.facts[".".join(names)] = value
    return source


def load_safely(file: Any, name: object, *, mmap: bool = False) -> Any:
    """Call ``torch.load``, but run no code from the file. ``name``: the file's name in errors."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = str(error).partition(". ")[0].partition("\n")[0]
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            why = f"the file contains objects such as {found[1]}, whose loading may run code"
        text = f"{name}: torch.load cannot read this file safely: {why}. Save a state_dict()."
        raise ValueError(text) from error


def leaves(value: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    """Yield the values in nested dictionaries and lists, each with its keys, outermost first."""
    if isinstance(value, Mapping | list | tuple):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(inner, (*names, str(name)))
    else:
        yield names, value


# ---------------------------------------------------------------- DCP


def _dcp(folder: Path) -> Source:
    # Import here, because importing torch.distributed.checkpoint is slow.
    from flatshard.checkpoint import dcp_files

    saved = dcp_files.Saved(folder)
    metadata = saved.metadata
    for stored in metadata.storage_data.values():
        end = stored.offset + stored.length
        folders.check_lengths(folder, {stored.relative_path: end}, "Convert another checkpoint.")
    paths, entries = metadata.planner_data or {}, metadata.state_dict_metadata
    names_of = {tuple(map(str, paths.get(name, (name,)))): name for name in entries}

    def read(names: Names) -> Tensor:
        one = entries[names_of[names]]
        state = {names_of[names]: torch.empty(one.size, dtype=one.properties.dtype)}
        saved.read(state)
        return state[names_of[names]]

    source = Source(folder, "torch.distributed.checkpoint", {}, read)
    source.incomplete = dcp_files.incomplete_tensors(metadata)
    for names, name in names_of.items():
        if hasattr(entries[name], "size"):
            source.tensors[names] = _meta(entries[name].size, entries[name].properties.dtype)
            if names[0] in _PROGRESS_KEYS and source.tensors[names].numel() == 1:
                source.facts[names[0]] = source.read(names).item()
    if (marker := folders.read_marker(folder)) is not None:
        source.kind = "flatshard.checkpoint"
        source.facts |= {"step": marker.step, "world size": marker.world_size}
        own_file = folder / folders.own_file(0)
        if kinds := load_safely(own_file, own_file).get("optimizers"):
            shown = (f"{name!r} ({kind})" for name, (kind, _) in kinds.items())
            source.facts["optimizers"] = ", ".join(shown)
    return source


# ---------------------------------------------------------------- convert

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    key: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Convert a model's weights between the files of several libraries, in one process.

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
    model = found.model(key)
    found.check_complete({names[0] for names in model.values()})
    tensors = {name: found.tensors[names] for name, names in model.items()}
    # Convert tied tensors once: they share memory (in a file of torch.save), or are one object.
    ties = safetensors.ties_in({n: safetensors.memory_of(one) for n, one in tensors.items()})
    like = {n: safetensors.as_saved(one, dtype) for n, one in tensors.items() if n not in ties}

    def read(name: str) -> Tensor:
        return found.read(model[name]).to(like[name].dtype)

    if is_torchs:
        _write_torch(final, like, ties, read)
    else:
        with contextlib.closing(safetensors.plan_files(like, final, max_shard_size, ties)) as plan:
            plan.create()
            plan.write((name, safetensors.whole(read(name))) for name in plan.places)
            plan.commit()


def _write_torch(
    final: Path, like: dict[str, Tensor], ties: dict[str, str], read: Callable[[str], Tensor]
) -> None:
    # Never hold all values in memory: `skip_data` reserves space in the file for these empty
    # tensors, and the loop below writes one tensor at a time through a memory map.
    state = {name: torch.empty_like(one, device="cpu") for name, one in like.items()}
    state |= {alias: state[kept] for alias, kept in ties.items()}
    beside = final.with_name(f"{final.name}.incomplete")
    with contextlib.ExitStack() as undo:
        undo.callback(beside.unlink, missing_ok=True)  # does nothing after the renaming below
        with torch.serialization.skip_data(), folders.zip_stream(beside) as stream:
            torch.save(state, stream)
            # Allocate disk space first: otherwise the file has a hole here, and on a full disk, a
            # write to a mapped hole ends the process by SIGBUS.
            os.posix_fallocate(stream.fileno(), 0, stream.tell())
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            state = torch.load(beside, mmap=True, weights_only=True)
        for name in like:
            state[name].copy_(read(name))
        del state
        folders.sync(beside)
        beside.replace(final)
