"""Safetensors files of a sharded model: all ranks write one file in place, and read their ranges.

The layout tells every rank which bytes of which file it owns, so there is nothing to gather and
nothing to plan together: ranks only tell one another whether all went well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from flatshard.checkpoint.host_ranks import sharded
from flatshard.checkpoint.ranges import OpenFiles, Place, Progress, read_range, write_range
from flatshard.checkpoint.safetensors import Plan, find_tensors, plan_files
from flatshard.state.model_shards import EntryShard
from flatshard.state.model_state import without_ddp_prefix

_REMEDY = "Call it on all ranks, with the same model, path and options"
Entries = Mapping[str, EntryShard]


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Save the unwrapped model's state dict as safetensors; all ranks write into the same file.

    ``safetensors.torch.load_file``, ``from_pretrained`` and ``load_safetensors`` read it. Nothing
    is gathered: every rank writes the bytes that it owns, at their place, from at most 16 MB of
    extra memory. Of tied parameters the first name is in the file, the others are in its metadata,
    as ``safetensors.torch.save_model`` has it. Buffers and ignored parameters are rank 0's.

    Files are written under the name ``*.incomplete``, with room for all bytes reserved first, and
    renamed when their bytes are on the disk: where anything fails, the file of before is as it was.

    Collective: all ranks; no tensor is sent.

    Example:
        ```python
        import safetensors.torch
        from flatshard import checkpoint

        checkpoint.save_safetensors(model, "model.safetensors", dtype=torch.bfloat16)

        if dist.get_rank() == 0:
            weights = safetensors.torch.load_file("model.safetensors")
        ```

    Args:
        model: a wrapper, or a module that contains some.
        path: a file, if it ends with ``.safetensors``; else a folder, made if there is none, for
            ``model.safetensors``. On a file system that all ranks share.
        max_shard_size: bytes, or "5GB": a folder's files are at most so large, if no tensor is
            larger, and have the index ``model.safetensors.index.json``.
        metadata: strings for the file's header; ``{"format": "pt"}`` is added.
        dtype: to save floating point tensors in another dtype.

    Raises:
        ValueError: on all ranks: a dtype or an entry of the state dict that safetensors cannot
            hold; ranks pass different arguments or models.
        OSError: on all ranks: no room, no permission, a disk that fails, on any of them.
        NotImplementedError: a unit trains on some of the ranks alone.
        RuntimeError: a forward or backward of the model is running.
    """
    shards, ranks = sharded(model, "save_safetensors()")
    op_name, is_first = "save_safetensors", ranks.rank == 0

    def prepare() -> tuple[Entries, Plan]:
        entries = shards.entries()
        first: dict[tuple[object, ...], str] = {}
        for name, one in entries.items():
            first.setdefault(one.key, name)
        kept = {name: _as_saved(entries[name].entry, dtype) for name in first.values()}
        # As safetensors' own save_model says it, whose load_model reads it.
        ties = {name: first[one.key] for name, one in entries.items() if name not in kept}
        return entries, plan_files(kept, path, max_shard_size, {**ties, **(metadata or {})})

    entries, plan = ranks.agree(prepare, op_name)
    facts = {name: str(header) for name, header in plan.headers.items()}
    ranks.compare({"the path": str(plan.folder), **facts}, op_name, lambda _: _REMEDY)
    with ExitStack() as incomplete:
        if is_first:
            incomplete.callback(plan.discard)
        ranks.on_first(plan.create, op_name)
        progress = Progress("saving", _held_bytes(entries), is_shown=is_first)
        ranks.agree(lambda: _write(entries, plan, is_first, progress), op_name)
        ranks.on_first(plan.commit, op_name)
        incomplete.pop_all()
    progress.end(path, sum(place.nbytes for place in plan.places.values()))


def _as_saved(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor without memory that has the shape and dtype in the file."""
    return torch.empty(
        value.shape,
        dtype=dtype if dtype is not None and value.is_floating_point() else value.dtype,
        device="meta",
    )


def _held_bytes(entries: Entries) -> int:
    return sum(one.local.nbytes for one in entries.values())


def _write(entries: Entries, plan: Plan, is_first: bool, progress: Progress) -> None:
    """Write this rank's elements of the planned tensors."""
    with OpenFiles(os.O_WRONLY) as files, torch.no_grad():
        for name, place in plan.places.items():
            one = entries[name]
            low, high = 0, one.local.numel()
            if one.replicas is not None:  # ranks that hold the same elements write a part each
                rank, size = one.replicas.rank, one.replicas.size
                low, high = high * rank // size, high * (rank + 1) // size
            if low < high and (one.replicas is not None or is_first):
                part = one.local[low:high]
                write_range(files[place.path], place, part, one.order, one.offset + low)
            progress.advance(one.local.nbytes)
        files.sync()


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> _IncompatibleKeys:
    """Load safetensors files of the unwrapped model; each rank reads only what it holds.

    Values are read straight into the shards, also into those that ``param_init_fn=leave_empty``
    left empty, and cast to their dtype; beside these a rank holds at most 16 MB. A tied parameter
    needs one of its names; DistributedDataParallel's ``module.`` prefix is accepted. Hooks and
    overrides of the modules' ``load_state_dict`` are not called.

    Collective: all ranks; no tensor is sent.

    Example:
        ```python
        from flatshard import checkpoint

        with torch.device("meta"):
            model = Model()
        model = ShardedWrapper(model, param_init_fn=flatshard.leave_empty)
        checkpoint.load_safetensors(model, "model.safetensors")
        ```

    Args:
        model: a wrapper, or a module that contains some.
        path: a file, the index of several, or a folder with either.
        strict: raise for tensors that the model or the files lack. Other shapes always raise.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

    Raises:
        ValueError: on all ranks, and before anything is loaded: all tensors that do not fit, by
            name; no safetensors file; a truncated, corrupt or missing one, by name.
        OSError: on all ranks: a file cannot be read.
        RuntimeError: a forward or backward of the model is running.
    """
    shards, ranks = sharded(model, "load_safetensors()")
    op_name = "load_safetensors"

    def prepare() -> tuple[Entries, dict[str, Place], _IncompatibleKeys]:
        entries, found = shards.entries(), find_tensors(path)
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
    progress = Progress("loading", _held_bytes(entries), is_shown=ranks.rank == 0)
    try:
        ranks.agree(lambda: _read(entries, places, progress), op_name)
    finally:
        shards.mark_written()
    progress.end(path, sum(places[name].nbytes for name in entries if name in places))
    return keys


def _check_fits(
    path: str,
    entries: Entries,
    places: Mapping[str, Place],
    keys: _IncompatibleKeys,
    *,
    strict: bool,
) -> None:
    """Raise ValueError with all tensors that do not fit."""
    expected = {n: f"{tuple(one.entry.shape)} {one.entry.dtype}" for n, one in entries.items()}
    found = {name: f"{place.shape} {place.dtype}" for name, place in places.items()}
    wrong = [n for n in places if n in entries and places[n].shape != tuple(entries[n].entry.shape)]
    names = [*wrong, *keys.missing_keys, *keys.unexpected_keys] if strict else wrong
    if names:
        problems = (
            f"{name!r}: expected {expected.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
            for name in names
        )
        remedy = "" if wrong else ". With strict=False it would load the rest"
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems)}{remedy}")


def _read(entries: Entries, places: Mapping[str, Place], progress: Progress) -> None:
    """Read this rank's ranges into its shards, and all of the tensors that are not sharded."""
    with OpenFiles(os.O_RDONLY) as files, torch.inference_mode(False), torch.no_grad():
        for name, one in entries.items():
            if name not in places:
                continue
            local = one.local
            if local.numel():
                read_range(files[places[name].path], places[name], local, one.order, one.offset)
            if one.replicas is None:
                if local.data_ptr() != one.entry.data_ptr():  # a copy of a tensor with gaps
                    permuted = one.entry.permute(tuple(one.order))
                    permuted.copy_(local.view(permuted.shape))
                torch.autograd.graph.increment_version(one.entry)
            progress.advance(local.nbytes)
