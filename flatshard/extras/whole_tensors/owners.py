"""Owners: chooses the rank that owns each parameter, and moves tensors to the owners and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
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


Piece = tuple[OwnedParam, Tensor]
"""A parameter, and values of it: this rank's part, ``(spec.numel,)``, or the full tensor."""
_Elements = tuple[int, Tensor]
"""A rank of the group, and elements to send to the rank or to receive from the rank."""


def gather_to_owners(
    comm: Communicator, pieces: Sequence[Piece], op_name: str
) -> Callable[[], list[Tensor]]:
    """Start to gather parts on the owners; the function returned waits and has the full tensors.

    Only those that are full here, in the order of ``pieces``; they have memory of their own.

    Collective: all ranks of the group, with pieces of the same parameters and dtypes.
    """
    full: dict[int, Tensor] = {}
    sends: list[_Elements] = []
    receives: list[_Elements] = []
    for number, (param, local) in enumerate(pieces):
        if comm.rank in param.held:
            owners = range(comm.size) if param.owner is None else [param.owner]
            sends += [(to, local) for to in owners if to != comm.rank]
        if param.is_full_here:
            flat = full[number] = local.new_empty(sum(one.numel for one in param.held.values()))
            for rank, held in param.held.items():
                if rank == comm.rank:
                    _range(flat, held).copy_(local)
                else:
                    receives.append((rank, _range(flat, held)))
    wait = _exchange(comm, pieces, sends, receives, op_name)

    def finish() -> list[Tensor]:
        wait()
        return [pieces[number][0].shaped(flat) for number, flat in full.items()]

    return finish


def scatter_to_shards(
    comm: Communicator, pieces: Sequence[Piece], parts: Sequence[Tensor], op_name: str
) -> None:
    """Overwrite ``parts``, of this rank, by the owners' full tensors.

    ``pieces`` have these where they are full; on other ranks any tensor of their dtype and device.

    Collective: all ranks of the group.
    """
    sends: list[_Elements] = []
    receives: list[_Elements] = []
    for (param, value), part in zip(pieces, parts, strict=True):
        if not param.is_full_here:
            if comm.rank in param.held and param.owner is not None:
                receives.append((param.owner, part))
            continue
        flat = param.flat(value)
        for rank, held in param.held.items():
            if rank == comm.rank:
                part.copy_(_range(flat, held))
            elif param.owner is not None:
                sends.append((rank, _range(flat, held)))
    # Parameters without an owner are full on every rank: nothing is sent.
    owned = [piece for piece in pieces if piece[0].owner is not None]
    _exchange(comm, owned, sends, receives, op_name)()


def _range(flat: Tensor, held: HeldRange) -> Tensor:
    return flat[held.offset : held.offset + held.numel]


def _exchange(
    comm: Communicator,
    pieces: Sequence[Piece],
    sends: list[_Elements],
    receives: list[_Elements],
    op_name: str,
) -> Callable[[], None]:
    """Start to exchange elements; the function returned waits. Collective."""
    # All ranks must decide the same, so a rank's own sends and receives do not count.
    if not any(param.is_moved for param, _ in pieces):
        return lambda: None
    lengths, expected = [0] * comm.size, [0] * comm.size
    for elements, counts in ((sends, lengths), (receives, expected)):
        elements.sort(key=itemgetter(0))  # stable: the elements of a rank keep the order of pieces
        for rank, tensor in elements:
            counts[rank] += tensor.nbytes
    nothing = pieces[0][1].new_empty(0, dtype=torch.uint8)
    sent = torch.cat([nothing, *(as_bytes(tensor) for _, tensor in sends)])
    work, received = comm.exchange(sent, lengths, expected, op_name=op_name)

    def wait() -> None:
        work.finish()
        parts = received.split([tensor.nbytes for _, tensor in receives])
        for (_, tensor), part in zip(receives, parts, strict=True):
            as_bytes(tensor).copy_(part)

    return wait
