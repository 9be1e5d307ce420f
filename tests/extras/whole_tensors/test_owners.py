"""Owners: nobody has much more than others, little moves."""

import math

import torch

from flatshard.extras.whole_tensors import choose_owners, step_cost
from flatshard.units.layout import FlatLayout


def _held(shapes: list[tuple[int, ...]], world_size: int) -> list[dict[int, int]]:
    params = {str(number): torch.empty(shape) for number, shape in enumerate(shapes)}
    layout = FlatLayout.build(params, world_size=world_size, itemsize=4)
    numels = [
        {rank: layout.local_span(index, rank).numel for rank in range(world_size)}
        for index in range(len(shapes))
    ]
    return [{rank: numel for rank, numel in one.items() if numel} for one in numels]


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
