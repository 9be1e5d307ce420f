"""``PeerMemory``: reads the memory of other processes on this host, without a copy between.

Linux lets a process read another one of the same user by ``process_vm_readv``: one copy, straight
to where it is wanted, at the speed of memory. Nothing is shared, and nothing is left behind however
a process ends. Where the kernel or a container forbids it, or the ranks are on several hosts, no
rank reads: ``meet`` gives the same answer on all of them.

Source: Cross Memory Attach (Linux 3.2), as MPI implementations use it between ranks on one host.

[Note: mailbox]
Each rank writes what it has to say into its own mailbox, which the others poll: "publication n of
this tag is at that address", and "I have taken all other ranks' publications n of this tag". What
is published must not change, and nothing else be published under its tag, until all ranks have
taken it. The others map the mailbox if they can, and otherwise read it like the rest: a poll costs
less than a microsecond or some ten, a message through a socket thirty and the attention of a
thread.

[Note: half written]
A reader may see a record while it is being written, so every record carries a check word. What was
written before a record must be there when the record is: a call through ``ctypes`` between gives
the interpreter's lock away and takes it back, which orders memory.

[Note: permission]
Where the Yama security module restricts ``ptrace`` (``kernel.yama.ptrace_scope=1``, the default of
Ubuntu), a process may be read only by its ancestors and by one process that it names, together with
that one's descendants. Every rank names the process that launched the ranks, or any process where
they have several launchers, and no rank reads before all have done so.
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

TAGS = 1 << 16
"""How many tags a mailbox has."""

_WORDS = 8
"""Of a tag: (number, address, check) of what is published, (number, check) of what is taken."""
_TAKEN = 4
_MAILBOX_BYTES = TAGS * _WORDS * 8
_CHECK = 0x666C6174  # so that no record of zeros is valid


class RankAddress(NamedTuple):
    """How other processes find this one.

    Attributes:
        problem: why they cannot, empty if they can; the rest means nothing then.
        host: identifies the kernel, and the process numbers that it gives in this container.
        pid: the process's number there.
        launcher: the number of the process that started it.
        mailbox: the address of its mailbox.
        file: the number of the file that the mailbox is, or -1.
        nonce: what is published under tag 0.
    """

    problem: str
    host: str = ""
    pid: int = 0
    launcher: int = 0
    mailbox: int = 0
    file: int = -1
    nonce: int = 0


class Mailbox:
    """What this process publishes to those that read its memory; ``address.problem``: why not."""

    def __init__(self) -> None:
        """An empty one; pages of it exist when they are written."""
        self._file: int | None = None
        try:
            self.address = self._open()
        # An error on this rank alone would leave the others waiting in `meet`.
        except (OSError, ValueError) as error:
            self.address = RankAddress(f"it has no shared memory: {error}")

    def _open(self) -> RankAddress:
        if _readv is None:
            return RankAddress("its system has no process_vm_readv")
        host = _host()
        self._file = mapped_files.create(_MAILBOX_BYTES, reserve=False)
        memory = None
        if self._file is not None:
            memory = mapped_files.mapped(self._file, _MAILBOX_BYTES, write=True)
        # Without a file the others read it through the kernel, which is slower.
        memory = memory or mmap.mmap(-1, _MAILBOX_BYTES)
        self.words = (ctypes.c_int64 * (TAGS * _WORDS)).from_buffer(memory)
        nonce = int.from_bytes(os.urandom(7), "little")
        self.offer(0, nonce, 0)
        file = -1 if self._file is None else self._file
        address = ctypes.addressof(self.words)
        return RankAddress("", host, os.getpid(), os.getppid(), address, file, nonce)

    def close_file(self) -> None:
        """Close the file, which all ranks have mapped by now if they could."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def offer(self, tag: int, number: int, address: int) -> None:
        """Publish that publication ``number`` of a tag is at ``address``."""
        _order_memory()
        first = tag * _WORDS
        # The check word comes last: until then the record is not valid.
        self.words[first] = number
        self.words[first + 1] = address
        self.words[first + 2] = number ^ address ^ _CHECK

    def take(self, tag: int, number: int) -> None:
        """Say that this rank has taken all other ranks' publications ``number`` of a tag."""
        _order_memory()
        first = tag * _WORDS + _TAKEN
        self.words[first] = number
        self.words[first + 1] = number ^ _CHECK


class PeerMemory:
    """The processes of a group, by rank."""

    def __init__(self, addresses: Sequence[RankAddress], timeout: float) -> None:
        """``addresses`` are the ranks', all on this host; waits end after ``timeout`` seconds."""
        self._addresses = list(addresses)
        self._mailboxes = [_mapped_mailbox(one) for one in addresses]
        self._timeout = timeout

    def pid(self, rank: int) -> int:
        """The number of the process of ``rank``."""
        return self._addresses[rank].pid

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
        _read(self.pid(rank), address, place, nbytes)

    def offered(self, rank: int, tag: int, number: int) -> Awaited:
        """Publication ``number`` of ``rank`` under a tag."""
        return Awaited(self._record(rank, tag * _WORDS, 3), number, self._timeout)

    def taken(self, rank: int, tag: int, number: int) -> Awaited:
        """That ``rank`` has taken publications ``number`` of a tag."""
        record = self._record(rank, tag * _WORDS + _TAKEN, 2)
        # A process that has ended reads nothing any more.
        return Awaited(record, number, self._timeout, or_gone=True)

    def _record(self, rank: int, first: int, length: int) -> _Record:
        address = self._addresses[rank]
        return _Record(address.pid, self._mailboxes[rank], address.mailbox, first, length)


class _Record(NamedTuple):
    """Some words of another process's mailbox.

    Attributes:
        pid: the process.
        words: the mailbox, if it is mapped.
        mailbox: its address there.
        first: the first of the words.
        length: how many.
    """

    pid: int
    words: Any
    mailbox: int
    first: int
    length: int

    def look(self) -> list[int]:
        """What they say now; raises ``RuntimeError`` as ``look_there``, if it is not mapped."""
        if self.words is not None:
            return list(self.words[self.first : self.first + self.length])
        return self.look_there()

    def look_there(self) -> list[int]:
        """The same, read from the process itself.

        Raises:
            RuntimeError: the process is gone, or may not be read.
        """
        seen = (ctypes.c_int64 * self.length)()
        place = self.mailbox + self.first * 8
        _read(self.pid, place, ctypes.addressof(seen), ctypes.sizeof(seen))
        return list(seen)


class Awaited:
    """A record in another rank's mailbox that is to come; same interface as ``dist.Work``.

    Attributes:
        address: what the record says, once it is there.
    """

    def __init__(
        self, record: _Record, number: int, timeout: float, *, or_gone: bool = False
    ) -> None:
        """It begins with ``number``; ``or_gone``: the end of the process is as good."""
        self._record, self._number, self._timeout = record, number, timeout
        self._or_gone = or_gone
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
            self._is_over = True
            if not (self._or_gone and isinstance(error, ProcessGone)):
                self._error = error
            return
        if number == self._number:
            self.address = rest[0] if rest else 0
            # Else it was read while it was written: the next look finds the rest.
            if number ^ self.address ^ _CHECK == check:
                self._is_over = True
                _order_memory()  # what was published is read after the record, never before

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            RuntimeError: the process is gone, nothing came in time, or it waits for this one.
        """
        looks = 0
        # One timeout for all that was awaited when the process did not answer in time.
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
                    # A mapped mailbox outlives its process.
                    self._look(self._record.look_there)
                    asked = now
                    if not self._is_over:
                        watchdog.check()
                time.sleep(_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error


class ProcessGone(RuntimeError):
    """The process has ended."""


_kept_mailboxes: list[Any] = []
"""For ever: other ranks may poll them when this one is done with the group."""
_given_up: dict[int, float] = {}  # when a process last did not answer in time
_QUICK_LOOKS = 20
_PAUSE_SECONDS = 5e-5
_ALIVE_SECONDS = 0.05


def meet(
    mailbox: Mailbox,
    exchange: Callable[[Any], list[Any]],
    ranks: Sequence[int],
    timeout: float,
) -> tuple[PeerMemory | None, str]:
    """Find out whether every rank can read the memory of all others.

    **Collective**: the ranks that ``exchange`` gathers from.

    Args:
        mailbox: this rank's.
        exchange: gives all ranks' values, in rank order.
        ranks: the global number of each, for messages.
        timeout: seconds after which waits for another rank fail.

    Returns:
        What reads, or None, and the reason in words; alike on all ranks.
    """
    try:
        addresses: list[RankAddress] = exchange(mailbox.address)
        problem = _first_problem([one.problem for one in addresses], ranks)
        if not problem and len({one.host for one in addresses}) > 1:
            problem = "the ranks are on several hosts, or in containers apart"
        if problem:
            return None, problem
        launchers = {one.launcher for one in addresses}
        reader = launchers.pop() if len(launchers) == 1 else 0
        _permission.grant(reader or _ANY)  # a launcher outside the container has no number
        exchange(None)  # a rank that reads before another has given permission is refused
        memory, problem = _try_to_read(addresses, ranks, timeout)
        problem = _first_problem(exchange(problem), ranks)
        if problem:
            _permission.revoke(reader or _ANY)
            return None, problem
        _kept_mailboxes.append(mailbox.words)
        return memory, "all ranks are on one host and may read each other's memory"
    finally:
        mailbox.close_file()


def _first_problem(problems: Sequence[str], ranks: Sequence[int]) -> str:
    found = zip(ranks, problems, strict=True)
    return next((f"rank {rank}: {problem}" for rank, problem in found if problem), "")


def _try_to_read(
    addresses: Sequence[RankAddress], ranks: Sequence[int], timeout: float
) -> tuple[PeerMemory | None, str]:
    memory = PeerMemory(addresses, timeout)
    for index, address in enumerate(addresses):
        try:
            if not memory.offered(index, 0, address.nonce).is_there():
                return None, f"process {address.pid} is not rank {ranks[index]}"
        except RuntimeError as error:
            return None, f"{error}; see kernel.yama.ptrace_scope and the container's rights"
    return memory, ""


def _mapped_mailbox(address: RankAddress) -> Any:
    """The words of a process's mailbox, mapped for reading; None where that is not possible."""
    file = mapped_files.open_of(address.pid, address.file) if address.file >= 0 else None
    if file is None:
        return None
    words = mapped_files.mapped(file, _MAILBOX_BYTES, write=False)
    os.close(file)
    return None if words is None else memoryview(words).cast("q")


def _host() -> str:
    """Names the kernel and the process numbers that it gives in this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


class _ReadPermission:
    """Who may read this process; see the note. The kernel keeps one reader per process."""

    def __init__(self) -> None:
        self._granted: list[int] = []  # one for each group of ranks that reads

    def grant(self, reader: int) -> None:
        """Let a process and its descendants read this one."""
        self._granted.append(reader)
        self._tell_kernel()

    def revoke(self, reader: int) -> None:
        """Take that back, unless another group of ranks needs it."""
        self._granted.remove(reader)
        self._tell_kernel()

    def _tell_kernel(self) -> None:
        readers = set(self._granted)
        _set_reader(readers.pop() if len(readers) == 1 else _ANY if readers else 0)


_permission = _ReadPermission()
_ANY = (1 << 64) - 1
_PR_SET_PTRACER = 0x59616D61


def _set_reader(reader: int) -> None:
    """Name the reader; 0: nobody. Does nothing where the kernel has no Yama."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


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
