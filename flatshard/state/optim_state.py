"""Optimizer state by parameter name: full tensors, whatever the sharding.

State is *per element* (a momentum, say) or *one per parameter* (``step``, text, whatever else).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.optimizer import state_dicts
from flatshard.optimizer.state_dicts import with_shared
from flatshard.optimizer.stepper import (
    ONE_PER_PARAMETER,
    is_elementwise,
    part_per_element,
    shared_state,
)
from flatshard.plan.module_tree import unit_text
from flatshard.state.full_params import gather_full, join, worlds_of
from flatshard.state.model_state import without_ddp_prefix
from flatshard.state.optim_fqns import OptimParam, OptimParams, unwrapped
from flatshard.tensor.sharded_tensor import FlatShardTensor, state_shard

StateDict = dict[str, Any]

_REMEDY = "Every rank must step the same optimizer and load the same state."


@dataclass
class _Entry:
    """The state of one parameter of the optimizer on this rank."""

    param: OptimParam
    state: StateDict
    is_alike: bool  # what is not per element, whatever its shape, is the same on all ranks
    parts: dict[str, Tensor] = field(init=False)  # this rank's part of what is per element, 1-D

    def __post_init__(self) -> None:
        items = self.state.items()
        parts = {key: _part(self.param, key, value, self.is_alike) for key, value in items}
        self.parts = {key: part for key, part in parts.items() if part is not None}

    def sharded(self, key: str, device: torch.device | None) -> Tensor:
        """This rank's part, as checkpoints take it."""
        original, part = self.param.original, self.parts[key]
        assert original is not None, "only what is sharded has parts"
        if not original.is_sharded:
            return self.state[key].detach().to(device or part.device)
        return state_shard(part.to(device or part.device), original.spec, f"{key} of")

    def facts(self) -> Iterable[tuple[str, str]]:
        """What must be equal on all ranks."""
        fqn = self.param.fqn
        yield f"state of {fqn!r}", "there"
        for key, value in self.state.items():
            part = self.parts.get(key)
            described = _fact(value) if part is None else f"{part.dtype} per element"
            yield f"state {key!r} of {fqn!r}", described


def full_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    state_dict: StateDict | None,
    *,
    rank0_only: bool,
    offload_to_cpu: bool,
) -> StateDict:
    """An optimizer's state by name, full; see ``ShardedWrapper.optim_state_dict``.

    Collective: all ranks that train ``units``, which are those in ``model``.
    """
    shared = _shared(optimizer)

    def prepare() -> tuple[_State, Facts]:
        found = _State.of(model, optimizer, units, state_dict, shared)
        return found, dict(chain.from_iterable(entry.facts() for entry in found.entries.values()))

    # Errors of one rank are raised on all, before the first all-gather.
    found = agreed(prepare, worlds_of(units), "optim_state_dict", _REMEDY)
    entries = found.entries
    is_saving = not rank0_only or not units or units[0].topology.world.rank == 0
    device = torch.device("cpu") if offload_to_cpu else None
    full = {
        e.param.fqn: {k: None if k in e.parts else _copied(v, device) for k, v in e.state.items()}
        for e in entries.values()
    }
    # In the units' order, which all ranks share.
    with torch.inference_mode(False), torch.no_grad():
        for handle in chain.from_iterable(unit.handles for unit in units):
            own_entries = [entry for entry in entries.values() if entry.param.handle is handle]
            _gather(handle, own_entries, full if is_saving else None, device)
    return found.by_name(full, device) if is_saving else {}


def sharded_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    state_dict: StateDict | None,
    *,
    offload_to_cpu: bool,
) -> StateDict:
    """An optimizer's state by name; what is per element is sharded, and shares memory with it."""
    if len(worlds_of(units)) > 1:
        raise NotImplementedError(
            "optim_state_dict: some units train on some of the model's ranks alone: other ranks "
            "may hold other state of their names, and a sharded checkpoint keeps one of a name. "
            "Ask for FULL_STATE_DICT."
        )
    found = _State.of(model, optimizer, units, state_dict, _shared(optimizer))
    device = torch.device("cpu") if offload_to_cpu else None
    state = {
        entry.param.fqn: {
            key: entry.sharded(key, device) if key in entry.parts else _copied(value)
            for key, value in entry.state.items()
        }
        for entry in found.entries.values()
    }
    return found.by_name(state, device)


def _shared(optimizer: torch.optim.Optimizer) -> dict[FlatShardTensor, StateDict]:
    return shared_state(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else {}


@dataclass
class _State:
    """An optimizer's own state dict, and what its keys are in the unwrapped model."""

    own: StateDict
    params: dict[Any, OptimParam]
    entries: dict[Any, _Entry]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        state_dict: StateDict | None,
        shared: dict[FlatShardTensor, StateDict],
    ) -> _State:
        _check_optimizer(optimizer)
        state_dicts.watch(optimizer)
        own = state_dicts.parts(optimizer) if state_dict is None else state_dict
        _check_form(own)
        own = with_shared(optimizer, state_dicts.unstamped(optimizer, own), shared)
        params = OptimParams(model, optimizer, units).by_key(own)
        is_alike = not is_elementwise(optimizer)
        entries = {
            key: _Entry(params[key], state, is_alike)
            for key, state in own["state"].items()
            if key in params
        }
        return cls(own, params, entries)

    def by_name(self, state: StateDict, device: torch.device | None) -> StateDict:
        """The state dict with ``state`` for its parameters'."""
        rest = self.own["state"].items()
        others = {key: _copied(v, device) for key, v in rest if key not in self.entries}
        groups = [
            {**_options(group), "params": [self.params[key].fqn for key in group["params"]]}
            for group in self.own["param_groups"]
        ]
        return {"state": {**state, **others}, "param_groups": groups}


def _check_optimizer(value: object) -> None:
    if not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer as the second argument, got {value!r:.100}")


def _check_form(state_dict: Any) -> None:
    if isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys():
        return
    got = f"keys {list(state_dict)}" if isinstance(state_dict, dict) else type(state_dict).__name__
    raise ValueError(
        f"expected a dict with 'state' and 'param_groups', got {got}. With rank0_only=True only "
        "rank 0 has the state: let every rank load the file."
    )


def _part(param: OptimParam, key: str, value: Any, is_alike: bool) -> Tensor | None:
    """This rank's part of state per element, 1-D; None for what is one per parameter."""
    handle, original = param.handle, param.original
    if handle is None or original is None or key in ONE_PER_PARAMETER:
        return None
    if isinstance(value, FlatShardTensor):
        return value.local  # of an optimizer that works on sharded parameters
    if isinstance(value, Tensor):
        spec = original.spec
        if tuple(value.shape) == spec.shape:
            # Full: not stepped on since wrapping or loading; or this rank holds all of it.
            return spec.slice(value)
        if tuple(value.shape) == (spec.numel,) and not handle.is_whole:
            return value  # of an optimizer that steps on local ranges
    shapes = {tuple(leaf.shape) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    if shapes - {()} and not handle.is_whole and not is_alike:
        raise ValueError(
            f"state {key!r} of parameter {param.fqn!r} ({unit_text(handle.unit_name)}) has "
            f"tensors of shape {sorted(shapes)}: only numbers, and tensors with one value per "
            "element of the parameter, can be put together from the ranks' parts."
        )
    return None


def _gather(
    handle: FlatParamHandle,
    entries: Sequence[_Entry],
    full: dict[str, StateDict] | None,
    device: torch.device | None,
) -> None:
    """Put what is per element into ``full``, by name and key; one all-gather per key and dtype.

    Collective: all ranks of the shard group. Without ``full`` this one only helps the others.
    """
    kinds = {(key, part.dtype) for entry in entries for key, part in entry.parts.items()}
    for key, dtype in sorted(kinds, key=str):  # in one order on all ranks
        some = [e for e in entries if key in e.parts and e.parts[key].dtype == dtype]
        parts = ((e.param.original, e.parts[key]) for e in some)
        shard = join(handle, ((original, part) for original, part in parts if original), dtype)
        tensors = gather_full(handle, shard, device, is_kept=full is not None)
        if full is not None:
            for fqn, original in ((e.param.fqn, e.param.original) for e in some):
                if original is not None:
                    full[fqn][key] = original.spec.unsplit(tensors[original.index])


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy with memory of its own; tensors in it go to ``device`` if there is one."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device or leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return pytree.tree_map(copied, value)


def state_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    state_dict: StateDict,
    *,
    by_name: bool,
) -> StateDict:
    """This rank's part of full state; see ``ShardedWrapper.optim_state_dict_to_load``.

    Collective: all ranks that train ``units``, which are those in ``model``.
    """

    def prepare() -> tuple[StateDict, Facts]:
        _check_optimizer(optimizer)
        state_dicts.watch(optimizer)
        _check_form(state_dict)
        params = OptimParams(model, optimizer, units)
        saved = _named(state_dict, params)
        group_of = {name: g for g in saved["param_groups"] for name in g["params"]}
        _check_names(group_of, [param.fqn for param in params])
        # The keys in the optimizer's own state dicts.
        name_of = {id(param): name for name, param in model.named_parameters()}
        position = count()
        loaded: StateDict = {"state": {}, "param_groups": []}
        facts: Facts = {}
        for number, group in enumerate(params.groups):
            own = optimizer.param_groups[number]
            keys = [name_of[id(param)] if by_name else next(position) for param in own["params"]]
            options = _options_of_group(params.fqns(number), group_of, own)
            loaded["param_groups"].append({**options, "params": keys})
            for key, param in zip(keys, group, strict=True):
                if (fqn := param.fqn) in saved["state"]:
                    state = _split(param, saved["state"][fqn])
                    loaded["state"][key] = _loaded(param, state, optimizer)
                    facts.update((f"state {k!r} of {fqn!r}", _fact(v)) for k, v in state.items())
        for key, value in saved["state"].items():
            if key not in group_of:
                loaded["state"][key] = _copied(value)
        return loaded, facts

    return agreed(prepare, worlds_of(units), "optim_state_dict_to_load", _REMEDY)


def _split(param: OptimParam, state: StateDict) -> StateDict:
    """The state of a tensor-parallel parameter's local part; any other as it is."""
    if param.original is None:
        return state
    return {key: param.original.spec.split(value) for key, value in state.items()}


def _named(state_dict: StateDict, params: OptimParams) -> StateDict:
    """The same with names for positions, without the prefixes that wrappers add to names."""
    if state_dicts.is_stamped(state_dict):
        raise ValueError(
            "an optimizer.state_dict() of a sharded model holds one rank's parts alone. Save "
            "ShardedWrapper.optim_state_dict(model, optimizer) and pass that."
        )
    key_of: dict[str, Any] = {}
    for number, group in enumerate(state_dict["param_groups"]):
        key_of.update(zip(_names(number, group, params), group["params"], strict=True))
    top_names = {param.fqn.partition(".")[0] for param in params}
    key_of = without_ddp_prefix(key_of, top_names)
    name_of = {key: unwrapped(name) for name, key in key_of.items()}
    groups = [
        {**group, "params": [name_of[key] for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    state = {name_of.get(key, key): value for key, value in state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def _names(number: int, group: StateDict, params: OptimParams) -> Sequence[str]:
    """The parameters of a saved group, by name or else by the optimizer's order."""
    keys = group["params"]
    if "param_names" in group:
        return group["param_names"]  # type: ignore[no-any-return]
    if all(isinstance(key, str) for key in keys):
        return keys  # type: ignore[no-any-return]
    fqns = params.fqns(number) if number < len(params.groups) else []
    if len(fqns) != len(keys):
        raise ValueError(
            f"group {number} of the state has {len(keys)} parameters without names, the "
            f"optimizer's has {len(fqns)}. Make the groups alike, or give the state names: "
            "ShardedWrapper.optim_state_dict(plain_model, plain_optimizer)."
        )
    return fqns


def _check_names(saved: Collection[str], own: Sequence[str]) -> None:
    """Both must have the same parameters, as torch asks of plain optimizers."""
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in set(own)]
    if missing or unexpected:
        raise ValueError(
            "the state is of other parameters than the optimizer's. Missing: "
            f"{', '.join(map(repr, missing)) or 'none'}. Unexpected: "
            f"{', '.join(map(repr, unexpected)) or 'none'}. Make the optimizer over the parameters "
            "that the saved one had."
        )


def _options_of_group(
    fqns: Sequence[str], group_of: dict[str, StateDict], own: StateDict
) -> StateDict:
    """The options for the optimizer's group ``own``, from where its parameters were."""
    groups = [group_of[fqn] for fqn in fqns] or [own]
    options = _options(groups[0])
    for fqn, group in zip(fqns, groups, strict=False):
        different = [key for key in options if repr(groups[0][key]) != repr(group.get(key))]
        if different:
            raise ValueError(
                f"parameters {fqns[0]!r} and {fqn!r} are in one group of the optimizer, but "
                f"were saved in groups of different {', '.join(different)}. Make the groups as "
                "they were."
            )
    return options


def _options(group: StateDict) -> StateDict:
    return {k: _copied(v) for k, v in group.items() if k not in ("params", "param_names")}


def _loaded(param: OptimParam, state: StateDict, optimizer: torch.optim.Optimizer) -> StateDict:
    """This rank's part of the full state of one parameter."""
    elementwise = is_elementwise(optimizer)
    return {
        key: _local(param, key, value, elementwise)
        if _is_per_element(param, key, value, elementwise)
        else _copied(value)
        for key, value in state.items()
    }


def _is_per_element(param: OptimParam, key: str, value: Any, elementwise: bool) -> bool:
    """Whether state has one value per element of its parameter; raises for another shape."""
    if param.original is None or key in ONE_PER_PARAMETER:
        return False
    shape = param.original.spec.shape
    if not isinstance(value, Tensor) or (value.dim() == 0 and shape):
        return False
    if tuple(value.shape) == shape:
        return True
    if not elementwise:
        return False  # the optimizer's own business, as in an unwrapped model
    raise ValueError(
        f"state {key!r} of parameter {param.fqn!r} ({unit_text(param.original.spec.unit)}): "
        f"expected the parameter's shape {shape}, got {tuple(value.shape)}. Was the state saved "
        "from another model?"
    )


def _local(param: OptimParam, key: str, value: Tensor, elementwise: bool) -> Tensor:
    """This rank's part of full state, as the optimizer has it."""
    handle, original = param.handle, param.original
    assert handle is not None, "the parameter is sharded"
    assert original is not None, "the parameter is sharded"
    spec = original.spec
    if handle.is_whole:
        # In the parameter's strides, which optimizers' fast paths compare.
        return spec.empty(value.new_empty(0, device=handle.flat_param.device)).copy_(value)
    # Sharded state is taken as it is, as torch's load_state_dict takes tensors.
    part = part_per_element(spec, key, value.detach())
    assert part is not None, "_is_per_element() has compared the shapes"
    part = part.to(handle.flat_param.device, copy=not isinstance(value, FlatShardTensor))
    return part if elementwise else FlatShardTensor(part, spec)


def _fact(value: Any) -> str:
    """A value that is one per parameter, as far as ranks can be expected to agree on it."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not isinstance(value, FlatShardTensor):
            return repr(value.item())
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
