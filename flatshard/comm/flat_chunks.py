"""``FlatChunks``: values of a flat parameter, scattered over several tensors.

Gradients can be averaged from the tensors in which autograd made them: copying them to one buffer
first costs as much time as a fast network needs to send them. ``ChunkPlan`` decides which small
ones are copied together all the same.

Sums over ranks are made here too, in rank order and in no less than fp32: they are the same in
every run and on every transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.plan.layout import FlatLayout


class Chunk(NamedTuple):
    """Elements of one part."""

    part: int  # its number
    offset: int  # where they begin in it
    start: int  # where they begin and end in the flat parameter
    end: int
    values: Tensor | None  # None: zeros


@dataclass(frozen=True)
class FlatChunks:
    """Values over the full length of a flat parameter, gradients for example, on each rank."""

    parts: Sequence[Tensor | None]  # (end - start,) each, contiguous, of one dtype; None: zeros
    ranges: Sequence[tuple[int, int]]  # their [start, end); ascending, the same on all ranks
    numel: int  # of all, padding included
    dtype: torch.dtype

    @classmethod
    def of(cls, buffer: Tensor) -> FlatChunks:
        """One piece of memory, ``(numel,)``."""
        return cls([buffer], [(0, buffer.numel())], buffer.numel(), buffer.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """The parts that are not zeros."""
        return [part for part in self.parts if part is not None]

    def cut(self, begin: int, end: int, numel: int | None = None) -> Iterator[Chunk]:
        """What there is in ``[begin, end)``, at most ``numel`` elements at a time."""
        for index, (first, last) in enumerate(self.ranges):
            start, stop = max(first, begin), min(last, end)
            part = self.parts[index]
            step = numel or max(stop - start, 1)
            for at in range(start, stop, step):
                until = min(at + step, stop)
                values = None if part is None else part[at - first : until - first]
                yield Chunk(index, at - first, at, until, values)


class ChunkPlan:
    """Which gradients share a part of a ``FlatChunks``.

    Those of ``min_bytes`` or more are a part each, without a copy; small neighbours are copied
    into one.
    """

    def __init__(self, layout: FlatLayout, min_bytes: int, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._runs: list[list[int]] = []
        # Ranges depend on the layout alone, not on which gradients exist: the same on all ranks.
        joins = False
        for index, span in enumerate(layout.spans):
            is_small = (span.end - span.start) * dtype.itemsize < min_bytes
            if joins and is_small:
                self._runs[-1].append(index)
            else:
                self._runs.append([index])
            joins = is_small

    def chunks(self, gradients: dict[int, Tensor]) -> FlatChunks:
        """Take gradients by original parameter, in memory order, any dtype; others are zero."""
        spans = self._layout.spans
        ranges = [(spans[run[0]].start, spans[run[-1]].end) for run in self._runs]
        parts = [self._part(run, gradients) for run in self._runs]
        return FlatChunks(parts, ranges, self._layout.padded_numel, self._dtype)

    def _part(self, run: list[int], gradients: dict[int, Tensor]) -> Tensor | None:
        there = [index for index in run if index in gradients]
        if not there:
            return None
        if len(run) == 1:
            return gradients.pop(run[0]).to(self._dtype)  # no copy if it has that dtype
        spans, device = self._layout.spans, gradients[there[0]].device
        first = spans[run[0]].start
        part = torch.zeros(spans[run[-1]].end - first, dtype=self._dtype, device=device)
        places = [part[spans[i].start - first : spans[i].end - first] for i in there]
        torch._foreach_copy_(places, [gradients[index] for index in there])
        return part


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values that come in ``dtype`` are added up."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def average(rows: Sequence[Tensor], out: Tensor) -> None:
    """Fill ``out``, in the dtype to add in, with the average of each rank's row, in rank order."""
    # One after the other: a kernel's own sum over ranks would choose an order by the sizes.
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    divide(out, len(rows), out)


def divide(total: Tensor, number: int, out: Tensor) -> None:
    """Fill ``out`` with ``total / number``, elements of the same dtype; may be the same tensor."""
    if number & (number - 1) == 0 and not total.is_complex():
        # To the bit the same for a power of two, in half the time.
        torch.mul(total, 1 / number, out=out)
    else:
        torch.div(total, number, out=out)


def as_real(tensor: Tensor) -> Tensor:
    """The same memory without complex numbers, which not every backend knows."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, ``(nbytes,)`` uint8."""
    return tensor.view(-1).view(torch.uint8)
