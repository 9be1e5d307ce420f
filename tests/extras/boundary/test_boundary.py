"""Boundaries of a layout, as properties over arbitrary shapes, world sizes and element sizes."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from flatshard.extras import boundary as extra
from flatshard.extras.boundary import Boundary, as_boundary, block_numel, check_padding, move
from flatshard.units.layout import ALIGNMENT_BYTES, FlatLayout, strides_of
from tests.harness import assert_raises

PARAMS = st.lists(
    st.lists(st.integers(0, 9), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
    ),
    max_size=8,
)
WORLDS = st.integers(1, 8)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
BOUNDARIES = st.sampled_from(["element", "row", "tensor"]) | st.integers(2, 40)

Param = tuple[tuple[int, ...], list[int]]


def _plain(params: list[Param], world_size: int, itemsize: int) -> FlatLayout:
    tensors = {
        f"p{index}": torch.empty_strided(shape, strides_of(shape, order), device="meta")
        for index, (shape, order) in enumerate(params)
    }
    return FlatLayout.build(tensors, world_size=world_size, itemsize=itemsize)


def _cuts(layout: FlatLayout, index: int) -> list[int]:
    """After how many of its elements a parameter is cut."""
    locals_ = [layout.local_span(index, rank) for rank in range(layout.world_size)]
    return [local.offset for local in locals_ if local.numel and local.offset]


@given(PARAMS, WORLDS, ITEMSIZES, BOUNDARIES)
def test_every_element_in_one_place_and_no_forbidden_cut(
    params: list[Param], world_size: int, itemsize: int, boundary: Boundary
) -> None:
    plain = _plain(params, world_size, itemsize)
    layout = move(plain, boundary, itemsize)
    assert layout == move(plain, boundary, itemsize)
    assert layout.world_size == world_size
    # The same parameters.
    spans = {span.name: span for span in layout.spans}
    assert len(layout.spans) == len(params)
    for index, (shape, order) in enumerate(params):
        span = spans[f"p{index}"]
        assert (span.shape, span.numel) == (shape, math.prod(shape))
        assert span.strides == strides_of(shape, order)
    # Ascending, disjoint, aligned, and filled up by the gaps.
    position = 0
    filled = [(span.start, span.end) for span in layout.spans if span.numel]
    for start, end in sorted([*filled, *(gap[1:] for gap in layout.gaps)]):
        assert start == position
        position = end
    assert position == layout.padded_numel
    starts = [span.start for span in layout.spans]
    assert starts == sorted(starts)
    assert all(start * itemsize % ALIGNMENT_BYTES == 0 for start in [*starts, layout.shard_numel])
    for index, span in enumerate(layout.spans):
        parts = [layout.local_span(index, rank) for rank in range(world_size)]
        held = [n for part in parts for n in range(part.offset, part.offset + part.numel)]
        assert held == list(range(span.numel))
        block = block_numel(span, boundary)
        assert all(cut % block == 0 for cut in _cuts(layout, index))
        if boundary == "tensor":
            assert not _cuts(layout, index)


@given(PARAMS, WORLDS, ITEMSIZES)
def test_whole_parameters_are_balanced(params: list[Param], world_size: int, itemsize: int) -> None:
    plain = _plain(params, world_size, itemsize)
    layout = move(plain, "tensor", itemsize)
    align = max(1, ALIGNMENT_BYTES // itemsize)
    sizes = [-(-span.numel // align) * align for span in plain.spans]
    # Graham's bound for the largest first: 4/3 of the best, which is at least the largest and mean.
    best = max(sum(sizes) / world_size, max(sizes, default=0))
    second = sorted(sizes)[-world_size - 1] if len(sizes) > world_size else 0
    assert layout.shard_numel <= max(best, second * 2) * 4 / 3 + align


def test_rows_are_those_in_memory() -> None:
    """Of channels_last images, and of transposed matrices."""
    params = {
        "conv": torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last),
        "transposed": torch.empty(5, 6).T,
        "number": torch.empty(()),
        "bias": torch.empty(7),
    }
    layout = FlatLayout.build(params, world_size=1, itemsize=4)
    assert [block_numel(span, "row") for span in layout.spans] == [36, 6, 1, 1]
    assert [block_numel(span, "tensor") for span in layout.spans] == [288, 30, 1, 7]


def test_too_much_padding_is_refused() -> None:
    params = {"head.bias": torch.empty(10), "head.weight": torch.empty(2048, 512)}
    plain = FlatLayout.build(params, world_size=4, itemsize=4)
    check_padding("head", [move(plain, "row", 4)], "row")
    layout = move(plain, "tensor", 4)
    assert layout.padding_numel > max(extra.FREE_PADDING, extra.MAX_PADDING * layout.numel)
    refused = r"unit 'head' would have 3,1.*, 300% of its 1,048,586"
    assert_raises(ValueError, refused, check_padding, "head", [layout], "tensor")
    refused = r"'head.weight' of shape \(2048, 512\), blocks of 1,048,576"
    assert_raises(ValueError, refused, check_padding, "head", [layout, plain], "tensor")
    # Small units may: it costs nothing.
    tiny = FlatLayout.build({"weight": torch.empty(10, 10)}, world_size=8, itemsize=4)
    check_padding("", [move(tiny, "tensor", 4)], "tensor")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(value, ValueError) for value in ("rows", "", 0, -256)],
        *[(value, TypeError) for value in (True, False, None, 2.0, ("row",))],
    ],
)
def test_what_is_no_boundary(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^boundary: expected 'element', 'row', 'tensor' or a number"):
        as_boundary(value)
