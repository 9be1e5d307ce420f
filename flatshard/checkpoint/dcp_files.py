"""Reads and writes files of ``torch.distributed.checkpoint`` (DCP), with torch's own classes.

Reading runs no code from the files: metadata may contain only a few classes, and other content is
loaded with ``weights_only``. Import this module in functions, because importing DCP is slow.
"""

import contextlib
import io
import math
import os
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, filesystem as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.planner import ReadItem

from flatshard.checkpoint.folder import FileRecord, zip_stream
from flatshard.checkpoint.sources import load_safely
from flatshard.optimizer.state_dicts import StateDict

# ---------------------------------------------------------------- writing


class Writer(dcp.FileSystemWriter):
    """Torch's writer, with metadata for every Python version, and OSError for a full disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs: Files = Files()

    def storage_meta(self) -> None:
        # Torch's writer would pickle the folder's path into the metadata. Python 3.13 renamed the
        # class of paths, so other versions of Python could not load the path.
        return None


class Files(dcp.FileSystem):
    """DCP's file system. ``records``: length and checksum of each file, computed while writing."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with zip_stream(path) as stream:
            yield stream
        # Use the final name: torch writes the metadata to a `.tmp` file, and then renames the file.
        self.records[Path(path).name.removesuffix(".tmp")] = stream.record


# ---------------------------------------------------------------- reading


_DCP, _PLAIN = "torch.distributed.checkpoint.", ("Size", "_get_layout", "_StorageInfo")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


def _member(kind: Any, name: Any) -> Any:
    """Replaces ``getattr``, which pickles of enum members from early Python 3.11 releases call."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError("the file has a builtins.getattr, whose loading may run code")


class _Metadata(pickle.Unpickler):
    """Unpickles DCP's metadata safely. Torch calls ``pickle.load``, which runs code in the file."""

    def find_class(self, module: str, name: str) -> Any:
        # Load every path as a PurePath: this class touches no file, and loads Windows paths on
        # Linux, too. The module is pathlib._local in Python 3.13, and otherwise pathlib.
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return PurePath
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module in ("torch", "torch.serialization", _DCP + "metadata", _DCP + "filesystem"):
            found = super().find_class(module, name)
            is_plain = isinstance(found, type) and found.__module__ == _DCP + "metadata"
            if is_plain or isinstance(found, torch.dtype) or name in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"the file has a {module}.{name}, whose loading may run code")


def incomplete_tensors(metadata: Any) -> list[str]:
    """Return the names of tensors with missing values. ``metadata``: DCP's ``Metadata``."""
    entries = metadata.state_dict_metadata
    incomplete = [key for key in metadata.planner_data or () if key not in entries]
    for key, entry in entries.items():
        chunks = getattr(entry, "chunks", None)  # None if the entry is not a tensor
        if chunks is not None:
            saved = sum(math.prod(chunk.sizes) for chunk in chunks)
            incomplete += [key] if saved < math.prod(entry.size) else []
    return incomplete


class Saved:
    """The tensors and values in a DCP folder. ``metadata``: torch's ``Metadata`` of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, content = folder, io.BytesIO((folder / ".metadata").read_bytes())
        try:
            self.metadata: Any = _Metadata(content).load()
            self.metadata.storage_data.values()
        except Exception as error:  # for invalid bytes, pickle raises errors of many types
            text = f"{folder / '.metadata'} cannot be read: {error}. Use another checkpoint."
            raise ValueError(text) from error

    def read(self, targets: StateDict) -> None:
        """Overwrite the values in ``targets`` with the saved values. No communication."""
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader, places = dcp.FileSystemReader(self._folder), self.metadata.storage_data
        with torch.no_grad():
            planner.set_up_planner(targets, self.metadata, False)
            plan = planner.create_local_plan()
            plan.items.sort(key=lambda item: places[item.storage_index].offset)
            reader.set_up_storage_reader(self.metadata, False)
            reader.read_data(plan, planner).wait()

    def nested(self, targets: StateDict) -> StateDict:
        """Convert a dict with DCP's flat names to nested dicts, as they were saved."""
        return unflatten_state_dict(targets, self.metadata.planner_data)

    def targets(self, wanted: StateDict) -> StateDict:
        """Return the tensors that ``read`` overwrites, keyed by DCP's flat names.

        ``wanted``: the program's own state dicts. A tensor in ``wanted`` that has the saved shape
        is returned itself, so that ``read`` loads in place. Otherwise, a new tensor is returned.

        Raises:
            ValueError: names or shapes differ, or the files lack values.
        """
        own, _ = flatten_state_dict(wanted)
        targets: StateDict = {}
        problems: list[str] = []
        asked = ("model",) if wanted["optimizer"] is None else ("model", "optimizer")
        incomplete = [key for key in incomplete_tensors(self.metadata) if key.startswith(asked)]
        if incomplete:
            raise ValueError(
                f"{self._folder} is incomplete: its files lack values of "
                f"{', '.join(incomplete):.300}. When the checkpoint was saved, only some ranks had "
                "optimizer state for some parameters. Load another checkpoint, or pass no "
                "optimizer, to load only the model."
            )
        missing = {fqn for fqn, value in wanted["model"].items() if isinstance(value, Tensor)}
        missing |= {"the optimizer"} if wanted["optimizer"] is not None else set()
        for key, names in self.metadata.planner_data.items():
            part, *rest = names
            if part == "optimizer" and wanted["optimizer"] is None:
                continue
            saved: Any = self.metadata.state_dict_metadata[key]
            size = getattr(saved, "size", None)  # None if the entry is not a tensor
            missing.discard("the optimizer" if part == "optimizer" else rest[0])
            fqn = rest[0] if part == "model" else rest[1]
            held, param = own.get(key), wanted["model"].get(fqn)
            if rest[0] != "param_groups" and fqn not in wanted["model"]:
                problems.append(f"{key!r}: expected nothing, got {_shape(size)}")
            elif part == "model" and isinstance(held, Tensor) and held.shape != size:
                problems.append(f"{key!r}: expected {_shape(held.shape)}, got {_shape(size)}")
            targets[key] = held
            if size is not None and not (isinstance(held, Tensor) and held.shape == size):
                # Read state with one element into an unsharded tensor. Even if the parameter has
                # one element, the state may be a step counter: `OptimState.to_load` decides later.
                is_alike = isinstance(param, Tensor) and param.shape == size and size.numel() > 1
                like: Any = param if is_alike else torch.empty(0)
                targets[key] = like.new_empty(size, dtype=saved.properties.dtype)
        problems += [f"{name!r}: missing in the checkpoint" for name in sorted(missing)]
        if problems:
            remedy = "Build the model and the optimizer as in the program that saved them."
            raise ValueError(f"{self._folder} is of another model: {'; '.join(problems)}. {remedy}")
        return targets


def _shape(size: Any) -> str:
    return "no tensor" if size is None else f"shape {tuple(size)}"


class _Planner(default_planner.DefaultLoadPlanner):
    """Torch's default planner for loading, but ``load_safely`` loads pickled values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_safely(value, f"file with {name!r}")
