"""``SharedMemoryTransport``: collectives of ranks that read each other's memory.

Each rank publishes where its part lies; the others copy it from there, or add it up piece by piece,
and say that they have. Each byte is copied once.

Large shards are not even copied. Each rank keeps its shard in a file in memory, and every rank maps
all of them, in rank order, onto one range of addresses: that is the unsharded buffer
(``MappedShards``). An all-gather only waits until every rank's shard is final, and resharding drops
the mapped pages. No rank may write its shard before the others are done with it, for which
``PendingSends`` waits.

The range is mapped privately: what a module writes into its unsharded parameters stays there until
they are resharded, as in a copy. A rank that cannot have such a file, or cannot map that of
another, copies instead; the others need not know.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from flatshard.comm.flat_chunks import FlatChunks, as_bytes, divide
from flatshard.comm.process_groups import timeout_of
from flatshard.comm.transports import BufferRequest, Gather, Members, ReduceScatter, Transport
from flatshard.comm.watch import History, WaitCondition, watched
from flatshard.comm.work import AsyncWork
from flatshard.extras.shared_memory import peer_memory
from flatshard.extras.shared_memory.peer_memory import Awaited, Mailbox, PeerProcess
from flatshard.memory import mapped_files
from flatshard.memory.buffers import BufferMemory, own_pages
from flatshard.memory.page_pool import allocate, fills_pages
from flatshard.options.offload import OffloadError
from flatshard.options.transport_options import TransportOptions

# Added to tags of reduce-scatters: half of a mailbox's records are for these.
_REDUCING = peer_memory.TAGS // 2
# Elements that are read and added at a time: they stay in the cache between.
_PIECE_NUMEL = 1 << 16


class SharedMemoryTransport(Transport):
    """Ranks on one host that read one another's memory; collectives match by tag."""

    name = "shared memory"

    def __init__(
        self, members: Members, processes: list[PeerProcess], mailbox: Mailbox, reason: str
    ) -> None:
        self.members, self.processes, self._mailbox = members, processes, mailbox
        self.reason = reason
        self._peers = {peer: processes[peer] for peer in members.peers}
        self._published: dict[int, Publication] = {}
        self._open_files: list[Publication] = []

    @classmethod
    def connect(cls, members: Members) -> SharedMemoryTransport | str:
        if not members.is_gloo:
            return ""
        # With a wire dtype, results must be the same wherever the ranks are.
        if members.options != TransportOptions():
            return "collectives= or wire_dtype= asks for it"
        mailbox = Mailbox()
        timeout = timeout_of(members.gather_group) or timedelta(minutes=30)
        processes, reason = peer_memory.meet(
            mailbox, members.host, members.ranks, timeout.total_seconds()
        )
        return cls(members, processes, mailbox, reason) if processes else reason

    def accepts(self, device: torch.device, tag: int) -> bool:
        return device.type == "cpu" and tag < _REDUCING  # else the mailbox has no place for it

    def min_chunk_bytes(self, dtype: torch.dtype) -> int | None:
        return 0

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        part = request.numel // self.members.size
        can_map = request.shard_files is not None and fills_pages(part * request.dtype.itemsize)
        if can_map:
            # No file can be had, or there are no addresses left: this rank copies.
            with contextlib.suppress(OSError, OffloadError):
                return MappedShards(self, part, request)
        memory = allocate(request.numel, request.dtype, request.device)
        memory.shows_shards = can_map  # alike on all ranks, who decide by it when to reshard
        return memory

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        shard, out, memory = request.shard, request.out, request.memory
        if isinstance(memory, MappedShards):
            return memory.begin(op_name)
        slots, source = as_bytes(out).chunk(self.members.size), as_bytes(shard)
        publication = self.publish(source.data_ptr(), request.tag, op_name)
        slots[self.members.rank].copy_(source)

        # In the wait, not here: the others may not have published yet.
        def read() -> None:
            for peer, record in publication.records.items():
                self.processes[peer].read(record.address, slots[peer])
            publication.take()

        return self.work(publication, op_name, read, shard, out)

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
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
        tables = [_table([0] * len(chunks.parts)) for _ in range(self.members.size)]
        for rank, record in publication.records.items():
            self.processes[rank].read_array(record.address, tables[rank])
        addresses = [list(table) for table in tables]
        first = self.members.rank * out.numel()
        scratch = torch.empty(min(_PIECE_NUMEL, out.numel()), dtype=chunks.dtype)
        for piece in chunks.cut(first, first + out.numel(), _PIECE_NUMEL):
            offset = piece.offset * chunks.dtype.itemsize
            starts = [table[piece.part] for table in addresses]
            self._average_piece(
                piece.values,
                [start + offset if start else 0 for start in starts],
                out[piece.start - first : piece.end - first],
                scratch[: piece.end - piece.start],
            )

    def _average_piece(
        self, own: Tensor | None, addresses: list[int], out: Tensor, scratch: Tensor
    ) -> None:
        # `addresses`: where each rank has the piece, 0 for zeros, as None in `own`, and for this
        # rank. `scratch` is as long as `out`, in the dtype of the values; `out` in that to add in.
        total: Tensor | None = None
        for rank, address in enumerate(addresses):
            if rank == self.members.rank:
                values = own
            elif address:
                # The first rank's values can arrive where the sum is made.
                values = out if total is None and out.dtype is scratch.dtype else scratch
                self.processes[rank].read(address, values)
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

    def close_taken_files(self) -> None:
        """Close what all ranks have mapped: a process may have 1,024 files open by default."""
        for one in list(self._open_files):
            if all(taken.is_completed() for taken in one.taken):
                os.close(one.file)
                self._open_files.remove(one)

    def publish(self, address: int, tag: int, op_name: str, file: int = -1) -> Publication:
        """Tell the others an address and an open file to map, and begin to wait for theirs.

        Collective: all ranks of the group. Waits until they took what was published under the tag
        before. The file is closed when they have mapped it.
        """
        # A mailbox has one record per tag: overwritten too early, a slow rank would never see it.
        before = self._published.get(tag)
        if before is not None and not all(taken.is_completed() for taken in before.taken):
            with watched(lambda: f"{op_name}, not taken the last time", before.sends_need):
                for taken in before.taken:
                    taken.wait()
        history = self.members.history
        records: dict[int, Awaited] = {}
        awaited: list[Awaited] = []
        # Counted before it is visible, or the detector could report it as missing.
        need = history.begin(("offer", tag), abort=lambda: _give_up(records.values()))
        number = need.number
        sends_need = history.needs(("take", tag), number, abort=lambda: _give_up(awaited))
        for peer, process in self._peers.items():
            records[peer] = process.offered(tag, number)
            awaited.append(process.taken(tag, number))
        publication = Publication(
            self._mailbox, history, tag, number, file, records, awaited, need, sends_need
        )
        self._published[tag] = publication
        if file >= 0:
            self._open_files.append(publication)
        self._mailbox.offer(tag, number, address, file)
        return publication

    def work(
        self, publication: Publication, op_name: str, then: Callable[[], None], *kept: object
    ) -> AsyncWork:
        """A publication as a collective under way, of which ``then`` makes the result."""
        return AsyncWork(
            list(publication.records.values()),
            op_name,
            kept,
            peers=[self.members.ranks[peer] for peer in publication.records],
            then=then,
            sends=publication.taken,
            need=publication.need,
            sends_need=publication.sends_need,
        )


@dataclass(slots=True)
class Publication:
    """What this rank lets the others read, and what it reads of theirs."""

    mailbox: Mailbox  # this rank's
    history: History
    tag: int
    number: int  # ordinal of this publication under its tag
    file: int
    records: dict[int, Awaited]  # those of the other ranks, by rank
    taken: list[Awaited]  # that each of them has read what this one published
    need: WaitCondition  # what ends a wait for `records`
    sends_need: WaitCondition  # what ends a wait for `taken`

    def take(self) -> None:
        """Say that this rank has read the others' parts."""
        self.history.reach(("take", self.tag), self.number)
        self.mailbox.take(self.tag, self.number)


def _give_up(awaited: Iterable[Awaited]) -> None:
    for one in awaited:
        one.give_up()


def _table(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(addresses))(*addresses)


class MappedShards(BufferMemory):
    """The shards of one flat parameter, side by side in memory without a copy."""

    shard: Tensor
    shows_shards = True

    def __init__(
        self, transport: SharedMemoryTransport, shard_numel: int, request: BufferRequest
    ) -> None:
        """Make the memory. No communication; the ranks map each other's at the first ``begin``.

        Raises:
            OSError: there is no file to be had, or no addresses are left.
            OffloadError: the file's disk is full.
        """
        assert request.shard_files is not None, "what makes the file"
        self._transport, self._tag, self._files = transport, request.tag, request.shard_files
        self._nbytes = shard_numel * request.dtype.itemsize
        buffer = mapped_files.reserve_range(self._nbytes * transport.members.size)
        self.buffer = torch.frombuffer(buffer, dtype=request.dtype)
        file = self._files.create(self._nbytes)
        try:
            found = self._files.mapped(file, self._nbytes)
        finally:
            os.close(file)
        self.shard = torch.frombuffer(found, dtype=request.dtype)  # others see what is written
        self._mapped: set[int] = set()  # the ranks whose shards the buffer shows
        self._num_copied = 0
        self._has_begun = self._is_copy = False
        self._publication: Publication | None = None

    @property
    def held_bytes(self) -> int:
        """Of the buffer, what is a copy: all after ``snapshot``, else what could not be mapped."""
        num_copied = self._transport.members.size if self._is_copy else self._num_copied
        return num_copied * self._nbytes

    def begin(self, op_name: str) -> AsyncWork:
        """Say that this rank's shard is final until ``free`` and begin to wait for the others'.

        Collective: all ranks of the group.
        """
        self._transport.close_taken_files()
        file, self._has_begun = -1 if self._has_begun else self._share(), True
        publication = self._transport.publish(self.shard.data_ptr(), self._tag, op_name, file)
        self._publication = publication
        return self._transport.work(
            publication, op_name, lambda: self._fill(publication), self.shard, self.buffer
        )

    def _share(self) -> int:
        """Move the shard to a file that is open for the others to map; its number, or -1."""
        # At the first all-gather, not before: until all ranks come here, each unit of a model would
        # have a file open.
        try:
            file = self._files.create(self._nbytes)
        except (OSError, OffloadError):  # too many open files; the disk is full
            return -1
        try:
            found = self._files.mapped(file, self._nbytes)
            with torch.no_grad():
                torch.frombuffer(found, dtype=self.shard.dtype).copy_(self.shard)
            # The shard keeps its addresses: tensors and views of them exist.
            mapped_files.map_at(file, self.shard.data_ptr(), self._nbytes)
        except OSError:
            os.close(file)
            return -1
        self._map(self._transport.members.rank, file)
        return file

    def _map(self, rank: int, file: int) -> None:
        """Show the open file of a rank at its place in the buffer, if that is possible."""
        place = self.buffer.data_ptr() + rank * self._nbytes
        with contextlib.suppress(OSError):
            mapped_files.map_at(file, place, self._nbytes, private=True)
            self._mapped.add(rank)

    def _fill(self, publication: Publication) -> None:
        """Let the buffer show all shards; all are final now."""
        members, processes = self._transport.members, self._transport.processes
        for rank, record in publication.records.items():
            # Open there until ``take``.
            with contextlib.suppress(OSError):
                if record.file >= 0:
                    file = peer_memory.open_of(processes[rank].pid, record.file)
                    self._map(rank, file)
                    os.close(file)
        self._num_copied = members.size - len(self._mapped)
        for rank, part in enumerate(self.buffer.chunk(members.size)):
            if rank in self._mapped:
                continue
            if rank == members.rank:
                part.copy_(self.shard)
            else:
                processes[rank].read(publication.records[rank].address, part)

    def renew(self) -> None:
        self.free()

    def free(self) -> None:
        # Only now may the others write their shards, which the buffer showed.
        if self._publication is not None:
            self._publication.take()
            self._publication = None
        self._is_copy = False
        mapped_files.drop_pages(self.buffer.data_ptr(), self.buffer.nbytes)

    def snapshot(self) -> None:
        if self._publication is not None:
            own_pages(self.buffer)
            # After the copy: from here on the others may write their shards.
            self._publication.take()
            self._publication = None
            self._is_copy = True
