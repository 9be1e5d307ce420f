"""Extra: ranks on one host read each other's memory, and map each other's shards.

Used for ``collectives="auto"`` if this folder is installed and the system permits ranks to read
each other's memory. Without this folder, ``collectives="auto"`` uses sockets.

In a collective, each rank publishes the address of its data. The other ranks copy the data (in an
all-gather) or add the data piece by piece (in a reduce-scatter). Then each rank publishes that it
has read the data of all ranks.

Large shards are not copied at all. Each rank keeps its shard in a file in memory, and maps all
ranks' files, in rank order, into the unsharded buffer (``MappedShards``). An all-gather only waits
until no rank writes to its shard any more, and resharding drops the mapped pages. At the end of a
forward or backward, each rank waits until all ranks have dropped its shard (``PendingSends``),
because an optimizer may write to it next.

The mapping is private, so if a module writes to unsharded parameters, the shards do not change. If
the file of a shard cannot be created or mapped, the shard is copied into the buffers.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor

from flatshard.comm import transports
from flatshard.comm.process_groups import timeout_of
from flatshard.comm.transports import BufferRequest, Gather, Members, ReduceScatter
from flatshard.comm.work import AsyncWork, WaitCondition, watched
from flatshard.extras import mapped_files
from flatshard.extras.shared_memory import peer_memory
from flatshard.extras.shared_memory.peer_memory import OFFER, TAKE, Awaited, Mailbox, PeerProcess
from flatshard.memory import BufferMemory
from flatshard.options import OffloadError, TransportOptions
from flatshard.units.layout import PAGED_BYTES, as_bytes

# Added to a reduce-scatter's tag, because the flat parameter's all-gathers have the same tag.
_REDUCING = peer_memory.TAGS // 2
# Number of elements to read and add at a time. So few elements stay in the CPU's cache.
_PIECE_NUMEL = 1 << 16


class SharedMemoryTransport(transports.Transport):
    """Collectives between ranks on one host, in which each rank reads the other ranks' memory.

    Ranks may start collectives in different orders: collectives match by tag, not by order.
    """

    name = "shared memory"
    host_only, max_tag = True, _REDUCING

    def __init__(
        self, members: Members, processes: list[PeerProcess], mailbox: Mailbox, reason: str
    ) -> None:
        self.members, self.processes, self._mailbox = members, processes, mailbox
        self.reason = reason
        # For each tag: the awaited `TAKE` records, in which the other ranks say that they have read
        # this rank's latest data. Before publishing new data, this rank waits for these records.
        self._published: dict[int, tuple[list[Awaited], WaitCondition]] = {}
        self._open_files: list[tuple[int, list[Awaited]]] = []

    @classmethod
    def connect(cls, members: Members) -> "SharedMemoryTransport | str":
        if not members.is_gloo:
            return ""
        # This transport cannot round to a `wire_dtype`; `collectives=` asks for another transport.
        if members.options != TransportOptions():
            return "collectives= or wire_dtype= asks for it"
        mailbox = Mailbox()
        timeout = timeout_of(members.gather_group) or timedelta(minutes=30)
        processes, reason = peer_memory.meet(mailbox, members.host, timeout.total_seconds())
        return cls(members, processes, mailbox, reason) if processes else reason

    def forget(self, tag: int) -> None:
        for one in (tag, tag + _REDUCING):
            self._published.pop(one, None)
            self.members.history.forget(("offer", one), ("take", one))

    def allocate_unsharded(self, request: BufferRequest) -> BufferMemory:
        nbytes = request.numel // self.members.size * request.dtype.itemsize
        # Only shards of whole pages can be mapped next to each other.
        can_map = nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0
        if can_map:
            # On an error (no file can be created, or no addresses are free), copy the shards.
            with contextlib.suppress(OSError, OffloadError):
                return MappedShards(self, nbytes, request)
        memory = super().allocate_unsharded(request)
        # Set the same value on all ranks, even if only this rank copies shards: `shows_shards`
        # decides when a rank reshards, and all ranks must reshard at the same time.
        memory.shows_shards = can_map
        return memory

    def gather(self, request: Gather, op_name: str) -> AsyncWork:
        shard, out, memory = request.shard, request.out, request.memory
        if isinstance(memory, MappedShards):
            return memory.begin(op_name)
        slots, source = as_bytes(out).chunk(self.members.size), as_bytes(shard)
        work, records, take = self.publish(source.data_ptr(), request.tag, op_name, shard, out)
        slots[self.members.rank].copy_(source)

        # Read in the wait, and not now: other ranks may not have published their shards yet.
        def read() -> None:
            for peer, record in records.items():
                self.processes[peer].read(record.address, slots[peer])
            take()

        work.then = read
        return work

    def reduce_scatter(self, request: ReduceScatter, op_name: str) -> AsyncWork:
        full, out, tag = request.full, request.out, request.tag + _REDUCING
        work, records, take = self.publish(full.data_ptr(), tag, op_name, full, out)

        def average() -> None:
            self._average(full, records, out)
            take()

        work.then = average
        return work

    def _average(self, full: Tensor, records: dict[int, Awaited], out: Tensor) -> None:
        """Fill ``out`` with this rank's part of the average. Ranks' values are added in order."""
        members, itemsize = self.members, full.itemsize
        own, first = full.chunk(members.size)[members.rank], members.rank * out.numel()
        scratch = torch.empty(min(_PIECE_NUMEL, out.numel()), dtype=full.dtype, device="cpu")
        for start in range(0, out.numel(), _PIECE_NUMEL):
            result = out[start : start + _PIECE_NUMEL]
            for rank in range(members.size):
                # Read the first values directly into the result, without a copy.
                in_place = rank == 0 and out.dtype is full.dtype
                values = result if in_place else scratch[: result.numel()]
                if rank == members.rank:
                    values = own[start : start + _PIECE_NUMEL]
                else:
                    place = records[rank].address + (first + start) * itemsize
                    self.processes[rank].read(place, values)
                if rank == 0:
                    total = values if values.dtype is out.dtype else result.copy_(values)
                else:
                    total = torch.add(total, values, out=result)
            transports.divide(total, members.size, result)

    def close_taken_files(self) -> None:
        """Close files that all ranks have mapped. A process can usually open only 1,024 files."""
        for one in list(self._open_files):
            file, taken = one
            if all(record.is_completed() for record in taken):
                os.close(file)
                self._open_files.remove(one)

    def publish(
        self, address: int, tag: int, op_name: str, *kept: object, file: int = -1
    ) -> tuple[AsyncWork, dict[int, Awaited], Callable[[], None]]:
        """Publish an address, and an open file if ``file`` is not -1, for the other ranks to read.

        First waits until the other ranks have read the tag's previous publication. The file is
        closed after all ranks have mapped the file. Collective: all ranks of the group.

        Returns:
            Three values: the work, which waits for the publications of the other ranks, and keeps
                ``kept`` alive until the other ranks have read this rank's memory; these
                publications, keyed by rank; and a function that tells all ranks that this rank has
                read their memory.
        """
        # A mailbox has only one record per tag. So before overwriting the previous record, wait
        # until even the slowest rank has read it.
        before, condition = self._published.get(tag, ([], None))
        if not all(record.is_completed() for record in before):
            with watched(f"{op_name}, previous values not read yet", condition):
                for record in before:
                    record.wait()
        members, history = self.members, self.members.history
        # Count the collective before other ranks see its record: deadlock detection compares how
        # many collectives each rank has begun.
        need = history.begin(members.gather_group, ("offer", tag))
        number, need = need.number, need._replace(abort=lambda: _give_up(offers))
        sends_need = need._replace(kind=("take", tag), abort=lambda: _give_up(taken))
        others = {peer: self.processes[peer] for peer in members.peers}
        records = {peer: Awaited(other, tag, OFFER, number) for peer, other in others.items()}
        offers, ranks = [*records.values()], [members.ranks[peer] for peer in members.peers]
        taken = [Awaited(other, tag, TAKE, number) for other in others.values()]
        self._published[tag] = taken, sends_need
        if file >= 0:
            self._open_files.append((file, taken))
        self._mailbox.publish(tag, OFFER, number, address, file)

        def take() -> None:
            history.begun["take", tag] = number
            self._mailbox.publish(tag, TAKE, number)

        work = AsyncWork(
            offers, op_name, kept, peers=ranks, sends=taken, condition=need, sends_need=sends_need
        )
        return work, records, take


def _give_up(awaited: Iterable[Awaited]) -> None:
    """Make the threads that wait for records raise ``RuntimeError``."""
    for one in awaited:
        one.is_given_up = True


class MappedShards(BufferMemory):
    """Unsharded buffer of a flat parameter, into which all ranks' shards are mapped, not copied."""

    shard: Tensor
    shows_shards = True

    def __init__(self, owner: SharedMemoryTransport, nbytes: int, request: BufferRequest) -> None:
        """Allocate the shard, of ``nbytes``, and the buffer, without communication.

        Ranks map each other's shards after the first ``begin``.

        Raises:
            OSError: no file can be created, or no addresses are left.
            OffloadError: the file's disk is full.
        """
        self._transport, self._tag, self._target = owner, request.tag, request.shard_target
        self._nbytes = nbytes
        buffer = mapped_files.reserve_range(nbytes * owner.members.size)
        super().__init__(torch.frombuffer(buffer, dtype=request.dtype))
        file, found = mapped_files.create_mapped(self._target, nbytes)
        os.close(file)
        # Map the file with the shard as shared memory, so that other ranks see writes to the shard.
        self.shard = torch.frombuffer(found, dtype=request.dtype)
        self._mapped: set[int] = set()  # the ranks whose shards are mapped into the buffer
        self._num_copied = 0
        self._has_begun = False
        # Function that tells all ranks that this rank has read their shards. None: nothing to tell.
        self._take: Callable[[], None] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of copies of shards in the buffer. Mapped shards need no memory."""
        return self._num_copied * self._nbytes

    def begin(self, op_name: str) -> AsyncWork:
        """Begin an all-gather: publish this rank's shard, and await the other ranks' shards.

        From now on, no rank may write a shard until all ranks have called ``free`` or ``snapshot``.
        Collective: all ranks of the group.
        """
        if self._take is not None or self._num_copied:
            self.free()  # the buffer still has the values of an earlier all-gather
        self._transport.close_taken_files()
        file, self._has_begun = -1 if self._has_begun else self._share(), True
        work, records, self._take = self._transport.publish(
            self.shard.data_ptr(), self._tag, op_name, self.shard, self.buffer, file=file
        )
        work.then = partial(self._fill, records)
        return work

    def _share(self) -> int:
        """Move the shard to a file, for other ranks to map.

        Returns the open file's descriptor; -1 if the shard could not be moved.
        """
        # Create the file now, and not at construction. If all units created files at construction,
        # the process would have too many open files.
        try:
            file, found = mapped_files.create_mapped(self._target, self._nbytes)
        except (OSError, OffloadError):  # too many files are open, or the disk is full
            return -1
        try:
            with torch.no_grad():
                torch.frombuffer(found, dtype=self.shard.dtype).copy_(self.shard)
            # Map the file at the shard's old address, to which existing tensors and views point.
            mapped_files.map_at(file, self.shard.data_ptr(), self._nbytes)
        except OSError:
            os.close(file)
            return -1
        self._map(self._transport.members.rank, file)
        return file

    def _map(self, rank: int, file: int) -> None:
        """Map the open file with a rank's shard into the buffer, at the rank's position.

        If the system refuses, ``_fill`` copies the shard later.
        """
        place = self.buffer.data_ptr() + rank * self._nbytes
        with contextlib.suppress(OSError):
            mapped_files.map_at(file, place, self._nbytes, private=True)
            self._mapped.add(rank)

    def _fill(self, records: dict[int, Awaited]) -> None:
        """Map or copy all shards into the buffer, after all ranks have published their shards."""
        members, processes = self._transport.members, self._transport.processes
        for rank, record in records.items():
            # The other process keeps the file open until this rank calls `take`.
            with contextlib.suppress(OSError):
                if record.file >= 0:
                    with peer_memory.open_of(processes[rank].pid, record.file) as file:
                        self._map(rank, file.fileno())
        self._num_copied = members.size - len(self._mapped)
        for rank, part in enumerate(self.buffer.chunk(members.size)):
            if rank in self._mapped:
                continue
            if rank == members.rank:
                part.copy_(self.shard)
            else:
                processes[rank].read(records[rank].address, part)

    def free(self) -> None:
        # Publish that this rank has read all ranks' shards. Ranks wait for this before they write.
        take, self._take = self._take, None
        if take is not None:
            take()
        self._num_copied = 0
        mapped_files.drop_pages(self.buffer.data_ptr(), self.buffer.nbytes)

    def snapshot(self) -> None:
        if self._take is not None:
            # The system copies a page of a private mapping at the first write to the page. So write
            # to one element of each page.
            touched = self.buffer.detach()[:: mmap.PAGESIZE // self.buffer.element_size()]
            touched.copy_(touched.clone())
            # Call `take` only after all shards are copied: `take` lets other ranks write their
            # shards.
            self._take()
            self._take, self._num_copied = None, self._transport.members.size
