"""Files of ``torch.distributed.checkpoint`` (DCP): torch's writer and reader, and checksums.

Pickles run no code here: the metadata may hold names of a few classes, all else is loaded with
``weights_only``.

This module loads torch's package, which is slow: import it where it is needed.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatshard.checkpoint.folder import FileRecord, Marker

# Bytes between two beginnings of writing to the disk, and of a piece that is summed up at once.
_PIECE = 32 << 20

Advance = Callable[[int], object]
"""Told how many bytes have been written or read."""


# ---------------------------------------------------------------- writing


class _SummedFile(io.FileIO):
    """A file that sums up what is written to it, and has it written to the disk meanwhile."""

    def __init__(self, path: Path, records: dict[str, FileRecord], advance: Advance) -> None:
        super().__init__(path, "wb")
        self._records, self._advance = records, advance
        self._crc32 = self._num_bytes = self._num_flushed = 0

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:_PIECE]
        count = super().write(piece)
        self._crc32 = zlib.crc32(piece[:count], self._crc32)
        self._num_bytes += count
        self._advance(count)
        if self._num_bytes - self._num_flushed >= _PIECE and hasattr(os, "posix_fadvise"):
            # Linux begins to write pages that are not needed. The disk would else stand still until
            # fsync.
            length = self._num_bytes - self._num_flushed
            os.posix_fadvise(self.fileno(), self._num_flushed, length, os.POSIX_FADV_DONTNEED)
            self._num_flushed = self._num_bytes
        return count

    def close(self) -> None:
        """Wait until the file is on the disk, and record its length and checksum."""
        if not self.closed:
            os.fsync(self.fileno())
            name = Path(os.fsdecode(self.name)).name.removesuffix(".tmp")
            self._records[name] = FileRecord(self._num_bytes, self._crc32)
        super().close()


class _Files(dcp.FileSystem):
    """The file system, with records of the files that were written."""

    def __init__(self, advance: Advance) -> None:
        self.records: dict[str, FileRecord] = {}
        self._advance = advance

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "this file system is a writer's"
        file = _SummedFile(path, self.records, self._advance)
        with io.BufferedWriter(file, 1 << 16) as stream:
            yield stream


class Writer(dcp.FileSystemWriter):
    """Writes one file for each rank, and ``own_file``; ``fs.records`` has their checksums."""

    def __init__(self, folder: Path, own_file: tuple[str, bytes], advance: Advance) -> None:
        super().__init__(folder, sync_files=False)  # the files do it themselves
        self.fs: Any = _Files(advance)
        self._own_file = own_file

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        name, content = self._own_file
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            stream.write(content)
        return super().write_data(plan, planner)


@contextmanager
def without_warning() -> Iterator[None]:
    """DCP warns that it runs on one process, which is the intent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


# ---------------------------------------------------------------- reading


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


def read_metadata(folder: Path) -> Any:
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


def check_lengths(folder: Path, found: metadata.Metadata) -> None:
    """Raise ValueError if a file is missing, or shorter than the metadata says."""
    for one in found.storage_data.values():
        file, end = folder / one.relative_path, one.offset + one.length
        nbytes = file.stat().st_size if file.exists() else 0
        if nbytes < end:
            raise ValueError(f"{file}: incomplete: expected at least {end} bytes, got {nbytes}")


def read(folder: Path, found: metadata.Metadata, targets: dict[str, Any], advance: Advance) -> None:
    """Overwrite ``targets``, tensors by DCP's key, by what was saved. No communication."""
    planner, reader = _Planner(advance), dcp.FileSystemReader(folder)
    with torch.no_grad():
        planner.set_up_planner(targets, found, False)
        plan = planner.create_local_plan()
        plan.items.sort(key=lambda item: found.storage_data[item.storage_index].offset)
        reader.set_up_storage_reader(found, False)
        reader.read_data(plan, planner).wait()


class _Planner(default_planner.DefaultLoadPlanner):
    """Plans what this rank reads, and unpickles no code."""

    def __init__(self, advance: Advance) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._advance = advance

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = content

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._advance(tensor.nbytes)


def check_sum(folder: Path, marker: Marker, name: str, advance: Advance) -> None:
    """Raise ValueError if a file is not what was written."""
    buffer, found, length = memoryview(bytearray(_PIECE // 8)), 0, 0
    with open(folder / name, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found, length = zlib.crc32(buffer[:count], found), length + count
            advance(count)
    expected = marker.files[name]
    if (length, found) != (expected.bytes, expected.crc32):
        raise ValueError(
            f"{folder / name} is corrupted: expected CRC-32 {expected.crc32:08x} of "
            f"{expected.bytes} bytes, got {found:08x} of {length}. Load another checkpoint."
        )
