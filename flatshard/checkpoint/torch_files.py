"""Files of ``torch.save``, and the metadata of ``torch.distributed.checkpoint`` (DCP) folders.

Pickles run no code here: ``weights_only``, and names of classes that can do nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Names = tuple[str, ...]  # of a value in nested dictionaries, outermost first


class _Inert:
    """Stands for a class of a library that need not be installed."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def load_torch(path: Path, library: str = "") -> Any:
    """What a file holds, mapped where it can be; of classes of ``library`` only what made them.

    Raises:
        ValueError: it is corrupt, or holds objects that only unsafe loading would read.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        stand_ins: list[Any] = [(_Inert, one) for one in found if library and library in one]
        if len(found) > len(stand_ins):
            raise ValueError(
                f"{path}: it holds objects such as {found[0]}, whose loading may run code. Save a "
                "state_dict()"
            )
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = str(error).partition(". ")[0].partition("\n")[0]
        raise ValueError(f"{path}: torch.load cannot read it safely: {why}") from error


def leaves(value: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    """The values in nested dictionaries and lists."""
    if isinstance(value, Mapping | list | tuple):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(inner, (*names, str(name)))
    else:
        yield names, value


_DCP, _PLAIN = "torch.distributed.checkpoint.", ("Size", "_get_layout", "_StorageInfo")


class _Metadata(pickle.Unpickler):
    """Torch itself reads this file with ``pickle.load``."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib", "PosixPath"):
            return os.path.join
        if module in ("torch", "torch.serialization", _DCP + "metadata", _DCP + "filesystem"):
            found = super().find_class(module, name)
            is_plain = isinstance(found, type) and found.__module__ == _DCP + "metadata"
            if is_plain or isinstance(found, torch.dtype) or name in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}, whose loading may run code")


def read_dcp_metadata(folder: Path) -> Any:
    """DCP's ``Metadata`` of a folder.

    Raises:
        ValueError: it is corrupt.
    """
    try:
        with open(folder / ".metadata", "rb") as stream:
            metadata = _Metadata(stream).load()
        metadata.storage_data.values()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / '.metadata'}: it cannot be read: {error}") from error
    return metadata


def incomplete_tensors(metadata: Any) -> list[str]:
    """Names of tensors that DCP's ``Metadata`` lists, and whose values are not all in its files."""
    entries = metadata.state_dict_metadata
    incomplete = [key for key in metadata.planner_data or () if key not in entries]
    for key, entry in entries.items():
        chunks = getattr(entry, "chunks", None)  # None: not a tensor
        if chunks is not None:
            saved = sum(math.prod(chunk.sizes) for chunk in chunks)
            incomplete += [key] if saved < math.prod(entry.size) else []
    return incomplete


def read_dcp(folder: Path) -> tuple[Any, Callable[[str], Tensor]]:
    """A folder's ``Metadata``, and what reads one of its tensors.

    Raises:
        ValueError: the metadata is corrupt, a file is missing or too short.
    """
    # Here, as torch's package is slow to load.
    from flatshard.checkpoint import dcp_files

    metadata = read_dcp_metadata(folder)
    for one in metadata.storage_data.values():
        file, end = folder / one.relative_path, one.offset + one.length
        nbytes = file.stat().st_size if file.exists() else 0
        if nbytes < end:
            raise ValueError(f"{file}: incomplete: expected at least {end} bytes, got {nbytes}")

    def read(name: str) -> Tensor:
        one = metadata.state_dict_metadata[name]
        state = {name: torch.empty(one.size, dtype=one.properties.dtype)}
        dcp_files.read(folder, metadata, state, lambda _: None)
        return state[name]

    return metadata, read


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """DCP warns that it runs on one process, which is the intent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
