"""Gathers sharded tensors to the rank that owns each, and scatters full ones back to the shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Communicator
from flatshard.comm.exchange import exchange
from flatshard.comm.flat_chunks import as_bytes
from flatshard.tensor.shard_spec import ShardSpec


class HeldRange(NamedTuple):
    """The range of a parameter that a rank holds, in elements in memory order."""

    offset: int
    numel: int


_NOTHING = HeldRange(0, 0)


@dataclass(frozen=True, eq=False)
class OwnedParam:
    """A sharded parameter, and the rank that gets the full one for a step.

    Attributes:
        spec: this rank's part of it.
        held: the parts that are not empty, by the rank in the group that holds the part.
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


class Route(NamedTuple):
    """Elements that go from one rank to another."""

    number: int  # of the piece
    source: int
    to: int
    range: HeldRange


def gather_to_owners(
    comm: Communicator, pieces: Sequence[Piece], op_name: str
) -> Callable[[], list[Tensor]]:
    """Start to gather parts on the owners; the function returned waits and has the full tensors.

    Only those that are full here, in the order of ``pieces``; they have memory of their own.

    Collective: all ranks of the group, with pieces of the same parameters and dtypes.
    """
    full = {
        number: local.new_empty(sum(held.numel for held in param.held.values()))
        for number, (param, local) in enumerate(pieces)
        if param.is_full_here
    }
    routes, me = [], comm.rank
    for number, (param, local) in enumerate(pieces):
        if me in param.held:
            owners = range(comm.size) if param.owner is None else [param.owner]
            routes += [Route(number, me, to, param.held[me]) for to in owners if to != me]
        if param.is_full_here:
            routes += [
                Route(number, rank, me, one) for rank, one in param.held.items() if rank != me
            ]
            _range(full[number], param.held.get(me, _NOTHING)).copy_(local)
    wait = _exchange(
        comm,
        routes,
        pieces,
        lambda route: pieces[route.number][1],
        lambda route: _range(full[route.number], route.range),
        op_name,
    )

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
    full = {n: param.flat(value) for n, (param, value) in enumerate(pieces) if param.is_full_here}
    routes, me = [], comm.rank
    for number, (param, _) in enumerate(pieces):
        if param.owner == me:
            routes += [Route(number, me, to, held) for to, held in param.held.items() if to != me]
        elif param.owner is not None and me in param.held:
            routes.append(Route(number, param.owner, me, param.held[me]))
    for number, flat in full.items():
        parts[number].copy_(_range(flat, pieces[number][0].held.get(me, _NOTHING)))
    _exchange(
        comm,
        routes,
        [piece for piece in pieces if piece[0].owner is not None],
        lambda route: _range(full[route.number], route.range),
        lambda route: parts[route.number],
        op_name,
    )()


def _range(flat: Tensor, held: HeldRange) -> Tensor:
    return flat[held.offset : held.offset + held.numel]


def _exchange(
    comm: Communicator,
    routes: Sequence[Route],
    pieces: Sequence[Piece],
    source_of: Callable[[Route], Tensor],
    target_of: Callable[[Route], Tensor],
    op_name: str,
) -> Callable[[], None]:
    """Start to move elements along this rank's routes; the function returned waits."""
    # All ranks must come to the same answer, also ranks that have no route themselves.
    if not any(param.is_moved for param, _ in pieces):
        return lambda: None
    # By the other rank, as the bytes lie in what is sent and in what is received.
    lengths, expected = [0] * comm.size, [0] * comm.size
    sources, targets = [], []
    for route in sorted(routes, key=lambda route: (route.source, route.to)):
        if route.source == comm.rank:
            sources.append(as_bytes(source_of(route)))
            lengths[route.to] += sources[-1].nbytes
        else:
            targets.append(target_of(route))
            expected[route.source] += targets[-1].nbytes
    sent = torch.cat(sources or [pieces[0][1].new_empty(0, dtype=torch.uint8)])
    work, received = exchange(comm, sent, lengths, expected, op_name=op_name)

    def wait() -> None:
        work.finish()
        parts = received.split([target.nbytes for target in targets])
        for target, part in zip(targets, parts, strict=True):
            as_bytes(target).copy_(part)

    return wait
