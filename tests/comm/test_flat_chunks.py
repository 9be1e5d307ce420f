"""Gradients in parts: every element is in one piece, and small neighbours are copied together."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatshard.comm.transports import ChunkPlan, FlatChunks
from flatshard.units.layout import FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), min_size=1, max_size=6)


@given(
    shapes=SHAPES,
    world_size=st.integers(1, 4),
    min_numel=st.integers(0, 12),
    step=st.one_of(st.none(), st.integers(1, 7)),
    absent=st.sets(st.integers(0, 5)),
)
def test_every_element_once(
    shapes: list[tuple[int, ...]],
    world_size: int,
    min_numel: int,
    step: int | None,
    absent: set[int],
) -> None:
    params = {f"p{number}": torch.empty(shape) for number, shape in enumerate(shapes)}
    layout = FlatLayout.build(params, world_size=world_size, itemsize=4)
    expected = torch.zeros(layout.padded_numel)
    gradients = {}
    for index, span in enumerate(layout.spans):
        if index not in absent:
            gradients[index] = 1 + index + torch.rand(span.end - span.start)
            expected[span.start : span.end] = gradients[index]
    whole = ChunkPlan(layout, 4 * min_numel, torch.float32).chunks(gradients)
    found = torch.zeros(layout.padded_numel)
    last = 0
    for rank in range(world_size):
        for piece in whole.cut(rank * layout.shard_numel, (rank + 1) * layout.shard_numel, step):
            assert last <= piece.start < piece.end <= (rank + 1) * layout.shard_numel
            assert step is None or piece.end - piece.start <= step
            last = piece.end
            if piece.values is not None:
                part = whole.parts[piece.part]
                assert torch.equal(part[piece.offset :][: piece.end - piece.start], piece.values)
                found[piece.start : piece.end] = piece.values
    assert torch.equal(found, expected)


def test_large_ones_are_not_copied() -> None:
    shapes = [(2,), (100,), (3,), (4,), (200,), (300,), (5,)]
    params = {f"p{number}": torch.empty(shape) for number, shape in enumerate(shapes)}
    layout = FlatLayout.build(params, world_size=2, itemsize=4)
    gradients = {index: torch.rand(shape) for index, shape in enumerate(shapes) if index != 5}
    whole = ChunkPlan(layout, 400, torch.float32).chunks(gradients.copy())
    small, large, joined, larger, missing, last = whole.parts
    assert large is gradients[1]
    assert larger is gradients[4]
    assert missing is None
    assert small.numel() == 2
    assert joined.numel() >= 7  # and the gap between them
    assert last.numel() == 5


def test_one_piece() -> None:
    buffer = torch.arange(10.0)
    (piece,) = FlatChunks.of(buffer).cut(4, 9)
    assert piece.values.tolist() == [4, 5, 6, 7, 8]
