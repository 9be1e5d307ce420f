"""Safetensors files of a sharded model: all ranks write one file in place, and read their ranges.

The layout tells every rank which bytes of which file it owns, so there is nothing to gather and
nothing to plan together: ranks only tell one another whether all went well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard.checkpoint.progress import Progress
from flatshard.checkpoint.ranges import OpenFiles, Place, read_range, write_range
from flatshard.checkpoint.safetensors import Plan, find_tensors, plan_files
from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed, raise_everywhere
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.plan.layout import memory_order
from flatshard.plan.module_tree import unit_text
from flatshard.state.model_state import (
    StateDictOptions,
    UnitStateDict,
    options_set,
    without_ddp_prefix,
)
from flatshard.tensor.sharded_tensor import FlatShardTensor

_REMEDY = "Call it on all ranks, with the same model, path and options"


@dataclass(frozen=True)
class _Part:
    """What this rank holds of an entry of the state dict."""

    value: Tensor
    # Of a unit's parameter: its flat parameter, and its number there.
    handle: FlatParamHandle | None = None
    index: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for entries that are one tensor."""
        value = self.value
        if self.handle is not None:
            return id(self.handle), self.index
        # Tensors of no element have no address.
        return (value.data_ptr(), *value.shape, *value.stride()) if value.numel() else (id(value),)

    def local(self) -> tuple[Tensor, Sequence[int], int]:
        """Its elements here, 1-D; their memory order; the number of the first one in that."""
        if self.handle is not None:
            spec = self.handle.params.specs[self.index]
            return self.handle.part(self.index), spec.order, spec.offset
        order = memory_order(self.value.shape, self.value.stride())
        return self.value.detach().permute(order).reshape(-1), order, 0


def _parts_of(
    model: nn.Module, units: Iterable[Unit], states: Sequence[UnitStateDict]
) -> dict[str, _Part]:
    """What this rank holds, by the names of the unwrapped model. No communication.

    Raises:
        ValueError: entries of the state dict that are no plain tensors.
    """
    owners: dict[int, tuple[FlatParamHandle, int]] = {}
    for handle in (handle for unit in units for handle in unit.handles):
        handle.absorb_replaced()
        for index, spec in enumerate(handle.params.specs):
            for one in (spec, handle.params.full[index], handle.sharded[index]):
                owners[id(one)] = handle, index
    with options_set(states, StateDictOptions(gathers=False)):
        state_dict = model.state_dict(keep_vars=True)
    parts, others = {}, []
    for name, value in state_dict.items():
        is_sharded = isinstance(value, FlatShardTensor)
        found = owners.get(id(value.spec if is_sharded else value))
        is_plain = isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
        if is_sharded and found is not None and value.numel():  # a user's hook may have copied it
            found = found if value.data_ptr() == found[0].part(found[1]).data_ptr() else None
        if found is None and (is_sharded or not is_plain or value.layout != torch.strided):
            others.append(f"{name!r} ({type(value).__name__})")
            continue
        parts[name] = _Part(value, *(found or ()))
    if others:
        raise ValueError(f"safetensors holds plain tensors alone, and these are none: {others}")
    return parts


def world_of(units: Sequence[Unit]) -> Communicator:
    """The ranks that train a model together."""
    return max((unit.topology.world for unit in units), key=lambda world: world.size)


def save(
    model: nn.Module,
    units: Sequence[Unit],
    states: Sequence[UnitStateDict],
    path: str,
    max_shard_size: int | str | None,
    metadata: Mapping[str, str] | None,
    dtype: torch.dtype | None,
) -> None:
    """See ``flatshard.checkpoint.save_safetensors``."""
    world, caller = world_of(units), "save_safetensors"
    with ExitStack() as incomplete:

        def prepare() -> tuple[tuple[dict[str, _Part], Plan], Facts]:
            check_alike(units, world)
            parts = _parts_of(model, units, states)
            first: dict[tuple[int, ...], str] = {}
            for name, part in parts.items():
                first.setdefault(part.key, name)
            kept = {name: _as_saved(parts[name].value, dtype) for name in first.values()}
            # As safetensors' own save_model says it, whose load_model reads it.
            ties = {n: first[p.key] for n, p in parts.items() if n not in kept}
            plan = plan_files(kept, path, max_shard_size, {**ties, **(metadata or {})})
            facts = {name: str(header) for name, header in plan.headers.items()}
            return (parts, plan), facts | {"the path": str(plan.folder)}

        parts, plan = agreed(prepare, [world], caller, _REMEDY)
        if world.rank == 0:
            incomplete.callback(plan.discard)
        _everywhere(plan.create if world.rank == 0 else lambda: None, world)
        progress = Progress("saving", _held_bytes(parts), is_shown=world.rank == 0)
        _everywhere(lambda: _write(parts, plan, world, progress), world)
        _everywhere(plan.commit if world.rank == 0 else lambda: None, world)
        incomplete.pop_all()
        progress.end(path, sum(place.nbytes for place in plan.places.values()))


def _everywhere(work: Callable[[], None], world: Communicator) -> None:
    """Do ``work``; all ranks raise the first one's error. Collective."""
    error: Exception | None = None
    try:
        work()
    except Exception as problem:
        error = problem
    raise_everywhere(error, world)


def check_alike(units: Iterable[Unit], world: Communicator) -> None:
    """Raise NotImplementedError if a unit trains on some of the ranks alone."""
    for unit in units:
        if unit.topology.world.size != world.size:
            raise NotImplementedError(
                f"{unit_text(unit.name)} trains on ranks {unit.topology.world.ranks_text} "
                f"of {world.ranks_text}: other ranks hold another module of this name, and one "
                "file cannot hold both. Save that module by itself, on its ranks"
            )


def _as_saved(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Shape and dtype of it in the file."""
    return torch.empty(
        value.shape,
        dtype=dtype if dtype is not None and value.is_floating_point() else value.dtype,
        device="meta",
    )


def _held_bytes(parts: Mapping[str, _Part]) -> int:
    local = (part.local()[0] if part.handle else part.value for part in parts.values())
    return sum(one.nbytes for one in local)


def _write(parts: Mapping[str, _Part], plan: Plan, world: Communicator, progress: Progress) -> None:
    """Write what this rank owns of the planned tensors."""
    path = ""
    try:
        with OpenFiles(os.O_WRONLY) as files, torch.no_grad():
            for name, place in plan.places.items():
                path, part = place.path, parts[name]
                local, order, start = part.local()
                low, high = 0, local.numel()
                if part.handle is not None:  # ranks that hold the same write a part each
                    same = part.handle.topology.replicate
                    low, high = high * same.rank // same.size, high * (same.rank + 1) // same.size
                if low < high and (part.handle is not None or world.rank == 0):
                    write_range(files[path], place, local[low:high], order, start + low)
                progress.advance(local.nbytes)
            files.sync()
    except OSError as error:
        error.filename = error.filename or path
        raise


def load(
    model: nn.Module,
    units: Sequence[Unit],
    states: Sequence[UnitStateDict],
    path: str,
    *,
    strict: bool,
) -> _IncompatibleKeys:
    """See ``flatshard.checkpoint.load_safetensors``."""
    world, caller = world_of(units), "load_safetensors"

    def prepare() -> tuple[tuple[dict[str, _Part], dict[str, Place], _IncompatibleKeys], Facts]:
        parts, found = _parts_of(model, units, states), find_tensors(path)
        places = without_ddp_prefix(found.places, {name.partition(".")[0] for name in parts})
        present = {part.key for name, part in parts.items() if name in places}
        keys = _IncompatibleKeys(
            [name for name, part in parts.items() if part.key not in present],
            [name for name in places if name not in parts],
        )
        _check_fits(path, parts, places, keys, strict=strict)
        facts = {name: f"{place.shape}, {place.dtype}" for name, place in places.items()}
        return (parts, places, keys), facts

    parts, places, keys = agreed(prepare, [world], caller, _REMEDY)
    progress = Progress("loading", _held_bytes(parts), is_shown=world.rank == 0)
    try:
        _everywhere(lambda: _read(parts, places, progress), world)
    finally:
        for unit in units:
            unit.num_loads += 1
            for handle in unit.handles:
                # What was read into memory passed the version counters by.
                written = handle.sharded if handle.is_whole else [handle.shard]
                torch.autograd.graph.increment_version(written)
                handle.page_out()
    progress.end(path, sum(places[name].nbytes for name in parts if name in places))
    return keys


def _check_fits(
    path: str,
    parts: Mapping[str, _Part],
    places: Mapping[str, Place],
    keys: _IncompatibleKeys,
    *,
    strict: bool,
) -> None:
    """Raise ValueError for all that does not fit."""

    def listed(names: Iterable[str]) -> list[str]:
        return [f"{name!r} ({', '.join(said(name))})" for name in names]

    def said(name: str) -> Iterator[str]:
        if name in parts:
            yield f"expected {tuple(parts[name].value.shape)} {parts[name].value.dtype}"
        if name in places:
            yield f"found {places[name].shape} {places[name].dtype}"

    wrong = [n for n in places if n in parts and places[n].shape != tuple(parts[n].value.shape)]
    problems = {"other shapes": listed(wrong)}
    if strict:
        problems["not in the file"] = listed(keys.missing_keys)
        problems["not in the model"] = listed(keys.unexpected_keys)
    text = "; ".join(f"{what}: {', '.join(them)}" for what, them in problems.items() if them)
    if text:
        remedy = "" if wrong else ". With strict=False it would load the rest"
        raise ValueError(f"{path} does not fit the model: {text}{remedy}")


def _read(parts: Mapping[str, _Part], places: Mapping[str, Place], progress: Progress) -> None:
    """Read this rank's ranges into its shards, and all of what is not sharded."""
    with OpenFiles(os.O_RDONLY) as files, torch.inference_mode(False), torch.no_grad():
        for name, part in parts.items():
            if name not in places:
                continue
            local, order, start = part.local()
            if local.numel():
                read_range(files[places[name].path], places[name], local, order, start)
            if part.handle is None:
                if local.data_ptr() != part.value.data_ptr():  # of a tensor with gaps: a copy
                    permuted = part.value.permute(tuple(order))
                    permuted.copy_(local.view(permuted.shape))
                torch.autograd.graph.increment_version(part.value)
            progress.advance(local.nbytes)
