"""``SharedMemoryTransport``: collectives of ranks that read each other's memory.

Each rank publishes where its part lies; the others copy it from there, or add it up piece by piece,
and say that they have. Each byte is copied once.

Large shards are not even copied: ``MappedShards`` shows those of all ranks side by side.

[Note: mapped shards]
Each rank keeps its shard in a file in memory, and every rank maps all of them, in rank order, onto
one range of addresses: that is the unsharded buffer. An all-gather only waits until every rank's
shard is final, and resharding drops the mapped pages. No rank may write its shard before the others
are done with it, for which ``PendingSends`` waits. The files have no name: they end with the last
process that has them.

The range is mapped privately: what a module writes into its unsharded parameters stays there until
they are resharded, as in a copy. ``snapshot`` uses the same to make the full range a copy. A rank
that cannot have such a file, or cannot map that of another, copies instead; the others need not
know.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from flatshard.comm.deadlock.detector import CollectiveCounter
from flatshard.comm.deadlock.watchdog import watched
from flatshard.comm.flat_chunks import FlatChunks, as_bytes, divide
from flatshard.comm.process_groups import timeout_of
from flatshard.comm.requests import BufferRequest, Gather, ReduceScatter
from flatshard.comm.transports import peer_memory
from flatshard.comm.transports.base import Members, Transport
from flatshard.comm.transports.peer_memory import Awaited, Mailbox, PeerMemory
from flatshard.comm.work import AsyncWork
from flatshard.memory import mapped_files
from flatshard.memory.buffers import AllocatedBuffer, BufferMemory
from flatshard.memory.mapped_files import Files
from flatshard.memory.page_pool import allocate, fills_pages
from flatshard.options.collectives import TransportOptions
from flatshard.options.offload import OffloadError

_REDUCING = peer_memory.TAGS // 2
"""Added to tags of reduce-scatters: half of a mailbox's records are for these."""

_PIECE_NUMEL = 1 << 16
"""Elements that are read and added at a time: they stay in the cache between."""


class SharedMemoryTransport(Transport):
    """Ranks on one host that read one another's memory.

    Attributes:
        members: the ranks.
        memory: reads that of the others.
    """

    name = "peer memory"

    def __init__(self, members: Members, memory: PeerMemory, mailbox: Mailbox, reason: str) -> None:
        """With this rank's mailbox."""
        self.members, self.memory, self._mailbox = members, memory, mailbox
        self.reason = reason
        self._published: dict[int, Publication] = {}
        self._open_files: list[tuple[int, Publication]] = []

    @classmethod
    def connect(cls, members: Members) -> SharedMemoryTransport | str:
        """See ``Transport``; for ranks that all may read one another."""
        if not members.is_gloo:
            return ""
        # With a wire dtype, results must be the same wherever the ranks are.
        if members.options != TransportOptions():
            return "collectives= or wire_dtype= asks for it"
        mailbox = Mailbox()
        timeout = timeout_of(members.gather_group) or timedelta(minutes=30)
        memory, reason = peer_memory.meet(
            mailbox, members.gather_objects, members.ranks, timeout.total_seconds()
        )
        return reason if memory is None else cls(members, memory, mailbox, reason)

    def accepts(self, device: torch.device, tag: int) -> bool:
        """See ``Transport``; as far as the mailbox has a place for the tag."""
        return device.type == "cpu" and tag < _REDUCING

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        """See ``Transport``."""
        return 0

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        """See ``Transport``: a large buffer shows the shards themselves."""
        numel, dtype, files = request.numel, request.dtype, request.shard_files
        part = numel // self.members.size
        if files is not None and fills_pages(part * dtype.itemsize):
            return MappedShards(self, part, dtype, tags=request.tags, files=files)
        return allocate(numel, dtype, request.device)

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        """See ``Transport``. Matches by tag, in any order."""
        if isinstance(request.memory, MappedShards):
            return request.memory.begin(op_name)
        shard, out = request.shard, request.out
        slots, source = as_bytes(out).chunk(self.members.size), as_bytes(shard)
        publication = self.publish(source.data_ptr(), request.tag, op_name)
        slots[self.members.rank].copy_(source)

        # In the wait, not here: the others may not have published yet.
        def read() -> None:
            for peer, record in publication.records.items():
                self.memory.read(peer, record.address, slots[peer])
            publication.take()

        return self.work(publication, op_name, read, shard, out)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        """See ``Transport``; added up in rank order."""
        chunks, out = request.chunks, request.out
        # The table stays alive with the work: the others read it, and then the parts it points at.
        table = _table([0 if part is None else part.data_ptr() for part in chunks.parts])
        publication = self.publish(ctypes.addressof(table), request.tag + _REDUCING, op_name)

        def average() -> None:
            self._average(chunks, publication, out)
            publication.take()

        return self.work(publication, op_name, average, *chunks.tensors, out, table)

    def _average(self, chunks: FlatChunks, publication: Publication, out: Tensor) -> None:
        """Average in rank order, so that every run and every rank rounds alike."""
        addresses: list[list[int]] = []
        for rank in range(self.members.size):
            table = _table([0] * len(chunks.parts))
            if rank != self.members.rank:
                place, nbytes = ctypes.addressof(table), ctypes.sizeof(table)
                self.memory.read_into(rank, publication.records[rank].address, place, nbytes)
            addresses.append(list(table))
        first = self.members.rank * out.numel()
        scratch = torch.empty(min(_PIECE_NUMEL, out.numel()), dtype=chunks.dtype)
        for piece in chunks.cut(first, first + out.numel(), _PIECE_NUMEL):
            self._average_piece(
                piece.values,
                [table[piece.part] for table in addresses],
                piece.offset * chunks.dtype.itemsize,
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
            if rank == self.members.rank:
                values = own
            elif address:
                # The first rank's values can arrive where the sum is made.
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

    def close_when_taken(self, number: int, publication: Publication) -> None:
        """Close an open file, if ``number`` is one, when all ranks have mapped it."""
        if number >= 0:
            self._open_files.append((number, publication))

    def close_taken_files(self) -> None:
        """Close what all ranks have mapped."""
        for one in list(self._open_files):
            if all(taken.is_completed() for taken in one[1].taken):
                os.close(one[0])
                self._open_files.remove(one)

    def publish(self, address: int, tag: int, op_name: str) -> Publication:
        """Tell the others an address under a tag, and begin to wait for theirs.

        Collective: all ranks of the group. Waits until they took what was published before.

        Args:
            address: an address in this rank's memory, or another number.
            tag: the tag.
            op_name: names the collective in errors.
        """
        counter, peers = self.members.counter, self.members.peers
        # A mailbox has one record per tag: overwritten too early, a slow rank would never see it.
        before = self._published.get(tag)
        if before is not None and not all(taken.is_completed() for taken in before.taken):
            need = counter.needs(("take", tag), before.number)
            with watched(lambda: f"{op_name}, not taken the last time", need):
                for taken in before.taken:
                    taken.wait()
        number = 1 if before is None else before.number + 1
        self._published[tag] = publication = Publication(
            self._mailbox,
            counter,
            tag,
            number,
            records={peer: self.memory.offered(peer, tag, number) for peer in peers},
            taken=[self.memory.taken(peer, tag, number) for peer in peers],
        )
        # Counted before it is visible, or the detector could report it as missing.
        counter.reach(("offer", tag), number)
        self._mailbox.offer(tag, number, address)
        return publication

    def work(
        self, publication: Publication, op_name: str, then: Callable[[], None], *kept: object
    ) -> AsyncWork:
        """A publication as a collective under way, of which ``then`` makes the result."""
        counter, tag, number = publication.counter, publication.tag, publication.number
        return AsyncWork(
            list(publication.records.values()),
            op_name,
            kept,
            peers=[self.members.ranks[peer] for peer in publication.records],
            then=then,
            sends=publication.taken,
            need=counter.needs(("offer", tag), number),
            sends_need=counter.needs(("take", tag), number),
        )


@dataclass(slots=True)
class Publication:
    """What this rank lets the others read, and what it reads of theirs.

    Attributes:
        mailbox: this rank's.
        counter: counts what this rank has reached.
        tag: tells the publication from others of the group.
        number: ordinal of this publication under its tag.
        records: those of the other ranks, by rank.
        taken: that each of them has read what this one published.
    """

    mailbox: Mailbox
    counter: CollectiveCounter
    tag: int
    number: int
    records: dict[int, Awaited]
    taken: list[Awaited]

    def take(self) -> None:
        """Say that this rank has read the others' parts."""
        self.counter.reach(("take", self.tag), self.number)
        self.mailbox.take(self.tag, self.number)


def _table(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(addresses))(*addresses)


class MappedShards(BufferMemory):
    """The shards of one flat parameter, side by side in memory without a copy.

    Attributes:
        shard: this rank's, ``(shard_numel,)``, zeros at first; others see what is written.
        buffer: all ranks', ``(padded_numel,)``; good between the wait for ``begin`` and ``free``.
        shows_shards: True: an all-gather copies nothing.
    """

    shard: Tensor
    shows_shards = True

    def __init__(
        self,
        transport: SharedMemoryTransport,
        numel: int,
        dtype: torch.dtype,
        *,
        tags: tuple[int, int],
        files: Files,
    ) -> None:
        """Make the memory. No communication; the ranks map each other's at the first ``begin``.

        Args:
            transport: how the ranks meet.
            numel: elements of a shard, whose bytes fill whole pages.
            dtype: of the elements.
            tags: of all-gathers, and of the publication of the file.
            files: makes this rank's file: in memory, or on a disk.
        """
        self._transport, self._tags, self._files = transport, tags, files
        self._nbytes = numel * dtype.itemsize
        own = self._new_file()
        # Where no file can be had, memory that others copy from.
        self.shard = torch.zeros(numel, dtype=dtype) if own is None else _values(own[1], dtype)
        if own is not None:
            os.close(own[0])
        self._mapped: set[int] = set()  # the ranks whose shards the buffer shows
        self._has_met = False  # mapped what can be mapped of the others
        self._introduction: Publication | None = None
        self._publication: Publication | None = None
        self._is_copy = False
        self._allocated: AllocatedBuffer | None = None
        try:
            everything = mapped_files.reserve_range(self._nbytes * transport.members.size)
        except OSError:  # no addresses left on this rank, which has to copy then
            device = torch.device("cpu")
            self._allocated = AllocatedBuffer(numel * transport.members.size, dtype, device)
            self.buffer = self._allocated.buffer
        else:
            self.buffer = _values(everything, dtype)

    def _new_file(self) -> tuple[int, mmap.mmap] | None:
        """An open file for the shard, and where it is mapped."""
        with contextlib.suppress(OSError, OffloadError):  # too many open files; the disk is full
            number = self._files.create(self._nbytes, reserve=True)
            if number is not None:
                found = self._files.mapped(number, self._nbytes, write=True)
                if found is not None:
                    return number, found
                os.close(number)
        return None

    @property
    def held_bytes(self) -> int:
        """Of the buffer, what is a copy: all after ``snapshot``, else what could not be mapped."""
        if self._allocated is not None:
            return self._allocated.held_bytes
        if self._is_copy:
            return self._transport.members.size * self._nbytes
        num_copied = self._transport.members.size - len(self._mapped) if self._has_met else 0
        return num_copied * self._nbytes

    def take(self) -> None:
        """Have the addresses, unless they are there."""
        if self._allocated is not None:
            self._allocated.take()

    def begin(self, op_name: str) -> AsyncWork:
        """Say that this rank's shard is final until ``free`` and begin to wait for the others'.

        Collective: all ranks of the group.
        """
        tag, map_tag = self._tags
        self._transport.close_taken_files()
        if self._introduction is None:
            number = self._share()
            self._introduction = self._transport.publish(number, map_tag, op_name)
            self._transport.close_when_taken(number, self._introduction)
        publication = self._transport.publish(self.shard.data_ptr(), tag, op_name)
        self._publication = publication
        return self._transport.work(
            publication, op_name, lambda: self._fill(publication), self.shard, self.buffer
        )

    def _share(self) -> int:
        """Move the shard to a file that is open for the others to map; its number, or -1.

        At the first all-gather, not before: until all ranks come here, each unit of a model would
        have a file open, and a process may open 1,024 by default.
        """
        new = self._new_file()
        if new is None:
            return -1
        number, found = new
        with torch.no_grad():
            _values(found, self.shard.dtype).copy_(self.shard)
        # The shard keeps its addresses: tensors and views of them exist.
        if not mapped_files.map_shared(number, self.shard.data_ptr(), self._nbytes):
            os.close(number)
            return -1
        self._map(self._transport.members.rank, number)
        return number

    def _map(self, rank: int, number: int) -> None:
        """Show the open file of a rank at its place in the buffer, if that is possible."""
        place = self.buffer.data_ptr() + rank * self._nbytes
        if self._allocated is None and mapped_files.map_privately(number, place, self._nbytes):
            self._mapped.add(rank)

    def _fill(self, publication: Publication) -> None:
        """Let the buffer show all shards; all are final now."""
        if not self._has_met:
            self._map_others()
        members = self._transport.members
        for rank, part in enumerate(self.buffer.chunk(members.size)):
            if rank in self._mapped:
                continue
            if rank == members.rank:
                part.copy_(self.shard)
            else:
                self._transport.memory.read(rank, publication.records[rank].address, part)

    def _map_others(self) -> None:
        """Map the other ranks' files, each at its place."""
        assert self._introduction is not None, "begin() comes first"
        for rank, record in self._introduction.records.items():
            record.wait()  # the file stays open there until ``take`` below
            number = mapped_files.open_of(self._transport.memory.pid(rank), record.address)
            if number is not None:
                self._map(rank, number)
                os.close(number)
        self._introduction.take()
        self._has_met = True

    def renew(self) -> None:
        """The buffer is stale: let other ranks write their shards."""
        self.free()

    def free(self) -> None:
        """Give the pages of the buffer back. Does nothing the second time."""
        # Only now may the others write their shards, which the buffer showed.
        if self._publication is not None:
            self._publication.take()
            self._publication = None
        self._is_copy = False
        if self._allocated is not None:
            self._allocated.free()
        else:
            mapped_files.drop_pages(self.buffer.data_ptr(), self.buffer.nbytes)

    def snapshot(self) -> None:
        """Turn the buffer into a copy, which outlives changes of the shards."""
        if self._publication is not None:
            per_page = mmap.PAGESIZE // self.buffer.element_size()
            touched = self.buffer.detach()[::per_page]
            touched.copy_(touched.clone())  # a write makes the page this process's own
            # After the copy: from here on the others may write their shards.
            self._publication.take()
            self._publication = None
            self._is_copy = True


def _values(found: mmap.mmap, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(found, dtype=dtype)
