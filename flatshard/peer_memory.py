"""``PeerMemory``: reading what other processes on this host have in memory, without a copy between.

Linux lets a process read another one of the same user by ``process_vm_readv``: one copy, straight
to where it is wanted, at the speed of memory. Nothing is shared, and nothing is left behind however
a process ends. Where the kernel or a container forbids it, or ranks are on several hosts, ranks
find out when they meet, and nobody reads.

Source: Cross Memory Attach (Linux 3.2), as MPI implementations use it between ranks on one host.

[Note: the board]
What ranks say to one another they write on a board in their own memory, which the others look at:
"the n-th part of this tag lies there", and "I have taken all others' n-th parts of this tag". A
part must not change, and no other be offered under its tag, until all have taken it. A look at the
board costs about a microsecond, a message through a socket some thirty.

[Note: half written]
A reader may see a record while it is being written, so every record carries a check word. What was
written before a record must be there when the record is: a call through ``ctypes`` between gives
the interpreter's lock away and takes it back, which orders memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

TAGS = 1 << 16
"""How many tags a board has."""

_WORDS = (
    8  # of a tag: (number, address, check) of what is offered, (number, check) of what is taken
)
_TAKEN = 4
_CHECK = 0x666C6174  # so that no record of zeros is valid


class Card(NamedTuple):
    """Where a process can be found: its host, its number there, its board, and what is on it."""

    host: str
    pid: int
    board: int
    nonce: int


class Board:
    """What this process tells those that read its memory."""

    def __init__(self) -> None:
        """An empty board; pages of it exist when they are written."""
        memory = mmap.mmap(-1, TAGS * _WORDS * 8)
        self._words = (ctypes.c_int64 * (TAGS * _WORDS)).from_buffer(memory)
        # For ever: others may look at it when this rank is done with the group.
        _boards.append(self._words)
        nonce = int.from_bytes(os.urandom(7), "little")
        self.offer(0, nonce, 0)
        host = _host() if _readv is not None else ""
        self.card = Card(host, os.getpid(), ctypes.addressof(self._words), nonce)

    def offer(self, tag: int, number: int, address: int) -> None:
        """Say that the ``number``-th part of a tag lies at ``address``."""
        _order_memory()
        first = tag * _WORDS
        self._words[first] = number
        self._words[first + 1] = address
        self._words[first + 2] = number ^ address ^ _CHECK

    def take(self, tag: int, number: int) -> None:
        """Say that this rank has taken all others' ``number``-th parts of a tag."""
        _order_memory()
        first = tag * _WORDS + _TAKEN
        self._words[first] = number
        self._words[first + 1] = number ^ _CHECK


class PeerMemory:
    """The processes of a group, by rank."""

    def __init__(self, cards: Sequence[Card], timeout: float) -> None:
        """``cards`` are the ranks', all on this host; waits end after ``timeout`` seconds."""
        self._cards = list(cards)
        self._timeout = timeout

    def pid(self, rank: int) -> int:
        """The number of the process of ``rank``."""
        return self._cards[rank].pid

    def read(self, rank: int, address: int, out: Tensor) -> None:
        """Fill ``out``, contiguous on the CPU, with what ``rank`` has at ``address``.

        Raises:
            RuntimeError: the process is gone, or has nothing there.
        """
        self.read_into(rank, address, out.data_ptr(), out.numel() * out.element_size())

    def read_into(self, rank: int, address: int, place: int, nbytes: int) -> None:
        """Copy ``nbytes`` at ``address`` of ``rank`` to ``place`` in this process.

        Raises:
            RuntimeError: as ``read``.
        """
        _read(self._cards[rank].pid, address, place, nbytes)

    def offered(self, rank: int, tag: int, number: int) -> Awaited:
        """The ``number``-th part that ``rank`` offers under a tag."""
        card = self._cards[rank]
        return Awaited(card.pid, card.board + tag * _WORDS * 8, 3, number, self._timeout)

    def taken(self, rank: int, tag: int, number: int) -> Awaited:
        """That ``rank`` has taken the ``number``-th parts of a tag."""
        card = self._cards[rank]
        place = card.board + (tag * _WORDS + _TAKEN) * 8
        return Taken(card.pid, place, 2, number, self._timeout)


class Awaited:
    """A record on another rank's board that is to come; waited for as the backends' handles are.

    Attributes:
        address: what the record says, once it is there.
    """

    def __init__(self, pid: int, place: int, length: int, number: int, timeout: float) -> None:
        """Of process ``pid``, ``length`` words at ``place`` that begin with ``number``."""
        self._pid, self._place, self._number, self._timeout = pid, place, number, timeout
        self._seen = (ctypes.c_int64 * length)()
        self._is_over = False
        self._error: RuntimeError | None = None
        self.address = 0

    def is_completed(self) -> bool:
        """Whether it is there, or never will be: then ``wait`` raises."""
        if not self._is_over:
            try:
                self._is_over = self._look()
            except RuntimeError as error:
                self._is_over, self._error = True, error
        return self._is_over

    def _look(self) -> bool:
        seen = self._seen
        _read(self._pid, self._place, ctypes.addressof(seen), ctypes.sizeof(seen))
        number, *rest, check = seen
        self.address = rest[0] if rest else 0
        return number == self._number and number ^ self.address ^ _CHECK == check

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            RuntimeError: the process is gone, or nothing came in time.
        """
        looks = 0
        began = time.monotonic()
        while not self.is_completed():
            looks += 1
            if looks > _QUICK_LOOKS:
                if time.monotonic() - began > self._timeout:
                    raise RuntimeError(f"nothing from process {self._pid} in {self._timeout:g} s")
                time.sleep(_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error


class Taken(Awaited):
    """The same of what was taken: a process that has ended wants nothing any more."""

    def _look(self) -> bool:
        try:
            return super()._look()
        except ProcessGone:
            return True


class ProcessGone(RuntimeError):
    """The process has ended."""


_boards: list[Any] = []
_QUICK_LOOKS = 20
_PAUSE_SECONDS = 5e-5


def meet(board: Board, cards: Sequence[Card], timeout: float) -> PeerMemory | None:
    """The memory of all these processes, if they are on this host and let this one read it.

    Args:
        board: this process's.
        cards: all ranks', in rank order.
        timeout: seconds after which waits for another rank fail.
    """
    if not board.card.host or any(card.host != board.card.host for card in cards):
        return None
    _allow_siblings()
    memory = PeerMemory(cards, timeout)
    try:
        can_read = all(
            memory.offered(rank, 0, card.nonce)._look() for rank, card in enumerate(cards)
        )
    except RuntimeError:
        return None
    return memory if can_read else None


def _host() -> str:
    """Names the kernel and the process numbers that it gives in this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _allow_siblings() -> None:
    """Where only ancestors may read a process, let any of the same user do."""
    if _YAMA.exists() and _YAMA.read_text().strip() == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)


def _order_memory() -> None:
    """See the note on what is half written."""
    if _getpid is not None:
        _getpid()


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find_readv() -> Any:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        count, pointer = ctypes.c_ulong, ctypes.POINTER(_Range)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return function


_readv = _find_readv()
_getpid = ctypes.CDLL(None).getpid if _readv is not None else None


def _read(pid: int, source: int, destination: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        here = _Range(destination + done, nbytes - done)
        there = _Range(source + done, nbytes - done)
        got = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            kind = ProcessGone if number == errno.ESRCH else RuntimeError
            raise kind(f"reading {nbytes} bytes of process {pid} failed: {os.strerror(number)}")
        done += got
