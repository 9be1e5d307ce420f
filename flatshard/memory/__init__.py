"""Memory of tensors: unsharded buffers, cached results, offload targets, and checksums."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatshard.units.layout import as_bytes

_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]

GLIBC_LIMIT_BYTES = 32 << 20
"""A tensor of at least this size gets its own memory mapping from glibc, unmapped when freed."""


# ---------------------------------------------------------------- unsharded buffers


class BufferMemory:
    """The memory of one unsharded buffer.

    Subclasses allocate the memory at each unshard, and free it at each reshard. The buffer's
    storage object never changes, so autograd's views of the buffer are valid again after the next
    unshard. This base class is for flat parameters that are not sharded: the buffer is the shard
    itself, and is never freed.
    """

    # Place of this rank's shard, `(shard_numel,)`, if the buffers of all ranks map the shard.
    # None: the shard has separate memory.
    shard: Tensor | None = None
    # Whether the shards of all ranks are mapped into the buffer. Then an all-gather copies nothing.
    shows_shards = False

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer  # (numel,), valid only between ``take`` and ``free``

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the buffer occupies now, without mapped shards."""
        return 0

    def take(self) -> None:
        """Allocate the memory, with undefined values, unless it is already allocated."""

    def free(self) -> None:
        """Free the memory of the buffer. A second call does nothing."""

    def snapshot(self) -> None:
        """Keep the buffer's values, even if ranks write to shards, until the next all-gather."""


class AllocatedBuffer(BufferMemory):
    """An unsharded buffer whose memory comes from torch's allocator for the device."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device=device))
        self._storage, self._nbytes = self.buffer.untyped_storage(), self.buffer.nbytes

    @property
    def held_bytes(self) -> int:
        return self._storage.nbytes()

    def take(self) -> None:
        # `resize_` would allocate and copy even if the storage already has the requested size.
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        # Resize the storage object, but do not delete it: autograd's views refer to the object.
        self._storage.resize_(0)


# ---------------------------------------------------------------- results


def storage_bytes(tensors: Iterable[object]) -> int:
    """Return the total size of the storages of ``tensors``. A shared storage counts once."""
    storages = [one.untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def prepare_allocator() -> None:
    """Let glibc's allocator reuse the memory that a training step frees in the next step."""
    # glibc returns freed blocks above a threshold to the operating system. When a block of up to
    # 32 MiB is freed, the threshold becomes the block's size. So allocate and free such a block.
    torch.empty(GLIBC_LIMIT_BYTES - 4096, dtype=torch.uint8)


class BufferCache:
    """Makes 1-D tensors for results (reduced gradients, for example), and reuses their memory.

    ``new``: function that allocates a tensor, given a number of elements and a dtype. None: torch
    allocates tensors, and only large CPU tensors are cached, because glibc would return the memory
    of these tensors to the operating system.
    """

    def __init__(self, new: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._new = new
        self._kept: Tensor | None = None  # the tensor whose memory the next `take` may reuse

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor, ``(numel,)``, in the cached memory if possible."""
        kept = self._kept
        if kept is not None:
            fits = kept.numel() == numel and kept.dtype == dtype and kept.device == device
            if fits and num_uses(kept) <= ALONE:
                return kept.detach()  # while this alias exists, the storage counts as used
            self.give_back()
        make = self._new
        new = make(numel, dtype) if make else torch.empty(numel, dtype=dtype, device=device)
        # Do not cache a tensor below the limit: the allocator itself reuses the tensor's memory.
        is_worth_it = new.nbytes >= GLIBC_LIMIT_BYTES and device.type == "cpu"
        if self._kept is not None or not (is_worth_it or make):
            return new
        self._kept = new
        return new.detach()

    def give_back(self) -> None:
        """Free the cached tensor, unless other code still uses its memory."""
        if self._kept is not None and num_uses(self._kept) <= ALONE:
            self._kept = None


def num_uses(tensor: Tensor) -> int:
    """Return how many references a tensor's storage has, including one that this call makes."""
    return int(_use_count(tensor.untyped_storage()._cdata))


# The result of `num_uses` for a storage that only one tensor uses.
ALONE = num_uses(torch.empty(1))


# ---------------------------------------------------------------- offload targets


class OffloadTarget:
    """Where shards, gradients or optimizer state are between uses. Base class: the device."""

    is_device = True

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor, ``(numel,)``, in this target's memory."""
        return torch.empty(numel, dtype=dtype)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is in this target's memory, otherwise a copy in this memory."""
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor. If the tensor is in this target's memory, the copy is there, too."""
        return tensor.clone()

    def page_in(self, *tensors: Tensor) -> None:
        """Prepare for writes to ``tensors``. Ignores tensors outside of this target's memory."""

    def page_out(self, *tensors: Tensor) -> None:
        """Free the memory of ``tensors`` that are in files. A later read loads the file again."""


class HostMemory(OffloadTarget):
    is_device = False

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def take_in(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.is_pinned() is self._pinned:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned).copy_(tensor)


DEVICE = OffloadTarget()


@dataclass(frozen=True)
class OffloadTargets:
    """The offload targets for the tensors of one unit."""

    shard: OffloadTarget = DEVICE  # target of shards of parameters
    gradient: OffloadTarget = DEVICE  # target of reduced gradients

    # Target of optimizer state with one value per element: `DiskMemory` of the extra `disk`. None:
    # optimizer state is stored beside the shard.
    state: Any = None
    keeps_copy: bool = False  # whether a copy of the shard for all-gathers stays on the device


@functools.cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the CUDA stream for ``purpose``, the same in each call.

    On the stream for "offload", shards are copied from the host, and gradients to the host.
    """
    return torch.cuda.Stream(device)


class _Nothing:
    """A context manager that does nothing."""

    # A function in C, for speed: it accepts any arguments, and returns "", which is false.
    __enter__ = __exit__ = "".format


NOTHING: contextlib.AbstractContextManager[object] = _Nothing()  # type: ignore[assignment]


@contextlib.contextmanager
def on_side_stream(device: torch.device, purpose: str) -> Iterator[None]:
    """Context in which CUDA work is queued on a side stream, behind the current stream's work."""
    stream = side_stream(device, purpose)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


# ------------------------------------------------------------ comparing memory

# The result of `checksum`. Different tensors almost always have different checksums.
Checksum = int

_ROW = 1 << 13  # number of words in a row of the table in `checksum`


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return random integers, ``(_ROW,)``, which are the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2**63 - 1, (_ROW,), generator=generator, device="cpu").to(device)


def checksum(tensor: Tensor) -> Checksum:
    """Return a 64-bit checksum of a tensor's memory, to find out whether two tensors differ."""
    words = words_of(tensor)
    if words.dtype is torch.int64:
        # Split each word in two: floats differ mostly in their high bits, and the product of the
        # high bits of an int64 and a factor overflows.
        words = words.view(torch.int32)
    factors = _factors(words.device)
    num_tabled = words.numel() // _ROW * _ROW
    table, rest = words[:num_tabled].view(-1, _ROW), words[num_tabled:]
    # Factors are random, because with indices as factors, (0, 1, 1, 0) and (1, 0, 0, 1) would have
    # equal sums. Multiply few rows at once, because the products need memory.
    num_rows = min(1 + len(table) // 64, 8 if words.is_cpu else 128)
    sums = torch.empty(len(table) + 1, dtype=torch.int64, device=words.device)
    # Write into `sums`: new tensors of sums would keep glibc from reusing the products' memory.
    for out, rows in zip(sums[:-1].split(num_rows), table.split(num_rows), strict=True):
        out.copy_((rows * factors).sum(1))
    sums[-1] = (rest * factors[: rest.numel()]).sum()
    return int(sums) if sums.numel() == 1 else checksum(sums)


def sample(tensor: Tensor) -> list[int]:
    """Return up to 32 words of a tensor's memory, to find out later whether the tensor was written.

    Empty for a tensor on an accelerator, because a read would wait for the device.
    """
    words = words_of(tensor) if tensor.is_cpu else torch.empty(0)
    return words[:: words.numel() // 32 + 1].tolist()


def words_of(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a tensor's memory: int64 if size and address allow, otherwise bytes."""
    data = as_bytes(tensor.detach().contiguous())
    is_wide = data.numel() % 8 == 0 and data.data_ptr() % 8 == 0
    return data.view(torch.int64) if is_wide else data
