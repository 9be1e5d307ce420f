"""Owners: the rank that steps a parameter whose optimizer needs the full tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

# What a rank may get for a parameter's sake that it holds most of, as a multiple of an equal share:
# less is sent then.
ABOUT_EQUAL = 1.05


def step_cost(shape: Sequence[int]) -> int:
    """About how much work it is to step a parameter: that of Newton-Schulz for a matrix."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = sorted((shape[0], math.prod(shape[1:])))
    # One iteration: two products of the matrix with one of (rows, rows), and one among those.
    return rows * rows * (2 * columns + rows)


def choose_owners(
    shapes: Sequence[Sequence[int]],
    held: Sequence[Mapping[int, int]],
    size: int,
    known: Sequence[int | None] | None = None,
) -> list[int]:
    """The owner of each parameter. Of parameter i, rank r of ``size`` holds ``held[i].get(r)``.

    Pure, hence the same on all ranks. A parameter that has an owner in ``known`` keeps it, and one
    that one rank holds stays there. The others, the most work first, go to the rank that holds most
    of them, of those that do not get more than their share of work or elements by it; if all would,
    to where these are fewest. Candidates are the holders and the rank with the least share: looking
    at all ranks for each parameter would take minutes in a large world.
    """
    works = [step_cost(shape) for shape in shapes]
    numels = [math.prod(shape) for shape in shapes]
    all_work, all_numel = max(sum(works), 1), max(sum(numels), 1)
    work, numel = [0] * size, [0] * size
    owners = [0] * len(shapes)
    least = [(0.0, rank) for rank in range(size)]  # a heap; shares may be out of date

    def share(rank: int, index: int | None = None) -> float:
        """Of the work or of the elements, what is greater, with one parameter more."""
        more = (0, 0) if index is None else (works[index], numels[index])
        return max((work[rank] + more[0]) / all_work, (numel[rank] + more[1]) / all_numel)

    def give(index: int, rank: int) -> None:
        owners[index] = rank
        work[rank] += works[index]
        numel[rank] += numels[index]
        heappush(least, (share(rank), rank))

    def rank_with_least() -> int:
        while least[0][0] != share(least[0][1]):
            heappop(least)
        return least[0][1]

    divided = []
    for index, parts in enumerate(held):
        owner = known[index] if known else None
        if owner is not None:
            give(index, owner)
        elif len(parts) == 1:
            give(index, next(iter(parts)))
        else:
            divided.append(index)
    for index in sorted(divided, key=lambda index: (-works[index], index)):
        parts = {rank_with_least(): 0, **held[index]}
        fits = [rank for rank in parts if share(rank, index) <= ABOUT_EQUAL / size]
        if fits:
            give(index, max(fits, key=lambda rank: (parts[rank], -share(rank), -rank)))
        else:
            give(index, min(parts, key=lambda rank: (share(rank), -parts[rank], rank)))
    return owners
