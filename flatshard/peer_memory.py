"""``PeerMemory``: reading what other processes on this host have in memory, without a copy between.

Linux lets a process read another one of the same user by ``process_vm_readv``: one copy, straight
to where it is wanted, at the speed of memory. Nothing is shared, and nothing is left behind however
a process ends. Where the kernel or a container forbids it, or ranks are on several hosts, ranks
find out when they meet, and nobody reads.

Source: Cross Memory Attach (Linux 3.2), as MPI implementations use it between ranks on one host.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61


class Card(NamedTuple):
    """Where a process can be found: its host, its number there, and bytes to try with."""

    host: str
    pid: int
    address: int
    nonce: bytes


class PeerMemory:
    """The processes of a group, by rank."""

    def __init__(self, pids: Sequence[int]) -> None:
        """``pids`` are the ranks' process numbers on this host."""
        self._pids = list(pids)

    def read(self, rank: int, address: int, out: Tensor) -> None:
        """Fill ``out``, contiguous on the CPU, with what ``rank`` has at ``address``.

        Raises:
            RuntimeError: the process is gone, or has nothing there.
        """
        _read(self._pids[rank], address, out.data_ptr(), out.numel() * out.element_size())


class Meeting:
    """What a rank tells the others so that they can find out whether they can read it."""

    def __init__(self) -> None:
        """Prepare to be read; says nothing where this system has no such call."""
        self._nonce = os.urandom(16)
        # Kept here, as it must stay where the card says.
        self._buffer = ctypes.create_string_buffer(self._nonce, len(self._nonce))
        self.card: Card | None = None
        if _readv is not None:
            _allow_siblings()
            address = ctypes.addressof(self._buffer)
            self.card = Card(_host(), os.getpid(), address, self._nonce)

    def try_reading(self, cards: Sequence[Card | None]) -> PeerMemory | None:
        """Whether all these processes are on this host and let this one read them."""
        if self.card is None:
            return None
        found = [card for card in cards if card is not None and card.host == self.card.host]
        if len(found) < len(cards):
            return None
        for card in found:
            seen = ctypes.create_string_buffer(len(card.nonce))
            try:
                _read(card.pid, card.address, ctypes.addressof(seen), len(card.nonce))
            except RuntimeError:
                return None
            if seen.raw != card.nonce:
                return None
        return PeerMemory([card.pid for card in found])


def _host() -> str:
    """Names the kernel and the process numbers that it gives in this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _allow_siblings() -> None:
    """Where only ancestors may read a process, let any of the same user do."""
    if _YAMA.exists() and _YAMA.read_text().strip() == "1":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)


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


def _read(pid: int, source: int, destination: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        here = _Range(destination + done, nbytes - done)
        there = _Range(source + done, nbytes - done)
        got = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            reason = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"reading {nbytes} bytes of process {pid} failed: {reason}")
        done += got
