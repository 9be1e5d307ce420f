"""``WholeTensors``: sharded tensors come together on one rank each, and go back to the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.exchange import exchange
from flatshard.comm.flat_chunks import as_bytes
from flatshard.tensor.shard_spec import ShardSpec


class Held(NamedTuple):
    """The range of a parameter that a rank holds, in elements in memory order."""

    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class Whole:
    """A parameter that a rank, its owner, is to have whole.

    Attributes:
        spec: this rank's part of it.
        held: each rank's part, by its rank in the group.
        owner: a rank in the group; None: every rank.
    """

    spec: ShardSpec
    held: Sequence[Held]
    owner: int | None

    @property
    def is_here(self) -> bool:
        """Whether this rank has it whole."""
        return self.owner in (None, self.spec.comm.rank)

    def shaped(self, flat: Tensor) -> Tensor:
        """The parameter's shape and strides for all its elements, ``(numel,)``."""
        return flat.as_strided(self.spec.shape, self.spec.strides)

    def flat(self, full: Tensor) -> Tensor:
        """All elements of a full tensor in the parameter's memory order, ``(numel,)``."""
        return full.permute(self.spec.order).reshape(-1)


Piece = tuple[Whole, Tensor]
"""A parameter, and values of it: this rank's part, ``(spec.numel,)``, or the full tensor."""


class Route(NamedTuple):
    """Elements that go from one rank to another."""

    number: int  # of the piece
    source: int
    to: int
    range: Held


def collect(comm: Communicator, pieces: Sequence[Piece], what: str) -> Callable[[], list[Tensor]]:
    """Begin to bring parts to the owners; what is returned waits, and has the full tensors.

    Those of the pieces that are here, in their order; they have memory of their own.

    Collective: all ranks of the group, with pieces of the same parameters and dtypes.
    """
    full = {
        number: local.new_empty(sum(held.numel for held in whole.held))
        for number, (whole, local) in enumerate(pieces)
        if whole.is_here
    }
    routes = []
    for number, (whole, local) in enumerate(pieces):
        for source, held in enumerate(whole.held):
            owners = range(comm.size) if whole.owner is None else [whole.owner]
            routes += [Route(number, source, to, held) for to in owners if to != source]
        if whole.is_here:
            _range(full[number], whole.held[comm.rank]).copy_(local)
    wait = _send(
        comm,
        routes,
        pieces[0][1],
        lambda route: pieces[route.number][1],
        lambda route: _range(full[route.number], route.range),
        what,
    )

    def finish() -> list[Tensor]:
        wait()
        return [pieces[number][0].shaped(flat) for number, flat in full.items()]

    return finish


def spread(comm: Communicator, pieces: Sequence[Piece], parts: Sequence[Tensor], what: str) -> None:
    """Overwrite ``parts``, of this rank, by the owners' full tensors.

    ``pieces`` have these where they are here; elsewhere any tensor of their dtype and device.

    Collective: all ranks of the group.
    """
    full = {n: whole.flat(value) for n, (whole, value) in enumerate(pieces) if whole.is_here}
    routes = [
        Route(number, whole.owner, to, held)
        for number, (whole, _) in enumerate(pieces)
        if whole.owner is not None
        for to, held in enumerate(whole.held)
        if to != whole.owner
    ]
    for number, flat in full.items():
        parts[number].copy_(_range(flat, pieces[number][0].held[comm.rank]))
    _send(
        comm,
        routes,
        pieces[0][1],
        lambda route: _range(full[route.number], route.range),
        lambda route: parts[route.number],
        what,
    )()


def _range(flat: Tensor, held: Held) -> Tensor:
    return flat[held.offset : held.offset + held.numel]


def _send(
    comm: Communicator,
    routes: Sequence[Route],
    like: Tensor,
    source_of: Callable[[Route], Tensor],
    place_of: Callable[[Route], Tensor],
    what: str,
) -> Callable[[], None]:
    """Begin to move elements along routes, which all ranks know; what is returned waits."""
    routes = [route for route in routes if route.range.numel]
    if not routes:
        return lambda: None
    sent: list[list[Tensor]] = [[] for _ in range(comm.size)]
    places: list[list[Tensor]] = [[] for _ in range(comm.size)]
    for route in routes:
        if route.source == comm.rank:
            sent[route.to].append(as_bytes(source_of(route)))
        elif route.to == comm.rank:
            places[route.source].append(place_of(route))
    lengths = [[one.nbytes for one in some] for some in places]
    work, came = exchange(
        comm,
        torch.cat([one for some in sent for one in some] or [like.new_empty(0, dtype=torch.uint8)]),
        [sum(one.nbytes for one in some) for some in sent],
        [sum(some) for some in lengths],
        op_name=what,
    )

    def wait() -> None:
        work.finish()
        pieces = came.split([length for some in lengths for length in some])
        for place, piece in zip((one for some in places for one in some), pieces, strict=True):
            as_bytes(place).copy_(piece)

    return wait
