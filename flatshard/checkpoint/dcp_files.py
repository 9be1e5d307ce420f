"""Reads and writes files of ``torch.distributed.checkpoint`` (DCP), with torch's own classes.

Reading runs no code from the files: the unpickler of the metadata accepts only a few classes, and
other content is loaded with ``weights_only``. Import this module in functions: DCP loads slowly.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.planner import ReadItem

from flatshard.checkpoint.folder import FileRecord, zip_stream
from flatshard.checkpoint.sources import load_safely

# ---------------------------------------------------------------- writing


class Writer(dcp.FileSystemWriter):
    """Torch's writer. Every Python version can read the metadata; a full disk raises OSError."""

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
        # Torch writes the metadata under a temporary name, and then renames the file.
        self.records[Path(path).name.removesuffix(".tmp")] = stream.record


# ---------------------------------------------------------------- reading


_DCP, _PLAIN = "torch.distributed.checkpoint.", ("Size", "_get_layout", "_StorageInfo")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


def _member(kind: Any, name: Any) -> Any:
    """Return an enum's member. Early Python 3.11 pickles the member as a call of ``getattr``."""
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


def read_metadata(folder: Path) -> Any:
    """Read the file ``.metadata`` in a DCP folder, and return torch's ``Metadata``."""
    content = io.BytesIO((folder / ".metadata").read_bytes())
    try:
        metadata = _Metadata(content).load()
        metadata.storage_data.values()
    except Exception as error:  # for invalid bytes, pickle raises errors of many types
        text = f"{folder / '.metadata'} cannot be read: {error}. Use another checkpoint."
        raise ValueError(text) from error
    return metadata


def incomplete_tensors(metadata: Any) -> list[str]:
    """Return the names of tensors, in DCP's ``Metadata``, that lack some values in the files."""
    entries = metadata.state_dict_metadata
    incomplete = [key for key in metadata.planner_data or () if key not in entries]
    for key, entry in entries.items():
        chunks = getattr(entry, "chunks", None)  # None if the entry is not a tensor
        if chunks is not None:
            saved = sum(math.prod(chunk.sizes) for chunk in chunks)
            incomplete += [key] if saved < math.prod(entry.size) else []
    return incomplete


def read(folder: Path, found: metadata.Metadata, targets: dict[str, Any]) -> None:
    """Overwrite the values in ``targets`` with the saved values. No communication."""
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = dcp.FileSystemReader(folder)
    with torch.no_grad():
        planner.set_up_planner(targets, found, False)
        plan = planner.create_local_plan()
        plan.items.sort(key=lambda item: found.storage_data[item.storage_index].offset)
        reader.set_up_storage_reader(found, False)
        reader.read_data(plan, planner).wait()


class _Planner(default_planner.DefaultLoadPlanner):
    """Torch's default planner for loading, but ``load_safely`` loads pickled values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_safely(value, f"file with {name!r}")
