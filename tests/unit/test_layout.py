"""The flat layout, as properties over arbitrary shapes, world sizes and element sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatshard.layout import ALIGNMENT_BYTES, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=8)
WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def _layout(shapes: list[tuple[int, ...]], world_size: int, itemsize: int) -> FlatLayout:
    named = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return FlatLayout.build(named, world_size=world_size, itemsize=itemsize)


@given(SHAPES, WORLDS, ITEMSIZES)
def test_every_element_has_one_owner(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int
) -> None:
    layout = _layout(shapes, world_size, itemsize)
    for index, shape in enumerate(shapes):
        held: list[int] = []
        for rank in range(world_size):
            local = layout.local_span(index, rank)
            assert 0 <= local.start <= local.end <= layout.shard_numel
            held.extend(range(local.offset, local.offset + local.numel))
            # The two ways to find an element agree.
            begin, _ = layout.shard_range(rank)
            if local.numel:
                assert begin + local.start == layout.spans[index].start + local.offset
        assert held == list(range(math.prod(shape)))


@given(SHAPES, WORLDS, ITEMSIZES)
def test_gaps_and_parameters_fill_the_space(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int
) -> None:
    layout = _layout(shapes, world_size, itemsize)
    ranges = [(span.start, span.end) for span in layout.spans if span.numel]
    position = 0
    for start, end in sorted([*ranges, *layout.gaps]):
        assert start == position
        position = end
    assert position == layout.padded_numel
    assert layout.numel + layout.padding_numel == layout.padded_numel
    assert layout.numel == sum(math.prod(shape) for shape in shapes)


@given(SHAPES, WORLDS, ITEMSIZES)
def test_alignment_and_bounded_padding(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int
) -> None:
    layout = _layout(shapes, world_size, itemsize)
    starts = [span.start for span in layout.spans] + [layout.shard_numel]
    assert all(start * itemsize % ALIGNMENT_BYTES == 0 for start in starts)
    align = max(1, ALIGNMENT_BYTES // itemsize)
    assert layout.padding_numel < align * (len(shapes) + world_size) + world_size


@given(SHAPES, WORLDS, ITEMSIZES)
def test_pure(shapes: list[tuple[int, ...]], world_size: int, itemsize: int) -> None:
    assert _layout(shapes, world_size, itemsize) == _layout(shapes, world_size, itemsize)


def test_one_parameter_over_three_ranks() -> None:
    layout = _layout([(10,)], 3, 16)
    pieces = [layout.local_span(0, rank) for rank in range(3)]
    assert [(p.start, p.end, p.offset) for p in pieces] == [(0, 4, 0), (0, 4, 4), (0, 2, 8)]


def test_fewer_elements_than_ranks() -> None:
    layout = _layout([(), (1,)], 4, 16)
    assert [[layout.local_span(i, r).numel for r in range(4)] for i in range(2)] == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
    ]


def test_nothing_at_all() -> None:
    layout = _layout([], 4, 4)
    assert (layout.numel, layout.padded_numel, layout.gaps) == (0, 0, ())


@pytest.mark.parametrize(("world_size", "itemsize"), [(0, 4), (1, 0), (-1, 4)])
def test_bad_sizes(world_size: int, itemsize: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _layout([(1,)], world_size, itemsize)
