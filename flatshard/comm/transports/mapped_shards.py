"""``MappedShards``: the shards of ranks on one host side by side in memory, without a copy.

Each rank keeps its shard in a file in memory, and every rank maps all of them, in rank order, onto
one range of addresses: that is the unsharded buffer. A gather only waits until every rank's shard
is final, and freeing gives the pages back to where they came from. No rank may write its shard
before the others are done with it, which ``AsyncWork`` keeps account of.

The files have no name and nothing to clean up: they end with the last process that has them.

[Note: private]
The range is mapped privately: what a module writes into its gathered parameters stays there until
they are freed, as in a copy. ``keep`` uses the same to make the whole range a copy.

[Note: fallback]
A rank that cannot have such a file, or cannot map that of another, copies instead, as
``SharedMemoryTransport`` does; the others need not know.
"""

from __future__ import annotations

import mmap
import os

import torch

from flatshard.comm.transports.shared_memory import Publication, SharedMemoryTransport
from flatshard.comm.work import AsyncWork
from flatshard.memory import mapped_files
from flatshard.memory.mapped_files import Files
from flatshard.plan.layout import PAGED_BYTES


class MappedShards:
    """One flat parameter's shards.

    Attributes:
        shard: this rank's, ``(shard_numel,)``, zeros at first; others see what is written.
        buffer: all ranks', ``(padded_numel,)``; good between the wait for ``begin`` and ``free``.
    """

    def __init__(
        self,
        group: SharedMemoryTransport,
        numel: int,
        dtype: torch.dtype,
        *,
        tag: int,
        map_tag: int,
        files: Files = mapped_files,
    ) -> None:
        """Make the memory. No communication; the ranks map each other's at the first ``begin``.

        Args:
            group: the ranks.
            numel: elements of a shard, whose bytes fill whole pages.
            dtype: of the elements.
            tag: for gathers, from the group's communicator.
            map_tag: for telling where the file is, likewise.
            files: makes this rank's file: in memory, or on a disk.
        """
        self._group, self._tag, self._map_tag = group, tag, map_tag
        self._nbytes = numel * dtype.itemsize
        self._file = files.create(self._nbytes, reserve=True)
        own = None
        if self._file is not None:
            own = files.mapped(self._file, self._nbytes, write=True)
        # Where the file could not be had, memory that others copy from.
        self.shard = torch.frombuffer(own or mmap.mmap(-1, self._nbytes), dtype=dtype)
        everything = mapped_files.reserve_range(self._nbytes * group.size)
        self.buffer = torch.frombuffer(everything, dtype=dtype)
        self._address = self.buffer.data_ptr()
        self._mapped: set[int] | None = None
        self._introduction: Publication | None = None
        self._offer: Publication | None = None
        self._is_kept = False

    @staticmethod
    def fits(numel: int, dtype: torch.dtype) -> bool:
        """Whether shards of ``numel`` elements can be mapped; smaller ones would gain nothing.

        The same on all ranks, as long as they run the same kind of system.
        """
        nbytes = numel * dtype.itemsize
        return mapped_files.CAN_MAP and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0

    @property
    def held_bytes(self) -> int:
        """Of the buffer, what is a copy: all after ``keep``, else what could not be mapped."""
        if self._is_kept:
            return self._group.size * self._nbytes
        copied = 0 if self._mapped is None else self._group.size - len(self._mapped)
        return copied * self._nbytes

    def begin(self, what: str) -> AsyncWork:
        """Say that this rank's shard is final until ``free`` and begin to wait for the others'.

        Collective: all ranks of the group.

        Args:
            what: names the gather in errors.
        """
        if self._introduction is None:
            number = -1 if self._file is None else self._file
            self._introduction = self._group.offer(number, self._map_tag, what)
        elif self._file is not None and all(t.is_completed() for t in self._introduction.taken):
            os.close(self._file)
            self._file = None
        self._offer = offer = self._group.offer(self.shard.data_ptr(), self._tag, what)
        return self._group.pending(offer, what, lambda: self._fill(offer), self.shard, self.buffer)

    def _fill(self, offer: Publication) -> None:
        """Let the buffer show all shards; all are final now."""
        if self._mapped is None:
            self._mapped = self._map_all()
        parts = self.buffer.chunk(self._group.size)
        for rank, part in enumerate(parts):
            if rank in self._mapped:
                continue
            if rank == self._group.rank:
                part.copy_(self.shard)
            else:
                self._group.memory.read(rank, offer.theirs[rank].address, part)

    def _map_all(self) -> set[int]:
        """Map the ranks' files, each at its place; returns the ranks for which that worked."""
        assert self._introduction is not None, "begin() comes first"
        mapped = set()
        for rank in range(self._group.size):
            file = self._file_of(rank, self._introduction)
            if file is not None:
                place = self._address + rank * self._nbytes
                if mapped_files.map_privately(file, place, self._nbytes):
                    mapped.add(rank)
                if rank != self._group.rank:
                    os.close(file)
        self._introduction.take()
        return mapped

    def _file_of(self, rank: int, introduction: Publication) -> int | None:
        if rank == self._group.rank:
            return self._file
        theirs = introduction.theirs[rank]
        theirs.wait()
        return mapped_files.open_of(self._group.memory.pid(rank), theirs.address)

    def take(self) -> None:
        """The addresses are there anyway."""

    def renew(self) -> None:
        """What was gathered is stale: let other ranks write their shards."""
        self.free()

    def free(self) -> None:
        """The buffer is not needed any more: give its pages back. Does nothing the second time."""
        if self._offer is not None:
            self._offer.take()
            self._offer = None
        self._is_kept = False
        mapped_files.drop_pages(self._address, self._nbytes * self._group.size)

    def keep(self) -> None:
        """Turn the buffer into a copy, which outlives changes of the shards."""
        if self._offer is not None:
            per_page = mmap.PAGESIZE // self.buffer.element_size()
            touched = self.buffer.detach()[::per_page]
            touched.copy_(touched.clone())  # a write makes the page this process's own
            self._offer.take()
            self._offer = None
            self._is_kept = True

    def __del__(self) -> None:
        """Close the file where no second gather did."""
        if self.__dict__.get("_file") is not None:
            os.close(self._file)  # type: ignore[arg-type]
