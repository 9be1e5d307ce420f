"""Owners: the rank that steps a parameter whose optimizer needs the full tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence


def step_cost(shape: Sequence[int]) -> int:
    """About how much work it is to step a parameter: that of Newton-Schulz for a matrix."""
    # numel * min(rows, columns) multiplications a matrix product; other shapes count as rows.
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    return rows * columns * max(1, min(rows, columns))


def choose_owners(shapes: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> list[int]:
    """The owner of each parameter, of which rank r of the group holds ``held[i][r]`` elements.

    Pure, hence the same on all ranks. A parameter that one rank holds stays there. The others, the
    most work first, go where work and elements together are fewest; of ranks that are about equal
    in this, to the one that holds most.
    """
    size = len(held[0]) if held else 1
    works = [step_cost(shape) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    all_work, all_numel = max(sum(works), 1), max(sum(numels), 1)
    shares = [0.0] * size  # of the work and of the elements, the greater one
    work, numel = [0] * size, [0] * size
    owners = [0] * len(shapes)

    def give(index: int, rank: int) -> None:
        owners[index] = rank
        work[rank] += works[index]
        numel[rank] += numels[index]
        shares[rank] = max(work[rank] / all_work, numel[rank] / all_numel)

    divided = []
    for index, parts in enumerate(held):
        most = max(range(size), key=parts.__getitem__)
        if parts[most] == numels[index]:
            give(index, most)
        else:
            divided.append(index)
    for index in sorted(divided, key=lambda index: (-works[index], index)):
        least, about_equal = min(shares), 0.1 / size
        near = [rank for rank in range(size) if shares[rank] <= least + about_equal]
        give(index, max(near, key=lambda rank: (held[index][rank], -shares[rank], -rank)))
    return owners
