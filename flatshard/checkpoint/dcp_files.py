"""Reads and writes files of ``torch.distributed.checkpoint`` (DCP), with torch's own classes.

Reading runs no code from the files. The unpickler of the metadata accepts only a few classes, and
all other content is loaded with ``weights_only``.

Import this module inside functions, because ``torch.distributed.checkpoint`` loads slowly.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from flatshard.checkpoint.folder import Advance

# ---------------------------------------------------------------- writing


class SavePlanner(default_planner.DefaultSavePlanner):
    """Torch's default planner for saving, which also counts the bytes that this rank writes."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance = advance

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        self._advance(data.nbytes if isinstance(data, Tensor) else 0)
        return data


# ---------------------------------------------------------------- reading


_DCP, _PLAIN = "torch.distributed.checkpoint.", ("Size", "_get_layout", "_StorageInfo")


class _Metadata(pickle.Unpickler):
    """Unpickles DCP's metadata safely. Torch calls ``pickle.load``, which runs code in the file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("pathlib", "PosixPath"):
            return os.path.join
        if module in ("torch", "torch.serialization", _DCP + "metadata", _DCP + "filesystem"):
            found = super().find_class(module, name)
            is_plain = isinstance(found, type) and found.__module__ == _DCP + "metadata"
            if is_plain or isinstance(found, torch.dtype) or name in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"the file has a {module}.{name}, whose loading may run code")


def read_metadata(folder: Path) -> Any:
    """Read the file ``.metadata`` in a DCP folder, and return torch's ``Metadata``.

    Raises:
        ValueError: the file is corrupt.
    """
    try:
        with open(folder / ".metadata", "rb") as stream:
            metadata = _Metadata(stream).load()
        metadata.storage_data.values()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
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


def read(folder: Path, found: metadata.Metadata, targets: dict[str, Any], advance: Advance) -> None:
    """Overwrite ``targets``, whose keys are DCP's flat names, with the saved values.

    No communication.
    """
    planner, reader = _Planner(advance), dcp.FileSystemReader(folder)
    with torch.no_grad():
        planner.set_up_planner(targets, found, False)
        plan = planner.create_local_plan()
        plan.items.sort(key=lambda item: found.storage_data[item.storage_index].offset)
        reader.set_up_storage_reader(found, False)
        reader.read_data(plan, planner).wait()


class _Planner(default_planner.DefaultLoadPlanner):
    """Torch's default planner for loading, which also counts bytes, and runs no code in files."""

    def __init__(self, advance: Advance) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._advance = advance

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = content

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._advance(tensor.nbytes)
