"""``PeerProcess``: reads the memory of another process on this host, and what it says in a mailbox.

Linux lets a process read another one of the same user by ``process_vm_readv``: one copy, straight
to where it is wanted, at the speed of memory (Cross Memory Attach, as MPI implementations use it).
Where the kernel or a container forbids it, or the ranks are on several hosts, no rank reads:
``meet`` gives the same answer on all of them.

Each rank writes what it has to say into its own mailbox, a file in memory that the others map and
poll: "publication n of this tag is at that address", and "I have taken all other ranks'
publications n of this tag". What is published must not change, and nothing else be published under
its tag, until all ranks have taken it. A poll costs less than a microsecond; a message through a
socket thirty, and the attention of a thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.host_exchange import HostExchange
from flatshard.memory import mapped_files

TAGS = 1 << 16  # so many does a mailbox have
# Of a tag: (number, address, file, check) of what is published, and the same of what is taken.
_WORDS = 8
_TAKEN = 4
_MAILBOX_BYTES = TAGS * _WORDS * 8
_CHECK = 0x666C6174  # so that no record of zeros is valid

_MEETING = "meeting on one host"
_QUICK_LOOKS = 20
_PAUSE_SECONDS = 5e-5
_ALIVE_SECONDS = 0.05
_alive = ctypes.c_int64()  # the others read it to see whether this process still runs


class RankAddress(NamedTuple):
    """How other processes find this one."""

    problem: str  # why they cannot, empty if they can; the rest means nothing then
    host: str = ""  # the kernel, and the process numbers that it gives in this container
    pid: int = 0
    launcher: int = 0  # the process that started it
    alive: int = 0  # an address that can be read as long as it runs
    file: int = -1  # the number of the file that the mailbox is
    nonce: int = 0  # what is published under tag 0


class Mailbox:
    """What this process publishes to those that read its memory; ``address.problem``: why not."""

    def __init__(self) -> None:
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
        # Pages of it exist when they are written.
        self._file = mapped_files.create(_MAILBOX_BYTES, reserve=False)
        self._words = _mapped_words(self._file)
        nonce = int.from_bytes(os.urandom(7), "little")
        self.offer(0, nonce, 0)
        alive = ctypes.addressof(_alive)
        return RankAddress("", host, os.getpid(), os.getppid(), alive, self._file, nonce)

    def close_file(self) -> None:
        """Close the file, which all ranks have mapped by now if they could."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def offer(self, tag: int, number: int, address: int, file: int = -1) -> None:
        """Publish that publication ``number`` of a tag is at ``address``; ``file`` is open."""
        self._write(tag * _WORDS, number, address, file)

    def take(self, tag: int, number: int) -> None:
        """Say that this rank has taken all other ranks' publications ``number`` of a tag."""
        self._write(tag * _WORDS + _TAKEN, number, 0, -1)

    def _write(self, first: int, number: int, address: int, file: int) -> None:
        _order_memory()  # what was written before the record must be there when the record is
        words = self._words
        words[first] = number
        words[first + 1] = address
        words[first + 2] = file
        # Last: a reader may see the record while it is being written, and until then it is invalid.
        words[first + 3] = number ^ address ^ file ^ _CHECK


class PeerProcess:
    """The process of another rank; raises ``OSError`` where its mailbox cannot be mapped."""

    def __init__(self, address: RankAddress, timeout: float) -> None:
        self.pid, self.timeout = address.pid, timeout  # waits end after so many seconds
        self.name = f"process {address.pid}"  # in errors
        self.given_up = 0.0  # when it last did not answer in time
        self._alive = address.alive
        file = open_of(address.pid, address.file)
        try:
            self.words = _mapped_words(file)
        finally:
            os.close(file)

    def read(self, address: int, out: Tensor) -> None:
        """Fill ``out``, contiguous on the CPU; raises ``RuntimeError`` if the process is gone."""
        _read(self, address, out.data_ptr(), out.nbytes)

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` where it cannot be read any more; its mailbox outlives it."""
        self.read(self._alive, torch.empty(1, dtype=torch.int64, device="cpu"))

    def offered(self, tag: int, number: int) -> Awaited:
        """Its publication ``number`` under a tag."""
        return Awaited(self, tag * _WORDS, number)

    def taken(self, tag: int, number: int) -> Awaited:
        """That it has taken publications ``number`` of a tag."""
        # A process that has ended reads nothing any more.
        return Awaited(self, tag * _WORDS + _TAKEN, number, or_gone=True)


class Awaited:
    """A record in another rank's mailbox that is to come; same interface as ``dist.Work``."""

    # What the record says, once it is there.
    address = 0
    file = -1
    _is_given_up = False

    def __init__(
        self, process: PeerProcess, first: int, number: int, *, or_gone: bool = False
    ) -> None:
        self._process, self._first, self._number = process, first, number
        self._or_gone = or_gone  # the end of the process is as good
        self._began = time.monotonic()
        self._is_over = False
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether it is there, or never will be: then ``wait`` raises."""
        if not self._is_over and self._process.words[self._first] == self._number:
            number, address, file, check = self._process.words[self._first : self._first + 4]
            # Else it was read while it was written: the next look finds the rest.
            if number ^ address ^ file ^ _CHECK == check:
                self._is_over, self.address, self.file = True, address, file
                _order_memory()  # what was published is read after the record, never before
        return self._is_over

    def wait(self) -> None:
        """Wait; raises ``RuntimeError`` if nothing comes, or the process waits for this one."""
        process, looks = self._process, 0
        # One timeout for all that was awaited when the process did not answer in time.
        timeout = 0.0 if self._began < process.given_up else process.timeout
        began = asked = time.monotonic()
        while not self.is_completed():
            looks += 1
            if looks > _QUICK_LOOKS:
                now = time.monotonic()
                if self._is_given_up:
                    raise RuntimeError(f"nothing will come from {process.name}")
                if now - began > timeout:
                    process.given_up = now
                    raise RuntimeError(
                        f"nothing from {process.name} in {process.timeout:g} s, the process "
                        "group's timeout: look for an error in its output, or for other modules "
                        "that it runs"
                    )
                if now - asked > _ALIVE_SECONDS:
                    asked = now
                    self._ask()
                time.sleep(_PAUSE_SECONDS)
        if self._error is not None:
            raise self._error

    def _ask(self) -> None:
        try:
            self._process.check_alive()
        except RuntimeError as error:
            self._is_over = True
            if not (self._or_gone and isinstance(error, _ProcessGone)):
                self._error = error

    def give_up(self) -> None:
        """Make ``wait``, in another thread, raise ``RuntimeError``, as nothing will come."""
        self._is_given_up = True


def meet(
    mailbox: Mailbox,
    host: HostExchange,
    ranks: Sequence[int],
    timeout: float,
) -> tuple[list[PeerProcess], str]:
    """Find out whether every rank can read the memory of all others.

    **Collective**: the ranks of ``host``, whose global numbers are ``ranks``.

    Returns:
        Every rank's process, or nothing, and the reason in words; alike on all ranks.
    """
    try:
        addresses: list[RankAddress] = host.gather(mailbox.address, _MEETING)
        problem = _first_problem([one.problem for one in addresses], ranks)
        if not problem and len({one.host for one in addresses}) > 1:
            problem = "the ranks are on several hosts, or in containers apart"
        if problem:
            return [], problem
        # Where the Yama security module restricts `ptrace` (kernel.yama.ptrace_scope=1), a process
        # may be read only by its ancestors and by one process that it names, together with that
        # one's descendants: the launcher of the ranks or, where they have several, any process.
        launchers = {one.launcher for one in addresses}
        # A launcher outside the container has the number 0, which names nobody.
        reader = (launchers.pop() if len(launchers) == 1 else 0) or _ANY
        _readers.append(reader)
        _tell_kernel()
        host.meet(_MEETING)  # a rank that reads before another has given permission is refused
        processes, problem = _try_to_read(addresses, ranks, timeout)
        problem = _first_problem(host.gather(problem, _MEETING), ranks)
        if problem:
            _readers.remove(reader)
            _tell_kernel()
            return [], problem
        return processes, "all ranks are on one host and may read each other's memory"
    finally:
        mailbox.close_file()


def _first_problem(problems: Sequence[str], ranks: Sequence[int]) -> str:
    found = zip(ranks, problems, strict=True)
    return next((f"rank {rank}: {problem}" for rank, problem in found if problem), "")


def _try_to_read(
    addresses: Sequence[RankAddress], ranks: Sequence[int], timeout: float
) -> tuple[list[PeerProcess], str]:
    processes = []
    for rank, address in zip(ranks, addresses, strict=True):
        try:
            processes.append(PeerProcess(address, timeout))
            processes[-1].name = f"rank {rank} (process {address.pid})"
            if not processes[-1].offered(0, address.nonce).is_completed():
                return [], f"process {address.pid} is not rank {rank}"
            processes[-1].check_alive()
        except (OSError, RuntimeError) as error:
            return [], f"{error}; see kernel.yama.ptrace_scope and the container's rights"
    return processes, ""


def open_of(pid: int, number: int) -> int:
    """Open file ``number`` of another process; raises ``OSError`` where that is not permitted."""
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


def _mapped_words(file: int) -> memoryview:
    return memoryview(mapped_files.mapped(file, _MAILBOX_BYTES)).cast("q")


def _host() -> str:
    # The kernel, and the process numbers that it gives in this container.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


_readers: list[int] = []
"""Whom each group of ranks lets read this process; the kernel keeps one reader per process."""
_ANY = (1 << 64) - 1
_PR_SET_PTRACER = 0x59616D61


def _tell_kernel() -> None:
    readers = set(_readers)
    _set_reader(readers.pop() if len(readers) == 1 else _ANY if readers else 0)


def _set_reader(reader: int) -> None:
    # 0: nobody. Does nothing where the kernel has no Yama.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


class _ProcessGone(RuntimeError):
    pass


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = mapped_files.c_function(
    "process_vm_readv",
    ctypes.c_ssize_t,
    ctypes.c_int,
    *(ctypes.POINTER(_Range), ctypes.c_ulong) * 2,
    ctypes.c_ulong,
)
# A call through `ctypes` gives the interpreter's lock away and takes it back, which orders memory.
_order_memory = mapped_files.c_function("getpid", ctypes.c_int)


def _read(process: PeerProcess, source: int, destination: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        here = _Range(destination + done, nbytes - done)
        there = _Range(source + done, nbytes - done)
        got = _readv(process.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            if number == errno.ESRCH:
                raise _ProcessGone(
                    f"{process.name} has ended: it failed (see the output of that process), or "
                    "its program was over. All ranks must make this call before a program ends"
                )
            denied = number == errno.EPERM
            remedy = ". Run all ranks as one user, or pass collectives='sockets'" if denied else ""
            raise RuntimeError(
                f"reading {nbytes} B of {process.name} failed: {os.strerror(number)}{remedy}"
            )
        done += got
