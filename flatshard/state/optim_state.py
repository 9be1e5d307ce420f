"""Optimizer state by parameter name: full tensors, whatever the sharding.

[Note: what state looks like]
State is *per element* (a momentum, say: a number for each element of the parameter) or *one per
parameter* (``step``, text, whatever else). On a rank, state per element has one of four forms:

    full, in the parameter's shape      from before wrapping or from a plain optimizer, not yet
                                        stepped on; or this rank holds all of the parameter
    this rank's part, 1-D               of an optimizer that steps on local ranges
    ``FlatShardTensor``                 of one that works on sharded parameters
    as long as the shard, 1-D           with ``use_orig_params=False``

In a state dict it is always full. State that is one per parameter goes as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.optimizer import local_state_guard
from flatshard.optimizer import step as optimizer_step
from flatshard.optimizer.buckets import ONE_PER_PARAMETER
from flatshard.state.full_params import gather_flat, join
from flatshard.state.model_state import DDP_PREFIX
from flatshard.state.optim_fqns import OptimParam, OptimParams, unwrapped
from flatshard.tensor.flat_parameter import view_of
from flatshard.tensor.sharded_tensor import FlatShardTensor

StateDict = dict[str, Any]

_REMEDY = "Every rank must step the same optimizer and load the same state."


# ---------------------------------------------------------------- saving


@dataclass
class _Entry:
    """The state of one parameter of the optimizer on this rank.

    Attributes:
        param: whose state.
        keys: the state's keys in the optimizer's order.
        parts: this rank's part of what is per element, 1-D.
        others: what is one per parameter.
    """

    param: OptimParam
    keys: list[str]
    parts: dict[str, Tensor] = field(default_factory=dict)
    others: StateDict = field(default_factory=dict)

    @classmethod
    def read(cls, param: OptimParam, state: StateDict) -> _Entry:
        """Tell what is per element from what is not."""
        entry = cls(param, list(state))
        for key, value in state.items():
            part = _part(param, key, value)
            if part is None:
                entry.others[key] = value
            else:
                entry.parts[key] = part
        return entry

    def facts(self) -> Iterable[tuple[str, str]]:
        """Facts that must be equal on all ranks."""
        fqn = self.param.fqns[0]
        yield f"state of {fqn!r}", "there"
        for key, part in self.parts.items():
            yield f"state {key!r} of {fqn!r}", f"{part.dtype} per element"
        for key, value in self.others.items():
            yield f"state {key!r} of {fqn!r}", _fact(value)


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

    Collective: all ranks that train ``units``.

    Args:
        model: what the names are relative to.
        optimizer: over some of its parameters.
        units: the units in ``model``.
        state_dict: what ``optimizer.state_dict()`` gave; None: asks for it.
        rank0_only: other ranks get an empty dict.
        offload_to_cpu: tensors lie in CPU memory.
    """

    def prepare() -> tuple[tuple[StateDict, dict[Any, OptimParam], dict[Any, _Entry]], Facts]:
        local_state_guard.watch(optimizer)
        own = local_state_guard.parts(optimizer) if state_dict is None else state_dict
        _check_form(own)
        own = local_state_guard.unstamped(optimizer, own)
        params = OptimParams(model, optimizer, units).by_key(own)
        entries = {
            key: _Entry.read(params[key], state)
            for key, state in own["state"].items()
            if key in params
        }
        facts = chain.from_iterable(entry.facts() for entry in entries.values())
        return (own, params, entries), dict(facts)

    # Errors of one rank are raised on all, before the first all-gather.
    own, params, entries = agreed(prepare, _worlds(units), "optim_state_dict", _REMEDY)
    is_saving = not rank0_only or not units or units[0].topology.world.rank == 0
    device = torch.device("cpu") if offload_to_cpu else None
    full = {
        fqn: {key: _copied(entry.others.get(key), device) for key in entry.keys}
        for entry in entries.values()
        for fqn in entry.param.fqns
    }
    # In the units' order, which all ranks share.
    with torch.inference_mode(False), torch.no_grad():
        for handle in chain.from_iterable(unit.handles for unit in units):
            mine = [entry for entry in entries.values() if entry.param.handle is handle]
            _gather(handle, mine, full if is_saving else None, device)
    if not is_saving:
        return {}
    rest = {key: _copied(v, device) for key, v in own["state"].items() if key not in entries}
    groups = [
        {**_options(group), "params": [fqn for key in group["params"] for fqn in params[key].fqns]}
        for group in own["param_groups"]
    ]
    return {"state": {**full, **rest}, "param_groups": groups}


def _check_form(state_dict: Any) -> None:
    if isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys():
        return
    got = f"keys {list(state_dict)}" if isinstance(state_dict, dict) else type(state_dict).__name__
    raise ValueError(
        f"expected a dict with 'state' and 'param_groups', got {got}. With rank0_only=True only "
        "rank 0 has the state: let every rank load the file."
    )


def _part(param: OptimParam, key: str, value: Any) -> Tensor | None:
    """This rank's part of state per element, 1-D; None for what is one per parameter.

    Raises:
        ValueError: neither; nobody would know how to put the ranks' parts together.
    """
    handle = param.handle
    if handle is None or key in ONE_PER_PARAMETER:
        return None
    if isinstance(value, FlatShardTensor):
        return value.local
    if isinstance(value, Tensor):
        if param.is_flat:
            if value.shape == handle.shard.shape:
                return value
        else:
            spec = handle.params.specs[param.indices[0]]
            if param.is_divided and tuple(value.shape) == (spec.numel,):
                return value
            if tuple(value.shape) == spec.shape:
                return spec.slice(value)
    shapes = {tuple(leaf.shape) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}
    if param.is_divided and shapes - {()}:
        raise ValueError(
            f"state {key!r} of parameter {param.fqns[0]!r} (unit {handle.unit_name!r}) has "
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
    """Put what is per element into ``full``: one all-gather per key and dtype.

    Collective: all ranks of the shard group.

    Args:
        handle: the flat parameter.
        entries: the state of its parameters.
        full: where it goes, by name and key; None: this rank only helps the others.
        device: where to; None: where the shard is.
    """
    kinds = {(key, part.dtype) for entry in entries for key, part in entry.parts.items()}
    for key, dtype in sorted(kinds, key=str):  # in one order on all ranks
        some = [e for e in entries if key in e.parts and e.parts[key].dtype == dtype]
        if some[0].param.is_flat:
            shard = some[0].parts[key].to(handle.shard.device)
        else:
            parts = ((entry.param.indices[0], entry.parts[key]) for entry in some)
            shard = join(handle, parts, dtype)
        flat = gather_flat(handle, shard)
        if full is None:
            continue
        for param in [entry.param for entry in some]:
            for fqn, index in zip(param.fqns, param.indices, strict=True):
                view = view_of(flat, handle.layout.spans[index])
                full[fqn][key] = view.to(device or view.device, copy=True)


def _copied(value: Any, device: torch.device | None) -> Any:
    """A copy with memory of its own; tensors in it go to ``device`` if there is one."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device or leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return pytree.tree_map(copied, value)


# ---------------------------------------------------------------- loading


def state_to_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[Unit],
    state_dict: StateDict,
    *,
    by_name: bool,
) -> StateDict:
    """This rank's part of full state, for ``optimizer.load_state_dict``.

    See ``ShardedWrapper.optim_state_dict_to_load``.

    Collective: all ranks that train ``units``.

    Args:
        model: what the names are relative to.
        optimizer: over some of its parameters.
        units: the units in ``model``.
        state_dict: of ``full_state``, or of a plain optimizer.
        by_name: the optimizer's own state dicts have names for positions.
    """

    def prepare() -> tuple[StateDict, Facts]:
        local_state_guard.watch(optimizer)
        _check_form(state_dict)
        params = OptimParams(model, optimizer, units)
        saved = _named(state_dict, params)
        group_of = {n: i for i, g in enumerate(saved["param_groups"]) for n in g["params"]}
        _check_names(group_of, [fqn for param in params for fqn in param.fqns])
        keys = _keys(model, optimizer, by_name)
        loaded: StateDict = {"state": {}, "param_groups": []}
        facts: Facts = {}
        for number, group in enumerate(params.groups):
            options = _options_of_group(params, number, saved, group_of, optimizer)
            loaded["param_groups"].append({**options, "params": keys[number]})
            for key, param in zip(keys[number], group, strict=True):
                states = {fqn: saved["state"][fqn] for fqn in param.fqns if fqn in saved["state"]}
                if states:
                    loaded["state"][key] = _loaded(param, states, optimizer)
                    facts.update(_saved_facts(states))
        for key, value in saved["state"].items():
            if key not in group_of:
                loaded["state"][key] = _copied(value, None)
        return loaded, facts

    return agreed(prepare, _worlds(units), "optim_state_dict_to_load", _REMEDY)


def _keys(model: nn.Module, optimizer: torch.optim.Optimizer, by_name: bool) -> list[list[Any]]:
    """Per group, the keys of its parameters in the optimizer's own state dicts."""
    names = {id(param): name for name, param in model.named_parameters()}
    keys: list[list[Any]] = []
    start = 0
    for group in optimizer.param_groups:
        end = start + len(group["params"])
        positions = list(range(start, end))
        keys.append([names[id(param)] for param in group["params"]] if by_name else positions)
        start = end
    return keys


def _named(state_dict: StateDict, params: OptimParams) -> StateDict:
    """The same with names for positions, without the prefixes that wrappers add to names."""
    if local_state_guard.is_stamped(state_dict):
        raise ValueError(
            "an optimizer.state_dict() of a sharded model holds one rank's parts alone. Save "
            "ShardedWrapper.optim_state_dict(model, optimizer) and pass that."
        )
    name_of: dict[Any, Any] = {}
    for number, group in enumerate(state_dict["param_groups"]):
        name_of.update(zip(group["params"], _names(number, group, params), strict=True))
    is_prefixed = all(name.startswith(DDP_PREFIX) for name in name_of.values())
    if is_prefixed and not any(fqn.startswith(DDP_PREFIX) for p in params for fqn in p.fqns):
        name_of = {key: name.removeprefix(DDP_PREFIX) for key, name in name_of.items()}
    name_of = {key: unwrapped(name) for key, name in name_of.items()}
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


def _check_names(saved: Iterable[str], own: Sequence[str]) -> None:
    """Both must have the same parameters, as torch asks of plain optimizers."""
    saved = dict.fromkeys(saved)
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
    params: OptimParams,
    number: int,
    saved: StateDict,
    group_of: dict[str, int],
    optimizer: torch.optim.Optimizer,
) -> StateDict:
    """The options for one of the optimizer's groups, from where its parameters were."""
    sources: dict[int, str] = {}
    for fqn in params.fqns(number):
        sources.setdefault(group_of[fqn], fqn)
    if not sources:
        return _options(optimizer.param_groups[number])
    (first, first_name), *others = sources.items()
    options = _options(saved["param_groups"][first])
    for source, name in others:
        other = _options(saved["param_groups"][source])
        different = [key for key in options if repr(options[key]) != repr(other.get(key))]
        if different:
            raise ValueError(
                f"parameters {first_name!r} and {name!r} are in one group of the optimizer, but "
                f"were saved in groups of different {', '.join(different)}. Make the groups as "
                "they were; all of a flat parameter is in one group."
            )
    return options


def _options(group: StateDict) -> StateDict:
    return {k: _copied(v, None) for k, v in group.items() if k not in ("params", "param_names")}


def _loaded(
    param: OptimParam, states: dict[str, StateDict], optimizer: torch.optim.Optimizer
) -> StateDict:
    """This rank's state of one parameter of the optimizer, from that of its originals."""
    first, keys = next((fqn, list(state)) for fqn, state in states.items())
    for fqn, state in states.items():
        if set(state) != set(keys):
            raise _cannot_join(param, first, fqn, f"state {keys} and {list(state)}")
    elementwise = optimizer_step.is_elementwise(optimizer)
    loaded: StateDict = {}
    for key in keys:
        values = {fqn: state[key] for fqn, state in states.items()}
        if not _is_per_element(param, key, values, elementwise):
            loaded[key] = _common_value(param, key, values)
        elif param.is_flat:
            loaded[key] = _flat(param, values)
        else:
            loaded[key] = _sliced(param, values[first], elementwise)
    return loaded


def _is_per_element(param: OptimParam, key: str, values: dict[str, Any], elementwise: bool) -> bool:
    """Whether state has one value per element of the parameters it is of.

    Raises:
        ValueError: a tensor of another shape than its parameter, which is no number either.
    """
    if param.handle is None or key in ONE_PER_PARAMETER:
        return False
    shapes = {fqn: param.shape(index) for fqn, index in zip(param.fqns, param.indices, strict=True)}
    for fqn, value in values.items():
        if not isinstance(value, Tensor) or (value.dim() == 0 and shapes[fqn]):
            return False
        if tuple(value.shape) == shapes[fqn]:
            continue
        if param.handle.is_whole and not param.is_flat and not elementwise:
            return False  # the optimizer's own business, as in an unwrapped model
        raise ValueError(
            f"state {key!r} of parameter {fqn!r} (unit {param.handle.unit_name!r}): expected "
            f"shape {shapes[fqn]}, the parameter's, got {tuple(value.shape)}. Is the state of "
            "another model?"
        )
    return True


def _common_value(param: OptimParam, key: str, values: dict[str, Any]) -> Any:
    """State that is one per parameter; raises if a flat parameter's originals differ in it."""
    first, *others = values
    for fqn in others:
        if _fact(values[fqn]) != _fact(values[first]):
            facts = f"{key!r} of {_fact(values[first])} and {_fact(values[fqn])}"
            raise _cannot_join(param, first, fqn, facts)
    return _copied(values[first], None)


def _cannot_join(param: OptimParam, first: str, second: str, differences: str) -> ValueError:
    assert param.handle is not None, "only flat parameters join originals"
    return ValueError(
        f"parameters {first!r} and {second!r} have {differences}, but are parts of one flat "
        f"parameter of unit {param.handle.unit_name!r}, which has one state. Wrap with "
        "use_orig_params=True."
    )


def _flat(param: OptimParam, values: dict[str, Tensor]) -> Tensor:
    """This rank's part of a flat parameter's state, ``(shard_numel,)``.

    Zero for originals without state: they were never used, so nothing was added up for them.
    """
    handle = param.handle
    assert handle is not None, "it is flat"
    parts = (
        (index, handle.params.specs[index].slice(values[fqn]))
        for fqn, index in zip(param.fqns, param.indices, strict=True)
        if fqn in values
    )
    return join(handle, parts, next(iter(values.values())).dtype)


def _sliced(param: OptimParam, value: Tensor, elementwise: bool) -> Tensor:
    """This rank's part of an original parameter's state, as the optimizer has it."""
    handle, (index,) = param.handle, param.indices
    assert handle is not None, "it is a part of a flat parameter"
    spec, device = handle.params.specs[index], handle.shard.device
    if handle.is_whole:
        # In the parameter's strides, which optimizers' fast paths compare.
        full = torch.empty_strided(spec.shape, spec.strides, dtype=value.dtype, device=device)
        return full.copy_(value)
    part = spec.slice(value.detach()).to(device, copy=True)
    return part if elementwise else FlatShardTensor(part, spec)


# ---------------------------------------------------------------- what ranks agree on


def _worlds(units: Sequence[Unit]) -> list[Communicator]:
    """The groups of ranks that train the units, each once; mostly one."""
    return list({tuple(u.topology.world.ranks): u.topology.world for u in units}.values())


def _saved_facts(states: dict[str, StateDict]) -> Iterable[tuple[str, str]]:
    for fqn, state in states.items():
        for key, value in state.items():
            yield f"state {key!r} of {fqn!r}", _fact(value)


def _fact(value: Any) -> str:
    """A value that is one per parameter, as far as ranks can be expected to agree on it."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return repr(value.item())
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
