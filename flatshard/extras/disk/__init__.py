"""Extra: keeps shards, gradients and optimizer state in files (``CPUOffload(path=...)``).

Without this folder, ``path`` raises when a model is wrapped. Offload to host memory needs no extra.

[Note: files without a name]
The files have no name in their directory, so that they end with the process, also with a process
that is killed.

A write to a page for which the disk has no room ends the process. So files have all their room when
they are made, and ``reserve`` keeps room for those that will be, where a failure can still be told.

[Note: optimizer steps a part at a time]
An optimizer steps all its parameters in one call. Before that call, the parameters whose state is
in files are stepped by themselves, some megabytes at a time. After each part, the state that the
optimizer has made goes to its file, and the pages are given back. The call itself steps the other
parameters.
"""

from __future__ import annotations

import inspect
import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.memory import mapped_files
from flatshard.memory.offload_target import OffloadTarget
from flatshard.optimizer.step import StepPart, step_parts
from flatshard.optimizer.stepper import (
    TORCHS_OWN,
    OptimizerExtension,
    extensions,
    state_to_target,
    step_groups,
)
from flatshard.options.offload import OffloadError
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, untraced

__all__ = ["DiskMemory"]

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
        self._reserve: IO[bytes] | None = None
        if not mapped_files.CAN_MAP:
            raise NotImplementedError("CPUOffload: path is supported on Linux alone; leave it out")
        try:
            self._nameless().close()
        except OSError as error:
            raise ValueError(
                f"CPUOffload: no file can be made in path {self._folder!r}: {error.strerror}. "
                "Pass a directory that exists and that this user may write to."
            ) from error

    def _nameless(self) -> IO[bytes]:
        # Also where the file system has no O_TMPFILE: then the file loses its name at once.
        return tempfile.TemporaryFile(prefix="flatshard-", dir=self._folder, buffering=0)

    def reserve(self, nbytes: int, what: str) -> None:
        """Keep room on the disk for tensors to come, which ``what`` names in errors.

        Raises:
            OffloadError: the disk is full; what was reserved before stays.
        """
        if nbytes == 0:
            return
        if self._reserve is None:
            self._reserve = self._nameless()
            weakref.finalize(self, self._reserve.close)
        before = self.reserved_bytes
        try:
            os.posix_fallocate(self._reserve.fileno(), before, nbytes)
        except OSError as error:
            self._reserve.truncate(before)  # it may have grown by a part
            raise self._full(error, nbytes, what) from error

    @property
    def reserved_bytes(self) -> int:
        """Not in use yet."""
        return 0 if self._reserve is None else os.fstat(self._reserve.fileno()).st_size

    def create(self, nbytes: int) -> int:
        """Zeros which have their room; takes it from the reserve."""
        # First: on a full disk the reserve is the only room that there is.
        if self._reserve is not None:
            self._reserve.truncate(max(0, self.reserved_bytes - nbytes))
        with self._nameless() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise self._full(error, nbytes, "a tensor") from error
            return os.dup(file.fileno())

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """A range whose pages ``page_out`` gives back."""
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
        self.page_out(place, tensor)
        return place

    def _full(self, error: OSError, nbytes: int, what: str) -> OffloadError:
        state = os.statvfs(self._folder)
        free = state.f_bavail * state.f_frsize
        return OffloadError(
            f"CPUOffload: {what} needs {nbytes:,} bytes on disk in {self._folder!r}, where "
            f"{free:,} are free: {error.strerror}. Make room or pass another path; the files go "
            "when the process does, or with the model and its optimizer."
        )

    @staticmethod
    def page_in(*tensors: Tensor) -> None:
        # Read the pages that are about to be written in one call.
        for address in _addresses(tensors):
            mapped_files.want_pages(address, _mapped[address])

    @staticmethod
    def page_out(*tensors: Tensor) -> None:
        # Pages of a mapped file occupy memory once they are touched. Released pages go to the
        # system's file cache, which writes them to disk when memory is short. So releasing costs
        # little, and pages that are soon used again come from the file cache.
        for address in _addresses(tensors):
            mapped_files.drop_pages(address, _mapped[address])

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


def state_disk(param: Any) -> DiskMemory | None:
    """The files that keep a parameter's state; None: the state is in memory."""
    if not isinstance(param, FlatShardTensor):
        return _state_disks.get(param) if _state_disks else None  # asked for each parameter, often
    target = param.spec.state_target
    return target if isinstance(target, DiskMemory) else None


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} & _mapped.keys()


# ------------------------------------------------------------ optimizer steps

# Parameter bytes from which a part is full. With Adam, four times as much is in memory.
_PART_BYTES = 8 << 20


def _has_grad(param: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad is not None


class DiskSteps(OptimizerExtension):
    """Steps parameters with state on a disk before the call that steps the other parameters."""

    def step_first(self, optimizer: torch.optim.Optimizer) -> Iterable[int]:
        parts = _plan_parts(optimizer)
        for part in parts:
            DiskMemory.page_in(*_tensors(optimizer, part.params))
            step_parts(optimizer, [part])
        return {id(param) for part in parts for param in part.params}

    def after_part(self, optimizer: torch.optim.Optimizer, params: Sequence[Any]) -> None:
        """Put the state of parameters that were stepped where it is kept, and give pages back."""
        for param in params:
            storage = state_disk(param)
            if storage is not None and not isinstance(param, FlatShardTensor):
                # The state of a sharded parameter is on the disk since the state was made.
                state_to_target(optimizer.state.get(param, {}), param.shape, storage)
        DiskMemory.page_out(*_tensors(optimizer, params))

    def before_backward(self, optimizer: torch.optim.Optimizer) -> None:
        _reserve(optimizer, before_backward=True)


@untraced
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        _steps.after_part(optimizer, group["params"])


def _plan_parts(optimizer: torch.optim.Optimizer) -> list[StepPart]:
    """Parts to step one at a time, before the call that steps the other parameters.

    Raises ``OffloadError`` if there is no room for state; nothing was stepped.
    """
    parts: list[StepPart] = []
    for group in optimizer.param_groups:
        shard, nbytes = None, 0
        for param in group["params"]:
            if state_disk(param) is None or not _has_grad(param):
                continue
            # Neighbours stay together: they are stepped as one.
            own = getattr(param, "flat", param)
            if shard is None or (own is not shard and nbytes >= _PART_BYTES):
                parts.append(StepPart(optimizer, group, []))
                nbytes = 0
            shard = own
            parts[-1].params.append(param)
            nbytes += local_range(param).nbytes
    return parts if parts and _reserve(optimizer) else []


def _tensors(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors that a step of ``params`` touches; only of those with state on the disk."""
    for param in params:
        if state_disk(param) is None:
            continue
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        values = [param, *optimizer.state.get(param, {}).values()]
        if type(grad) in (Tensor, FlatShardTensor):  # a consumed gradient has no memory
            values.append(grad)
        yield from (local_range(value) for value in values if isinstance(value, Tensor))


def _reserve(optimizer: torch.optim.Optimizer, *, before_backward: bool = False) -> bool:
    """Reserve room for state that is still to be made; says whether steps can be in parts.

    Before a backward, parameters count that are still to get a gradient. Raises ``OffloadError``
    if the disk is full; nothing was stepped.
    """
    if inspect.unwrap(type(optimizer).step) not in TORCHS_OWN:
        return False  # others may count their steps somewhere
    # What an optimizer keeps is known when it has made it, which is too late to find that a disk
    # is full: some parameters would be stepped and others not.
    needed: Counter[Any] = Counter()
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if state_disk(param) is not None]
        stepped = [
            one for one in kept if (one.requires_grad if before_backward else _has_grad(one))
        ]
        new = [param for param in stepped if param not in optimizer.state]
        per_element = _bytes_per_element(optimizer, group, new[0]) if new else 0
        if per_element is None:
            return False
        for param in stepped:
            needed[state_disk(param)] += _bytes_to_come(optimizer, param, per_element)
    name = type(optimizer).__name__
    for storage, nbytes in needed.items():
        storage.reserve(max(0, nbytes - storage.reserved_bytes), f"the state of {name}")
    return True


def _bytes_to_come(optimizer: torch.optim.Optimizer, param: Any, per_element: int) -> int:
    """Bytes of the files that one parameter's state still needs."""
    if param not in optimizer.state:
        nbytes = local_range(param).numel() * per_element
        return rounded(nbytes) if per_element else 0
    # State that was loaded is in memory until the next step.
    values = optimizer.state[param].values()
    loaded = [local_range(value) for value in values if isinstance(value, Tensor) and value.dim()]
    return sum(rounded(value.nbytes) for value in loaded if not is_on_disk(value))


def _bytes_per_element(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor
) -> int | None:
    """Bytes of state per element; None: a step changes the group, so it cannot be divided."""
    probe = nn.Parameter(torch.zeros(2, dtype=param.dtype))
    probe.grad = torch.zeros_like(probe)
    # The optimizer itself steps the probe: how to construct a second one is not known.
    try:
        with torch.no_grad():
            changed = step_groups(optimizer, [{**group, "params": [probe]}])
    finally:
        state = optimizer.state.pop(probe, {})
    if changed is not None:
        return None
    return sum(
        value.element_size()
        for value in state.values()
        if isinstance(value, Tensor) and value.shape == probe.shape
    )


# From the first model on that keeps something on a disk, in the steps of all optimizers.
_steps = DiskSteps()
extensions.append(_steps)
register_optimizer_step_post_hook(_after_step)  # after users' hooks
