"""Files in memory, without a name, which other processes on this host can map.

No clean-up is needed: a file is freed with the last process that has it open or mapped. The files
are not in ``/dev/shm``, so the size limit of ``/dev/shm`` does not apply.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

# Linux's constants. Python's ``mmap`` does not define all of them on every system.
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x4000
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MFD_NOEXEC_SEAL = 8


def create(nbytes: int, *, reserve: bool = True) -> int:
    """An open file of ``nbytes`` zeros in memory; raises ``OSError`` if no file can be made."""
    number = _memfd()
    try:
        os.ftruncate(number, nbytes)
        if reserve:
            # Allocate the pages now: otherwise a write would end the process when memory runs out.
            os.posix_fallocate(number, 0, nbytes)
    except OSError:
        os.close(number)
        raise
    return number


def _memfd() -> int:
    try:
        # With sysctl vm.memfd_noexec=2 the kernel refuses files that could be executed.
        return os.memfd_create("flatshard", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("flatshard")  # before Linux 6.3


def reserve_range(nbytes: int) -> mmap.mmap:
    """A range of addresses that reads as zeros and takes no memory until it is written."""
    # Raises OSError if no addresses are left (RLIMIT_AS), or if the system counts reserved
    # addresses as memory (vm.overcommit_memory=2).
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, nbytes, flags=flags)


def mapped(number: int, nbytes: int) -> mmap.mmap:
    """A range of addresses that shows an open file, for reading and writing; raises ``OSError``."""
    found = reserve_range(nbytes)  # Python's mapping of a file would keep the file open
    map_at(number, address_of(found), nbytes)
    return found


def map_at(number: int, place: int, nbytes: int, *, private: bool = False) -> None:
    """Map an open file over addresses that this process has reserved; raises ``OSError``."""
    # Writes to a private mapping do not reach the file, and are lost after ``drop_pages``.
    flags = (_MAP_PRIVATE if private else _MAP_SHARED) | _MAP_FIXED | _MAP_NORESERVE
    if _mmap(place, nbytes, _PROT_READ_WRITE, flags, number, 0) != place:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {os.strerror(error)}")


def address_of(found: mmap.mmap) -> int:
    """The address at which a range begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(found))


def drop_pages(place: int, nbytes: int) -> None:
    """Give the memory of a range back; a mapped file is read again at the next access."""
    if _madvise(place, nbytes, _MADV_DONTNEED) != 0:
        raise RuntimeError(
            f"giving {nbytes:,} bytes back to the system failed (madvise: "
            f"{os.strerror(ctypes.get_errno())}). Is their memory locked (mlockall, ulimit -l)?"
        )


def want_pages(place: int, nbytes: int) -> None:
    """Fault in the pages of a range, for writing, in one call."""
    # Older systems return an error, and each page faults at its first use.
    _madvise(place, nbytes, _MADV_POPULATE_WRITE)


def move_pages(source: int, place: int, nbytes: int) -> bool:
    """Move the pages of one range of this process to another; returns whether that worked."""
    # Afterwards the source range reads as zeros and has no memory. The previous contents of the
    # target range are lost. Before Linux 5.7 the call fails.
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_mremap(source, nbytes, nbytes, flags, place) == place)


def forbid(place: int, nbytes: int) -> None:
    _mprotect(place, nbytes, _PROT_NONE)  # a read or write ends the process


def allow(place: int, nbytes: int) -> None:
    """Allow reads and writes of a range; raises ``MemoryError`` after too many mappings."""
    if _mprotect(place, nbytes, _PROT_READ_WRITE) != 0:
        raise MemoryError(f"mprotect: {os.strerror(ctypes.get_errno())}")


def give_back_freed() -> None:
    """Make the allocator return its free memory to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


CAN_MAP = sys.platform == "linux" and hasattr(os, "memfd_create")


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library; None if the library lacks it or files cannot be mapped."""
    if not CAN_MAP:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype, function.argtypes = result, list(arguments)
    return function


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = c_function("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
_madvise = c_function("madvise", _int, _address, _size, _int)
_mremap = c_function("mremap", _address, _address, _size, _size, _int, _address)
_mprotect = c_function("mprotect", _int, _address, _size, _int)
_malloc_trim = c_function("malloc_trim", _int, _size)  # glibc's
