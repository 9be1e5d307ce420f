"""Owners: every rank chooses the same, nobody has much more than others, little moves."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from flatshard.extras.whole_tensors.owners import choose_owners, step_cost
from flatshard.units.layout import FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)


def _held(shapes: list[tuple[int, ...]], world_size: int) -> list[dict[int, int]]:
    params = {str(number): torch.empty(shape) for number, shape in enumerate(shapes)}
    layout = FlatLayout.build(params, world_size=world_size, itemsize=4)
    numels = [
        {rank: layout.local_span(index, rank).numel for rank in range(world_size)}
        for index in range(len(shapes))
    ]
    return [{rank: numel for rank, numel in one.items() if numel} for one in numels]


@given(SHAPES, st.integers(1, 8))
def test_what_one_rank_holds_stays_there(shapes: list[tuple[int, ...]], world_size: int) -> None:
    held = _held(shapes, world_size)
    owners = choose_owners(shapes, held, world_size)
    for shape, parts, owner in zip(shapes, held, owners, strict=True):
        assert 0 <= owner < world_size
        if math.prod(shape) in parts.values():
            assert parts[owner] == math.prod(shape)
    assert choose_owners(shapes, held, world_size) == owners


def test_work_and_elements_are_shared_out() -> None:
    """The blocks of a transformer: no rank has more than 15 % above its part."""
    block = [(1152, 384), (384, 384), (1536, 384), (384, 1536)]
    for world_size in (2, 3, 4, 8):
        shapes, held = block * 12, _held(block, world_size) * 12
        owners = choose_owners(shapes, held, world_size)
        for measure in (math.prod, step_cost):
            total = sum(map(measure, shapes))
            for rank in range(world_size):
                own = sum(measure(s) for s, o in zip(shapes, owners, strict=True) if o == rank)
                assert own <= 1.15 * total / world_size, (world_size, measure, rank)
        # At most the parts that are not there already, twice to the owner and once back.
        moved = sum(sum(h.values()) - h.get(o, 0) for h, o in zip(held, owners, strict=True))
        assert 3 * moved <= 2 * sum(map(math.prod, shapes)), (world_size, moved)


def test_nothing_to_own() -> None:
    assert choose_owners([], [], 1) == []
