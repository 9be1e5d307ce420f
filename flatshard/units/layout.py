"""``FlatLayout``: where each original parameter is in a flat parameter, and which ranks store it.

The layout depends only on shapes, memory orders, alignment and world size. So every rank knows
without communication which rank stores an element.

The elements of a parameter stay in memory order, so a view of the parameter's range has the same
strides as the unwrapped parameter (channels_last, for example). ``start``, ``end`` and ``offset``
count elements in memory order. In this example, ``.`` is padding:

    a:(2,3) b:(5,) on 2 ranks, alignment 1 -> numel 11, padded_numel 12, shard_numel 6
      rank 0 |a a a a a a|   rank 1 |b b b b b .|

torch's distributed checkpoints consist of n-D boxes (rectangular blocks). ``boxes_of`` divides a
range of a parameter's elements into boxes:

    shape (4, 3), elements [2, 11):    . . 1     box 1: offsets (0, 2), sizes (1, 1)
                                       2 2 2     box 2: offsets (1, 0), sizes (2, 3)
                                       2 2 2
                                       3 3 .     box 3: offsets (3, 0), sizes (1, 2)
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16  # alignment of original parameters and shards in a flat parameter
# Large shards fill whole memory pages, so that shared memory or a file can be mapped as a shard.
PAGE_BYTES = max(mmap.PAGESIZE, 4096)
PAGED_BYTES = 1 << 20  # minimum size of a shard that fills whole pages


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor, from the outermost in memory to the innermost."""
    # If dimensions of a dense tensor have equal strides, at most one of the sizes is larger than 1.
    # Put dimensions of size 1 further in, so that `strides_of(order)` returns the tensor's strides.
    shape, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -max(shape[d], 1)))
    dense = strides_of(shape, order)
    if all(shape[d] == 1 or strides[d] == dense[d] for d in order):
        return tuple(order)
    # The tensor overlaps itself or has gaps: use the order of a contiguous tensor.
    return tuple(range(len(shape)))


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor whose memory order is ``order``."""
    strides = [0] * len(shape)
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


@dataclass(frozen=True)
class ParamSpan:
    """An original parameter, and its half-open range ``[start, end)`` in the flat parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    order: tuple[int, ...]  # dimensions of the parameter in memory, see `memory_order`

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides, in elements, of the parameter as a view of the flat parameter."""
        return strides_of(self.shape, self.order)

    @property
    def is_contiguous(self) -> bool:
        return self.order == tuple(range(len(self.shape)))

    @cached_property
    def numel(self) -> int:
        return self.end - self.start


class LocalSpan(NamedTuple):
    """The part of an original parameter that is in one rank's shard. The part may be empty."""

    start: int  # index of the part's first element in the shard
    numel: int
    offset: int  # index of the same element in the parameter, in memory order


def view_of(flat: Tensor, span: ParamSpan) -> Tensor:
    """Return the parameter at ``span`` as a view of ``flat``, an unsharded buffer."""
    return flat.as_strided(span.shape, span.strides, flat.storage_offset() + span.start)


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as real numbers: some backends do not support complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, ``(nbytes,)``, dtype uint8."""
    return tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class FlatLayout:
    """Positions of the original parameters, padding and shards of one flat parameter."""

    spans: tuple[ParamSpan, ...]  # in ascending order and disjoint; each start is aligned
    world_size: int  # number of ranks that share the flat parameter
    shard_numel: int  # elements per rank, padding included

    @classmethod
    def build(cls, params: Mapping[str, Tensor], *, world_size: int, itemsize: int) -> Self:
        align = max(1, ALIGNMENT_BYTES // itemsize)
        spans: list[ParamSpan] = []
        end = 0
        for name, param in params.items():
            start = round_up(end, align)
            end = start + param.numel()
            spans.append(ParamSpan(name, tuple(param.shape), start, end, memory_order(param)))
        length = round_up if world_size == 1 else partial(shard_length, itemsize=itemsize)
        return cls(tuple(spans), world_size, length(-(-end // world_size), align))

    @cached_property
    def numel(self) -> int:
        """Number of elements of all original parameters, without padding."""
        return sum(span.numel for span in self.spans)

    @cached_property
    def padded_numel(self) -> int:
        """Number of elements of the unsharded buffer, with padding."""
        return self.shard_numel * self.world_size

    @property
    def padding_numel(self) -> int:
        return self.padded_numel - self.numel

    @cached_property
    def gaps(self) -> tuple[tuple[int, int, int], ...]:
        """Ranges of padding, in ascending order: the index of the next parameter, start, end."""
        starts = [0, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), self.padded_numel]
        return tuple((i, start, ends[i]) for i, start in enumerate(starts) if start < ends[i])

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the flat parameter that ``rank`` stores."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local_span(self, index: int, rank: int) -> LocalSpan:
        """Return the part of original parameter ``index`` that is in the shard of ``rank``."""
        span = self.spans[index]
        begin, stop = self.shard_range(rank)
        start = min(max(span.start, begin), stop)
        end = max(min(span.end, stop), start)
        offset = min(max(start - span.start, 0), span.numel)
        return LocalSpan(start - begin, end - start, offset)

    def division(self, index: int) -> tuple[int, int, int]:
        """Return numbers that describe how parameter ``index`` is divided into shards.

        The numbers are: the index of the first shard that has elements of the parameter, and how
        many elements this shard and the next shard have. If the numbers of two parameters of equal
        size are equal, both are divided in the same way.
        """
        start, numel = self.spans[index].start, self.spans[index].numel
        first = min(self.shard_numel - start % self.shard_numel, numel) if numel else 0
        return start // max(self.shard_numel, 1), first, min(self.shard_numel, numel - first)

    def holders(self, index: int, ranks: Sequence[int]) -> list[tuple[int, slice]]:
        """Return (rank, slice) for each part of parameter ``index``. ``ranks[i]`` has shard i."""
        start, end, numel = self.spans[index].start, self.spans[index].end, self.shard_numel
        shards = range(start // numel, -(-end // numel)) if start < end else ()
        begins = ((i, i * numel - start) for i in shards)
        return [(ranks[i], slice(max(b, 0), min(b + numel, end - start))) for i, b in begins]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def shard_length(numel: int, multiple: int, *, itemsize: int) -> int:
    """Return the length of a shard: ``numel``, rounded up for alignment, and to whole pages."""
    numel = round_up(numel, multiple)
    is_paged = numel * itemsize >= PAGED_BYTES
    return round_up(numel, math.lcm(multiple, PAGE_BYTES // itemsize)) if is_paged else numel


# ------------------------------------------------------------ a range as boxes


class Box(NamedTuple):
    """A rectangular part of an n-D tensor. All sizes are at least 1."""

    offsets: tuple[int, ...]  # index of the first element of the box in the tensor, per dimension
    sizes: tuple[int, ...]
    position: int  # index of the first element in the range that was cut into boxes

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int, order: Sequence[int]) -> Iterator[Box]:
    """Split the elements ``[start, stop)`` of an n-D tensor into at most ``2n - 1`` boxes.

    ``order``: dimensions from the outermost in memory to the innermost.
    """
    strides, at = strides_of(shape, order), start
    while at < stop:
        # Find the largest box that begins at element `at`, from the innermost dimension outwards.
        sizes, numel = [1] * len(shape), 1
        for d in reversed(order):
            # If dimension `d` begins at `at` and fits, take all of it. Otherwise take a part: done.
            if at % (numel * shape[d]) == 0 and at + numel * shape[d] <= stop:
                sizes[d], numel = shape[d], numel * shape[d]
                continue
            sizes[d] = min(shape[d] - at // numel % shape[d], (stop - at) // numel)
            numel *= sizes[d]
            break
        offsets = tuple(at // strides[d] % shape[d] for d in range(len(shape)))
        yield Box(offsets, tuple(sizes), at - start)
        at += numel
