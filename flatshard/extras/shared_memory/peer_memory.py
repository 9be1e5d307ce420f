"""``PeerProcess``: reads the memory and the mailbox of another process on this host.

On Linux, a process can read the memory of another process of the same user with the system call
``process_vm_readv`` (Cross Memory Attach), which copies directly to the destination. If the kernel
or a container forbids the call on any rank, or if the ranks are on several hosts, no rank uses the
call: ``meet`` returns the same answer on all ranks.

Each rank publishes records in a mailbox, a file in memory that the other ranks map and poll. A
record belongs to a tag, a number for all collectives of one kind on one flat parameter. There are
two kinds of records: "my data for collective n of this tag are at this address" (an offer), and "I
have read all other ranks' data for collective n of this tag" (the data are taken). Until all ranks
have taken a rank's data, the rank must not change them, and must make no new offer for the tag.

Polling a mailbox takes less than a microsecond. A message through a socket would take thirty
microseconds, and need a thread.
"""

import ctypes
import errno
import os
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.host_exchange import HostExchange
from flatshard.extras import mapped_files

# Number of tags in a mailbox.
TAGS = 1 << 16
# The two kinds of records of a tag: "my data are at this address", and "I have taken your data".
OFFER, TAKE = range(2)
_WORDS = 4  # words of a record: number, address, file, check
_MAILBOX_BYTES = TAGS * 2 * _WORDS * 8
_CHECK = 0x666C6174  # mixed into a record's check word, so that a record of zeros is invalid

_MEETING = "meeting on one host"
_QUICK_LOOKS = 20
_PAUSE_SECONDS = 5e-5
_ALIVE_SECONDS = 0.05
_alive = ctypes.c_int64()  # other ranks read this word to check whether this process still runs


class RankAddress(NamedTuple):
    """Where other processes find the memory and the mailbox of this process."""

    problem: str  # why other processes cannot read this process's memory; "" if they can
    host: str = ""  # identifies the kernel and the PID namespace of the container
    pid: int = 0
    launcher: int = 0  # process id of the parent process
    alive: int = 0  # an address, readable for other processes as long as the process runs
    file: int = -1  # file descriptor of the mailbox
    nonce: int = 0  # random number, also in the mailbox, by which other ranks verify the process


class Mailbox:
    """The records published by this process, in a file in memory, for other ranks to map."""

    def __init__(self) -> None:
        self._file: int | None = None
        try:
            self.address = self._open()
        # Do not raise on this rank only: the other ranks would wait for it in `meet`.
        except (OSError, ValueError) as error:
            self.address = RankAddress(f"no mailbox in shared memory: {error}")

    def _open(self) -> RankAddress:
        if _readv is None:
            return RankAddress("the system has no process_vm_readv")
        host = _host()
        # Most tags are never used, and their pages take no memory.
        self._file = mapped_files.create(_MAILBOX_BYTES, reserve=False)
        self._words = _mapped_words(self._file)
        nonce = int.from_bytes(os.urandom(7), "little")
        self.publish(0, OFFER, nonce)
        alive = ctypes.addressof(_alive)
        return RankAddress("", host, os.getpid(), os.getppid(), alive, self._file, nonce)

    def close_file(self) -> None:
        """Close the mailbox's file. Called after all ranks have tried to map the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def publish(self, tag: int, kind: int, number: int, address: int = 0, file: int = -1) -> None:
        """Publish a record for collective ``number`` of ``tag``.

        With an ``OFFER``, this rank's data are at ``address``, and ``file`` is an open file with
        the data for other ranks to map, or -1. With a ``TAKE``, this rank has read all ranks' data.
        """
        # Other ranks must see earlier writes (the data to publish) before the record.
        _order_memory()
        words, first = self._words, (2 * tag + kind) * _WORDS
        words[first] = number
        words[first + 1] = address
        words[first + 2] = file
        # Write the check last, because a reader ignores a record until the check matches.
        words[first + 3] = number ^ address ^ file ^ _CHECK


class PeerProcess:
    """The process of another rank. ``__init__`` raises ``OSError`` if it cannot map the mailbox."""

    def __init__(self, address: RankAddress, timeout: float) -> None:
        self.pid, self.timeout = address.pid, timeout  # `timeout`: seconds until a wait raises
        self.name = f"process {address.pid}"  # name of the process in errors
        self.given_up = 0.0  # time at which a wait for the process last timed out
        self._alive = address.alive
        with open_of(address.pid, address.file) as file:
            self.words = _mapped_words(file.fileno())

    def read(self, address: int, out: Tensor) -> None:
        """Copy the process's memory at ``address`` into ``out``, a contiguous CPU tensor."""
        _read(self, address, out.data_ptr(), out.nbytes)

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if the process has ended, which its mailbox does not show."""
        self.read(self._alive, torch.empty(1, dtype=torch.int64, device="cpu"))


class Awaited:
    """A wait for a record in another rank's mailbox. Has the interface of ``dist.Work``.

    The wait for a ``TAKE`` also ends if the process ends: an ended process reads no more data.
    """

    # Contents of the record: valid after the record has arrived.
    address = 0
    file = -1
    is_given_up = False  # whether `wait` raises

    def __init__(self, process: PeerProcess, tag: int, kind: int, number: int) -> None:
        self._process, self._kind, self._number = process, kind, number
        self._first = (2 * tag + kind) * _WORDS
        self._began = time.monotonic()
        self._is_over = False

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise immediately."""
        if not self._is_over and self._process.words[self._first] == self._number:
            number, address, file, check = self._process.words[self._first : self._first + _WORDS]
            # If the check does not match, the other process is just writing the record.
            if number ^ address ^ file ^ _CHECK == check:
                self._is_over, self.address, self.file = True, address, file
                _order_memory()  # published memory must be read after the record, never before
        return self._is_over

    def wait(self) -> None:
        """Wait for the record.

        Raises ``RuntimeError`` if the record does not arrive within the timeout, if the memory of
        the other rank's process cannot be read any more, or if ``is_given_up`` is set.
        """
        process = self._process
        # Do not wait if another wait for the same process has timed out since this object was made:
        # otherwise a program with many waits would run for many timeouts.
        timeout = 0.0 if self._began < process.given_up else process.timeout
        began = asked = time.monotonic()
        if any(self.is_completed() for _ in range(_QUICK_LOOKS)):
            return
        while not self.is_completed():
            now = time.monotonic()
            if self.is_given_up:
                raise RuntimeError(f"flatshard ended a wait for {process.name} that never ends.")
            if now - began > timeout:
                process.given_up = now
                raise RuntimeError(
                    f"{process.name} sent nothing in {process.timeout:g} s, the process group's "
                    "timeout. Look for an error in the output of that process, or check whether "
                    "it runs the same modules in the same order."
                )
            if now - asked > _ALIVE_SECONDS:
                asked = now
                try:
                    process.check_alive()
                except RuntimeError as error:
                    if not (self._kind == TAKE and isinstance(error, _ProcessGone)):
                        raise
                    self._is_over = True
            time.sleep(_PAUSE_SECONDS)


def meet(mailbox: Mailbox, host: HostExchange, timeout: float) -> tuple[list[PeerProcess], str]:
    """Find out whether every rank can read the memory of all other ranks.

    **Collective**: the ranks of ``host``.

    Returns:
        Two values: the list of the processes of all ranks (empty if any rank cannot read another
            rank's memory), and a text with the reason. Whether the list is empty, and the text, are
            the same on all ranks.
    """
    try:
        addresses: list[RankAddress] = host.gather(mailbox.address, _MEETING)
        problem = _first_problem([one.problem for one in addresses], host.ranks)
        if not problem and len({one.host for one in addresses}) > 1:
            problem = "the ranks are on several hosts, or in separate containers"
        if problem:
            return [], problem
        # With the kernel's security module Yama (kernel.yama.ptrace_scope=1), a process can be read
        # only by its ancestors, by one reader that it chooses, and by the reader's descendants.
        # Choose the launcher as the reader, because all ranks are its descendants. If the ranks
        # have several launchers, allow any process.
        launchers = {one.launcher for one in addresses}
        # If the launcher is outside of the container, its process id is 0 here. But 0 means "no
        # process" to the kernel, so allow any process instead.
        reader = (launchers.pop() if len(launchers) == 1 else 0) or _ANY
        _readers.append(reader)
        _tell_kernel()
        # Wait until every rank has given permission. Before that, the kernel would refuse reads.
        host.meet(_MEETING)
        processes, problem = _try_to_read(addresses, host.ranks, timeout)
        problem = _first_problem(host.gather(problem, _MEETING), host.ranks)
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
            if not Awaited(processes[-1], 0, OFFER, address.nonce).is_completed():
                return [], f"process {address.pid} is not rank {rank}"
            processes[-1].check_alive()
        except (OSError, RuntimeError) as error:
            return [], f"{error}; check kernel.yama.ptrace_scope and the container's permissions"
    return processes, ""


def open_of(pid: int, number: int) -> FileIO:
    """Open the file that another process has open as ``number``; OSError if not permitted."""
    return open(f"/proc/{pid}/fd/{number}", "r+b", buffering=0)


def _mapped_words(file: int) -> memoryview:
    return memoryview(mapped_files.mapped(file, _MAILBOX_BYTES)).cast("q")


def _host() -> str:
    # The boot id identifies the kernel; the PID namespace identifies the container.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


_readers: list[int] = []
"""Ids of the processes that may read this process: one for each group of ranks.

The kernel stores only one id. If the groups need different ids, any process may read this process.
"""
_ANY = (1 << 64) - 1
_PR_SET_PTRACER = 0x59616D61


def _tell_kernel() -> None:
    readers = set(_readers)
    _set_reader(readers.pop() if len(readers) == 1 else _ANY if readers else 0)


def _set_reader(reader: int) -> None:
    # A reader of 0 allows no process. The call does nothing if the kernel has no Yama.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


class _ProcessGone(RuntimeError):
    """The process has ended, and its memory is gone."""


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = mapped_files.c_function(
    "process_vm_readv",
    ctypes.c_ssize_t,
    ctypes.c_int,
    *(ctypes.POINTER(_Range), ctypes.c_ulong) * 2,
    ctypes.c_ulong,
)
# Any call through `ctypes` is a memory barrier, because the call releases and takes the GIL.
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
                    f"{process.name} has ended, but this rank still had to read its memory. Look "
                    "for an error in that process's output. All ranks must make the same calls."
                )
            text = f"reading {nbytes} bytes of {process.name} failed: {os.strerror(number)}."
            if number == errno.EPERM:
                text += " Run all ranks as one user, or pass collectives='sockets'."
            raise RuntimeError(text)
        done += got
