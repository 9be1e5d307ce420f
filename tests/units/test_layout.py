"""The flat layout, as properties over arbitrary shapes, world sizes and element sizes."""

import itertools
import math

import torch
from hypothesis import given, strategies as st

from flatshard.units import layout as layouts
from flatshard.units.layout import FlatLayout, boxes_of, memory_order, strides_of

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=8)
WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
ORDERED = st.lists(st.integers(0, 5), max_size=5).flatmap(
    lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
)
Ordered = tuple[tuple[int, ...], list[int]]
STRIDED = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4)


def _layout(shapes: list[tuple[int, ...]], world_size: int, itemsize: int) -> FlatLayout:
    params = {f"p{index}": torch.empty(shape) for index, shape in enumerate(shapes)}
    return FlatLayout.build(params, world_size=world_size, itemsize=itemsize)


def _strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, device="meta")


@given(SHAPES, WORLDS, ITEMSIZES)
def test_every_element_has_one_owner_and_a_place(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int
) -> None:
    layout = _layout(shapes, world_size, itemsize)
    for index, shape in enumerate(shapes):
        held: list[int] = []
        for rank in range(world_size):
            local = layout.local_span(index, rank)
            assert 0 <= local.start <= local.start + local.numel <= layout.shard_numel
            held.extend(range(local.offset, local.offset + local.numel))
            # The two ways to find an element agree.
            begin, _ = layout.shard_range(rank)
            if local.numel:
                assert begin + local.start == layout.spans[index].start + local.offset
        assert held == list(range(math.prod(shape)))
    # Gaps and parameters fill the space, and padding is bounded.
    ranges = [(span.start, span.end) for span in layout.spans if span.numel]
    position = 0
    for start, end in sorted([*ranges, *(gap[1:] for gap in layout.gaps)]):
        assert start == position
        position = end
    assert position == layout.padded_numel
    assert layout.numel + layout.padding_numel == layout.padded_numel
    assert layout.numel == sum(math.prod(shape) for shape in shapes)
    starts = [span.start for span in layout.spans] + [layout.shard_numel]
    assert all(start * itemsize % layouts.ALIGNMENT_BYTES == 0 for start in starts)
    align = max(1, layouts.ALIGNMENT_BYTES // itemsize)
    assert layout.padding_numel < align * (len(shapes) + world_size) + world_size


def _places(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where the elements of a tensor lie, in the order of its indices."""
    indices = itertools.product(*map(range, shape))
    return [sum(i * step for i, step in zip(index, strides, strict=True)) for index in indices]


@given(ORDERED)
def test_strides_fill_the_range_and_tell_their_order(ordered: Ordered) -> None:
    shape, order = ordered
    strides = strides_of(shape, order)
    assert sorted(_places(shape, strides)) == list(range(math.prod(shape)))
    # Sizes of one leave several orders for the same strides: the strides are what survives.
    found = memory_order(_strided(shape, strides))
    assert strides_of(shape, found) == strides
    if min(shape, default=2) > 1:
        assert found == tuple(order)


@given(STRIDED)
def test_any_strides(strided: list[tuple[int, int]]) -> None:
    """Dense tensors keep their elements' places, all others become contiguous."""
    shape = tuple(size for size, _ in strided)
    strides = tuple(step for _, step in strided)
    order = memory_order(_strided(shape, strides))
    places = _places(shape, strides)
    if places and sorted(places) == list(range(math.prod(shape))):
        assert _places(shape, strides_of(shape, order)) == places
    elif places:
        assert order == tuple(range(len(shape)))


def test_large_shards_fill_pages() -> None:
    numel = (2 << 20) // 4 + 1
    for world_size, whole_pages in ((1, False), (2, True), (4, False)):
        layout = _layout([(numel,)], world_size, 4)
        assert (layout.shard_numel * 4 % layouts.PAGE_BYTES == 0) is whole_pages
        assert layout.padded_numel - numel < world_size * layouts.PAGE_BYTES // 4
    assert _layout([(numel,)], 2, 4).shard_numel * 4 > 1 << 20


@given(ORDERED, st.integers(0, 700), st.integers(0, 700))
def test_boxes_have_each_element_once(ordered: Ordered, start: int, length: int) -> None:
    shape, order = ordered
    start = min(start, math.prod(shape))
    stop = min(start + length, math.prod(shape))
    boxes = list(boxes_of(shape, start, stop, order))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    strides = strides_of(shape, order)
    found = []
    for box in boxes:
        assert all(box.sizes)
        assert box.position == len(found)
        axes = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        places = itertools.product(*axes)
        found += sorted(sum(i * s for i, s in zip(p, strides, strict=True)) for p in places)
    assert found == list(range(start, stop))
