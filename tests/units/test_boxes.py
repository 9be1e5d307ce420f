"""Ranges of elements as boxes: each element once, in order, whatever the shape and memory order."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from flatshard.units.layout import boxes_of, strides_of

SHAPES = st.lists(st.integers(0, 5), max_size=4).flatmap(
    lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
)


@given(SHAPES, st.integers(0, 700), st.integers(0, 700))
def test_each_element_once(
    shape_and_order: tuple[tuple[int, ...], list[int]], start: int, length: int
) -> None:
    shape, order = shape_and_order
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
