"""Safetensors files of a sharded model: each rank writes and reads its own ranges of a file.

Each rank computes from the layout where its elements lie in the files. So no tensor is gathered,
and the ranks only exchange errors and compare their arguments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard.checkpoint import safetensors
from flatshard.checkpoint.folder import log_speed
from flatshard.checkpoint.host_ranks import sharded
from flatshard.checkpoint.safetensors import OpenFiles, Place, Plan, as_saved, read_range
from flatshard.comm.communicator import Communicator
from flatshard.extras.model_shards import ModelShards
from flatshard.options.extras import extra
from flatshard.state.model_state import without_ddp_prefix
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.layout import memory_order

_REMEDY = "Make this call on all ranks, with the same model, path and options."


@dataclass(frozen=True)
class EntryShard:
    """This rank's elements of one entry of a state dict.

    Attributes:
        entry: the tensor in the state dict, with the full shape.
        local: the elements that this rank holds, 1-D.
        order: the dimensions of the entry in memory, outermost first.
        offset: index of the first element of ``local`` among all elements in memory order.
        replicas: the ranks that hold the same elements. None: the entry is a buffer or an ignored
            parameter, and its values may differ between ranks.
        key: identifies the tensor. If two entries (tied parameters) have the same tensor, their
            keys are equal.
    """

    entry: Tensor
    local: Tensor
    order: Sequence[int]
    offset: int
    replicas: Communicator | None
    key: tuple[object, ...]


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

    Collective: all ranks call it; no tensor is sent.

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
        OSError: on all ranks: on one of them the disk is full or fails, or permission is missing.
        NotImplementedError: a unit trains only on some ranks, or an adapter is no plain LoRA.
        RuntimeError: a forward or backward of the model is running.
    """
    shards, ranks = sharded(model, "save_safetensors()")
    weights = extra("weights", "save_safetensors(merge_lora=True)") if merge_lora else None
    op_name, is_first, begun = "save_safetensors", ranks.rank == 0, time.monotonic()

    def prepare() -> tuple[Entries, Plan]:
        entries = _entries_of(shards)
        if weights is not None:
            name_of = weights.MergedLora(model).name_of
            named = ((name_of(name), one) for name, one in entries.items())
            entries = {name: one for name, one in named if name is not None}
        first: dict[tuple[object, ...], str] = {}
        for name, one in entries.items():
            first.setdefault(one.key, name)
        kept = {name: as_saved(entries[name].entry, dtype) for name in first.values()}
        # Map the other names of a tied tensor to the saved name, as `safetensors.torch.load_model`
        # expects.
        ties = {name: first[one.key] for name, one in entries.items() if name not in kept}
        more = {**ties, **(metadata or {})}
        return entries, safetensors.plan_files(kept, path, max_shard_size, more)

    entries, plan = ranks.agree(prepare, op_name)
    facts = {name: str(header) for name, header in plan.headers.items()}
    ranks.compare({"the path": str(plan.folder), **facts}, op_name, lambda _: _REMEDY)
    with ExitStack() as incomplete:
        if is_first:
            incomplete.callback(plan.discard)
        ranks.on_first(plan.create, op_name)
        if weights is None:
            ranks.agree(lambda: _write(entries, plan, is_first), op_name)
        else:
            merged = weights.full_tensors(model, dtype=dtype, merge_lora=True, ranks=0)
            ranks.agree(partial(safetensors.write_whole, plan, merged), op_name)
        ranks.on_first(plan.commit, op_name)
        incomplete.pop_all()
    if is_first:
        log_speed("saved", path, sum(place.nbytes for place in plan.places.values()), begun)


def _write(entries: Entries, plan: Plan, is_first: bool) -> None:
    """Write this rank's elements of the planned tensors."""
    with OpenFiles(os.O_WRONLY) as files, torch.no_grad():
        for name, place in plan.places.items():
            one = entries[name]
            low, high = 0, one.local.numel()
            # The ranks in `replicas` all hold these elements. Each of these ranks writes a part.
            if one.replicas is not None:
                rank, size = one.replicas.rank, one.replicas.size
                low, high = high * rank // size, high * (rank + 1) // size
            if low < high and (one.replicas is not None or is_first):
                part = one.local[low:high]
                safetensors.write_range(files[place.path], place, part, one.order, one.offset + low)
        files.sync()


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
    op_name, begun = "load_safetensors", time.monotonic()

    def prepare() -> tuple[Entries, Places, _IncompatibleKeys]:
        entries, found = _entries_of(shards), safetensors.find_tensors(path)
        places = without_ddp_prefix(found.places, {name.partition(".")[0] for name in entries})
        present = {one.key for name, one in entries.items() if name in places}
        keys = _IncompatibleKeys(
            [name for name, one in entries.items() if one.key not in present],
            [name for name in places if name not in entries],
        )
        _check_fits(os.fspath(path), entries, places, keys, strict=strict)
        return entries, places, keys

    entries, places, keys = ranks.agree(prepare, op_name)
    facts = {name: f"{place.shape}, {place.dtype}" for name, place in places.items()}
    ranks.compare(facts, op_name, lambda _: _REMEDY)
    try:
        ranks.agree(lambda: _read(entries, places), op_name)
    finally:
        shards.mark_written()
    if ranks.rank == 0:
        num_bytes = sum(places[name].nbytes for name in entries if name in places)
        log_speed("loaded", path, num_bytes, begun)
    return keys


def _entries_of(shards: ModelShards) -> dict[str, EntryShard]:
    """Return this rank's elements of each entry of a model's state dict.

    The elements share memory with the model.

    Raises:
        ValueError: an entry is not a plain tensor, or a hook replaced a parameter by another
            tensor.
    """
    replicas_of = shards.replicas()
    entries: dict[str, EntryShard] = {}
    others = []
    for name, value in shards.state_dict().items():
        is_sharded = isinstance(value, FlatShardTensor)
        is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
        if not is_sharded and not (is_plain and value.layout == torch.strided):
            others.append(f"{name!r} ({type(value).__name__})")
            continue
        local = value.local if is_sharded else value
        storage = local.untyped_storage()._cdata
        replicas = replicas_of.get(storage)
        if not is_sharded:
            order = memory_order(value)
            local = value.permute(order).reshape(-1)
            # Tied entries have the same address. A tensor without elements has no address.
            place = (value.data_ptr(), *value.shape, *value.stride())
            key: tuple[object, ...] = place if value.numel() else (id(value),)
            entries[name] = EntryShard(value, local, order, 0, replicas, key)
        elif replicas is None:
            others.append(f"{name!r} (replaced by a hook)")
        else:
            spec, key = value.spec, (storage, value.spec.name)
            entries[name] = EntryShard(value, local, spec.order, spec.offset, replicas, key)
    if others:
        raise ValueError(
            "a safetensors file can contain only tensors of the model, but the state dict also "
            f"has {', '.join(others)}. Use flatshard.checkpoint.save instead."
        )
    return entries


def _check_fits(
    path: str, entries: Entries, places: Places, keys: _IncompatibleKeys, *, strict: bool
) -> None:
    """Raise ValueError if tensors do not fit the model. The error lists all such tensors."""
    expected = {n: f"{tuple(one.entry.shape)} {one.entry.dtype}" for n, one in entries.items()}
    found = {name: f"{place.shape} {place.dtype}" for name, place in places.items()}
    wrong = [n for n in places if n in entries and places[n].shape != tuple(entries[n].entry.shape)]
    names = [*wrong, *keys.missing_keys, *keys.unexpected_keys] if strict else wrong
    if names:
        problems = (
            f"{name!r}: expected {expected.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
            for name in names
        )
        remedy = "Load into the saved model" + ("." if wrong else ", or pass strict=False.")
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems)}. {remedy}")


def _read(entries: Entries, places: Places) -> None:
    """Read this rank's ranges into its shards, and read all tensors that are not sharded."""
    with OpenFiles(os.O_RDONLY) as files, torch.inference_mode(False), torch.no_grad():
        for name, one in entries.items():
            if name not in places:
                continue
            local = one.local
            if local.numel():
                read_range(files[places[name].path], places[name], local, one.order, one.offset)
            if one.replicas is None:
                # If the tensor has gaps in memory, `local` is a flat copy of the tensor. Then copy
                # the values from `local` into the tensor.
                if local.data_ptr() != one.entry.data_ptr():
                    permuted = one.entry.permute(tuple(one.order))
                    permuted.copy_(local.view(permuted.shape))
                torch.autograd.graph.increment_version(one.entry)
