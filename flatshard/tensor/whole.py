"""Gathers full tensors from the ranks' parts, and divides full tensors into parts again.

One exchange (an all-to-all of bytes) moves any number of tensors. From the layout, every rank knows
which elements the other ranks hold.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.tensor.shard_spec import ShardSpec
from flatshard.units.layout import as_bytes


class Moved(NamedTuple):
    """A tensor with a parameter's shape, to gather from its parts or to scatter into parts."""

    spec: ShardSpec
    part: Tensor  # this rank's elements, 1-D
    full: Tensor | None  # None on a rank that does not have, or does not get, the full tensor
    owner: int | None  # the rank of `spec.comm` with the full tensor; None: every rank


def start_gather(
    parts: Iterable[tuple[ShardSpec, Tensor, int | None]], op_name: str
) -> Callable[[], list[Tensor | None]]:
    """Start gathering full tensors.

    Collective: all ranks of the parameters' shard groups. If ranks gather different tensors, all
    ranks raise CollectiveError before any value is sent.

    ``parts``: for each tensor, the parameter's spec, this rank's elements, and the owner: the rank
    of ``spec.comm`` that gets the full tensor (None: every rank). Returns a function that waits,
    and returns the full tensors in the order of ``parts``, or None for tensors that this rank does
    not get. Full tensors share no memory with the parts.
    """
    moved = [
        Moved(spec, part, spec.empty(part) if owner in (None, spec.comm.rank) else None, owner)
        for spec, part, owner in parts
    ]
    waits = [_exchange(some, op_name, divides=False) for some in _by_comm(moved)]

    def finish() -> list[Tensor | None]:
        for wait in waits:
            wait()
        return [one.full for one in moved]

    return finish


def scatter(moved: Sequence[Moved], op_name: str) -> None:
    """Overwrite this rank's part of each tensor with the owner's values. Collective."""
    for spec, part, full, owner in moved:
        if owner is None and full is not None:
            part.copy_(spec.slice(full))
    for some in _by_comm(one for one in moved if one.owner is not None):
        _exchange(some, op_name, divides=True)()


def _by_comm(moved: Iterable[Moved]) -> Iterable[list[Moved]]:
    found: dict[object, list[Moved]] = {}
    for one in moved:
        key = one.spec.comm, one.part.device, one.owner is None
        found.setdefault(key, []).append(one)
    return found.values()


def _exchange(moved: Sequence[Moved], op_name: str, *, divides: bool) -> Callable[[], None]:
    """Start copying parts into full tensors or, if ``divides``, full tensors into parts.

    Returns a function that waits for the copies. Collective: all ranks of the group.
    """
    comm = moved[0].spec.comm
    # At index i: the ranges of this rank's full tensors that rank i stores.
    ranges: list[list[Tensor]] = [[] for _ in range(comm.size)]
    # At index i: this rank's parts of the tensors that rank i has, or gets, in full.
    parts: list[list[Tensor]] = [[] for _ in range(comm.size)]
    held = Counter[int]()  # number of bytes that each rank sends to every other rank
    is_moved = False
    for spec, part, full, owner in moved:
        holders = spec.holders()  # call this on all ranks, because the first call may be collective
        is_moved |= any(rank != owner for rank, _ in holders)
        if owner is not None and part.numel():
            parts[owner].append(part)
        if full is not None:
            flat = _flat(spec, full)
            for rank, elements in holders:
                ranges[rank].append(flat[elements])
        if owner is None:
            held.update({r: (e.stop - e.start) * part.itemsize for r, e in holders})
    if held:
        parts = [[one.part for one in moved if one.part.numel()]] * comm.size
    sends, receives = (ranges, parts) if divides else (parts, ranges)
    for source, target in zip(sends[comm.rank], receives[comm.rank], strict=True):
        target.copy_(source)
    sends[comm.rank], receives[comm.rank] = [], []
    if comm.size == 1:
        return lambda: None
    # Before any value is sent, ranks compare this name. Otherwise values of different tensors could
    # be mixed, because backends match collectives only by their order.
    kinds = "; ".join(f"{spec.name}, {part.dtype}, {owner}" for spec, part, _, owner in moved)
    op_name = f"{op_name}, set {zlib.crc32(kinds.encode()):08x}"
    comm.host.meet(op_name)
    # Choose the kind of exchange by the layout of all ranks, not by this rank's parts, so that
    # all ranks choose the same.
    if not is_moved:
        return lambda: None
    if max(held.values(), default=0) * comm.size > 2 * held.total():
        # A few ranks store most elements, and would send them to all other ranks. A sum over the
        # ranks sends less per rank than this exchange.
        return _sum(moved, op_name)
    nbytes = attrgetter("nbytes")
    lengths, expected = ([sum(map(nbytes, one)) for one in side] for side in (sends, receives))
    nothing = moved[0].part.new_empty(0)
    sent = torch.cat([*map(as_bytes, chain([nothing], *sends))])
    work, received = comm.exchange(sent, lengths, expected, op_name=op_name)

    def wait() -> None:
        work.wait()
        targets = [*chain(*receives)]
        for target, data in zip(targets, received.split([*map(nbytes, targets)]), strict=False):
            as_bytes(target).copy_(data)

    return wait


def _sum(moved: Sequence[Moved], op_name: str) -> Callable[[], None]:
    """Fill full tensors, which have only this rank's elements, by a sum over the ranks."""
    flats = [_flat(one.spec, one.full) for one in moved if one.full is not None]
    for one, flat in zip(moved, flats, strict=False):
        flat[: one.spec.offset] = flat[one.spec.offset + one.spec.numel :] = 0
    # Each element is zero on all ranks except the rank that stores it. Add the elements as bytes,
    # so that no value is rounded.
    data = torch.cat([*map(as_bytes, flats)])
    moved[0].spec.comm.reduce_scalars(data, "SUM", op_name=op_name)
    for flat, values in zip(flats, data.split([flat.nbytes for flat in flats]), strict=False):
        as_bytes(flat).copy_(values)
    return lambda: None


def _flat(spec: ShardSpec, full: Tensor) -> Tensor:
    """Return the elements of a full tensor in the parameter's memory order, 1-D."""
    return full.permute(spec.order).reshape(-1)
