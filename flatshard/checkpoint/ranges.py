"""Ranges of tensors in files: which bytes hold them, and how these are read and written in place.

Files hold tensors row by row. A parameter may lie in another memory order (channels_last): then a
range of it is cut into boxes, and every box into runs that are contiguous in the file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.plan.boxes import Box, boxes_of
from flatshard.plan.layout import strides_of

# What is cast, copied to another device or put in another order passes a buffer of this size.
PIECE_BYTES = 16 << 20


class Place(NamedTuple):
    """Where a file holds a tensor, row by row."""

    path: str
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Slab(NamedTuple):
    """Elements of a range that are moved at once: a box of the tensor."""

    position: int  # in the range
    sizes: tuple[int, ...]  # of the box, in memory order
    order: tuple[int, ...]
    runs: Sequence[int]  # where the box begins in the file, and where it goes on, in elements
    run_numel: int

    def in_file_order(self, part: Tensor) -> Tensor:
        """The slab of a range ``part``, 1-D, with the dimensions of the file; a view."""
        slab = part[self.position : self.position + math.prod(self.sizes)].view(self.sizes)
        return slab.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def _slabs(
    shape: Sequence[int], order: Sequence[int], start: int, end: int, piece_numel: int
) -> Iterator[_Slab]:
    """Cut the elements ``[start, end)``, counted in memory order, of a tensor into slabs."""
    dimensions = [d for d in order if shape[d] != 1]
    if dimensions == sorted(dimensions):
        for at in range(start, end, piece_numel):
            numel = min(piece_numel, end - at)
            yield _Slab(at - start, (numel,), (0,), (at,), numel)
        return
    row = math.prod(shape[d] for d in order[1:])
    # Cut between rows: a part of a row may be runs of one element each.
    piece = max(1, piece_numel // row) * row
    cuts = [start, *range((start // piece + 1) * piece, end, piece), end]
    for low, high in itertools.pairwise(cuts):
        for box in boxes_of(shape, low, high, order):
            sizes = tuple(box.sizes[d] for d in order)
            yield _Slab(low - start + box.position, sizes, tuple(order), *_runs(shape, box))


def _runs(shape: Sequence[int], box: Box) -> tuple[list[int], int]:
    strides = strides_of(shape, range(len(shape)))
    # The dimensions behind `split` are whole, so that steps in it touch one another.
    split = max((d for d, size in enumerate(shape) if box.sizes[d] != size), default=0)
    first = sum(map(operator.mul, box.offsets, strides))
    steps = [range(0, box.sizes[d] * strides[d], strides[d]) for d in range(split)]
    return [first + sum(at) for at in itertools.product(*steps)], box.sizes[split] * strides[split]


def write_range(file: int, place: Place, part: Tensor, order: Sequence[int], start: int) -> None:
    """Write ``part``, ``(numel,)``: the elements from ``start`` on, in memory order ``order``.

    ``file`` is open for writing. Values are cast to the dtype in the file.
    """
    size = place.dtype.itemsize
    for slab in _slabs(place.shape, order, start, start + part.numel(), PIECE_BYTES // size):
        values = slab.in_file_order(part).to(place.dtype).cpu().contiguous()
        data = bytes_of(values)
        for index, run in enumerate(slab.runs):
            at, step = place.offset + run * size, slab.run_numel * size
            left = data[index * step : (index + 1) * step]
            while left:
                written = os.pwrite(file, left, at)
                left, at = left[written:], at + written


def read_range(file: int, place: Place, part: Tensor, order: Sequence[int], start: int) -> None:
    """Overwrite ``part``, as ``write_range`` has it, with what the file holds, cast to its dtype.

    Raises:
        ValueError: the file ends before.
    """
    size = place.dtype.itemsize
    for slab in _slabs(place.shape, order, start, start + part.numel(), PIECE_BYTES // size):
        target = slab.in_file_order(part)
        fits = target.is_contiguous() and target.device.type == "cpu"
        values = target if fits and target.dtype == place.dtype else None
        if values is None:
            values = torch.empty(target.shape, dtype=place.dtype)
        data = bytes_of(values)
        for index, run in enumerate(slab.runs):
            at, step = place.offset + run * size, slab.run_numel * size
            left = data[index * step : (index + 1) * step]
            while left:
                got = os.preadv(file, [left], at)
                if not got:
                    raise ValueError(f"{place.path}: it ends at byte {at}, and was longer before")
                left, at = left[got:], at + got
        if values is not target:
            target.copy_(values)


class OpenFiles:
    """Files by their paths, opened at the first use, for ``os.O_RDONLY`` or ``os.O_WRONLY``."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._files: dict[str, int] = {}

    def __getitem__(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, self._flags)
        return self._files[path]

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises OSError."""
        for file in self._files.values():
            os.fsync(file)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory; without numpy, which torch may lack."""
    array = ctypes.c_char * tensor.nbytes
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")
