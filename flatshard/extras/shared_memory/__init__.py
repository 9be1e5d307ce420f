"""Extra: ranks on one host read one another's memory, and map one another's shards.

Used for ``collectives="auto"`` wherever this folder is installed and the system permits it. Without
this folder, ``collectives="auto"`` uses sockets.

In a collective of ``SharedMemoryTransport`` each rank publishes where its part lies. The other
ranks copy the part from there, or add it up piece by piece, and say that they have. Each byte is
copied once.

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
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from flatshard.comm.process_groups import as_bytes, timeout_of
from flatshard.comm.transports import (
    BufferRequest,
    FlatChunks,
    Gather,
    Members,
    ReduceScatter,
    Transport,
    divide,
)
from flatshard.comm.work import AsyncWork, WaitCondition, watched
from flatshard.extras.shared_memory import peer_memory
from flatshard.extras.shared_memory.peer_memory import Awaited, Mailbox, PeerProcess
from flatshard.memory import mapped_files
from flatshard.memory.buffers import BufferMemory, allocate, fills_pages, own_pages
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
        # By tag: what the other ranks have yet to take of the last publication.
        self._published: dict[int, tuple[list[Awaited], WaitCondition]] = {}
        self._open_files: list[tuple[int, list[Awaited]]] = []

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
        can_map = request.shard_target is not None and fills_pages(part * request.dtype.itemsize)
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
        publication = self.publish(source.data_ptr(), request.tag, op_name, shard, out)
        slots[self.members.rank].copy_(source)

        # In the wait, not here: the others may not have published yet.
        def read() -> None:
            for peer, record in publication.records.items():
                self.processes[peer].read(record.address, slots[peer])
            publication.take()

        publication.then = read
        return publication

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        chunks, out, tag = request.chunks, request.out, request.tag + _REDUCING
        # The table stays alive with the work: the others read it, and then the parts it points at.
        places = [0 if part is None else part.data_ptr() for part in chunks.parts]
        table = torch.tensor(places, device="cpu")
        publication = self.publish(table.data_ptr(), tag, op_name, *chunks.tensors, out, table)

        def average() -> None:
            self._average(chunks, publication.records, out)
            publication.take()

        publication.then = average
        return publication

    def _average(self, chunks: FlatChunks, records: dict[int, Awaited], out: Tensor) -> None:
        """Average in rank order, so that every run and every rank rounds alike."""
        members = self.members
        tables = torch.zeros(members.size, len(chunks.parts), dtype=torch.int64, device="cpu")
        for rank, record in records.items():
            self.processes[rank].read(record.address, tables[rank])
        places = tables.tolist()  # where each rank has its parts; 0: zeros
        first = members.rank * out.numel()
        scratch = torch.empty(min(_PIECE_NUMEL, out.numel()), dtype=chunks.dtype, device="cpu")
        for piece in chunks.cut(first, first + out.numel(), _PIECE_NUMEL):
            result = out[piece.start - first : piece.end - first]
            total: Tensor | None = None
            for rank in range(members.size):
                values = piece.values if rank == members.rank else None
                if place := places[rank][piece.part]:
                    # The first rank's values can arrive where the sum is made.
                    in_place = total is None and out.dtype is chunks.dtype
                    values = result if in_place else scratch[: result.numel()]
                    self.processes[rank].read(place + piece.offset * values.itemsize, values)
                if values is None:
                    continue
                if total is None:
                    total = values if values.dtype is out.dtype else result.copy_(values)
                else:
                    total = torch.add(total, values, out=result)
            if total is None:
                result.zero_()
            else:
                divide(total, members.size, result)

    def close_taken_files(self) -> None:
        """Close what all ranks have mapped: a process may have 1,024 files open by default."""
        for one in list(self._open_files):
            file, taken = one
            if all(record.is_completed() for record in taken):
                os.close(file)
                self._open_files.remove(one)

    def publish(
        self, address: int, tag: int, op_name: str, *kept: object, file: int = -1
    ) -> Publication:
        """Tell the other ranks an address and an open file to map; begin to wait for theirs.

        Collective: all ranks of the group. Waits until the other ranks have taken the tag's last
        publication. The file is closed when all ranks have mapped the file. ``kept`` stays alive
        until the other ranks have read.
        """
        # A mailbox has one record per tag: overwritten too early, a slow rank would never see it.
        before, condition = self._published.get(tag, ([], None))
        if not all(record.is_completed() for record in before):
            with watched(f"{op_name}, not taken the last time", condition):
                for record in before:
                    record.wait()
        members, history = self.members, self.members.history
        records: dict[int, Awaited] = {}
        taken: list[Awaited] = []
        # Counted before it is visible, or the detector could report it as missing.
        need = history.begin(("offer", tag), abort=lambda: _give_up(records.values()))
        number = need.number
        sends_need = history.needs(("take", tag), number, abort=lambda: _give_up(taken))
        for peer in members.peers:
            records[peer] = self.processes[peer].offered(tag, number)
            taken.append(self.processes[peer].taken(tag, number))
        self._published[tag] = taken, sends_need
        if file >= 0:
            self._open_files.append((file, taken))
        self._mailbox.offer(tag, number, address, file)
        return Publication(
            list(records.values()),
            op_name,
            kept,
            peers=[members.ranks[peer] for peer in members.peers],
            sends=taken,
            need=need,
            sends_need=sends_need,
            records=records,
            take=partial(self._take, tag, number),
        )

    def _take(self, tag: int, number: int) -> None:
        """Say that this rank has read the others' publications ``number`` of a tag."""
        self.members.history.reach(("take", tag), number)
        self._mailbox.take(tag, number)


@dataclass(eq=False)
class Publication(AsyncWork):
    """A collective under way: what this rank lets the others read, and what it reads of theirs."""

    _: KW_ONLY
    records: dict[int, Awaited]  # what the other ranks publish, by rank
    take: Callable[[], None]  # says that this rank has read the others' parts


def _give_up(awaited: Iterable[Awaited]) -> None:
    for one in awaited:
        one.give_up()


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
        assert request.shard_target is not None, "what makes the file"
        self._transport, self._tag, self._target = transport, request.tag, request.shard_target
        self._nbytes = shard_numel * request.dtype.itemsize
        buffer = mapped_files.reserve_range(self._nbytes * transport.members.size)
        self.buffer = torch.frombuffer(buffer, dtype=request.dtype)
        file, found = self._target.create_mapped(self._nbytes)
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
        publication = self._transport.publish(
            self.shard.data_ptr(), self._tag, op_name, self.shard, self.buffer, file=file
        )
        publication.then = partial(self._fill, publication.records)
        self._publication = publication
        return publication

    def _share(self) -> int:
        """Move the shard to a file that is open for the others to map; its number, or -1."""
        # At the first all-gather, not before: until all ranks come here, each unit of a model would
        # have a file open.
        try:
            file, found = self._target.create_mapped(self._nbytes)
        except (OSError, OffloadError):  # too many open files; the disk is full
            return -1
        try:
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

    def _fill(self, records: dict[int, Awaited]) -> None:
        """Let the buffer show all shards; all are final now."""
        members, processes = self._transport.members, self._transport.processes
        for rank, record in records.items():
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
                processes[rank].read(records[rank].address, part)

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
