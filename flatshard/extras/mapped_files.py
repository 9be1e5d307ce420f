"""Unnamed files in memory (memfd) and address ranges, for the extras that map memory.

Other processes on the same host can map the files, to share memory. No clean-up is needed: the
system frees a file when no process has the file open or mapped. The files are not in ``/dev/shm``,
so the size limit of ``/dev/shm`` does not apply.

The arguments ``place`` and ``nbytes`` of the functions are the first address and the size of an
address range.
"""

import ctypes
import mmap
import os
from typing import Any

from flatshard.memory import OffloadTarget
from flatshard.options import OffloadError

# Constants of Linux that Python's modules ``mmap`` and ``os`` lack.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_WRITE, _MFD_NOEXEC_SEAL = 23, 8


def create(nbytes: int, *, reserve: bool = True) -> int:
    """Make and open a file of ``nbytes`` zeros in memory, and return the file descriptor.

    ``reserve``: whether to allocate all memory now, so that later writes cannot run out of memory.
    """
    try:
        # The flag is needed with sysctl vm.memfd_noexec=2, which forbids executable files.
        number = os.memfd_create("flatshard", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        number = os.memfd_create("flatshard")  # before Linux 6.3 the flag does not exist
    try:
        os.ftruncate(number, nbytes)
        if reserve:
            # If memory runs out, this call raises. A later write would end the process instead.
            os.posix_fallocate(number, 0, nbytes)
    except OSError:
        os.close(number)
        raise
    return number


def reserve_range(nbytes: int) -> mmap.mmap:
    """Reserve ``nbytes`` of addresses, which read as zeros and take no memory until written."""
    # The addresses can run out because of a limit (RLIMIT_AS), or because the system counts
    # reserved addresses as used memory (vm.overcommit_memory=2).
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def mapped(number: int, nbytes: int) -> mmap.mmap:
    """Map the open file with descriptor ``number``, for reading and writing."""
    # Do not use `mmap.mmap` for the file: it would keep a duplicate of the file descriptor open,
    # and a process may open only about 1,000 files.
    found = reserve_range(nbytes)
    map_at(number, address_of(found), nbytes)
    return found


def create_mapped(target: OffloadTarget, nbytes: int) -> tuple[int, mmap.mmap]:
    """Make, open and map a file of ``nbytes`` zeros, on the target's disk or in memory.

    Returns the descriptor and the mapping.
    """
    # Only a target on disk (`DiskMemory`, extra `disk`) has methods `create` and `mapped`.
    number = getattr(target, "create", create)(nbytes)
    try:
        return number, getattr(target, "mapped", mapped)(number, nbytes)
    except (OSError, OffloadError):
        os.close(number)
        raise


def map_at(number: int, place: int, nbytes: int, *, private: bool = False) -> None:
    """Map the open file with descriptor ``number`` to addresses that this process has reserved.

    ``private``: whether writes stay in this process and do not reach the file.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_FIXED | _MAP_NORESERVE
    if _mmap(place, nbytes, access, flags, number, 0) != place:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {os.strerror(error)}")


def address_of(found: mmap.mmap) -> int:
    """Return the first address of a range that ``reserve_range`` or ``mapped`` returned."""
    return ctypes.addressof(ctypes.c_char.from_buffer(found))


def drop_pages(place: int, nbytes: int) -> None:
    """Free the memory of a range: the next read returns the mapped file's contents, or zeros."""
    if _madvise(place, nbytes, mmap.MADV_DONTNEED) != 0:
        raise RuntimeError(
            f"freeing {nbytes:,} bytes of memory failed (madvise: "
            f"{os.strerror(ctypes.get_errno())}). Do not lock the process's memory (mlockall)."
        )


def want_pages(place: int, nbytes: int) -> None:
    """Allocate all pages of a range now, which is faster than a page fault for each page later."""
    # Ignore errors: Linux before 5.14 does not know this request.
    _madvise(place, nbytes, _MADV_POPULATE_WRITE)


def c_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the C library, or None if this C library has no such function."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype, function.argtypes = result, list(arguments)
    return function


_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = c_function("mmap", _address, _address, _size, _int, _int, _int, ctypes.c_long)
_madvise = c_function("madvise", _int, _address, _size, _int)
