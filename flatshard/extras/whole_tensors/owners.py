"""Chooses an owner for each parameter: the rank that steps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Maximum share of work and memory of a rank, as a multiple of an equal share. If this multiple is
# above 1, more parameters can go to the rank that already holds most of the parameter's elements.
ABOUT_EQUAL = 1.05


def step_cost(shape: Sequence[int]) -> int:
    """Return the approximate work of a parameter's step; for a matrix, of Newton-Schulz."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = sorted((shape[0], math.prod(shape[1:])))
    # A Newton-Schulz iteration on a matrix X computes three products: A = X @ X.T, A @ A, and a
    # (rows, rows) matrix @ X.
    return rows * rows * (2 * columns + rows)


def choose_owners(
    shapes: Sequence[Sequence[int]],
    held: Sequence[Mapping[int, int]],
    size: int,
    known: Sequence[int | None] | None = None,
) -> list[int]:
    """Choose for each parameter its owner, the rank that will step it. Returns a list of ranks.

    The choice gives each rank about an equal share of the work and memory, and sends few elements.
    All ranks choose the same owners.

    A parameter with an owner in ``known`` keeps this owner, and a parameter whose elements are all
    on one rank goes to that rank. The others follow in order of decreasing cost. Candidates are the
    ranks with elements of the parameter (``held``: how many), and the rank with the smallest share
    so far. Among the candidates that stay within an equal share, the rank with most elements
    becomes the owner. If no candidate does, the rank with the smallest share becomes the owner.
    """
    works = [step_cost(shape) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    all_work, all_numel = max(sum(works), 1), max(sum(numels), 1)
    costs = [w / all_work + n / all_numel for w, n in zip(works, numels, strict=True)]
    most = ABOUT_EQUAL * sum(costs) / size
    taken = [0.0] * size
    owners = [0] * len(shapes)

    def give(index: int, rank: int) -> None:
        owners[index] = rank
        taken[rank] += costs[index]

    divided = []
    for index, parts in enumerate(held):
        owner = known[index] if known else None
        if owner is not None:
            give(index, owner)
        elif len(parts) == 1:
            give(index, next(iter(parts)))
        else:
            divided.append(index)
    for index in sorted(divided, key=lambda index: -costs[index]):
        least = min(range(size), key=taken.__getitem__)
        parts = {least: 0, **held[index]}
        fits = [rank for rank in parts if taken[rank] + costs[index] <= most] or [least]
        give(index, max(fits, key=lambda rank: (parts[rank], -taken[rank], -rank)))
    return owners
