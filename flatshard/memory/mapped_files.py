"""Unnamed files in memory, and address ranges that show a file or have no memory.

Other processes on the same host can map the files. No clean-up is needed: the system frees a file
when no process has it open or mapped. The files are not in ``/dev/shm``, so the size limit of
``/dev/shm`` does not apply.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Any

# Linux's constants, because Python's ``mmap`` does not define all of them on every system.
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x4000
_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MFD_NOEXEC_SEAL = 8


def create(nbytes: int, *, reserve: bool = True) -> int:
    """Make and open a file of ``nbytes`` zeros in memory, and return the file descriptor.

    Raises:
        OSError: no file can be made, or with ``reserve`` there is not enough memory.
    """
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
        # This flag is required by systems with sysctl vm.memfd_noexec=2, which refuse files that
        # could be executed.
        return os.memfd_create("flatshard", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("flatshard")  # before Linux 6.3 the flag does not exist


def reserve_range(nbytes: int) -> mmap.mmap:
    """Reserve a range of addresses, which reads as zeros and takes no memory until written."""
    # Raises OSError if no addresses are left (RLIMIT_AS), or if the system counts reserved
    # addresses as memory (vm.overcommit_memory=2).
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return mmap.mmap(-1, nbytes, flags=flags)


def mapped(number: int, nbytes: int) -> mmap.mmap:
    """Map an open file for reading and writing. Raises ``OSError``."""
    # Do not use Python's `mmap` of a file, because it would keep a duplicate of the file descriptor
    # open for as long as the mapping exists.
    found = reserve_range(nbytes)
    map_at(number, address_of(found), nbytes)
    return found


def map_at(number: int, place: int, nbytes: int, *, private: bool = False) -> None:
    """Map an open file to addresses that this process has reserved. Raises ``OSError``."""
    # Writes to a private mapping do not reach the file, and ``drop_pages`` discards them.
    flags = (_MAP_PRIVATE if private else _MAP_SHARED) | _MAP_FIXED | _MAP_NORESERVE
    if _mmap(place, nbytes, _PROT_READ_WRITE, flags, number, 0) != place:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {os.strerror(error)}")


def address_of(found: mmap.mmap) -> int:
    """Return the first address of a range."""
    return ctypes.addressof(ctypes.c_char.from_buffer(found))


def drop_pages(place: int, nbytes: int) -> None:
    """Free the memory of a range. The next access reads zeros, or the file if one is mapped."""
    if _madvise(place, nbytes, _MADV_DONTNEED) != 0:
        raise RuntimeError(
            f"freeing {nbytes:,} bytes of memory failed (madvise: "
            f"{os.strerror(ctypes.get_errno())}). Do not lock the process's memory (mlockall)."
        )


def want_pages(place: int, nbytes: int) -> None:
    """Allocate the pages of a range for writing, in one call."""
    # Ignore errors: systems before Linux 5.14 do not know this request, and then each page is
    # allocated at its first use.
    _madvise(place, nbytes, _MADV_POPULATE_WRITE)


def move_pages(source: int, place: int, nbytes: int) -> bool:
    """Move the pages of one address range to another. Return whether this succeeded."""
    # Afterwards the source range reads as zeros and has no memory. The previous contents of the
    # target range are lost. The call fails on systems before Linux 5.7, which do not know the flag
    # DONTUNMAP.
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_mremap(source, nbytes, nbytes, flags, place) == place)


def forbid(place: int, nbytes: int) -> None:
    _mprotect(place, nbytes, _PROT_NONE)  # from now on a read or write ends the process


def allow(place: int, nbytes: int) -> None:
    """Allow reads and writes of a range. Raises ``MemoryError`` if there are too many mappings."""
    if _mprotect(place, nbytes, _PROT_READ_WRITE) != 0:
        raise MemoryError(f"mprotect: {os.strerror(ctypes.get_errno())}")


def give_back_freed() -> None:
    """Make the C library's allocator return its free memory to the operating system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


CAN_MAP = sys.platform == "linux" and hasattr(os, "memfd_create")


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the C library; None if it does not exist or files cannot be mapped."""
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
_malloc_trim = c_function("malloc_trim", _int, _size)  # exists only in glibc
