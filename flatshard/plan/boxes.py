"""``boxes_of``: a range of a tensor's elements as n-D boxes, which checkpoints are made of.

shape (4, 3), elements [2, 11):    . . a     a: offsets (0, 2), sizes (1, 1)
                                   b b b     b: offsets (1, 0), sizes (2, 3)
                                   b b b
                                   c c .     c: offsets (3, 0), sizes (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular part of an n-D tensor, none of whose sizes is 0."""

    offsets: tuple[int, ...]  # of its first element, by dimension
    sizes: tuple[int, ...]
    position: int  # of its first element in the range; its elements are neighbours there

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of(
    shape: Sequence[int], start: int, stop: int, order: Sequence[int] | None = None
) -> Iterator[Box]:
    """Split the elements ``[start, stop)`` of a tensor into boxes, at most ``2n - 1`` of them.

    Elements count in memory order: the last dimension of ``order`` varies fastest. Without
    ``order`` that is the last of ``shape``.
    """
    order = range(len(shape)) if order is None else order
    position = 0
    for offsets, sizes in _row_major([shape[dimension] for dimension in order], start, stop):
        by_dimension = {d: (o, s) for d, o, s in zip(order, offsets, sizes, strict=True)}
        places = [by_dimension[dimension] for dimension in range(len(shape))]
        box = Box(tuple(o for o, _ in places), tuple(s for _, s in places), position)
        yield box
        position += box.numel


def _row_major(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    numel = math.prod(inner)
    first, last = -(-start // numel), stop // numel  # the rows that are whole
    if start < min(first * numel, stop):
        yield from _in_row(first - 1, inner, start, min(first * numel, stop))
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if first <= last and last * numel < stop:
        yield from _in_row(last, inner, last * numel, stop)


def _in_row(
    row: int, inner: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(inner)
    for offsets, sizes in _row_major(inner, start - begin, stop - begin):
        yield (row, *offsets), (1, *sizes)
