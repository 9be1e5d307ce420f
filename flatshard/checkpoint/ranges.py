"""Reads and writes ranges of a tensor's elements in a file.

In a file, a tensor lies row by row. In memory, the dimensions of a parameter may have another order
(channels_last). A range of the parameter in memory is then cut into boxes, and each box into pieces
that are contiguous in the file.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.units.layout import boxes_of, strides_of

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


def _pieces(
    place: Place, order: Sequence[int], start: int, part: Tensor
) -> Iterator[tuple[Tensor, int]]:
    """Cut ``part``, a range of a tensor's elements, into views that are contiguous in the file.

    ``part`` begins with element ``start`` of the tensor in memory order. Yields each view, with its
    dimensions in the file's order, and the index that the view's first element has in the file.
    """
    shape, end, num_dims = place.shape, start + part.numel(), len(place.shape)
    strides, in_file = (
        strides_of(shape, range(num_dims)),
        sorted(range(num_dims), key=order.__getitem__),
    )
    # A row has all elements with the same index in the outermost dimension of memory. If the memory
    # order differs from the order in the file, cut only between rows: a part of a row would be
    # scattered over many small places in the file.
    row = 1 if sorted(order) == list(order) else math.prod(shape[d] for d in order[1:])
    piece = max(1, PIECE_BYTES // place.dtype.itemsize // max(1, row)) * max(1, row)
    cuts = [start, *range((start // piece + 1) * piece, end, piece), end]
    for low, high in itertools.pairwise(cuts):
        for box in boxes_of(shape, low, high, order):
            sizes = [box.sizes[d] for d in order]
            values = part[low - start + box.position :][: box.numel].view(sizes).permute(in_file)
            # In the dimensions after `split`, the box has the full size of the tensor. So its
            # elements along `split` and all later dimensions are contiguous in the file.
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

    ``first`` is the index, in the file's tensor, of the first element of ``values``. ``move``
    writes or reads bytes at a position in the file, and returns the number of bytes. ``move`` is
    called until no bytes are left.
    """
    at, left = place.offset + first * place.dtype.itemsize, bytes_of(values)
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
        # Add the path to the error: reads and writes use the descriptor of an open file, so the
        # error does not know the path.
        if isinstance(error, OSError):
            error.filename = error.filename or self._used


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, without a copy. Numpy may not be installed."""
    array = ctypes.c_char * tensor.nbytes
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")
