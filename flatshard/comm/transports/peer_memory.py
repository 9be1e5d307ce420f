"""``PeerMemory``: reading what other processes on this host have in memory, without a copy between.

Linux lets a process read another one of the same user by ``process_vm_readv``: one copy, straight
to where it is wanted, at the speed of memory. Nothing is shared, and nothing is left behind however
a process ends. Where the kernel or a container forbids it, or ranks are on several hosts, ranks
find out when they meet, and nobody reads.

Source: Cross Memory Attach (Linux 3.2), as MPI implementations use it between ranks on one host.

[Note: the board]
What ranks say to one another they write on a board in their own memory, which the others look at:
"the n-th part of this tag lies there", and "I have taken all others' n-th parts of this tag". A
part must not change, and no other be offered under its tag, until all have taken it. Boards are
mapped by the others where they can be, and read like the rest where not: a look costs less than a
microsecond or some ten, a message through a socket thirty and the attention of a thread.

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flatshard.comm.deadlock import watchdog
from flatshard.memory import mapped_files

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

TAGS = 1 << 16
"""How many tags a board has."""

_WORDS = (
    8  # of a tag: (number, address, check) of what is offered, (number, check) of what is taken
)
_TAKEN = 4
_BOARD_BYTES = TAGS * _WORDS * 8
_CHECK = 0x666C6174  # so that no record of zeros is valid


class RankAddress(NamedTuple):
    """Where a process can be found.

    Attributes:
        host: names it.
        pid: the process's number there.
        board: the address of its board.
        file: the number of the file that the board is, or -1.
        nonce: what is on it.
    """

    host: str
    pid: int
    board: int
    file: int
    nonce: int


class Mailbox:
    """What this process tells those that read its memory."""

    def __init__(self) -> None:
        """An empty board; pages of it exist when they are written."""
        self._file = mapped_files.create(_BOARD_BYTES, reserve=False)
        memory = None
        if self._file is not None:
            memory = mapped_files.mapped(self._file, _BOARD_BYTES, write=True)
        memory = memory or mmap.mmap(-1, _BOARD_BYTES)
        self._words = (ctypes.c_int64 * (TAGS * _WORDS)).from_buffer(memory)
        # For ever: others may look at it when this rank is done with the group.
        _boards.append(self._words)
        nonce = int.from_bytes(os.urandom(7), "little")
        self.offer(0, nonce, 0)
        host = _host() if _readv is not None else ""
        file = -1 if self._file is None else self._file
        self.card = RankAddress(host, os.getpid(), ctypes.addressof(self._words), file, nonce)

    def close_file(self) -> None:
        """All have met, and mapped the board if they could."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

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

    def __init__(self, cards: Sequence[RankAddress], timeout: float) -> None:
        """``cards`` are the ranks', all on this host; waits end after ``timeout`` seconds."""
        self._cards = list(cards)
        self._boards = [_mapped_board(card) for card in cards]
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
        return Awaited(self._record(rank, tag * _WORDS, 3), number, self._timeout)

    def taken(self, rank: int, tag: int, number: int) -> Awaited:
        """That ``rank`` has taken the ``number``-th parts of a tag."""
        return Taken(self._record(rank, tag * _WORDS + _TAKEN, 2), number, self._timeout)

    def _record(self, rank: int, first: int, length: int) -> _Record:
        card = self._cards[rank]
        return _Record(card.pid, self._boards[rank], card.board, first, length)


class _Record(NamedTuple):
    """Some words of another process's board.

    Attributes:
        pid: the process.
        words: the board, if it is mapped.
        board: its address there.
        first: the first of the words.
        length: how many.
    """

    pid: int
    words: Any
    board: int
    first: int
    length: int

    def look(self) -> list[int]:
        """What they say now.

        Raises:
            RuntimeError: the board is not mapped, and its process is gone.
        """
        if self.words is not None:
            return list(self.words[self.first : self.first + self.length])
        return self.look_there()

    def look_there(self) -> list[int]:
        """The same, always by way of the process.

        Raises:
            RuntimeError: the process is gone.
        """
        seen = (ctypes.c_int64 * self.length)()
        place = self.board + self.first * 8
        _read(self.pid, place, ctypes.addressof(seen), ctypes.sizeof(seen))
        return list(seen)


class Awaited:
    """A record on another rank's board that is to come; waited for as the backends' handles are.

    Attributes:
        address: what the record says, once it is there.
    """

    def __init__(self, record: _Record, number: int, timeout: float) -> None:
        """It begins with ``number``."""
        self._record, self._number, self._timeout = record, number, timeout
        self._began = time.monotonic()
        self._is_over = False
        self._error: RuntimeError | None = None
        self.address = 0

    def is_completed(self) -> bool:
        """Whether it is there, or never will be: then ``wait`` raises."""
        if not self._is_over:
            self._look(self._record.look)
        return self._is_over

    def is_there(self) -> bool:
        """Ask the process itself.

        Raises:
            RuntimeError: it may not be asked.
        """
        self._look(self._record.look_there)
        if self._error is not None:
            raise self._error
        return self._is_over

    def _look(self, look: Callable[[], list[int]]) -> None:
        try:
            number, *rest, check = look()
        except RuntimeError as error:
            self._is_over, self._error = True, self._told(error)
            return
        if number == self._number:
            self.address = rest[0] if rest else 0
            if number ^ self.address ^ _CHECK == check:
                self._is_over = True
                _order_memory()

    def _told(self, error: RuntimeError) -> RuntimeError | None:
        """What the end of the process means."""
        return error

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            RuntimeError: the process is gone, nothing came in time, or it waits for this one.
        """
        looks = 0
        # Of what was awaited of a process when it did not come in time, nothing is coming.
        given_up = _given_up.get(self._record.pid, 0.0)
        timeout = 0.0 if self._began < given_up else self._timeout
        began = asked = time.monotonic()
        while not self.is_completed():
            looks += 1
            if looks > _QUICK_LOOKS:
                now = time.monotonic()
                if now - began > timeout:
                    _given_up[self._record.pid] = now
                    raise RuntimeError(
                        f"nothing from process {self._record.pid} in {self._timeout:g} s"
                    )
                if now - asked > _ALIVE_SECONDS:
                    # A mapped board outlives its process.
                    self._look(self._record.look_there)
                    asked = now
                    if not self._is_over:
                        watchdog.check()
                time.sleep(_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error


class Taken(Awaited):
    """The same of what was taken: a process that has ended wants nothing any more."""

    def _told(self, error: RuntimeError) -> RuntimeError | None:
        return None if isinstance(error, ProcessGone) else error


class ProcessGone(RuntimeError):
    """The process has ended."""


_boards: list[Any] = []
_given_up: dict[int, float] = {}  # when a process was last waited for in vain
_QUICK_LOOKS = 20
_PAUSE_SECONDS = 5e-5
_ALIVE_SECONDS = 0.05


def meet(board: Mailbox, cards: Sequence[RankAddress], timeout: float) -> PeerMemory | None:
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
            memory.offered(rank, 0, card.nonce).is_there() for rank, card in enumerate(cards)
        )
    except RuntimeError:
        return None
    return memory if can_read else None


def _mapped_board(card: RankAddress) -> Any:
    """The words of a process's board, mapped for reading; None where that is not possible."""
    file = mapped_files.open_of(card.pid, card.file) if card.file >= 0 else None
    if file is None:
        return None
    words = mapped_files.mapped(file, _BOARD_BYTES, write=False)
    os.close(file)
    return None if words is None else memoryview(words).cast("q")


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
