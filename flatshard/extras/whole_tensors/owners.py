"""Chooses an owner for each parameter (the rank that steps it), and moves tensors to owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import as_bytes

# Maximum share of work and memory of a rank, as a multiple of an equal share. With a number above
# 1, more parameters can go to the rank that already holds most of the elements, so less data is
# sent.
ABOUT_EQUAL = 1.05


def step_cost(shape: Sequence[int]) -> int:
    """Return the approximate work of a step of a parameter; for a matrix, of Newton-Schulz."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = sorted((shape[0], math.prod(shape[1:])))
    # One Newton-Schulz iteration has two products of the matrix with a matrix of shape (rows,
    # rows), and one product of two matrices of shape (rows, rows).
    return rows * rows * (2 * columns + rows)


def choose_owners(
    shapes: Sequence[Sequence[int]],
    held: Sequence[Mapping[int, int]],
    size: int,
    known: Sequence[int | None] | None = None,
) -> list[int]:
    """Choose for each parameter its owner, the rank that will step it. Returns a list of ranks.

    The choice gives each rank about an equal share of the work and memory, and sends few elements.
    It depends only on the arguments, so all ranks choose the same owners.

    A parameter with an owner in ``known`` keeps this owner, and a parameter whose elements are all
    on one rank goes to that rank. The remaining parameters are assigned in order of decreasing
    cost. Candidates are the ranks with elements of the parameter, and the rank with the smallest
    share so far. Among the candidates that stay within an equal share, the rank with most elements
    of the parameter becomes the owner. If no candidate does, the rank with the smallest share
    becomes the owner.

    Args:
        shapes: the shape of each parameter.
        held: for each parameter, the number of its elements on each rank that has any.
        size: number of ranks.
        known: for each parameter, its owner, or None if it has none yet.
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


# ------------------------------------------------------------ to the owners, and back


class HeldRange(NamedTuple):
    """The range of elements, in memory order, that a rank holds of a parameter."""

    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class OwnedParam:
    """A sharded parameter, the ranges of all ranks, and the owner: the rank that steps it.

    Attributes:
        spec: the parameter's shape and this rank's part.
        held: the range of elements of each rank, keyed by the rank in the group. Ranks without
            elements are left out.
        owner: the owner's rank in the group; None if every rank gets the full parameter.
    """

    spec: ShardSpec
    held: Mapping[int, HeldRange]
    owner: int | None

    @property
    def is_full_here(self) -> bool:
        """Whether this rank gets the full parameter."""
        return self.owner in (None, self.spec.comm.rank)

    @property
    def is_moved(self) -> bool:
        """Whether a step sends elements between ranks. All ranks get the same answer."""
        return self.spec.comm.size > 1 and any(rank != self.owner for rank in self.held)

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a view of ``flat`` with the parameter's shape.

        ``flat`` has all elements of the parameter in memory order, and shape ``(numel,)``.
        """
        return flat.as_strided(self.spec.shape, self.spec.strides)

    def flat(self, full: Tensor) -> Tensor:
        """Flatten a full tensor to ``(numel,)``, in the parameter's memory order."""
        return full.permute(self.spec.order).reshape(-1)


Piece = tuple[OwnedParam, Tensor, Tensor | None]
"""Three values about a tensor with the shape of a parameter: the parameter, this rank's part of the
tensor, and the full tensor, flattened. The full tensor is None on a rank that does not get it.
"""
_Elements = tuple[int, Tensor]
"""Two values: a rank of the group, and the elements to send to the rank or to receive from it."""


def gather_to_owners(
    comm: Communicator, parts: Sequence[tuple[OwnedParam, Tensor]], op_name: str
) -> Callable[[], list[Tensor]]:
    """Start to send the parts of tensors to the owners of the tensors' parameters.

    Returns a function that waits, and returns the full tensors owned by this rank, in the order of
    ``parts``. The full tensors do not share memory with ``parts``.

    Collective: all ranks of the group, with parts of the same parameters and dtypes.
    """
    pieces: list[Piece] = []
    for param, part in parts:
        numel = math.prod(param.spec.shape)
        pieces.append((param, part, part.new_empty(numel) if param.is_full_here else None))
    ours, ranges = _split(comm, pieces)
    moved = [piece for piece in pieces if piece[0].is_moved]
    wait = _exchange(comm, moved, ours, ranges, op_name)

    def finish() -> list[Tensor]:
        wait()
        return [param.shaped(flat) for param, _, flat in pieces if flat is not None]

    return finish


def scatter_to_shards(comm: Communicator, pieces: Sequence[Piece], op_name: str) -> None:
    """Overwrite this rank's part of each piece with values from the owner's full tensor.

    Collective: all ranks of the group.
    """
    flats = [(p, part, None if full is None else p.flat(full)) for p, part, full in pieces]
    ours, ranges = _split(comm, flats)
    # If a parameter has no owner, every rank has the full tensor, so nothing is sent.
    moved = [piece for piece in flats if piece[0].is_moved and piece[0].owner is not None]
    _exchange(comm, moved, ranges, ours, op_name)()


def _split(comm: Communicator, pieces: Sequence[Piece]) -> tuple[list[_Elements], list[_Elements]]:
    """Return two lists of elements to exchange: this rank's parts, and ranges of full tensors.

    A part is exchanged with the owner of the parameter, a range with the holder of the range.
    """
    ours: list[_Elements] = []
    ranges: list[_Elements] = []
    for param, part, flat in pieces:
        if comm.rank in param.held:
            owners = range(comm.size) if param.owner is None else [param.owner]
            ours += [(owner, part) for owner in owners]
        if flat is not None:
            ranges += [
                (rank, flat[held.offset : held.offset + held.numel])
                for rank, held in param.held.items()
            ]
    return ours, ranges


def _exchange(
    comm: Communicator,
    moved: Sequence[Piece],
    sends: list[_Elements],
    receives: list[_Elements],
    op_name: str,
) -> Callable[[], None]:
    """Start to send ``sends`` to other ranks, and to fill ``receives`` from other ranks.

    Elements for this rank are copied at once. Returns a function that waits for the exchange.
    Collective: all ranks of the group.
    """
    own = [[tensor for rank, tensor in side if rank == comm.rank] for side in (sends, receives)]
    for source, target in zip(*own, strict=True):
        target.copy_(source)
    # All ranks must decide in the same way whether to communicate. So decide by `moved`, which is
    # equal on all ranks, and not by this rank's sends and receives.
    if not moved:
        return lambda: None
    lengths, expected = [0] * comm.size, [0] * comm.size
    ordered: list[list[Tensor]] = []
    for elements, counts in ((sends, lengths), (receives, expected)):
        others = [(rank, tensor) for rank, tensor in elements if rank != comm.rank]
        others.sort(key=itemgetter(0))  # by rank; elements for the same rank stay in order
        for rank, tensor in others:
            counts[rank] += tensor.nbytes
        ordered.append([tensor for _, tensor in others])
    nothing = moved[0][1].new_empty(0, dtype=torch.uint8)
    sent = torch.cat([nothing, *map(as_bytes, ordered[0])])
    work, received = comm.exchange(sent, lengths, expected, op_name=op_name)

    def wait() -> None:
        work.finish()
        parts = received.split([tensor.nbytes for tensor in ordered[1]])
        for tensor, part in zip(ordered[1], parts, strict=True):
            as_bytes(tensor).copy_(part)

    return wait
