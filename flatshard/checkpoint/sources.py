"""``Source``: tensors in files of any library, read one at a time, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flatshard.checkpoint import deepspeed, safetensors
from flatshard.checkpoint.folder import read_marker
from flatshard.checkpoint.ranges import OpenFiles, read_range
from flatshard.checkpoint.torch_files import Names, incomplete_tensors, leaves, load_torch, read_dcp

_MODEL_KEYS = {"model", "module", "state_dict", "model_state_dict"}
_PROGRESS_KEYS = {"step", "global_step", "epoch", "iteration"}


@dataclass
class Source:
    kind: str
    tensors: dict[Names, Tensor]  # of some only shape and dtype, on the meta device
    read: Callable[[Names], Tensor]
    facts: dict[str, object] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)  # names of what is no tensor
    ties: dict[str, str] = field(default_factory=dict)  # other names of tensors
    incomplete: list[str] = field(default_factory=list)  # names of tensors that miss values

    def model(self, key: str | None = None) -> dict[str, Names]:
        """The model's tensors by their names, or those below ``key`` ("app.model", say).

        Raises:
            ValueError: there is no such key; none, or several, that may be the model's.
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
            raise ValueError(f"which of its entries is the model? Choose by key: {known}")
        depth = len(found[0])
        model = {".".join(n[depth:]): n for n in self.tensors if n[:depth] == found[0]}
        for prefix in ("module.", "_orig_mod."):  # of DistributedDataParallel, of torch.compile
            if all(name.startswith(prefix) for name in model):
                model = {name.removeprefix(prefix): names for name, names in model.items()}
        flat = next((name for name in model if name.endswith("_flat_param")), None)
        if flat is not None:
            raise ValueError(
                f"{flat!r} is a flat parameter of FSDP1's LOCAL_STATE_DICT, whose parts only that "
                "model knows. Save it with SHARDED_STATE_DICT"
            )
        return model


def open_source(path: str | os.PathLike[str]) -> Source:
    """Find out what ``path`` is, a file or a folder, and which tensors it holds.

    Raises:
        ValueError: nothing that is known; it is incomplete, corrupt, or needs unsafe loading.
        OSError: it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.name.endswith(".incomplete"):  # also one that was complete, and is being deleted
        raise ValueError(f"{path}: incomplete: its save did not end")
    if path.is_dir():
        if (path / ".metadata").exists():
            return _dcp(path)
        folder = deepspeed.find_folder(path)
        if folder is not None:
            return _deepspeed(folder)
        if not list(path.glob("*.safetensors")):
            held = ", ".join(sorted(one.name for one in path.iterdir())[:5]) or "nothing"
            raise ValueError(
                f"{path}: no checkpoint of torch.distributed.checkpoint, DeepSpeed or safetensors: "
                f"it holds {held}"
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
            order = range(value.dim())
            read_range(files[place.path], place, value.view(-1), order, 0)
        return value

    tensors: dict[Names, Tensor] = {(n,): _meta(p.shape, p.dtype) for n, p in places.items()}
    ties = {name: kept for name, kept in metadata.items() if kept in places and name not in places}
    facts = {name: value for name, value in metadata.items() if name not in ties}
    return Source("safetensors", tensors, read, dict(facts), ties=ties)


def _torch(path: Path) -> Source:
    source = Source("torch.save", {}, lambda names: source.tensors[names])
    for names, value in leaves(load_torch(path)):
        if isinstance(value, Tensor):
            source.tensors[names] = value
        elif names and names[-1] in _PROGRESS_KEYS:
            source.facts[".".join(names)] = value
        else:
            source.others.append(".".join(names))
    return source


def _deepspeed(folder: Path) -> Source:
    pieces, ties, facts = deepspeed.find_pieces(folder)
    tensors: dict[Names, Tensor] = {
        (name,): _meta(one.shape, one.parts[0].dtype) for name, one in pieces.items()
    }
    return Source("DeepSpeed", tensors, lambda names: pieces[names[0]].read(), facts, ties=ties)


def _dcp(folder: Path) -> Source:
    metadata, read = read_dcp(folder)
    paths, entries = metadata.planner_data or {}, metadata.state_dict_metadata
    names_of = {tuple(map(str, paths.get(name, (name,)))): name for name in entries}
    source = Source("torch.distributed.checkpoint", {}, lambda names: read(names_of[names]))
    source.incomplete = incomplete_tensors(metadata)
    for names, name in names_of.items():
        if hasattr(entries[name], "size"):
            source.tensors[names] = _meta(entries[name].size, entries[name].properties.dtype)
            if names[0] in _PROGRESS_KEYS and source.tensors[names].numel() == 1:
                source.facts[names[0]] = source.read(names).item()
        else:
            source.others.append(name)
    marker = read_marker(folder)
    if marker is not None:
        source.kind = "flatshard.checkpoint"
        source.facts |= {"step": marker.step, "world size": marker.world_size}
        return source
    # DCP calls files __RANK_NUMBER.distcp.
    files = {one.relative_path for one in metadata.storage_data.values()}
    source.facts["world size"] = len({one.split("_")[2] for one in files if one.count("_") > 2})
    return source
