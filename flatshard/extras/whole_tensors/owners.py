"""Owners: chooses the rank that owns each parameter, and moves tensors to the owners and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.process_groups import as_bytes
from flatshard.tensor.shard_spec import ShardSpec

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

    Pure, hence the same on all ranks. A parameter that has an owner in ``known`` keeps this owner,
    and a parameter that only one rank holds stays there. The others, the most expensive first, go
    to the rank that holds most of the parameter, among the ranks that stay within an equal share.
    If no rank does, the parameter goes to the rank with the least share. Candidates are the holders
    and the rank that has the least share of all ranks.
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
    """The range of a parameter that a rank holds, in elements in memory order."""

    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class OwnedParam:
    """A sharded parameter, and the rank that gets the full one for a step.

    Attributes:
        spec: this rank's part of it.
        held: the parts that are not empty; keys are the holders' ranks in the group.
        owner: a rank in the group; None: every rank.
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
        """Whether elements go from one rank to another; the same on all ranks."""
        return self.spec.comm.size > 1 and any(rank != self.owner for rank in self.held)

    def shaped(self, flat: Tensor) -> Tensor:
        """The parameter's shape and strides for all its elements, ``(numel,)``."""
        return flat.as_strided(self.spec.shape, self.spec.strides)

    def flat(self, full: Tensor) -> Tensor:
        """All elements of a full tensor in the parameter's memory order, ``(numel,)``."""
        return full.permute(self.spec.order).reshape(-1)


Piece = tuple[OwnedParam, Tensor, Tensor | None]
"""A parameter, this rank's part of some values of the parameter, and all of these values.

All values are None on a rank that does not get the full parameter.
"""
_Elements = tuple[int, Tensor]
"""A rank of the group, and elements to send to the rank or to receive from the rank."""


def gather_to_owners(
    comm: Communicator, parts: Sequence[tuple[OwnedParam, Tensor]], op_name: str
) -> Callable[[], list[Tensor]]:
    """Start to gather parts on the owners; the function returned waits and has the full tensors.

    Only the tensors that are full here, in the order of ``parts``, in memory of their own.

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
    """Overwrite the part of each piece on this rank by the owner's full tensor.

    Collective: all ranks of the group.
    """
    flats = [(p, part, None if full is None else p.flat(full)) for p, part, full in pieces]
    ours, ranges = _split(comm, flats)
    # A parameter without an owner is full on every rank: nothing is sent.
    moved = [piece for piece in flats if piece[0].is_moved and piece[0].owner is not None]
    _exchange(comm, moved, ranges, ours, op_name)()


def _split(comm: Communicator, pieces: Sequence[Piece]) -> tuple[list[_Elements], list[_Elements]]:
    """This rank's parts, by owner, and the ranges of the full tensors here, by holder."""
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
    """Copy this rank's elements to itself, and start to exchange the elements of ``moved``.

    The function returned waits. Collective.
    """
    own = [[tensor for rank, tensor in side if rank == comm.rank] for side in (sends, receives)]
    for source, target in zip(*own, strict=True):
        target.copy_(source)
    # All ranks must decide the same, so a rank's own sends and receives do not count.
    if not moved:
        return lambda: None
    lengths, expected = [0] * comm.size, [0] * comm.size
    ordered: list[list[Tensor]] = []
    for elements, counts in ((sends, lengths), (receives, expected)):
        others = [(rank, tensor) for rank, tensor in elements if rank != comm.rank]
        others.sort(key=itemgetter(0))  # stable: the elements of a rank keep the order of pieces
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
