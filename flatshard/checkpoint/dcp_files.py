"""Files of ``torch.distributed.checkpoint`` (DCP): written and read in place, with checksums.

[Note: envelopes]
DCP stores each box of a tensor as what ``torch.save`` writes: a head that depends on shape, dtype
and version alone, the bytes, and a tail. We write head and tail as torch makes them (without its
checksums, as the file has one), and the bytes from where they are. Where the head in a file is the
one that we would write, the bytes behind it are read to where they belong; otherwise, as in files
of other writers, ``torch.load`` reads the box.

This module loads torch's package, which is slow: import it where it is needed.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import default_planner, metadata
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatshard.checkpoint.folder import FileRecord, Marker
from flatshard.checkpoint.ranges import Place, bytes_of, read_range

# Bytes between two beginnings of writing to the disk, and of a piece that is summed up at once.
_PIECE = 32 << 20
# Nothing that torch.save writes around a tensor is as long.
_SMALL = 4096

Advance = Callable[[int], object]
"""Told how many bytes have been written or read."""


# ---------------------------------------------------------------- writing


class _SummedFile(io.FileIO):
    """A file that sums up what is written to it, and has it written to the disk meanwhile."""

    crc32 = 0
    num_bytes = 0
    _num_flushed = 0

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:_PIECE]
        count = super().write(piece)
        self.crc32 = zlib.crc32(piece[:count], self.crc32)
        self.num_bytes += count
        if self.num_bytes - self._num_flushed >= _PIECE and hasattr(os, "posix_fadvise"):
            # Linux begins to write pages that are not needed. The disk would else stand still until
            # fsync.
            length = self.num_bytes - self._num_flushed
            os.posix_fadvise(self.fileno(), self._num_flushed, length, os.POSIX_FADV_DONTNEED)
            self._num_flushed = self.num_bytes
        return count


class _Files(dcp.FileSystem):
    """The file system, with records of the files that were written."""

    def __init__(self, records: dict[str, FileRecord]) -> None:
        self._records = records

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummedFile(path, "wb") as raw, io.BufferedWriter(raw, 1 << 16) as stream:
            yield stream
            stream.flush()
            os.fsync(raw.fileno())
        self._records[Path(path).name.removesuffix(".tmp")] = FileRecord(raw.num_bytes, raw.crc32)


class Writer(dcp.FileSystemWriter):
    """Writes one file for each rank; ``records`` has its checksum, and on rank 0 the metadata's."""

    def __init__(self, folder: Path, own_file: tuple[str, bytes], advance: Advance) -> None:
        super().__init__(folder, sync_files=False)  # the files do it themselves
        self.records: dict[str, FileRecord] = {}
        self.fs: Any = _Files(self.records)
        self._own_file, self._advance = own_file, advance

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{dcp.DEFAULT_SUFFIX}"
        results: list[WriteResult] = []
        own_name, own = self._own_file
        with self.fs.create_stream(Path(self.path) / own_name, "wb") as stream:
            stream.write(own)
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                start, data = stream.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    data = data.detach().contiguous().cpu()
                    head, tail = _envelope(tuple(data.shape), data.dtype)
                    for part in (head, bytes_of(data), tail):
                        stream.write(part)
                length = stream.tell() - start
                self._advance(length)
                place = dcp._StorageInfo(name, start, length)
                results.append(WriteResult(item.index, length, place))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class _Outline(io.BytesIO):
    """Keeps what ``torch.save`` writes before and behind the bytes of one tensor."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes, self.parts = num_bytes, [bytearray()]

    def write(self, data: Any) -> int:
        if len(data) == self._num_bytes:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += data
        return len(data)


@lru_cache(maxsize=4096)
def _envelope(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and behind the bytes of a contiguous CPU tensor."""
    # Memory that nobody touches; hence without torch's checksum.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    outline = _Outline(tensor.nbytes)
    whole = io.BytesIO()
    computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, whole if tensor.nbytes < _SMALL else outline)
    finally:
        torch.serialization.set_crc32_options(computes_crc32)
    if tensor.nbytes < _SMALL:
        whole.seek(0)
        reader: Any = torch._C.PyTorchFileReader(whole)
        start = reader.get_record_offset("data/0")
        return whole.getvalue()[:start], whole.getvalue()[start + tensor.nbytes :]
    head, tail = outline.parts
    return bytes(head), bytes(tail)


# ---------------------------------------------------------------- reading


def read(folder: Path, found: metadata.Metadata, targets: dict[str, Any], advance: Advance) -> None:
    """Overwrite ``targets``, tensors by DCP's key, by what was saved. No communication.

    Each byte is read once, to where it belongs, where this module or its like wrote it.
    """
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    boxes = {
        metadata.MetadataIndex(fqn, chunk.offsets): (tuple(chunk.sizes), tensor.properties.dtype)
        for fqn, tensor in ((fqn, found.state_dict_metadata[fqn]) for fqn in targets)
        if isinstance(tensor, metadata.TensorStorageMetadata)
        for chunk in tensor.chunks
    }

    def place(item: ReadItem) -> tuple[str, int]:
        info = found.storage_data[item.storage_index]
        return info.relative_path, info.offset

    with torch.no_grad():
        planner.set_up_planner(targets, found, False)
        items = sorted(planner.create_local_plan().items, key=place)
        for name, in_file in groupby(items, lambda item: place(item)[0]):
            with _opened(folder / name) as file:
                for item in in_file:
                    info = found.storage_data[item.storage_index]
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, _content(file, info.offset, info.length))
                        continue
                    target = planner.resolve_tensor(item).detach()
                    _read(file, info, item, boxes[item.storage_index], target)
                    advance(target.nbytes)


class _Planner(default_planner.DefaultLoadPlanner):
    """Plans what this rank reads, and unpickles no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, map_location="cpu", weights_only=True)
        self.state_dict[read_item.dest_index.fqn] = content


def _read(
    file: io.BufferedReader,
    info: Any,
    item: ReadItem,
    box: tuple[tuple[int, ...], torch.dtype],
    target: Tensor,
) -> None:
    """Read a part of a saved box into ``target``."""
    shape, dtype = box
    start = _run(shape, item.storage_offsets, item.lengths)
    head = b"" if start is None else _envelope(shape, dtype)[0]
    if start is not None and _content(file, info.offset, len(head)).getbuffer() == head:
        place = Place(file.name, info.offset + len(head), dtype, shape)
        part = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        read_range(file.fileno(), place, part.view(-1), range(len(shape)), start)
    else:
        data = _content(file, info.offset, info.length)
        part = torch.load(data, map_location="cpu", weights_only=True)
        for dim, offset in enumerate(item.storage_offsets):
            part = part.narrow(dim, offset, item.lengths[dim])
    if part is not target:
        target.copy_(part)


def _opened(path: Path) -> io.BufferedReader:
    """The file, of which the system reads ahead more than it would unasked."""
    file = open(path, "rb")
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file


def _run(box: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Where a part of a box begins in its row-major elements; None if it has gaps."""
    start = 0
    is_one = True  # whether the part has one index in each dimension so far
    for size, offset, length in zip(box, offsets, lengths, strict=True):
        if not is_one and length != size:
            return None
        is_one = is_one and length == 1
        start = start * size + offset
    return start


def _content(file: io.BufferedReader, offset: int, length: int) -> io.BytesIO:
    """Bytes of a file, in memory.

    Raises:
        ValueError: the file ends before.
    """
    file.seek(offset)
    data = file.read(length)
    if len(data) < length:
        raise ValueError(f"{file.name} ends early: it is truncated")
    return io.BytesIO(data)


def check_sum(folder: Path, marker: Marker, name: str, advance: Advance) -> None:
    """Raise ValueError if a file is not what was written."""
    buffer, found, length = memoryview(bytearray(_PIECE // 8)), 0, 0
    with _opened(folder / name) as file:
        while count := file.readinto(buffer):
            found, length = zlib.crc32(buffer[:count], found), length + count
            advance(count)
    expected = marker.files[name]
    if (length, found) != (expected.bytes, expected.crc32):
        raise ValueError(
            f"{folder / name} is corrupted: expected CRC-32 {expected.crc32:08x} of "
            f"{expected.bytes} bytes, got {found:08x} of {length}. Load another checkpoint."
        )
