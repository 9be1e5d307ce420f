"""Extra: offloads shards, gradients and optimizer state to a disk (``CPUOffload(path=...)``).

Without this folder, wrapping a model with ``CPUOffload(path=...)`` raises an error. Offload to host
memory needs no extra.

[Note: files without a name]
Tensors lie in files mapped into memory. The files have no name in the directory, so the system
deletes the files when the process ends, even if the process is killed.

If the disk is full, a write to a mapped page ends the process by SIGBUS. So ``create`` allocates
the whole file on the disk before the file is mapped. ``reserve`` allocates disk space for files
that are created later, so that a full disk raises an exception before a step begins.

[Note: optimizer steps a part at a time]
An ordinary optimizer step would load the files of all parameters into memory at once. So when
``optimizer.step()`` begins, ``DiskSteps`` first steps the parameters whose state is in files, some
megabytes at a time. After each of these parts, ``DiskSteps`` moves new state to files and releases
the part's memory pages. The optimizer's own step then steps only the remaining parameters.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from flatshard.comm.consistency import raise_everywhere
from flatshard.extras import mapped_files
from flatshard.extras.partial_steps import step_groups, step_parts
from flatshard.memory import OffloadTarget, OffloadTargets
from flatshard.module.model_plan import ModelPlan
from flatshard.optimizer import adapter
from flatshard.options import OffloadError
from flatshard.tensor.sharded_tensor import FlatShardTensor, local_range, untraced
from flatshard.units.layout import PAGE_BYTES, round_up
from flatshard.units.module_tree import unit_text

# None if the C library is not glibc.
_malloc_trim = mapped_files.c_function("malloc_trim", ctypes.c_int, ctypes.c_size_t)
_mallopt = mapped_files.c_function("mallopt", ctypes.c_int, ctypes.c_int, ctypes.c_int)
# Two options of glibc's `mallopt`, and their value, glibc's default. From this size on, free memory
# at the end of the heap is returned to the system, and new blocks are made outside of the heap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _THRESHOLD = -1, -3, 128 << 10

# Length in bytes of each mapped file, keyed by the address at which the file is mapped.
_mapped: dict[int, int] = {}
# Maps each parameter that is not sharded to the disk that holds the parameter's optimizer state.
# For a sharded parameter (``FlatShardTensor``), this disk is ``spec.state_target``.
_state_disks: MutableMapping[Tensor, "DiskMemory"] = WeakIdKeyDictionary()


class DiskMemory(OffloadTarget):
    """Offload target that keeps tensors in files of ``folder``."""

    is_device = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        # Fix both thresholds. Otherwise glibc raises them to the size of freed blocks (up to
        # 32 MiB), and the process keeps several times the memory that the model needs.
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD) if _mallopt is not None else ():
            _mallopt(option, _THRESHOLD)
        self._folder = os.fspath(folder)
        self._reserve: IO[bytes] | None = None
        try:
            self._nameless().close()
        except OSError as error:
            raise ValueError(
                f"CPUOffload: no file can be made in path {self._folder!r}: {error.strerror}. "
                "Pass an existing directory in which this user may write."
            ) from error

    def _nameless(self) -> IO[bytes]:
        return tempfile.TemporaryFile(prefix="flatshard-", dir=self._folder, buffering=0)

    def reserve(self, nbytes: int, what: str) -> None:
        """Allocate disk space for tensors (``what``) that ``create`` will make later.

        Raises ``OffloadError`` if the disk is full. Earlier reservations stay.
        """
        if nbytes == 0:
            return
        if self._reserve is None:
            self._reserve = self._nameless()
            weakref.finalize(self, self._reserve.close)
        self._allocate(self._reserve, self.reserved_bytes, nbytes, what)

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._reserve is None else os.fstat(self._reserve.fileno()).st_size

    def create(self, nbytes: int) -> int:
        """Open a new file of ``nbytes`` zeros, which uses reserved disk space if there is any."""
        # First shrink the reserved file by `nbytes`, because the rest of the disk may be full.
        if self._reserve is not None:
            self._reserve.truncate(max(0, self.reserved_bytes - nbytes))
        with self._nameless() as file:
            self._allocate(file, 0, nbytes, "a tensor")
            return os.dup(file.fileno())

    def _allocate(self, file: IO[bytes], length: int, nbytes: int, what: str) -> None:
        """Allocate disk space for ``nbytes`` more bytes of a file that has ``length`` bytes."""
        try:
            os.posix_fallocate(file.fileno(), length, nbytes)
        except OSError as error:
            file.truncate(length)  # the failed call may have allocated some space
            state = os.statvfs(self._folder)
            free = state.f_bavail * state.f_frsize
            raise OffloadError(
                f"CPUOffload: {what} needs {nbytes:,} bytes on disk in {self._folder!r}, where "
                f"{free:,} are free: {error.strerror}. Free disk space, or pass another path. The "
                "system deletes flatshard's files when the process ends or the model is freed."
            ) from error

    def mapped(self, number: int, nbytes: int) -> mmap.mmap:
        """Map an open file, and record its address and length for ``page_in`` and ``page_out``."""
        try:
            found = mapped_files.mapped(number, nbytes)
        except OSError as error:
            raise OffloadError(
                f"CPUOffload: a file of {nbytes:,} bytes in {self._folder!r} cannot be mapped: the "
                "process has reached vm.max_map_count (number of mappings) or ulimit -v (address "
                "space). Raise this limit, or use fewer units: each unit maps its own files."
            ) from error
        address = mapped_files.address_of(found)
        _mapped[address] = nbytes
        weakref.finalize(found, _mapped.pop, address)
        return found

    def new(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in a new file. May raise OffloadError."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = round_up(numel * dtype.itemsize, mmap.PAGESIZE)
        number, found = mapped_files.create_mapped(self, nbytes)
        os.close(number)  # the file exists as long as it is mapped
        return torch.frombuffer(found, dtype=dtype, count=numel)

    def take_in(self, tensor: Tensor) -> Tensor:
        """Return the dense ``tensor`` if it is in a file, otherwise a copy that is in a file."""
        return self._copy(tensor) if tensor.numel() and not is_on_disk(tensor) else tensor

    def copy(self, tensor: Tensor) -> Tensor:
        return self._copy(tensor) if is_on_disk(tensor) else tensor.clone()

    def _copy(self, tensor: Tensor) -> Tensor:
        place = self.new(tensor.numel(), tensor.dtype)
        place = place.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
        # Release the pages: otherwise the process's memory (RSS) would grow by every copied tensor.
        self.page_out(place, tensor)
        return place

    @staticmethod
    def page_in(*tensors: Tensor) -> None:
        # A single call is faster than a page fault per page.
        for address in _addresses(tensors):
            mapped_files.want_pages(address, _mapped[address])

    @staticmethod
    def page_out(*tensors: Tensor) -> None:
        # A release costs little: the pages stay in the system's file cache, and are written to disk
        # only when memory is short.
        for address in _addresses(tensors):
            mapped_files.drop_pages(address, _mapped[address])

    def take_state(self, state: dict[str, Any], shape: torch.Size) -> None:
        """Move the tensors of shape ``shape`` in a parameter's optimizer state to this disk."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                state[key] = self.take_in(value)

    def keep_state_of(self, param: Tensor) -> None:
        """Make optimizers keep per-element state of the plain parameter ``param`` on this disk."""
        _state_disks[param] = self

    def trim(self) -> None:
        """Give memory that wrapping has freed back to the operating system."""
        if _malloc_trim is not None:
            _malloc_trim(0)


def find_targets(plan: ModelPlan) -> OffloadTargets:
    """Choose the offload targets, and reserve disk space for shards and gradients.

    Collective: all ranks. All ranks raise if the disk of any rank cannot be used, or is too full.
    """
    offload, error = plan.settings.cpu_offload, None
    try:
        disk = DiskMemory(offload.path or "")
        targets = OffloadTargets(state=disk)
        if offload.takes_params or plan.settings.device.type != "cpu":
            targets = OffloadTargets(disk, disk, disk, keeps_copy=not offload.takes_params)
            for planned in plan.units:
                nbytes = 0
                for flat in planned.flats:
                    copies = 1 + flat.requires_grad
                    needed = flat.layout.shard_numel * flat.dtype.itemsize * copies
                    nbytes += round_up(needed, PAGE_BYTES) + 2 * PAGE_BYTES
                disk.reserve(nbytes, f"{unit_text(planned.name)} (shards and gradients)")
    except (ValueError, OffloadError) as found:
        error = found
    # Raise on all ranks, even if only some fail: other ranks would wait in the next collective.
    raise_everywhere(error, plan.settings.ranks.world)
    return targets


def is_on_disk(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor``, which must not be a tensor subclass, is a mapped file."""
    return tensor.untyped_storage().data_ptr() in _mapped


def state_disk(param: Any) -> DiskMemory | None:
    """Return the disk that keeps a parameter's optimizer state, or None if no disk does."""
    if not isinstance(param, FlatShardTensor):
        # Skip the slow lookup if possible: each step calls this function for each parameter.
        return _state_disks.get(param) if _state_disks else None
    target = param.spec.state_target
    return target if isinstance(target, DiskMemory) else None


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} & _mapped.keys()


# ------------------------------------------------------------ optimizer steps

# Once a part of an optimizer step has this number of parameter bytes, further shards go to the next
# part. With Adam, a step of the part needs four times as many bytes in memory.
_PART_BYTES = 8 << 20


class DiskSteps(adapter.OptimizerExtension):
    """Steps parameters with state on a disk, see [Note: optimizer steps a part at a time]."""

    def step_first(self, optimizer: Optimizer) -> Iterable[int]:
        parts = _plan_parts(optimizer)
        for part in parts:
            DiskMemory.page_in(*_tensors(optimizer, part["params"]))
            step_parts(optimizer, [part])
        return {id(param) for part in parts for param in part["params"]}

    def after_part(self, optimizer: Optimizer, params: Sequence[Any]) -> None:
        """Move new state of the stepped ``params`` to the disk, and release their memory pages."""
        for param in params:
            storage = state_disk(param)
            # Skip sharded parameters, whose state is created on the disk.
            if storage is not None and not isinstance(param, FlatShardTensor):
                storage.take_state(optimizer.state.get(param, {}), param.shape)
        DiskMemory.page_out(*_tensors(optimizer, params))

    def before_backward(self, optimizer: Optimizer) -> None:
        _reserve(optimizer, before_backward=True)


@untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    _steps.after_part(optimizer, [*adapter.all_params(optimizer)])


def _plan_parts(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Divide the parameters with a gradient and with state on a disk into parts to step.

    Returns no parts if ``optimizer`` must not be stepped in parts (see ``_reserve``).
    """
    parts: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        shard, nbytes = None, 0
        for param in group["params"]:
            if state_disk(param) is None or param.grad is None:
                continue
            # Keep the parameters of a shard in one part: a shard is stepped as a single tensor.
            own = getattr(param, "shard_flat", param)
            if shard is None or (own is not shard and nbytes >= _PART_BYTES):
                parts.append({**group, "params": []})
                nbytes = 0
            shard = own
            parts[-1]["params"].append(param)
            nbytes += local_range(param).nbytes
    return parts if parts and _reserve(optimizer) else []


def _tensors(optimizer: Optimizer, params: Iterable[Any]) -> Iterator[Tensor]:
    """For each of ``params`` with state on a disk, yield the parameter, state and gradient."""
    for param in params:
        if state_disk(param) is not None:
            # Skip the placeholder in `.grad` from `step_in_backward`, which has no memory.
            grads = [param.grad] if type(param.grad) in (Tensor, FlatShardTensor) else []
            values = (param, *optimizer.state.get(param, {}).values(), *grads)
            yield from (local_range(value) for value in values if isinstance(value, Tensor))


def _reserve(optimizer: Optimizer, *, before_backward: bool = False) -> bool:
    """Reserve disk space for new state; return whether ``optimizer`` may be stepped in parts.

    With ``before_backward``, the reservation includes parameters without a gradient. Raises
    ``OffloadError``, before any parameter is stepped, if the disk is full.
    """
    # Do not step another library's optimizer in parts: its `step` would run once per part, and may
    # count the calls.
    if not adapter.is_torchs_own(optimizer):
        return False

    # Reserve before the step, which creates state: if the disk became full during the step, only
    # some of the parameters would be stepped.
    needed: Counter[Any] = Counter()
    for group in optimizer.param_groups:
        kept = [param for param in group["params"] if state_disk(param) is not None]
        stepped = [p for p in kept if (p.requires_grad if before_backward else p.grad is not None)]
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


def _bytes_to_come(optimizer: Optimizer, param: Any, per_element: int) -> int:
    """Return how many bytes of disk space a parameter's state still needs."""
    if param not in optimizer.state:
        return round_up(local_range(param).numel() * per_element, mmap.PAGESIZE)
    # State from `load_state_dict` is in memory until the next step.
    values = optimizer.state[param].values()
    loaded = [local_range(value) for value in values if isinstance(value, Tensor) and value.dim()]
    return sum(round_up(value.nbytes, mmap.PAGESIZE) for value in loaded if not is_on_disk(value))


def _bytes_per_element(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> int | None:
    """Return how many bytes of state ``optimizer`` keeps per element of a parameter like ``param``.

    Returns None if a step changes options of the parameter group (a step count, for example),
    because each part would change the group again.
    """
    probe = nn.Parameter(torch.zeros(2, dtype=param.dtype))
    probe.grad = torch.zeros_like(probe)
    # Step a probe parameter with this optimizer: the arguments for a new optimizer are not known.
    try:
        with torch.no_grad():
            changed = step_groups(optimizer, [{**group, "params": [probe]}])
    finally:
        state = optimizer.state.pop(probe, {})
    if changed is not None:
        return None
    kept = (v for v in state.values() if isinstance(v, Tensor) and v.shape == probe.shape)
    return sum(value.element_size() for value in kept)


# This module is imported when the first model with `CPUOffload(path=...)` is wrapped.
_steps = DiskSteps()
adapter.extensions.append(_steps)
# torch runs global hooks after an optimizer's own hooks. So `_after_step` runs after the hook by
# which flatshard restores the sharded parameters and their state.
register_optimizer_step_post_hook(_after_step)
