"""``SharedMemoryTransport``: all-gathers and averages among ranks that read each other's memory.

Each says where its part lies; the others copy it from there, or add it up piece by piece, and say
that they have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatshard.comm.deadlock.detector import CollectiveCounter
from flatshard.comm.deadlock.watchdog import watched
from flatshard.comm.flat_chunks import FlatChunks
from flatshard.comm.rank_order import divide
from flatshard.comm.transports import peer_memory
from flatshard.comm.transports.peer_memory import Awaited, Mailbox, PeerMemory
from flatshard.comm.work import AsyncWork

_REDUCING = peer_memory.TAGS // 2
"""Added to the tags of reductions: half of a mailbox's places are for gathers, half for these."""

_PIECE_NUMEL = 1 << 16
"""Elements that are read and added at a time: they stay in the cache between."""


class SharedMemoryTransport:
    """Ranks that read one another's memory.

    Attributes:
        memory: reads the others'.
        progress: what this rank has begun, and needs of the others, for ``Deadlock``.
        rank: this rank within the group.
        size: ranks in the group.
    """

    def __init__(
        self,
        memory: PeerMemory,
        mailbox: Mailbox,
        rank: int,
        ranks: Sequence[int],
        progress: CollectiveCounter,
    ) -> None:
        """With this rank's mailbox, and the members by their numbers in the default group."""
        self.progress = progress
        self.memory, self._mailbox = memory, mailbox
        self.rank, self.size, self._ranks = rank, len(ranks), ranks
        self._offers: dict[int, Publication] = {}

    @staticmethod
    def takes(tag: int) -> bool:
        """Whether the mailbox has a place for a tag."""
        return tag < _REDUCING

    def all_gather(self, shard: Tensor, out: Tensor, tag: int, what: str) -> AsyncWork:
        """See ``Communicator.all_gather``."""
        parts = _as_bytes(out).chunk(self.size)
        source = _as_bytes(shard)
        offer = self.offer(source.data_ptr(), tag, what)
        if parts[self.rank].data_ptr() != source.data_ptr():
            parts[self.rank].copy_(source)

        def read() -> None:
            for peer, theirs in offer.theirs.items():
                self.memory.read(peer, theirs.address, parts[peer])
            offer.take()

        return self.pending(offer, what, read, shard, out)

    def reduce_scatter(self, whole: FlatChunks, out: Tensor, tag: int, what: str) -> AsyncWork:
        """See ``Communicator.reduce_scatter``."""
        table = _table([0 if part is None else part.data_ptr() for part in whole.parts])
        offer = self.offer(ctypes.addressof(table), tag + _REDUCING, what)

        def average() -> None:
            self._average(whole, offer, out)
            offer.take()

        return self.pending(offer, what, average, *whole.tensors, out, table)

    def _average(self, whole: FlatChunks, offer: Publication, out: Tensor) -> None:
        """Average in rank order, so that every run and every rank rounds alike."""
        addresses: list[list[int]] = []
        for rank in range(self.size):
            table = _table([0] * len(whole.parts))
            if rank != self.rank:
                place, nbytes = ctypes.addressof(table), ctypes.sizeof(table)
                self.memory.read_into(rank, offer.theirs[rank].address, place, nbytes)
            addresses.append(list(table))
        first = self.rank * out.numel()
        scratch = torch.empty(min(_PIECE_NUMEL, out.numel()), dtype=whole.dtype)
        for piece in whole.cut(first, first + out.numel(), _PIECE_NUMEL):
            self._average_piece(
                piece.values,
                [table[piece.part] for table in addresses],
                piece.offset * whole.dtype.itemsize,
                out[piece.start - first : piece.end - first],
                scratch[: piece.end - piece.start],
            )

    def _average_piece(
        self, own: Tensor | None, addresses: list[int], offset: int, out: Tensor, scratch: Tensor
    ) -> None:
        """Average one piece of one part.

        Args:
            own: this rank's values; None: zeros.
            addresses: where each rank has the part; 0: it has zeros, or is this rank.
            offset: of the piece in the part, in bytes.
            out: where the average goes; in the dtype to add in.
            scratch: as long as ``out``, in the dtype of the values.
        """
        total: Tensor | None = None
        for rank, address in enumerate(addresses):
            if rank == self.rank:
                values = own
            elif address:
                values = out if total is None and out.dtype is scratch.dtype else scratch
                self.memory.read(rank, address + offset, values)
            else:
                values = None
            if values is None:
                continue
            if total is None:
                total = values if values.dtype is out.dtype else out.copy_(values)
            else:
                total = torch.add(total, values, out=out)
        if total is None:
            out.zero_()
        else:
            divide(total, len(addresses), out)

    def offer(self, address: int, tag: int, what: str) -> Publication:
        """Tell the others a number under a tag, and begin to wait for theirs.

        Collective: all ranks of the group. Waits until they have taken what was offered before.

        Args:
            address: the number, mostly where something lies in this rank's memory.
            tag: the tag.
            what: what for, in messages.
        """
        before = self._offers.get(tag)
        if before is not None and not all(taken.is_completed() for taken in before.taken):
            need = self.progress.needs(("take", tag), before.number)
            with watched(lambda: f"{what}, not taken the last time", need):
                for taken in before.taken:
                    taken.wait()
        number = 1 if before is None else before.number + 1
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._offers[tag] = offer = Publication(
            self._mailbox,
            self.progress,
            tag,
            number,
            theirs={peer: self.memory.offered(peer, tag, number) for peer in peers},
            taken=[self.memory.taken(peer, tag, number) for peer in peers],
        )
        self.progress.reach(("offer", tag), number)
        self._mailbox.offer(tag, number, address)
        return offer

    def pending(
        self,
        offer: Publication,
        what: str,
        then: Callable[[], None],
        *kept: object,
    ) -> AsyncWork:
        """An offer as a collective under way, of which ``then`` makes the result."""
        return AsyncWork(
            list(offer.theirs.values()),
            what,
            *kept,
            peers=[self._ranks[peer] for peer in offer.theirs],
            then=then,
            trailing=offer.taken,
            need=self.progress.needs(("offer", offer.tag), offer.number),
            trailing_need=self.progress.needs(("take", offer.tag), offer.number),
        )


@dataclass(slots=True)
class Publication:
    """What this rank lets the others read, and what it reads of theirs.

    Attributes:
        mailbox: this rank's.
        progress: likewise.
        tag: tells the offer from others of the group.
        number: how many this is under the tag.
        theirs: the other ranks' offers, by rank.
        taken: that they have read what this one offers, awaited of each.
    """

    mailbox: Mailbox
    progress: CollectiveCounter
    tag: int
    number: int
    theirs: dict[int, Awaited]
    taken: list[Awaited]

    def take(self) -> None:
        """Say that this rank has read the others' parts."""
        self.progress.reach(("take", self.tag), self.number)
        self.mailbox.take(self.tag, self.number)


def _table(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(addresses))(*addresses)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
