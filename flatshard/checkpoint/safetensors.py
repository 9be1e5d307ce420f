"""Reads and writes safetensors files (a JSON header and the tensors' bytes), and their index.

Each rank of a sharded model computes the positions of its own elements in the files, and reads and
writes only these elements. So no tensor is gathered; ranks exchange only errors and arguments.

A file is written under a temporary name in the same folder, and renamed when all bytes are on the
disk. So a reader finds either the old file or the new file.

[Note: ranges of a tensor]
A file stores a tensor row by row. In memory, the dimensions of a parameter may have another order
(channels_last). Then a range of the parameter in memory is cut into boxes (one range of indices per
dimension), and each box is cut into pieces that are contiguous in the file.
"""

import contextlib
import ctypes
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard.checkpoint.folder import sync
from flatshard.checkpoint.training import sharded
from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.extras.model_shards import ModelShards
from flatshard.options.extras import extra
from flatshard.state.model_state import without_ddp_prefix
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.layout import boxes_of, memory_order, strides_of

_WORDS = """F64 float64 F32 float32 F16 float16 BF16 bfloat16 C64 complex64 BOOL bool
I64 int64 I32 int32 I16 int16 I8 int8 U64 uint64 U32 uint32 U16 uint16 U8 uint8 F8_E4M3
float8_e4m3fn F8_E5M2 float8_e5m2 F8_E4M3FNUZ float8_e4m3fnuz F8_E5M2FNUZ float8_e5m2fnuz""".split()
_PAIRS = zip(_WORDS[::2], _WORDS[1::2], strict=True)
DTYPES = {name: getattr(torch, dtype) for name, dtype in _PAIRS}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # limit in the safetensors format
_NAME, _INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_REMEDY = "Make this call on all ranks, with the same model, path and options."

# Size of the buffer for elements that are cast, copied to another device, or reordered.
PIECE_BYTES = 16 << 20


class Place(NamedTuple):
    """Position of a tensor in a safetensors file. The file stores the tensor row by row."""

    path: str
    offset: int  # position of the tensor's first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Elements(NamedTuple):
    """A range of a tensor's elements, in the order that they have in memory."""

    values: Tensor  # 1-D
    order: Sequence[int]  # the dimensions of the tensor in memory, outermost first
    start: int  # index of the first value among all elements of the tensor in memory order


Parts = Iterator[tuple[str, Elements]]  # elements of tensors, with the tensors' names


def whole(tensor: Tensor) -> Elements:
    """Return all elements of a tensor, in the file's order."""
    return Elements(tensor.reshape(-1), range(tensor.dim()), 0)


# ---------------------------------------------------------------- writing


@dataclass
class Plan:
    """Files to write, and the ``Place`` of each tensor in the files."""

    folder: Path
    headers: dict[str, bytes] = field(default_factory=dict)  # keyed by file name

    # Place of each tensor in the temporary files, keyed by the tensor's name.
    places: dict[str, Place] = field(default_factory=dict)
    index: str = ""  # text of the index; empty for a single file
    replaces: str = ""  # regular expression for the names of old files, which `commit` deletes

    def temporary(self, name: str) -> Path:
        """Return the temporary path of a file, which is the same on all ranks."""
        return self.folder / f"{name}.incomplete"

    def add(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        entries: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        # Put large dtypes first: then each tensor is aligned, and readers can map the file.
        for key in sorted(tensors, key=lambda key: -tensors[key].itemsize):
            start, end = end, end + tensors[key].nbytes
            dtype, shape = _DTYPE_NAMES[tensors[key].dtype], list(tensors[key].shape)
            entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.headers[name] = len(text).to_bytes(8, "little") + text
        self.places |= _places_in(str(self.temporary(name)), len(text), entries)

    def create(self) -> None:
        """Make the temporary files with their headers, and reserve room for all bytes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ends = {place.path: place.offset + place.nbytes for place in self.places.values()}
        for name, header in self.headers.items():
            with open(self.temporary(name), "wb") as file:
                end = max(ends.get(file.name, 0), len(header))
                try:
                    # Reserve all bytes now, so that a full disk raises before tensors are written.
                    os.posix_fallocate(file.fileno(), 0, end)
                except OSError as error:
                    what = f"{error.strerror}, for {end:,} bytes"
                    raise OSError(error.errno, what, file.name) from error
                file.write(header)

    def write(self, parts: Parts) -> None:
        """Write elements of tensors, and wait until all bytes are on the disk.

        Reads all ``parts``, even after an error, because the iterator may run all-gathers.
        """
        problem: OSError | None = None
        with torch.no_grad():
            for name, part in parts:
                try:
                    if problem is None:
                        move(self.places[name], part, to_file=True)
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem
        for path in {place.path for place in self.places.values()}:
            sync(Path(path))

    def commit(self) -> None:
        """Rename the temporary files to their final names, and delete files of an older save.

        All bytes must already be on the disk.

        Raises:
            OSError: a file cannot be renamed or deleted.
        """
        index = self.folder / _INDEX
        if self.index:
            self.temporary(_INDEX).write_text(self.index)
            # Delete the old index before any file is replaced: otherwise the index would list files
            # of two models.
            index.unlink(missing_ok=True)
        for name in self.headers:
            self.temporary(name).replace(self.folder / name)
        if self.index:
            self.temporary(_INDEX).replace(index)
        for old in self.folder.iterdir():
            if re.fullmatch(self.replaces, old.name) and old.name not in self.headers:
                old.unlink()
        sync(self.folder)

    def close(self) -> None:
        """Delete the temporary files of a failed save. Without effect after ``commit``."""
        for name in self.headers:
            with contextlib.suppress(OSError):
                self.temporary(name).unlink()


def as_saved(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a meta tensor with the shape and the dtype in which ``value`` is saved."""
    is_cast = dtype is not None and value.is_floating_point()
    return torch.empty(value.shape, dtype=dtype if is_cast else value.dtype, device="meta")


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key, equal for tensors with the same memory, dtype, shape and strides."""
    if tensor.is_meta or not tensor.numel():  # the tensor has no address
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, *tensor.shape, *tensor.stride()


def ties_in(key_of: Mapping[str, object]) -> dict[str, str]:
    """Map the later names of each tied tensor to its first name. Tied tensors have equal keys."""
    first: dict[object, str] = {}
    for name, key in key_of.items():
        first.setdefault(key, name)
    return {name: first[key] for name, key in key_of.items() if first[key] != name}


def plan_files(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan one file if ``path`` ends with ``.safetensors``, otherwise files in a folder ``path``.

    The plan depends only on names, dtypes and shapes, so it is the same on all ranks. Names of
    files and the index follow huggingface_hub.
    """
    path = Path(path).absolute()
    is_file = path.suffix == ".safetensors"
    if is_file and max_shard_size is not None:
        text = f"max_shard_size makes several files, but {path} is one file. Pass a folder."
        raise ValueError(text)
    unknown = [f"{n!r} ({t.dtype})" for n, t in tensors.items() if t.dtype not in _DTYPE_NAMES]
    if unknown:
        raise ValueError(f"safetensors has no dtype for {', '.join(unknown)}. Cast these tensors.")
    metadata = {"format": "pt", **(metadata or {})}
    if not all(isinstance(one, str) for pair in metadata.items() for one in pair):
        raise ValueError(f"metadata: expected a dict of strings to strings, got {metadata!r}.")
    if is_file:
        plan = Plan(path.parent)
        plan.add(path.name, tensors, metadata)
        return plan
    groups: list[dict[str, Tensor]] = [{}]
    limit, filled = _read_size(max_shard_size), 0
    for name, one in tensors.items():
        if groups[-1] and filled + one.nbytes > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = one
        filled += one.nbytes
    plan = Plan(path, replaces=r"model(-\d{5}-of-\d{5})?\.safetensors")
    for number, group in enumerate(groups, 1):
        suffix = "" if len(groups) == 1 else f"-{number:05d}-of-{len(groups):05d}"
        plan.add(f"model{suffix}.safetensors", group, metadata)
    if len(groups) > 1:
        weight_map = {name: Path(place.path).stem for name, place in plan.places.items()}
        size = {"total_size": sum(one.nbytes for one in tensors.values())}
        plan.index = json.dumps({"metadata": size, "weight_map": weight_map}, indent=2)
    else:
        plan.replaces += r"|model\.safetensors\.index\.json"
    return plan


def _read_size(size: int | str | None) -> float:
    """Convert a number or a text such as "5GB" to bytes; None means no limit. Raises ValueError."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?B)?", str(size).strip().upper())
    with contextlib.suppress(ValueError):
        if size is None or (found and float(found[1]) > 0):
            return float(found[1]) * _UNITS[found[2] or "B"] if found else float("inf")
    raise ValueError(f'max_shard_size: expected bytes or a size such as "5GB", got {size!r}.')


# ---------------------------------------------------------------- reading


class Found(NamedTuple):
    """The place of each tensor in a file, or in all files of an index, and the files' metadata."""

    places: dict[str, Place]
    metadata: dict[str, str]


def find_tensors(path: str | os.PathLike[str]) -> Found:
    """Find the tensors in a file, in the files of an index, or in a folder. Reads only headers."""
    path = Path(path).absolute()
    if path.is_dir():
        path = _main_file(path)
    if path.suffix != ".json":
        return _read_header(path)
    try:
        weight_map = dict(json.loads(path.read_text())["weight_map"])
        files = {name: _read_header(path.parent / name) for name in set(weight_map.values())}
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not an index of safetensors files: expected JSON with a 'weight_map'. Pass "
            "the folder of the files, or one .safetensors file."
        ) from error
    found = Found({}, {})
    for name, file in weight_map.items():
        if name not in files[file].places:
            remedy = "Save or copy all files of the folder again."
            raise ValueError(f"{path} lists {name!r} in {file}, which has no such tensor. {remedy}")
        found.places[name] = files[file].places[name]
        found.metadata.update(files[file].metadata)
    return found


def _main_file(folder: Path) -> Path:
    for pattern in (_NAME, "*.safetensors.index.json", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(one.name for one in files[:5])
            raise ValueError(f"{folder} has several files ({names}) but no index. Pass one file.")
    held = ", ".join(sorted(one.name for one in folder.iterdir())[:5]) or "nothing"
    raise ValueError(
        f"{folder}: expected safetensors files (or, to convert, files of "
        f"torch.distributed.checkpoint), got {held}. Check the path."
    )


def _read_header(path: Path) -> Found:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file. Check the path.")
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(nbytes - 8, _MAX_HEADER_BYTES) else b""
    try:
        if not text:
            raise ValueError(f"a header of {length} bytes in a file of {nbytes} bytes is not valid")
        entries = json.loads(text)
        metadata = dict(entries.get("__metadata__", {}))
        places = _places_in(str(path), length, entries)
        end = 8 + length
        for name, place in sorted(places.items(), key=lambda item: item[1].offset):
            if place.offset != end:
                raise ValueError(f"{name!r} begins at byte {place.offset}, expected {end}")
            end += place.nbytes
        if nbytes != end:
            raise ValueError(f"expected {end} bytes, got {nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({type(error).__name__}: {error}). Copy or "
            "save the file again."
        ) from error
    return Found(places, metadata)


def _places_in(path: str, header_bytes: int, entries: Mapping[str, Any]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            places[name] = place = Place(path, 8 + header_bytes + low, dtype, shape)
            if min(shape, default=0) < 0 or place.nbytes != high - low:
                text = f"{name!r} has {high - low} bytes, which do not fit shape {shape}, {dtype}"
                raise ValueError(text)
    return places


# ---------------------------------------------------------------- ranges of tensors


def _pieces(place: Place, part: Elements) -> Iterator[tuple[Tensor, int]]:
    """Cut a range of a tensor's elements into views that are contiguous in the file.

    Yields each view, with its dimensions in the file's order, and the index that the view's first
    element has in the file.
    """
    elements, order, start = part
    shape, end, num_dims = place.shape, start + elements.numel(), len(place.shape)
    strides = strides_of(shape, range(num_dims))
    in_file = sorted(range(num_dims), key=order.__getitem__)
    # If the orders in memory and in the file differ, cut only between rows (all elements with one
    # index in memory's outermost dimension): part of a row would be scattered over the file.
    row = 1 if sorted(order) == list(order) else math.prod(shape[d] for d in order[1:])
    piece = max(1, PIECE_BYTES // place.dtype.itemsize // max(1, row)) * max(1, row)
    cuts = [start, *range((start // piece + 1) * piece, end, piece), end]
    for low, high in itertools.pairwise(cuts):
        for box in boxes_of(shape, low, high, order):
            sizes = [box.sizes[d] for d in order]
            values = elements[low - start + box.position :][: box.numel]
            values = values.view(sizes).permute(in_file)
            # In all dimensions after `split`, the box is as large as the tensor. So the box's
            # elements that share the indices before `split` are contiguous in the file.
            split = max((d for d in range(num_dims) if box.sizes[d] != shape[d]), default=0)
            for steps in itertools.product(*map(range, box.sizes[:split])):
                at = map(operator.add, box.offsets, (*steps, *[0] * num_dims))
                yield values[steps], sum(map(operator.mul, at, strides))


def move(place: Place, part: Elements, *, to_file: bool) -> None:
    """Write a range of a tensor's elements to the file, or read the range from the file.

    Elements are cast to or from the dtype of ``place``.
    """
    file: Any = open(place.path, "r+b" if to_file else "rb")
    try:
        with file:
            for values, first in _pieces(place, part):
                is_there = values.is_contiguous() and values.is_cpu and values.dtype == place.dtype
                moved = values if is_there else torch.empty(values.shape, dtype=place.dtype)
                # View the bytes with ctypes, because numpy lacks some dtypes, such as bfloat16.
                data = (ctypes.c_char * moved.nbytes).from_address(moved.data_ptr())
                file.seek(place.offset + first * place.dtype.itemsize)
                if to_file:
                    # Do not copy a shard onto itself. The copy would count as a write, but only on
                    # some ranks, and the next forward would all-gather only on these ranks.
                    if not is_there:
                        moved.copy_(values)
                    file.write(data)
                elif missing := len(data) - file.readinto(data):
                    raise ValueError(
                        f"{place.path} became shorter while it was read: {missing} bytes are "
                        "missing. Restore the file, and do not write to it during a load."
                    )
                else:
                    values.copy_(moved)
    except OSError as error:  # reads and writes raise errors without the path
        error.filename = error.filename or place.path
        raise


# ---------------------------------------------------------------- files of a sharded model


class EntryShard(NamedTuple):
    """This rank's elements of one entry of a state dict."""

    entry: Tensor  # with the full shape
    local: Elements  # the elements that this rank holds
    # The ranks that hold the same elements. None: the entry is a buffer or an ignored parameter,
    # and its values may differ between ranks.
    replicas: Communicator | None
    key: tuple[object, ...]  # equal for entries with the same tensor (tied parameters)


Entries = Mapping[str, EntryShard]
Places = Mapping[str, Place]


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    merge_lora: bool = False,
) -> None:
    """Save the unwrapped model's state dict as safetensors; all ranks write into the same file.

    ``safetensors.torch.load_file``, ``from_pretrained`` and ``load_safetensors`` read the file. No
    tensor is gathered: each rank writes its own elements in place, and needs at most 16 MB of extra
    memory. The file contains tied parameters once, under their first name. The metadata maps the
    other names to the first name, as with ``safetensors.torch.save_model``. Buffers and ignored
    parameters have rank 0's values.

    Rank 0 first reserves room on the disk for all bytes, in files called ``*.incomplete``. When all
    bytes are on the disk, rank 0 renames the files. If a rank fails, older files stay intact.

    Collective: all ranks call it. No tensor is sent, except with ``merge_lora``.

    Example:
        ```python
        import safetensors.torch
        from flatshard import checkpoint

        checkpoint.save_safetensors(model, "model.safetensors", dtype=torch.bfloat16)

        if dist.get_rank() == 0:
            weights = safetensors.torch.load_file("model.safetensors")
        ```

    Args:
        model: a wrapper, or a module that contains wrappers.
        path: a file whose name ends with ``.safetensors``, or a folder for ``model.safetensors``,
            which is made if necessary. All ranks must share the file system.
        max_shard_size: largest size of a file in a folder, in bytes or as a text ("5GB"). Only a
            file with a single tensor may be larger. Several files get the index
            ``model.safetensors.index.json``.
        metadata: strings for the header of each file; ``{"format": "pt"}`` is added.
        dtype: the dtype in which floating point tensors are saved.
        merge_lora: merge PEFT's LoRA adapters, and save the model without adapters, as an
            inference engine loads it; see ``flatshard.full_tensors``. Then each unit is
            all-gathered, and rank 0 writes all files.

    Raises:
        ValueError: on all ranks: safetensors does not support a dtype or an entry of the state
            dict, or ranks passed different arguments or models.
        OSError: on all ranks, if on any rank the disk is full or fails, or permission is missing.
        NotImplementedError: a unit trains only on some ranks, or an adapter is no plain LoRA.
        RuntimeError: a forward or backward of the model is running.
    """
    shards, ranks = sharded(model, "save_safetensors()")
    weights = extra("weights", "save_safetensors(merge_lora=True)") if merge_lora else None
    op_name = "save_safetensors"

    def prepare() -> tuple[tuple[Entries, Plan], Facts]:
        entries = _entries_of(shards)
        if weights is not None:
            name_of = weights.MergedLora(model).name_of
            named = ((name_of(name), one) for name, one in entries.items())
            entries = {name: one for name, one in named if name is not None}
        else:
            _entries_of(shards, model)  # raises for entries that `load_safetensors` cannot read
        # `safetensors.torch.load_model` reads the names of tied tensors from the metadata.
        ties = ties_in({name: one.key for name, one in entries.items()})
        kept = {n: as_saved(one.entry, dtype) for n, one in entries.items() if n not in ties}
        plan = plan_files(kept, path, max_shard_size, {**ties, **(metadata or {})})
        facts = {name: str(header) for name, header in plan.headers.items()}
        return (entries, plan), {"the path": str(plan.folder), **facts}

    entries, plan = agreed(prepare, [ranks], op_name, _REMEDY)
    with contextlib.closing(plan):
        ranks.on_first(plan.create, op_name)
        parts = _own_parts(entries, plan.places, ranks.rank == 0)
        if weights is not None:
            merged = weights.full_tensors(model, dtype=dtype, merge_lora=True, ranks=0)
            parts = ((name, whole(tensor)) for name, tensor in merged)
        ranks.agree(lambda: plan.write(parts), op_name)
        ranks.on_first(plan.commit, op_name)


def _own_parts(entries: Entries, names: Iterable[str], is_first: bool) -> Parts:
    for name in names:
        one = entries[name]
        values, order, start = one.local
        low, high = 0, values.numel()
        # The ranks in `replicas` all hold these elements. Each of these ranks writes a part.
        if one.replicas is not None:
            rank, size = one.replicas.rank, one.replicas.size
            low, high = high * rank // size, high * (rank + 1) // size
        if low < high and (one.replicas is not None or is_first):
            yield name, Elements(values[low:high], order, start + low)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> _IncompatibleKeys:
    """Load safetensors files of the unwrapped model; each rank reads only its own elements.

    Values are read directly into the shards, and cast to the shards' dtype. Shards that
    ``param_init_fn=leave_empty`` left empty are filled too. A rank needs at most 16 MB of extra
    memory. For a tied parameter, the files need only one of the names. The prefix ``module.`` of
    DistributedDataParallel is removed from names. Hooks and overrides of the modules'
    ``load_state_dict`` are not called.

    Collective: all ranks call it; no tensor is sent.

    Example:
        ```python
        from flatshard import checkpoint

        with torch.device("meta"):
            model = Model()
        model = ShardedWrapper(model, param_init_fn=flatshard.leave_empty)
        checkpoint.load_safetensors(model, "model.safetensors")
        ```

    Args:
        model: a wrapper, or a module that contains wrappers.
        path: a file, the index of several files, or a folder with a file or an index.
        strict: raise for tensors that only the model or only the files have. A different shape
            always raises.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as from ``load_state_dict``.

    Raises:
        ValueError: on all ranks, before any tensor is loaded: tensors do not fit (the error lists
            all of them), ``path`` has no safetensors file, or a file is truncated, corrupt or
            missing.
        OSError: on all ranks: a file cannot be read.
        RuntimeError: a forward or backward of the model is running.
    """
    shards, ranks = sharded(model, "load_safetensors()")
    op_name = "load_safetensors"

    def prepare() -> tuple[tuple[Entries, Places, _IncompatibleKeys], Facts]:
        entries, found = _entries_of(shards, model), find_tensors(path)
        places = without_ddp_prefix(found.places, entries)
        keys = _check_fits(os.fspath(path), entries, places, strict=strict)
        facts = {name: f"{place.shape}, {place.dtype}" for name, place in places.items()}
        return (entries, places, keys), facts

    entries, places, keys = agreed(prepare, [ranks], op_name, _REMEDY)
    try:
        ranks.agree(lambda: _read(entries, places), op_name)
    finally:
        shards.mark_written()
    return keys


def _entries_of(shards: ModelShards, to_load: nn.Module | None = None) -> dict[str, EntryShard]:
    """Return this rank's elements of each entry of a model's state dict.

    ``to_load``: the model, if the entries will be overwritten. Then the entries must be the model's
    own tensors. Raises if a hook has replaced a tensor by a copy (in another dtype, for example).
    """
    replicas_of = shards.replicas()
    entries: dict[str, EntryShard] = {}
    others = []
    own = None
    if to_load is not None:
        own = {id(one) for one in itertools.chain(to_load.parameters(), to_load.buffers())}
    for name, value in shards.state_dict(keep_vars=to_load is not None).items():
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided
        if isinstance(value, FlatShardTensor):
            spec = value.spec
            part = Elements(value.local, spec.order, spec.offset)
            key: tuple[object, ...] = part.values.untyped_storage()._cdata, spec.name
        elif not is_plain or is_traceable_wrapper_subclass(value):
            others.append(f"{name!r} ({type(value).__name__})")
            continue
        else:
            key, order = memory_of(value), memory_order(value)
            part = Elements(value.detach().permute(order).reshape(-1), order, 0)
        replicas = replicas_of.get(part.values.untyped_storage()._cdata)
        is_own = replicas is not None or not isinstance(value, FlatShardTensor)
        if not (is_own if own is None else id(value) in own):
            others.append(f"{name!r} (replaced by a hook)")
        entries[name] = EntryShard(value, part, replicas, key)
    if others:
        raise ValueError(
            "a safetensors file can contain only tensors of the model, but the state dict also "
            f"has {', '.join(others)}. Use flatshard.checkpoint.save instead."
        )
    return entries


def _check_fits(path: str, entries: Entries, places: Places, *, strict: bool) -> _IncompatibleKeys:
    """Return the names that only the model or only the files have. Raises if tensors do not fit."""
    present = {one.key for name, one in entries.items() if name in places}
    missing = [name for name, one in entries.items() if one.key not in present]
    unexpected = [name for name in places if name not in entries]
    wrong = [n for n in places if n in entries and places[n].shape != tuple(entries[n].entry.shape)]
    names = [*wrong, *missing, *unexpected] if strict else wrong
    if names:
        expected = {n: f"{tuple(one.entry.shape)} {one.entry.dtype}" for n, one in entries.items()}
        found = {name: f"{place.shape} {place.dtype}" for name, place in places.items()}
        problems = (
            f"{name!r}: expected {expected.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
            for name in names
        )
        remedy = "Load into the saved model" + ("." if wrong else ", or pass strict=False.")
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems)}. {remedy}")
    return _IncompatibleKeys(missing, unexpected)


def _read(entries: Entries, places: Places) -> None:
    """Read this rank's elements of sharded tensors, and all elements of unsharded tensors."""
    with torch.inference_mode(False), torch.no_grad():
        for name, one in entries.items():
            if name not in places:
                continue
            values, order, _ = one.local
            if values.numel():
                move(places[name], one.local, to_file=False)
            if one.replicas is None:
                # If the tensor has gaps in memory, `values` is a copy, not a view. Then write the
                # values back into the tensor.
                if values.data_ptr() != one.entry.data_ptr():
                    permuted = one.entry.permute(tuple(order))
                    permuted.copy_(values.view(permuted.shape))
                torch.autograd.graph.increment_version(one.entry)
