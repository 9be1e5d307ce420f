"""Ranges of tensors in files: which bytes hold them, and how these are read and written in place.

Files hold tensors row by row. A parameter may lie in another memory order (channels_last): then a
range of it is cut into boxes, and every box into runs that are contiguous in the file.

``Progress`` shows how far reading or writing has come.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import logging
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatshard.plan.layout import Box, boxes_of, strides_of

logger = logging.getLogger("flatshard.checkpoint")

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


def _slabs(place: Place, order: Sequence[int], start: int, part: Tensor) -> Iterator[_Slab]:
    """Cut ``part``, the elements from ``start`` on in memory order, into slabs."""
    shape, end, piece_numel = place.shape, start + part.numel(), PIECE_BYTES // place.dtype.itemsize
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
    for slab in _slabs(place, order, start, part):
        values = slab.in_file_order(part).to(place.dtype).cpu().contiguous()
        _move(values, slab, place, lambda data, at: os.pwrite(file, data, at))


def read_range(file: int, place: Place, part: Tensor, order: Sequence[int], start: int) -> None:
    """Overwrite ``part``, as ``write_range`` has it, with what the file holds, cast to its dtype.

    Raises:
        ValueError: the file ends before.
    """
    for slab in _slabs(place, order, start, part):
        target = slab.in_file_order(part)
        is_there = target.is_contiguous() and target.is_cpu and target.dtype == place.dtype
        values = target if is_there else torch.empty(target.shape, dtype=place.dtype)
        _move(values, slab, place, lambda data, at: os.preadv(file, [data], at))
        if values is not target:
            target.copy_(values)


def _move(
    values: Tensor, slab: _Slab, place: Place, move: Callable[[memoryview, int], int]
) -> None:
    """Let ``move`` write or read each run of a slab; it returns how many bytes it has moved."""
    size = place.dtype.itemsize
    data, step = bytes_of(values), slab.run_numel * size
    for index, run in enumerate(slab.runs):
        at, left = place.offset + run * size, data[index * step : (index + 1) * step]
        while left:
            count = move(left, at)
            if not count:
                raise ValueError(f"{place.path}: it ends at byte {at}, and was longer before")
            left, at = left[count:], at + count


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


class Progress:
    """In a terminal a bar for what takes seconds, by tqdm; at the end a line in the log."""

    def __init__(self, verb: str, total: int, *, is_shown: bool) -> None:
        self._verb, self._is_shown, self._begun = verb, is_shown, time.monotonic()
        self._bar: Any = None
        # Elsewhere tqdm shows none, but makes a semaphore, which a kill would leave behind.
        if is_shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            make = importlib.import_module("tqdm").tqdm
            options = {"unit": "B", "unit_scale": True, "delay": 2, "leave": False}
            self._bar = make(desc=verb, total=total, **options)

    def advance(self, num_bytes: int) -> None:
        """Count bytes that this rank has written or read."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def end(self, path: object, num_bytes: int) -> None:
        """Say how many bytes all ranks moved, and how fast."""
        if self._bar is not None:
            self._bar.close()
        if self._is_shown:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            said = f"{num_bytes / 1e9:.3f} GB in {seconds:.2f} s, {num_bytes / seconds / 1e9:.2f}"
            logger.info("%s %s: %s GB/s", self._verb, path, said)
