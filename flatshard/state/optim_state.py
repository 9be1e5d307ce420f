"""Optimizer state dicts by parameter name, with full or sharded tensors.

Full tensors do not depend on the sharding, so any number of ranks can load them. An entry of a
parameter's state has either one value per element, like a momentum, or one value per parameter,
like ``step``. Entries with one value per element are sharded like the parameter.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import ALONE
from flatshard.comm.consistency import Facts, agreed
from flatshard.engine.unit import Unit
from flatshard.optimizer import adapter, state_dicts
from flatshard.optimizer.adapter import Optimizer, map_state, named_values
from flatshard.optimizer.state_dicts import StateDict, check_same_state, copied
from flatshard.state.model_state import hosts_of, without_ddp_prefix
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.module_tree import unit_text

_REMEDY = "Every rank must step the same optimizer and load the same state."


class OptimParam(NamedTuple):
    """A parameter of an optimizer, with its name in the unwrapped model."""

    fqn: str
    original: OriginalParam | None = None  # None if no unit owns the parameter


@dataclass
class OptimState:
    """The state of an optimizer over parameters of ``model``, to save and to load."""

    model: nn.Module
    optimizer: Optimizer
    units: Sequence[Unit]  # the units in `model`

    @cached_property
    def groups(self) -> list[list[OptimParam]]:
        """The optimizer's parameters: one list for each group in ``optimizer.param_groups``."""
        named = self.model.named_modules()
        prefixes = {module: unwrapped(f"{name}.") if name else "" for name, module in named}
        found: dict[int, OptimParam] = {}
        for param in chain.from_iterable(handle.params for u in self.units for handle in u.handles):
            # A tied parameter has several locations. Use the first one inside of the given model,
            # which may be only a part of the sharded model.
            place = next(place for place in param.locations if place.module in prefixes)
            name = prefixes[place.module] + place.attribute
            found[id(param.sharded)] = OptimParam(name, param)
        for name, other in self.model.named_parameters():
            # Also add parameters that no unit owns: the user has excluded them from sharding
            # (`ignored_modules`), or the model is not wrapped.
            found.setdefault(id(other), OptimParam(unwrapped(name)))
        for number, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                known = found.get(id(param))
                if known is None or (known.original is None and isinstance(param, FlatShardTensor)):
                    raise ValueError(
                        f"parameter {position} of the optimizer's group {number}, of shape "
                        f"{tuple(param.shape)}, is not in the given model. Pass the outermost "
                        "ShardedWrapper and an optimizer over its parameters."
                    )
        return [[found[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    @property
    def params(self) -> list[OptimParam]:
        return [*chain.from_iterable(self.groups)]

    def full(
        self, state_dict: StateDict | None, device: torch.device | None, rank0_only: bool
    ) -> StateDict:
        """Return the full state, keyed by parameter name, on ``device``. Collective."""
        shared, units = self._shared(), self.units

        def prepare() -> tuple[StateDict, Facts]:
            named = self._by_name(state_dict, shared)
            facts: Facts = {}
            for name, state in named["state"].items():
                facts[f"state of {name!r}"] = "there"
                facts |= _facts(f"of {name!r}", state if isinstance(state, dict) else {"": state})
            facts |= _facts("of the optimizer", _rest(named))
            return named, facts

        # If a rank fails, all ranks raise here, before the first tensor is all-gathered.
        named = agreed(prepare, hosts_of(units), "optim_state_dict", _REMEDY)
        whole = [unit for unit in units if any(handle.is_whole for handle in unit.handles)]
        for host in hosts_of(whole):
            check_same_state(self.unsharded(named), host, type(self.optimizer).__name__)
        world = units[0].topology.world if units else ALONE
        with torch.inference_mode(False), torch.no_grad():
            full = copied(named)  # copies only this rank's parts of sharded tensors
            state_dicts.to_full(full["state"], device, world.ranks[0] if rank0_only else None)
        is_kept = not rank0_only or world.rank == 0
        return copied(full, device, shares_memory=True) if is_kept else {}

    def sharded(self, state_dict: StateDict | None, device: torch.device | None) -> StateDict:
        """Return the state, keyed by parameter name. State with one value per element is sharded.

        The tensors share memory with the optimizer's state, unless they are copied to the CPU.
        """
        if len(hosts_of(self.units)) > 1:
            raise NotImplementedError(
                "optim_state_dict: some units train only on some of the model's ranks. Other ranks "
                "may hold other state under the same names, but a sharded checkpoint keeps one "
                "state per name. Call set_state_dict_type(model, 'FULL_STATE_DICT') first."
            )
        named = self._by_name(state_dict, self._shared())
        return copied(named, device, shares_memory=True)  # type: ignore[no-any-return]

    def unsharded(self, named: StateDict) -> dict[str, Any]:
        """Return the state of parameters that are not sharded (NO_SHARD), for ranks to compare.

        A checkpoint contains a single copy of this state, so the state must be equal on all ranks.
        ``named``: the optimizer's state dict, keyed by parameter name.
        """
        whole = [
            [p.fqn for p in group if p.original is not None and not p.original.is_sharded]
            for group in self.groups
        ]
        groups = ((n, named["param_groups"][n]) for n, fqns in enumerate(whole) if fqns)
        states = ((fqn, named["state"].get(fqn, {})) for fqn in chain.from_iterable(whole))
        return state_dicts.comparable(states, groups)

    def to_load(self, state_dict: StateDict, *, by_name: bool) -> StateDict:
        """See ``ShardedWrapper.optim_state_dict_to_load``. Collective."""
        optimizer = self.optimizer

        def prepare() -> tuple[StateDict, Facts]:
            _watch(optimizer)
            _check_form(state_dict, "an optimizer state")
            saved = self._named(state_dict)
            states = saved["state"]
            group_of = {name: g for g in saved["param_groups"] for name in g["params"]}
            _check_names(group_of, [param.fqn for param in self.params])
            # Keys of parameters in the result: names if `by_name`, otherwise positions.
            name_of = {id(param): name for name, param in self.model.named_parameters()}
            position = count()
            elementwise = adapter.is_elementwise(optimizer)
            shapes = {param.fqn: param.original and param.original.spec for param in self.params}
            numbers = adapter.numbers_in((shapes.get(name), one) for name, one in states.items())
            loaded: StateDict = {**copied(_rest(saved)), "state": {}, "param_groups": []}
            facts: Facts = {}
            for group, own in zip(self.groups, optimizer.param_groups, strict=False):
                keys = [name_of[id(p)] if by_name else next(position) for p in own["params"]]
                options = _options_of_group([param.fqn for param in group], group_of, own)
                loaded["param_groups"].append({**options, "params": keys})
                for key, param in zip(keys, group, strict=True):
                    if (fqn := param.fqn) in states:
                        load = partial(_loaded, param, elementwise, numbers)
                        loaded["state"][key] = map_state(load, states[fqn])
                        facts |= _facts(f"of {fqn!r}", states[fqn])
            loaded["state"] |= {k: copied(v) for k, v in states.items() if k not in group_of}
            return loaded, facts

        return agreed(prepare, hosts_of(self.units), "optim_state_dict_to_load", _REMEDY)

    def _shared(self) -> dict[FlatShardTensor, StateDict]:
        is_optimizer = isinstance(self.optimizer, Optimizer)
        return adapter.shared_state(self.optimizer) if is_optimizer else {}

    def _by_name(self, state_dict: StateDict | None, shared: dict[Any, StateDict]) -> StateDict:
        """Return the optimizer's state dict, keyed by parameter name.

        State with one value per element is a sharded tensor. ``shared``: the result of `_shared`.
        """
        optimizer = self.optimizer
        _watch(optimizer)
        own = state_dicts.parts(optimizer) if state_dict is None else state_dict
        kind = type(optimizer).__name__
        _check_form(own, f"{kind}.state_dict()", f"Let {kind} save and load torch's form.")
        if state_dict is None:
            state_dicts.check_inner(optimizer, own)
        own = state_dicts.unstamped(optimizer, own)
        keys = [group["params"] for group in own["param_groups"]]
        lengths, expected = [*map(len, keys)], [*map(len, self.groups)]
        if lengths != expected:
            raise ValueError(
                f"optim_state_dict: expected groups of {expected} parameters, as in the optimizer, "
                f"but the state dict has groups of {lengths}. Pass optimizer.state_dict(), or None."
            )
        params = dict(zip(chain.from_iterable(keys), self.params, strict=True))
        own = state_dicts.with_shards(optimizer, own, shared=shared)
        # An entry whose key belongs to no parameter is state of the whole optimizer.
        whole = {key: value for key, value in own["state"].items() if key not in params}
        taken = whole.keys() & {param.fqn for param in self.params}
        _check_whole(optimizer, {**_rest(own), **whole}, taken)
        return _renamed(own, {key: param.fqn for key, param in params.items()})

    def _named(self, state_dict: StateDict) -> StateDict:
        """Return a state dict to load, with names of the unwrapped model's parameters as keys."""
        if state_dicts.is_stamped(state_dict):
            raise ValueError(
                "an optimizer.state_dict() of a sharded model contains only the parts of one rank. "
                "Save ShardedWrapper.optim_state_dict(model, optimizer), and pass the saved state."
            )
        key_of: dict[str, Any] = {}
        for number, group in enumerate(state_dict["param_groups"]):
            key_of.update(zip(self._names(number, group), group["params"], strict=True))
        key_of = without_ddp_prefix(key_of, {param.fqn for param in self.params})
        return _renamed(state_dict, {key: unwrapped(name) for name, key in key_of.items()})

    def _names(self, number: int, saved: StateDict) -> Sequence[str]:
        """Return the names of the parameters in ``saved``, which is group ``number`` of a state."""
        keys = saved["params"]
        if "param_names" in saved or all(isinstance(key, str) for key in keys):
            return saved.get("param_names", keys)  # type: ignore[return-value]
        fqns = [param.fqn for group in self.groups[number : number + 1] for param in group]
        if len(fqns) != len(keys):
            raise ValueError(
                f"group {number} of the state has {len(keys)} parameters without names, but group "
                f"{number} of the optimizer has {len(fqns)} parameters. Make the same groups, or "
                "save the state with names: "
                "ShardedWrapper.optim_state_dict(plain_model, plain_optimizer)."
            )
        return fqns


def _rest(state_dict: StateDict) -> StateDict:
    """Return the entries of a state dict except torch's usual ``state`` and ``param_groups``."""
    return {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}


def _renamed(state_dict: StateDict, name_of: dict[Any, str]) -> StateDict:
    """Return a state dict whose keys of parameters are replaced by the names in ``name_of``."""
    saved = state_dict["param_groups"]
    groups = [{**_options(one), "params": [name_of[k] for k in one["params"]]} for one in saved]
    state = {name_of.get(key, key): value for key, value in state_dict["state"].items()}
    return {**_rest(state_dict), "state": state, "param_groups": groups}


def _check_whole(optimizer: Optimizer, whole: StateDict, taken: set[Any]) -> None:
    """Raise ValueError if state of the whole optimizer would be lost, or differs between ranks."""
    name = f"{type(optimizer).__name__}.state_dict()"
    if taken:
        raise ValueError(
            f"{name} has state under names of parameters: {sorted(taken)}. Saved state is keyed by "
            "parameter name, so use other keys for state of the whole optimizer."
        )
    for key, value in named_values(whole).items():
        if isinstance(value, FlatShardTensor):
            raise ValueError(
                f"{name} has a tensor of parameter {value.spec.name!r} in its entry {key!r}. Only "
                "state in optimizer.state[parameter] can be saved and resharded."
            )


def _watch(optimizer: object) -> None:
    """Check that ``optimizer`` is an optimizer, and register the hooks for its state dicts."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {optimizer!r:.100}. For several "
            "optimizers over one model, pass a list, or a dict with names, to checkpoint.save()."
        )
    state_dicts.watch(optimizer)


_OF_RANK_0 = (
    "If the state was made with rank0_only=True, save rank 0's state to a file, and load the file "
    "on every rank."
)


def _check_form(state_dict: Any, what: str, remedy: str = _OF_RANK_0) -> None:
    if isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys():
        return
    got = f"keys {list(state_dict)}" if isinstance(state_dict, dict) else type(state_dict).__name__
    raise ValueError(f"expected {what} with 'state' and 'param_groups', got {got}. {remedy}")


def _check_names(saved: Collection[str], own: Sequence[str]) -> None:
    """Raise ValueError unless state and optimizer have the same parameters, as torch requires."""
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in set(own)]
    if missing or unexpected:
        raise ValueError(
            "the state and the optimizer have different parameters. Missing in the state: "
            f"{', '.join(map(repr, missing)) or 'none'}. Unexpected: "
            f"{', '.join(map(repr, unexpected)) or 'none'}. Make the optimizer over the same "
            "parameters as the saved optimizer."
        )


def _options_of_group(fqns: list[str], group_of: dict[str, StateDict], own: StateDict) -> StateDict:
    """Return the saved options for a group of the optimizer. ``fqns``: the group's parameters."""
    groups = [group_of[fqn] for fqn in fqns] or [own]
    options = _options(groups[0])
    for fqn, group in zip(fqns, groups, strict=False):
        if different := [k for k in options if repr(groups[0][k]) != repr(group.get(k))]:
            raise ValueError(
                f"parameters {fqns[0]!r} and {fqn!r} are in one group of the optimizer, but were "
                f"saved in groups with different {', '.join(different)}. Make the groups as in the "
                "saved optimizer."
            )
    return options


def _options(group: StateDict) -> StateDict:
    return {k: copied(v) for k, v in group.items() if k not in ("params", "param_names")}


def _loaded(param: OptimParam, elementwise: bool, numbers: set[str], name: str, value: Any) -> Any:
    """Return this rank's part of ``value``, the entry ``name`` of a parameter's full state."""
    if (original := param.original) is None:
        return copied(value)
    spec, value = original.spec, original.spec.split(value)
    # `part` is a copy if `value` is full. A sharded `value` is not copied, as in torch.
    part = adapter.part_per_element(spec, value, is_number=name in numbers)
    if part is None:
        is_tensor = isinstance(value, Tensor) and value.dim() > 0
        is_number = is_tensor and value.numel() == 1 and name in numbers
        # Optimizers that are not element-wise may have state of any shape.
        if is_number or not (is_tensor and elementwise):
            return copied(value)
        raise ValueError(
            f"state {name!r} of parameter {param.fqn!r} ({unit_text(spec.unit)}): expected the "
            f"parameter's shape {spec.shape}, got {tuple(value.shape)}. Load a state that was "
            "saved from the same model."
        )
    device = original.sharded.device
    if not original.is_sharded:
        # Copy the value into a tensor with the parameter's strides: optimizers use their fast
        # kernels only if state and parameter have equal strides.
        return spec.empty(value.new_empty(0, device=device)).copy_(value)
    return FlatShardTensor(part.detach().to(device), spec, role=f"{name} of")


def _facts(where: str, state: StateDict) -> Facts:
    return {f"state {name!r} {where}": _fact(v) for name, v in named_values(state).items()}


def _fact(value: Any) -> str:
    """Return a text, for ranks to compare, that describes a value in an optimizer's state."""
    if isinstance(value, FlatShardTensor):
        return f"{value.dtype} per element"
    if isinstance(value, Tensor):
        is_number = value.numel() == 1
        return repr(value.item()) if is_number else f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def unwrapped(name: str) -> str:
    """Return a name without the prefix of torch's ``checkpoint_wrapper``, as in state dicts."""
    return name.replace("_checkpoint_wrapped_module.", "")
