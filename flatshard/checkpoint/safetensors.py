"""The safetensors format: a JSON header and the tensors' bytes, and the index of several files.

A file is written under a temporary name in the same folder, and renamed when all bytes are on the
disk. So a reader finds either the old file or the new file.

[Note: ranges of a tensor]
In a file, a tensor lies row by row. In memory, the dimensions of a parameter may have another order
(channels_last). A range of the parameter in memory is then cut into boxes, and each box into pieces
that are contiguous in the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.checkpoint.folder import sync
from flatshard.units.layout import boxes_of, strides_of

_WORDS = """F64 float64 F32 float32 F16 float16 BF16 bfloat16 C64 complex64 BOOL bool
I64 int64 I32 int32 I16 int16 I8 int8 U64 uint64 U32 uint32 U16 uint16 U8 uint8 F8_E4M3
float8_e4m3fn F8_E5M2 float8_e5m2 F8_E4M3FNUZ float8_e4m3fnuz F8_E5M2FNUZ float8_e5m2fnuz""".split()
DTYPES = {
    name: getattr(torch, dtype) for name, dtype in zip(_WORDS[::2], _WORDS[1::2], strict=True)
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # limit in the safetensors format
_NAME, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

# Size of the buffer for elements that are cast, copied to another device, or reordered.
PIECE_BYTES = 16 << 20


class Place(NamedTuple):
    """The place of a tensor in a file, which stores the tensor row by row."""

    path: str
    offset: int  # position of the tensor's first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# ---------------------------------------------------------------- writing


@dataclass
class Plan:
    """Files to write, and the place of each tensor in the files."""

    folder: Path
    headers: dict[str, bytes] = field(default_factory=dict)  # keyed by file name

    # Place of each tensor in the temporary files, keyed by the tensor's name.
    places: dict[str, Place] = field(default_factory=dict)
    index: str = ""  # text of the index; empty for a single file
    replaces: str = ""  # regular expression for files that `commit` deletes

    def temporary(self, name: str) -> Path:
        """Return the temporary path of a file, which is the same on all ranks."""
        return self.folder / f"{name}.incomplete"

    def add(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        entries: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        # Largest elements first: then each tensor is aligned for its dtype, so a reader can map it.
        for key in sorted(tensors, key=lambda key: -tensors[key].itemsize):
            start, end = end, end + tensors[key].nbytes
            dtype, shape = _DTYPE_NAMES[tensors[key].dtype], list(tensors[key].shape)
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.headers[name] = len(text).to_bytes(8, "little") + text
        self.places |= _places_in(str(self.temporary(name)), len(text), entries)

    def create(self) -> None:
        """Make the temporary files with their headers, and reserve room for all bytes.

        Raises:
            OSError: the disk is full, or permission is missing.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        ends = {place.path: place.offset + place.nbytes for place in self.places.values()}
        for name, header in self.headers.items():
            with open(self.temporary(name), "wb") as file:
                end = max(ends.get(file.name, 0), len(header))
                try:
                    # Reserve all bytes now, so that a full disk raises before tensors are written.
                    os.posix_fallocate(file.fileno(), 0, end)
                except OSError as error:
                    what = f"{error.strerror}, for {end:,} bytes"
                    raise OSError(error.errno, what, file.name) from error
                file.write(header)

    def commit(self) -> None:
        """Rename the temporary files to their final names, and delete files that they replace.

        All bytes must already be on the disk.

        Raises:
            OSError: a file cannot be renamed or deleted.
        """
        index = self.folder / _INDEX
        if self.index:
            self.temporary(_INDEX).write_text(self.index)
            # Delete the old index before any file is replaced: otherwise the index would list files
            # of two models.
            index.unlink(missing_ok=True)
        for name in self.headers:
            self.temporary(name).replace(self.folder / name)
        if self.index:
            self.temporary(_INDEX).replace(index)
        for old in self.folder.iterdir():
            if re.fullmatch(self.replaces, old.name) and old.name not in self.headers:
                old.unlink()
        sync(self.folder)

    def discard(self) -> None:
        for name in self.headers:
            with contextlib.suppress(OSError):
                self.temporary(name).unlink()


def as_saved(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor on the meta device, with the shape and dtype of ``value`` in the file."""
    is_cast = dtype is not None and value.is_floating_point()
    return torch.empty(value.shape, dtype=dtype if is_cast else value.dtype, device="meta")


def plan_files(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan one file if ``path`` ends with ``.safetensors``, otherwise files in a folder ``path``.

    The plan depends only on names, dtypes and shapes, so it is the same on all ranks. Names of
    files and the index follow huggingface_hub.

    Raises:
        ValueError: safetensors lacks a dtype, ``max_shard_size`` or ``metadata`` is invalid, or
            ``max_shard_size`` is given for a single file.
    """
    path = Path(path).absolute()
    is_file = path.suffix == ".safetensors"
    if is_file and max_shard_size is not None:
        text = f"max_shard_size makes several files, but {path} is one file. Pass a folder."
        raise ValueError(text)
    unknown = [
        f"{n!r} ({one.dtype})" for n, one in tensors.items() if one.dtype not in _DTYPE_NAMES
    ]
    if unknown:
        raise ValueError(f"safetensors has no dtype for {', '.join(unknown)}. Cast these tensors.")
    metadata = {"format": "pt", **(metadata or {})}
    if not all(isinstance(one, str) for pair in metadata.items() for one in pair):
        raise ValueError(f"metadata: expected a dict of strings to strings, got {metadata!r}.")
    if is_file:
        plan = Plan(path.parent)
        plan.add(path.name, tensors, metadata)
        return plan
    groups: list[dict[str, Tensor]] = [{}]
    limit, filled = _read_size(max_shard_size), 0
    for name, one in tensors.items():
        if groups[-1] and filled + one.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = one
        filled += one.nbytes
    plan = Plan(path, replaces=r"model(-\d{5}-of-\d{5})?\.safetensors")
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        suffix = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        plan.add(f"model{suffix}.safetensors", group, metadata)
        weight_map |= dict.fromkeys(group, f"model{suffix}.safetensors")
    if len(groups) > 1:
        size = {"total_size": sum(one.nbytes for one in tensors.values())}
        plan.index = json.dumps({"metadata": size, "weight_map": weight_map}, indent=2)
    else:
        plan.replaces += r"|model\.safetensors\.index\.json"
    return plan


def _read_size(size: int | str | None) -> float:
    """Convert a number or a text such as "5GB" to bytes; None means no limit. Raises ValueError."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?B)?", str(size).strip().upper())
    with contextlib.suppress(ValueError):
        if size is None or (found and float(found[1]) > 0):
            return float(found[1]) * _UNITS[found[2] or "B"] if found else float("inf")
    raise ValueError(f'max_shard_size: expected bytes or a size such as "5GB", got {size!r}.')


# ---------------------------------------------------------------- reading


class Found(NamedTuple):
    """The place of each tensor in a file, or in all files of an index, and the files' metadata."""

    places: dict[str, Place]
    metadata: dict[str, str]


def find_tensors(path: str | os.PathLike[str]) -> Found:
    """Find the tensors in a file, in the files of an index, or in a folder. Reads only headers.

    Raises:
        ValueError: ``path`` has no safetensors files, or a file is truncated, corrupt or missing.
        OSError: a file cannot be read.
    """
    path = Path(path).absolute()
    if path.is_dir():
        path = _main_file(path)
    if path.suffix != ".json":
        return _read_header(path)
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
        files = {name: _read_header(path.parent / name) for name in set(weight_map.values())}
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not an index of safetensors files: expected JSON with a 'weight_map'. Pass "
            "the folder of the files, or one .safetensors file."
        ) from error
    found = Found({}, {})
    for name, file in weight_map.items():
        if name not in files[file].places:
            remedy = "Save or copy all files of the folder again."
            raise ValueError(f"{path} lists {name!r} in {file}, which has no such tensor. {remedy}")
        found.places[name] = files[file].places[name]
        found.metadata.update(files[file].metadata)
    return found


def _main_file(folder: Path) -> Path:
    for pattern in (_NAME, "*.safetensors.index.json", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(one.name for one in files[:5])
            raise ValueError(f"{folder} has several files ({names}) but no index. Pass one file.")
    raise ValueError(f"{folder}: there is no safetensors file in this folder. Check the path.")


def _read_header(path: Path) -> Found:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file. Check the path.")
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(nbytes - 8, _MAX_HEADER_BYTES) else b""
    try:
        if not text:
            raise ValueError(f"a header of {length} bytes in a file of {nbytes} bytes is not valid")
        entries = json.loads(text)
        metadata = dict(entries.get("__metadata__", {}))
        places = _places_in(str(path), length, entries)
        end = 8 + length
        for name, place in sorted(places.items(), key=lambda item: item[1].offset):
            if place.offset != end:
                raise ValueError(f"{name!r} begins at byte {place.offset}, expected {end}")
            end += place.nbytes
        if nbytes != end:
            raise ValueError(f"expected {end} bytes, got {nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({type(error).__name__}: {error}). Copy or "
            "save the file again."
        ) from error
    return Found(places, metadata)


def _places_in(path: str, header_bytes: int, entries: Mapping[str, Any]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            places[name] = place = Place(path, 8 + header_bytes + low, dtype, shape)
            if min(shape, default=0) < 0 or place.nbytes != high - low:
                text = f"{name!r} has {high - low} bytes, which do not fit shape {shape}, {dtype}"
                raise ValueError(text)
    return places


# ---------------------------------------------------------------- ranges of tensors


def _pieces(
    place: Place, order: Sequence[int], start: int, part: Tensor
) -> Iterator[tuple[Tensor, int]]:
    """Cut ``part``, a range of a tensor's elements, into views that are contiguous in the file.

    ``part`` begins with element ``start`` of the tensor in memory order. Yields each view, with its
    dimensions in the file's order, and the index that the view's first element has in the file.
    """
    shape, end, num_dims = place.shape, start + part.numel(), len(place.shape)
    strides = strides_of(shape, range(num_dims))
    in_file = sorted(range(num_dims), key=order.__getitem__)
    # If the orders in memory and in the file differ, cut only between rows (all elements with one
    # index in memory's outermost dimension): part of a row would be scattered over the file.
    row = 1 if sorted(order) == list(order) else math.prod(shape[d] for d in order[1:])
    piece = max(1, PIECE_BYTES // place.dtype.itemsize // max(1, row)) * max(1, row)
    cuts = [start, *range((start // piece + 1) * piece, end, piece), end]
    for low, high in itertools.pairwise(cuts):
        for box in boxes_of(shape, low, high, order):
            sizes = [box.sizes[d] for d in order]
            values = part[low - start + box.position :][: box.numel].view(sizes).permute(in_file)
            # After `split`, the box is as large as the tensor, so its elements from there on are
            # contiguous in the file.
            split = max((d for d in range(num_dims) if box.sizes[d] != shape[d]), default=0)
            for steps in itertools.product(*map(range, box.sizes[:split])):
                at = map(operator.add, box.offsets, (*steps, *[0] * num_dims))
                yield values[steps], sum(map(operator.mul, at, strides))


def write_range(file: int, place: Place, part: Tensor, order: Sequence[int], start: int) -> None:
    """Write a range of a tensor's elements into a file, cast to the dtype of ``place``.

    Args:
        file: descriptor of a file that is open for writing.
        place: the place of the tensor in the file.
        part: the elements to write, 1-D, in memory order.
        order: the tensor's dimensions in memory, outermost first.
        start: index of the first element of ``part`` among all elements in memory order.
    """
    for values, first in _pieces(place, order, start, part):
        source = values.to(place.dtype).cpu().contiguous()
        _move(source, first, place, lambda data, at: os.pwrite(file, data, at))


def write_whole(plan: Plan, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write full tensors, by name. Reads all ``tensors``, also after an error.

    Raises:
        OSError: a file cannot be written.
    """
    problem: OSError | None = None
    with OpenFiles(os.O_WRONLY) as files:
        for name, tensor in tensors:
            place = plan.places[name]
            try:
                if problem is None:
                    flat, order = tensor.reshape(-1), range(tensor.dim())
                    write_range(files[place.path], place, flat, order, 0)
            except OSError as error:  # raised at the end: other ranks may wait for the next tensors
                problem = error
        files.sync()
        if problem is not None:
            raise problem


def read_range(file: int, place: Place, part: Tensor, order: Sequence[int], start: int) -> None:
    """Overwrite ``part`` with the values in the file, cast to the dtype of ``part``.

    The arguments are those of ``write_range``, with a file that is open for reading.

    Raises:
        ValueError: the file ends before the last value.
    """
    for values, first in _pieces(place, order, start, part):
        is_there = values.is_contiguous() and values.is_cpu and values.dtype == place.dtype
        target = values if is_there else torch.empty(values.shape, dtype=place.dtype)
        _move(target, first, place, lambda data, at: os.preadv(file, [data], at))
        if target is not values:
            values.copy_(target)


def _move(values: Tensor, first: int, place: Place, move: Callable[[memoryview, int], int]) -> None:
    """Write all of ``values`` into the file, or overwrite all of them with the file's values.

    ``first``: index of the first element in the file's tensor. ``move`` writes or reads bytes at a
    position in the file, and returns their number. It is called until no bytes are left.
    """
    at = place.offset + first * place.dtype.itemsize
    # A view of the tensor's bytes, without a copy. Numpy may not be installed.
    array = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    left = memoryview(array).cast("B")
    while left:
        count = move(left, at)
        if not count:
            raise ValueError(
                f"{place.path} became shorter while it was read: it now ends at byte {at}. "
                "Restore the file, and do not write to it during a load."
            )
        left, at = left[count:], at + count


class OpenFiles:
    """Open files, keyed by path. A file is opened at its first use, with the flags of os.open."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._files: dict[str, int] = {}
        self._used = ""  # the most recently used path

    def __getitem__(self, path: str) -> int:
        self._used = path
        if path not in self._files:
            self._files[path] = os.open(path, self._flags)
        return self._files[path]

    def sync(self) -> None:
        """Wait until all written bytes are on the disk. Raises OSError."""
        for path in self._files:
            os.fsync(self[path])

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        for file in self._files.values():
            os.close(file)
        # Reads and writes of a descriptor raise errors without the path.
        if isinstance(error, OSError):
            error.filename = error.filename or self._used
