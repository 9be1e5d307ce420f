"""``Source``: a checkpoint of any known library, whose tensors are read one at a time.

Reading runs no code from the files. Pickles are loaded with ``weights_only``. Objects of
DeepSpeed's classes are replaced by objects without behaviour, so DeepSpeed need not be installed.

[Note: DeepSpeed]
A folder of ZeRO contains the fp32 weights in flat partitions, in the layout that DeepSpeed's script
``zero_to_fp32.py`` reads.

stages 1, 2   each parameter group is one vector, which is cut into one part per rank
stage 3       each parameter is padded and cut into one part per rank; the parts of a rank are
              concatenated into one vector
"""

from __future__ import annotations

import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.checkpoint import safetensors
from flatshard.checkpoint.folder import check_lengths, read_marker
from flatshard.checkpoint.ranges import OpenFiles, read_range

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
        if (folder := _deepspeed_folder(path)) is not None:
            return _deepspeed(folder)
        if not list(path.glob("*.safetensors")):
            held = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "nothing"
            raise ValueError(
                f"{path}: expected files of torch.distributed.checkpoint, DeepSpeed or "
                f"safetensors in this folder, got {held}. Check the path."
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
        with OpenFiles(os.O_RDONLY) as files:
            read_range(files[place.path], place, value.view(-1), range(value.dim()), 0)
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


class _Inert:
    """Replaces an object whose library (DeepSpeed, for example) may not be installed."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def load_torch(path: Path, library: str = "") -> Any:
    """Load a file of ``torch.save``. Tensors in zip files are mapped, not read.

    Objects of ``library``'s classes are replaced by ``_Inert`` objects, which run no code.

    Raises:
        ValueError: the file is corrupt, or contains objects that only unsafe loading would read.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        stand_ins: list[Any] = [(_Inert, one) for one in found if library and library in one]
        if len(found) > len(stand_ins):
            raise ValueError(
                f"{path} contains objects such as {found[0]}, whose loading may run code, so the "
                "file is not loaded. Save a state_dict() instead."
            )
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
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
        dcp_files.read(folder, metadata, state, lambda _: None)
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
    return source


# ---------------------------------------------------------------- DeepSpeed


def _deepspeed(folder: Path) -> Source:
    pieces, ties, facts = _find_pieces(folder)
    tensors: dict[Names, Tensor] = {
        (name,): _meta(one.shape, one.parts[0].dtype) for name, one in pieces.items()
    }
    return Source("DeepSpeed", tensors, lambda names: pieces[names[0]].read(), facts, ties=ties)


class _Pieces(NamedTuple):
    """A tensor that is the concatenation of parts of mapped files, perhaps followed by padding."""

    shape: tuple[int, ...]
    parts: list[Tensor]

    def read(self) -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in self.parts])
        return flat[: math.prod(self.shape)].view(self.shape)


def _deepspeed_folder(path: Path) -> Path | None:
    """Return DeepSpeed's folder of one step: ``path``, or the folder that ``path/latest`` names.

    Returns None if the folder has no files of DeepSpeed.
    """
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    return folder if list(folder.glob("*_model_states.pt")) else None


def _find_pieces(folder: Path) -> tuple[dict[str, _Pieces], dict[str, str], dict[str, object]]:
    """Find the weights in DeepSpeed's files.

    Returns:
        The pieces of each weight, keyed by name; other names of tied weights, mapped to a name that
        has pieces; and facts for ``flatshard inspect``.

    Raises:
        ValueError: a file is missing or corrupt, or tensor parallelism has split the model.
    """
    models = [load_torch(one, "deepspeed") for one in _by_rank(folder, "model")]
    states = [load_torch(one, "deepspeed") for one in _by_rank(folder, "optim")]
    first = models[0]
    if list(folder.glob("*mp_rank_01_*")) or list(folder.glob("*expert*")):
        raise ValueError(
            f"{folder}: DeepSpeed trained this model with tensor or expert parallelism. Expected a "
            "checkpoint of ZeRO or of plain data parallelism. Pass the folder of such a checkpoint."
        )
    facts = {"DeepSpeed": first["ds_version"], "step": first["global_steps"]}
    ties, whole = first.get("shared_params") or {}, first["module"]
    if not states:  # without ZeRO
        found = {n: _Pieces(tuple(t.shape), [t]) for n, t in whole.items() if n not in ties}
        return found, ties, facts | {"world size": first["dp_world_size"]}
    optims = [one["optimizer_state_dict"] for one in states]
    stage, counts = optims[0]["zero_stage"], optims[0]["partition_count"]
    stage = getattr(stage, "args", [stage])[0]
    size = max(counts) if isinstance(counts, list) else counts
    if len(states) != size or (stage == 3 and len(models) != size):
        raise ValueError(
            f"{folder} is incomplete: expected files of {size} ranks, got {len(states)}. Copy the "
            "files of all ranks into this folder."
        )
    names = first["buffer_names"] if stage == 3 else [name for name in whole if name not in ties]
    found = {name: _Pieces(tuple(whole[name].shape), [whole[name]]) for name in names}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        found[name] = _Pieces(tuple(shape), [one["frozen_param_fragments"][name] for one in models])
    merge = _stage_3 if stage == 3 else _stage_2
    found.update(merge(first["param_shapes"], optims))
    return found, ties, facts | {"ZeRO stage": stage, "world size": size}


def _by_rank(folder: Path, kind: str) -> list[Path]:
    found = folder.glob(f"*_{kind}_states.pt")
    return sorted(found, key=lambda one: [int(n) for n in re.findall(r"\d+", one.name)])


def _stage_2(groups: list[Any], optims: list[Any]) -> Iterator[tuple[str, _Pieces]]:
    for number, shapes in enumerate(groups):
        vectors = [one["single_partition_of_fp32_groups"][number] for one in optims]
        paddings = optims[0].get("param_alignment_paddings") or [[0] * len(shapes)] * len(groups)
        start = 0
        for (name, shape), padding in zip(shapes.items(), paddings[number], strict=True):
            end = start + math.prod(shape)
            yield name, _Pieces(tuple(shape), _cut(vectors, start, end))
            start = end + padding


def _stage_3(groups: list[Any], optims: list[Any]) -> Iterator[tuple[str, _Pieces]]:
    start = 0
    for name, shape in (item for shapes in groups for item in shapes.items()):
        end = start + -(-math.prod(shape) // len(optims))
        parts = [part for one in optims for part in _cut(one["fp32_flat_groups"], start, end)]
        yield name, _Pieces(tuple(shape), parts)
        start = end


def _cut(vectors: Iterable[Tensor], start: int, end: int) -> list[Tensor]:
    """Return views of elements ``[start, end)`` of the concatenated vectors, one per vector."""
    parts = []
    for one in vectors:
        parts.append(one[max(0, start) : max(0, end)])
        start, end = start - one.numel(), end - one.numel()
    return parts
