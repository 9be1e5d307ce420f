"""``Source``: a checkpoint of any known library, whose tensors are read one at a time.

Reading runs no code from the files. Pickles are loaded with ``weights_only``.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshard.checkpoint import safetensors
from flatshard.checkpoint.folder import check_lengths, own_file, read_marker
from flatshard.checkpoint.safe_pickles import STAND_INS, load_safely

Names = tuple[str, ...]  # keys of a value in nested dictionaries, the outermost key first

_MODEL_KEYS = {"model", "module", "state_dict", "model_state_dict"}
_PROGRESS_KEYS = {"step", "global_step", "epoch", "iteration"}


@dataclass
class Source:
    """An opened checkpoint: a list of its tensors, and a function that reads one tensor."""

    kind: str  # name of the checkpoint's format, such as "safetensors"
    tensors: dict[Names, Tensor]  # on the meta device, if only shape and dtype are known
    read: Callable[[Names], Tensor]
    facts: dict[str, object] = field(default_factory=dict)  # values that are not tensors, to show

    # Other names of tied tensors, mapped to the name under which `tensors` has the tensor.
    ties: dict[str, str] = field(default_factory=dict)
    # Names of tensors that lack some values in the files.
    incomplete: list[str] = field(default_factory=list)

    def model(self, key: str | None = None) -> dict[str, Names]:
        """Return the names of the model's parameters, mapped to the keys in ``tensors``.

        ``key`` ("app.model", for example) is the entry of the checkpoint that contains the model.
        If None, the entry has one of the usual names (model, module, state_dict,
        model_state_dict), or the whole checkpoint is the model.

        Raises:
            ValueError: there is no such entry, or there are several; or FSDP1 saved local state.
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
            wrong = f"expected one entry that contains the model, got {len(found)}"
            raise ValueError(f"key={key!r}: {wrong}. Pass the model's key, one of: {known}.")
        depth = len(found[0])
        model = {".".join(n[depth:]): n for n in self.tensors if n[:depth] == found[0]}
        # DistributedDataParallel and torch.compile put these prefixes before all names.
        for prefix in ("module.", "_orig_mod."):
            if all(name.startswith(prefix) for name in model):
                model = {name.removeprefix(prefix): names for name, names in model.items()}
        flat = next((name for name in model if name.endswith("_flat_param")), None)
        if flat is not None:
            raise ValueError(
                f"{flat!r} is a flat parameter of FSDP1's LOCAL_STATE_DICT, which cannot be read "
                "without the wrapped model. Save the model again with SHARDED_STATE_DICT."
            )
        return model


def open_source(path: str | os.PathLike[str]) -> Source:
    """Recognize the format of a file or folder, and list its tensors.

    Raises:
        ValueError: the format is unknown, or the files are incomplete, corrupt, or need unsafe
            loading.
        OSError: a file cannot be read.
    """
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
        if not list(path.glob("*.safetensors")):
            held = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "nothing"
            raise ValueError(
                f"{path}: expected files of torch.distributed.checkpoint or safetensors in this "
                f"folder, got {held}. Check the path."
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
        with safetensors.OpenFiles(os.O_RDONLY) as files:
            safetensors.read_range(files[place.path], place, value.view(-1), range(value.dim()), 0)
        return value

    tensors: dict[Names, Tensor] = {(n,): _meta(p.shape, p.dtype) for n, p in places.items()}
    ties = {name: kept for name, kept in metadata.items() if kept in places and name not in places}
    facts = {name: value for name, value in metadata.items() if name not in ties}
    return Source("safetensors", tensors, read, dict(facts), ties=ties)


# ---------------------------------------------------------------- torch.save


def _torch(path: Path) -> Source:
    source = Source("torch.save", {}, lambda names: source.tensors[names])
    for names, value in leaves(load_torch(path)):
        if isinstance(value, Tensor):
            source.tensors[names] = value
        elif names and names[-1] in _PROGRESS_KEYS:
            source.facts[".".join(names)] = value
    return source


def load_torch(path: Path) -> Any:
    """Load a file of ``torch.save``. Tensors in zip files are mapped, not read.

    Raises:
        ValueError: the file is corrupt, or contains objects that only unsafe loading would read.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        found = [one for one in found if one not in {name for _, name in STAND_INS}]
        if found:
            raise ValueError(
                f"{path} contains objects such as {found[0]}, whose loading may run code, so the "
                "file is not loaded. Save a state_dict() instead."
            )
        return load_safely(path, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = str(error).partition(". ")[0].partition("\n")[0]
        text = f"{path}: torch.load cannot read this file safely: {why}. Save a state_dict()."
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
    # Import here, because torch.distributed.checkpoint loads slowly.
    from flatshard.checkpoint import dcp_files

    metadata = dcp_files.read_metadata(folder)
    for stored in metadata.storage_data.values():
        end = stored.offset + stored.length
        check_lengths(folder, {stored.relative_path: end}, "Convert another checkpoint.")
    paths, entries = metadata.planner_data or {}, metadata.state_dict_metadata
    names_of = {tuple(map(str, paths.get(name, (name,)))): name for name in entries}

    def read(names: Names) -> Tensor:
        one = entries[names_of[names]]
        state = {names_of[names]: torch.empty(one.size, dtype=one.properties.dtype)}
        dcp_files.read(folder, metadata, state)
        return state[names_of[names]]

    source = Source("torch.distributed.checkpoint", {}, read)
    source.incomplete = dcp_files.incomplete_tensors(metadata)
    for names, name in names_of.items():
        if hasattr(entries[name], "size"):
            source.tensors[names] = _meta(entries[name].size, entries[name].properties.dtype)
            if names[0] in _PROGRESS_KEYS and source.tensors[names].numel() == 1:
                source.facts[names[0]] = source.read(names).item()
    if (marker := read_marker(folder)) is not None:
        source.kind = "flatshard.checkpoint"
        source.facts |= {"step": marker.step, "world size": marker.world_size}
        if kinds := load_torch(folder / own_file(0)).get("optimizers"):
            shown = (f"{name!r} ({kind})" for name, (kind, _) in kinds.items())
            source.facts["optimizers"] = ", ".join(shown)
    return source
