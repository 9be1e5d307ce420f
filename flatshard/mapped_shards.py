"""``MappedShards``: the shards of ranks on one host side by side in memory, without a copy.

Each rank keeps its shard in a file in memory, and every rank maps all of them, in rank order, onto
one range of addresses: that is the unsharded buffer. A gather only waits until every rank's shard
is final, and freeing gives the pages back to where they came from. No rank may write its shard
before the others are done with it, which ``Pending`` keeps account of.

The files have no name and nothing to clean up: they end with the last process that has them.

[Note: private]
The range is mapped privately: what a module writes into its gathered parameters stays there until
they are freed, as in a copy. ``keep`` uses the same to make the whole range a copy.

[Note: fallback]
A rank that cannot have such a file, or cannot map that of another, copies instead, as ``HostGroup``
does; the others need not know.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

import torch

from flatshard.layout import PAGED_BYTES
from flatshard.on_host import HostGroup, Offer
from flatshard.pending import Pending

_MADV_DONTNEED = 4


class MappedShards:
    """One flat parameter's shards.

    Attributes:
        shard: this rank's, ``(shard_numel,)``, zeros at first; others see what is written.
        buffer: all ranks', ``(padded_numel,)``; good between the wait for ``begin`` and ``end``.
    """

    def __init__(
        self, group: HostGroup, numel: int, dtype: torch.dtype, *, tag: int, map_tag: int
    ) -> None:
        """Make the memory. No communication; the ranks map each other's at the first ``begin``.

        Args:
            group: the ranks.
            numel: elements of a shard, whose bytes fill whole pages.
            dtype: of the elements.
            tag: for gathers, from the group's communicator.
            map_tag: for telling where the file is, likewise.
        """
        self._group, self._tag, self._map_tag = group, tag, map_tag
        self._nbytes = numel * dtype.itemsize
        self._file = _memory_file(self._nbytes)
        # Where the file could not be had, memory that others copy from.
        own = mmap.mmap(-1 if self._file is None else self._file, self._nbytes)
        self.shard = torch.frombuffer(own, dtype=dtype)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        everything = mmap.mmap(-1, self._nbytes * group.size, flags=private)
        self.buffer = torch.frombuffer(everything, dtype=dtype)
        self._address = self.buffer.data_ptr()
        self._mapped: set[int] | None = None
        self._introduction: Offer | None = None
        self._offer: Offer | None = None

    @staticmethod
    def fits(numel: int, dtype: torch.dtype) -> bool:
        """Whether shards of ``numel`` elements can be mapped; smaller ones would gain nothing.

        The same on all ranks, as long as they run the same kind of system.
        """
        nbytes = numel * dtype.itemsize
        return _mmap is not None and nbytes >= PAGED_BYTES and nbytes % mmap.PAGESIZE == 0

    @property
    def copied_bytes(self) -> int:
        """Of the buffer, what is a copy in every gather, as it could not be mapped."""
        copied = 0 if self._mapped is None else self._group.size - len(self._mapped)
        return copied * self._nbytes

    def begin(self, what: str) -> Pending:
        """Say that this rank's shard is final until ``end`` and begin to wait for the others'.

        Collective: all ranks of the group.

        Args:
            what: names the gather in errors.
        """
        if self._introduction is None:
            number = -1 if self._file is None else self._file
            self._introduction = self._group.offer(number, self._map_tag)
        elif self._file is not None and all(t.is_completed() for t in self._introduction.taken):
            os.close(self._file)
            self._file = None
        self._offer = offer = self._group.offer(self.shard.data_ptr(), self._tag)
        return self._group.pending(offer, what, lambda: self._fill(offer), self.shard, self.buffer)

    def _fill(self, offer: Offer) -> None:
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
            if rank == self._group.rank:
                path, number = "/proc/self", -1 if self._file is None else self._file
            else:
                introduced = self._introduction.theirs[rank]
                introduced.wait()
                path, number = f"/proc/{self._group.memory.pid(rank)}", introduced.address
            place = self._address + rank * self._nbytes
            if number >= 0 and _map_file(f"{path}/fd/{number}", place, self._nbytes):
                mapped.add(rank)
        self._introduction.take()
        return mapped

    def end(self) -> None:
        """The buffer is not needed any more: give its pages back. Does nothing the second time."""
        if self._offer is not None:
            self._offer.take()
            self._offer = None
        _call(_madvise, self._address, self._nbytes * self._group.size, _MADV_DONTNEED)

    def keep(self) -> None:
        """Turn the buffer into a copy, which outlives changes of the shards."""
        if self._offer is not None:
            per_page = mmap.PAGESIZE // self.buffer.element_size()
            touched = self.buffer.detach()[::per_page]
            touched.copy_(touched.clone())  # a write makes the page this process's own
            self._offer.take()
            self._offer = None

    def __del__(self) -> None:
        """Close the file where no second gather did."""
        if self.__dict__.get("_file") is not None:
            os.close(self._file)  # type: ignore[arg-type]


def _memory_file(nbytes: int) -> int | None:
    """A file of ``nbytes`` zeros in memory; None where there can be none."""
    try:
        number = os.memfd_create("flatshard")
    except OSError:
        return None
    try:
        # The pages too: without them a write would end the process where memory is short.
        os.posix_fallocate(number, 0, nbytes)
    except OSError:
        os.close(number)
        return None
    return number


def _map_file(path: str, place: int, nbytes: int) -> bool:
    """Map a file privately at ``place``; says whether that worked."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        return bool(_mmap(place, nbytes, protection, flags, number, 0) == place)
    finally:
        os.close(number)


def _call(function: Any, *args: int) -> None:
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise RuntimeError(f"{function.__name__}: {os.strerror(number)}")


_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def _find(name: str, result: Any, *arguments: Any) -> Any:
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = _find("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
_madvise = _find("madvise", _int, _address, _size, _int)
