"""Files in memory, without a name, which other processes on this host map.

There is nothing to clean up: a file ends with the last process that has it. They are not in
``/dev/shm`` and not subject to its size.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any, Protocol

# Linux's numbers, by name only where Python's ``mmap`` has them on every system.
_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0, 1, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x4000
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MFD_NOEXEC_SEAL = 8


class Files(Protocol):
    """What makes files to be mapped: this module, or ``DiskMemory``."""

    def create(self, nbytes: int, *, reserve: bool) -> int | None:
        """An open file of ``nbytes`` zeros; None where there can be none."""

    def mapped(self, number: int, nbytes: int, *, write: bool) -> mmap.mmap | None:
        """A range in which an open file is seen, and written; None where that is impossible."""


def create(nbytes: int, *, reserve: bool) -> int | None:
    """An open file of ``nbytes`` zeros in memory; None where there can be none.

    Args:
        nbytes: its length.
        reserve: have the pages too: without them a write ends the process where memory is short.
    """
    if not CAN_MAP:
        return None
    try:
        number = _memfd()
    except OSError:
        return None
    try:
        os.ftruncate(number, nbytes)
        if reserve:
            os.posix_fallocate(number, 0, nbytes)
    except OSError:
        os.close(number)
        return None
    return number


def _memfd() -> int:
    try:
        # With sysctl vm.memfd_noexec=2 the kernel refuses files that could be executed.
        return os.memfd_create("flatshard", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("flatshard")  # before Linux 6.3


def open_of(pid: int, number: int) -> int | None:
    """Open, for reading, file ``number`` of another process; None where that is not permitted."""
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def reserve_range(nbytes: int) -> mmap.mmap:
    """A range of addresses, of zeros that take no memory until they are written.

    Raises:
        OSError: there are no addresses left (``RLIMIT_AS``), or the system counts them as memory
            (``vm.overcommit_memory=2``).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, nbytes, flags=flags)


def mapped(number: int, nbytes: int, *, write: bool) -> mmap.mmap | None:
    """A range in which an open file is seen, and written; None where that is not possible."""
    try:
        found = reserve_range(nbytes)  # Python's own mapping of a file would keep it open
    except OSError:
        return None
    protection = _PROT_READ_WRITE if write else _PROT_READ
    return found if _map(number, address_of(found), nbytes, protection, _MAP_SHARED) else None


def map_privately(number: int, place: int, nbytes: int) -> bool:
    """Map an open file over addresses that this process has; says whether that worked.

    What is written there stays there, and is gone after ``drop_pages``.
    """
    return _map(number, place, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE)


def map_shared(number: int, place: int, nbytes: int) -> bool:
    """The same, but what is written there is written to the file."""
    return _map(number, place, nbytes, _PROT_READ_WRITE, _MAP_SHARED)


def address_of(found: mmap.mmap) -> int:
    """Where a range begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(found))


def _map(number: int, place: int, nbytes: int, protection: int, kind: int) -> bool:
    flags = kind | _MAP_FIXED | _MAP_NORESERVE
    return bool(_mmap(place, nbytes, protection, flags, number, 0) == place)


def drop_pages(place: int, nbytes: int) -> None:
    """Give the memory of a range back; what is mapped there is read again when it is needed."""
    if _madvise(place, nbytes, _MADV_DONTNEED) != 0:
        raise RuntimeError(f"madvise: {os.strerror(ctypes.get_errno())}")


def want_pages(place: int, nbytes: int) -> None:
    """Fault the pages of a range in, for writing, in one call."""
    _madvise(place, nbytes, _MADV_POPULATE_WRITE)  # older systems do not know it: pages then fault


def move_pages(source: int, place: int, nbytes: int) -> bool:
    """Move what is in one range of this process's own memory to another; says if that worked.

    The first range is zeros after it, without memory. What was in the other is gone.
    """
    if _mremap is None:
        return False
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_mremap(source, nbytes, nbytes, flags, place) == place)


def forbid(place: int, nbytes: int) -> None:
    """Forbid reads and writes of a range; one ends the process."""
    _mprotect(place, nbytes, _PROT_NONE)


def allow(place: int, nbytes: int) -> None:
    """Let a range be read and written again.

    Raises:
        MemoryError: the system has no room to tell its parts apart.
    """
    if _mprotect(place, nbytes, _PROT_READ_WRITE) != 0:
        raise MemoryError(f"mprotect: {os.strerror(ctypes.get_errno())}")


def give_back_freed() -> None:
    """Make the allocator return its free memory to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


CAN_MAP = sys.platform == "linux" and hasattr(os, "memfd_create")


def _find(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library; None where it has none of that name."""
    if not CAN_MAP:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype, function.argtypes = result, list(arguments)
    return function


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = _find("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
_madvise = _find("madvise", _int, _address, _size, _int)
_mremap = _find("mremap", _address, _address, _size, _size, _int, _address)
_mprotect = _find("mprotect", _int, _address, _size, _int)
_malloc_trim = _find("malloc_trim", _int, _size)  # glibc's
