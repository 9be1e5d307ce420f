"""``DiskMemory``: tensors whose memory is files in a directory, which have no name.

The files end with the process, also with one that is killed.

A write to a page for which the disk has no room ends the process. So files have all their room when
they are made, and ``reserve`` keeps room for those that will be, where a failure can still be told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.memory import mapped_files
from flatshard.memory.offload_target import OffloadTarget
from flatshard.options.offload import OffloadError
from flatshard.tensor.sharded_tensor import FlatShardTensor

_mapped: dict[int, int] = {}  # where files are mapped: first address, length in bytes
# By parameter, the disk that holds its optimizer state. Parameters that are not sharded only: the
# spec of a ``FlatShardTensor`` names the disk.
_state_disks: MutableMapping[Tensor, DiskMemory] = WeakIdKeyDictionary()


class DiskMemory(OffloadTarget):
    """Tensors over files in one directory."""

    is_device = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Try whether files can be made there: else ``ValueError`` or ``NotImplementedError``."""
        self._folder = os.fspath(folder)
        self._reserve: int | None = None
        self.files = self
        if not mapped_files.CAN_MAP:
            raise NotImplementedError("CPUOffload: path is supported on Linux alone; leave it out")
        try:
            os.close(self._nameless())
        except OSError as error:
            raise ValueError(
                f"CPUOffload: no file can be made in path {self._folder!r}: {error.strerror}. "
                "Pass a directory that exists and that this user may write to."
            ) from error

    def _nameless(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(self._folder, flags | os.O_TMPFILE, 0o600)
        # Not every file system has O_TMPFILE: this file loses its name at once.
        number, name = tempfile.mkstemp(prefix="flatshard-", dir=self._folder)
        os.unlink(name)
        return number

    def reserve(self, nbytes: int, what: str) -> None:
        """Keep room on the disk for tensors to come, which ``what`` names in errors.

        Raises:
            OffloadError: the disk is full; what was reserved before stays.
        """
        if nbytes == 0:
            return
        if self._reserve is None:
            self._reserve = self._nameless()
            weakref.finalize(self, os.close, self._reserve)
        before = os.fstat(self._reserve).st_size
        try:
            os.posix_fallocate(self._reserve, before, nbytes)
        except OSError as error:
            os.ftruncate(self._reserve, before)  # it may have grown by a part
            raise self._full(error, nbytes, what) from error

    @property
    def reserved_bytes(self) -> int:
        """Not in use yet."""
        return 0 if self._reserve is None else os.fstat(self._reserve).st_size

    def create(self, nbytes: int) -> int:
        """See ``Files``: zeros which have their room; takes it from the reserve."""
        # First: on a full disk the reserve is the only room that there is.
        if self._reserve is not None:
            os.ftruncate(self._reserve, max(0, self.reserved_bytes - nbytes))
        number = self._nameless()
        try:
            os.posix_fallocate(number, 0, nbytes)
        except OSError as error:
            os.close(number)
            raise self._full(error, nbytes, "a tensor") from error
        return number

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """See ``Files``: a range whose pages ``release`` gives back."""
        found = mapped_files.mapped(number, nbytes)
        address = mapped_files.address_of(found)
        _mapped[address] = nbytes
        weakref.finalize(found, _mapped.pop, address)
        return found

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in a file, ``(numel,)``.

        Raises:
            OffloadError: the disk is full, or the system maps no more files.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = rounded(numel * dtype.itemsize)
        number = self.create(nbytes)
        try:
            found = self.mapped(number, nbytes)
        except OSError as error:
            raise OffloadError(
                f"{nbytes:,} bytes in a file in {self._folder!r} cannot be mapped: the limit of "
                "mappings (vm.max_map_count) or of addresses (ulimit -v) is reached"
            ) from error
        finally:
            os.close(number)  # the mapping keeps the file
        return torch.frombuffer(found, dtype=dtype, count=numel)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A tensor without gaps in a file: itself, or a copy with its strides."""
        return self._copy(tensor) if tensor.numel() and not is_on_disk(tensor) else tensor

    def copy(self, tensor: Tensor) -> Tensor:
        return self._copy(tensor) if is_on_disk(tensor) else tensor.clone()

    def _copy(self, tensor: Tensor) -> Tensor:
        place = self.new(tensor.numel(), tensor.dtype)
        place = place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        # Both: else each copied tensor would stay in RSS.
        release(place, tensor)
        return place

    def _full(self, error: OSError, nbytes: int, what: str) -> OffloadError:
        state = os.statvfs(self._folder)
        free = state.f_bavail * state.f_frsize
        return OffloadError(
            f"CPUOffload: {what} needs {nbytes:,} bytes on disk in {self._folder!r}, where "
            f"{free:,} are free: {error.strerror}. Make room or pass another path; the files go "
            "when the process does, or with the model and its optimizer."
        )

    def page_in(self, *tensors: Tensor) -> None:
        fetch(*tensors)

    def page_out(self, *tensors: Tensor) -> None:
        release(*tensors)

    def keep_state_of(self, param: Tensor) -> None:
        _state_disks[param] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> DiskMemory:
        return self  # each tensor has a file of its own


def rounded(nbytes: int) -> int:
    """Length in bytes of a file for ``nbytes``: whole pages."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def is_on_disk(tensor: Tensor) -> bool:
    """Whether the memory of an ordinary tensor is a file."""
    return tensor.untyped_storage().data_ptr() in _mapped


def fetch(*tensors: Tensor) -> None:
    """Read the pages of ordinary tensors that are about to be written, in one go."""
    for address in _addresses(tensors):
        mapped_files.want_pages(address, _mapped[address])


def release(*tensors: Tensor) -> None:
    """Give back the pages of ordinary tensors, those in files, and of what shares their memory."""
    # What is touched takes memory. The system's cache of files gets it, and writes it when it needs
    # the room: releasing costs little, and what is used again soon comes from that cache.
    for address in _addresses(tensors):
        mapped_files.drop_pages(address, _mapped[address])


def state_disk(param: Any) -> DiskMemory | None:
    """The files that keep a parameter's state; None: the state is in memory."""
    if not isinstance(param, FlatShardTensor):
        return _state_disks.get(param) if _state_disks else None  # asked for each parameter, often
    target = param.spec.state_target
    return target if isinstance(target, DiskMemory) else None


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} & _mapped.keys()
