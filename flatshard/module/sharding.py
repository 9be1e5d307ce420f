"""``Sharding``: the state of a wrapper. Functions find the shardings and units of a model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.run_state import RunState
from flatshard.engine.unit import Unit
from flatshard.module.settings import Settings
from flatshard.state.model_shards import ModelShards
from flatshard.state.model_state import UnitStateDict
from flatshard.units.ignored import Ignored
from flatshard.units.module_proxy import ModuleProxy
from flatshard.units.module_tree import paths, unit_text


@dataclass(eq=False)
class Sharding:
    """The state of one wrapper. Wrappers of small neighbouring modules may share a unit."""

    wrapper: ModuleProxy
    unit: Unit
    state_dict: UnitStateDict
    settings: Settings
    ignored: Ignored
    reason: str = ""  # why a policy chose the module; empty for a module that was wrapped by hand

    # Function that is called before the first forward, and raises if `leave_empty` left a tensor
    # empty and no state dict filled the tensor. None: no tensor was left empty.
    check_loaded: Callable[[nn.Module, Communicator], None] | None = None
    # Whether a `param_init_fn` is running. Construction calls the function for every module, so
    # `apply` and conversions inside of the function must not go into other units.
    is_initialising: bool = False
    context: RunState = dataclasses.field(init=False)  # state of the model's steps (`start_run`)
    # The outermost wrappers that contained this wrapper at their construction.
    roots: WeakSet[Sharding] = dataclasses.field(default_factory=WeakSet, init=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """Copy the state for a copied wrapper. ``start_run`` must then make a ``RunState``."""
        twin = copy.copy(self)
        twin.wrapper, twin.unit = memo[id(self.wrapper)], memo[id(self.unit)]
        twin.roots = WeakSet()
        twin.state_dict = copy.deepcopy(self.state_dict, memo)
        twin.ignored = copy.deepcopy(self.ignored, memo)
        return twin

    def check_between_steps(self, caller: str) -> RunState:
        """Return the model's ``RunState``. Raises RuntimeError inside a forward or backward."""
        context = self.context
        context.forward.recover()
        if self.unit.stays_unsharded and caller != "no_sync()":
            raise RuntimeError(
                f"{caller} was called inside of no_sync(uneven=True), where ranks do not meet. "
                "Call it outside of the context."
            )
        if context.is_running:
            raise RuntimeError(
                f"{caller} was called while a forward or backward of "
                f"{unit_text(self.unit.name)} is running. Call it between steps."
            )
        return context

    def check_has_all_modules(self, action: str) -> None:
        """Raise RuntimeError if modules outside of this wrapper share a unit with its modules."""
        inside = set(self.wrapper.modules())
        for unit in units_in(self.wrapper):
            if not inside.issuperset(unit.modules):
                name = self.unit.names[list(self.unit.modules).index(self.wrapper.module)]
                raise RuntimeError(
                    f"{unit_text(unit.name)}: {name!r} cannot be {action} separately: the "
                    "module is small and shares a unit with its neighbours. Use the outermost "
                    "wrapper, or wrap with coalesce_bytes=0."
                )

    def summary(self) -> str:
        unit, strategy = self.unit, self.settings.strategy.name
        if len(unit.modules) > 1:
            return f"{strategy}: part of unit {unit.name}"
        numel = sum(handle.layout.numel for handle in unit.handles)
        padding = sum(handle.layout.padding_numel for handle in unit.handles)
        ranks = self.settings.topology.shard.size
        over = f"over {ranks} rank{'s' if ranks != 1 else ''}"
        return f"{strategy}: {numel:,} elements + {padding:,} padding {over}"


def sharding_of(wrapper: ModuleProxy) -> Sharding:
    found: Sharding = wrapper.__dict__["_sharding"]
    return found


def shardings_in(module: nn.Module, *, nested: bool = True) -> list[Sharding]:
    """Return the shardings in a model, outermost first; an empty list for an unwrapped model.

    ``nested=False``: without the shardings of wrappers that are inside of another wrapper.
    """
    # `module.modules()` takes three times as long, because it builds the name of every module.
    found, waiting = dict[Sharding, None](), [module]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ModuleProxy):
            found[sharding_of(inner)] = None
        if nested or not isinstance(inner, ModuleProxy):
            waiting += [one for one in reversed(inner._modules.values()) if one is not None]
    return list(found)


def named_shardings(module: nn.Module) -> dict[Sharding, str]:
    """Return the shardings in a model, outermost first, with the names of the wrapped modules."""
    found: dict[Sharding, str] = {}
    for name, path in paths(module):
        if isinstance(path[-1], ModuleProxy):
            found.setdefault(sharding_of(path[-1]), name)
    return found


def other_roots(shardings: Iterable[Sharding]) -> dict[Sharding, Set[Sharding]]:
    """Return the wrappers of a module that also belong to another model.

    ``shardings``: all wrappers of the module. The values are the outermost wrappers of the other
    models, as long as these wrappers exist.
    """
    inside = dict.fromkeys(shardings)  # so that all ranks name the same wrapper first
    return {one: others for one in inside if (others := one.roots - inside.keys())}


def units_in(module: nn.Module) -> list[Unit]:
    return list(dict.fromkeys(sharding.unit for sharding in shardings_in(module)))


def state_dicts_in(module: nn.Module) -> list[UnitStateDict]:
    return list(dict.fromkeys(sharding.state_dict for sharding in shardings_in(module)))


def handles_in(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for unit in units_in(module) for handle in unit.handles]


def sharded_ids(shardings: Iterable[Sharding]) -> set[int]:
    """Return the ids of the parameters that the units of ``shardings`` own."""
    handles = [handle for sharding in shardings for handle in sharding.unit.handles]
    return {id(param) for handle in handles for param in handle.sharded}


def modules_apart(shardings: Iterable[Sharding], world_size: int) -> set[nn.Module]:
    """Return the modules of the ``shardings`` that fewer than ``world_size`` ranks train.

    Each group of ranks that trains such a unit has different values in the unit's buffers.
    """
    return {
        inner
        for sharding in shardings
        if sharding.settings.ranks.world.size < world_size
        for inner in sharding.wrapper.modules()
    }


def check_not_summoned(units: list[Unit], action: str) -> None:
    """Raise RuntimeError inside of ``summon_full_params``.

    ``action`` completes the message "the model was ...": "copied", for example.
    """
    for unit in units:
        if any(handle.summoned is not None for handle in unit.handles):
            raise RuntimeError(
                f"{unit_text(unit.name)}: the model was {action} under "
                "summon_full_params(). Leave the context first."
            )


def units_between_steps(module: nn.Module, caller: str) -> list[Unit]:
    """Return a model's units. Raises RuntimeError inside of a step or ``summon_full_params``."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: the model must be an nn.Module, got {type(module).__name__}.")
    shardings = shardings_in(module)
    for one in {one.context: one for one in reversed(shardings)}.values():
        one.check_between_steps(caller)
    units = list(dict.fromkeys(one.unit for one in shardings))
    check_not_summoned(units, f"asked for {caller}")
    return units


def model_shards(model: nn.Module, caller: str) -> ModelShards | None:
    """Return this rank's shards of a model, for checkpoints; None for an unwrapped model.

    Collective: all ranks that train the model. If one rank is inside of a step or of
    ``summon_full_params``, all ranks raise that rank's error.
    """
    problem = None
    try:
        units_between_steps(model, caller)
    except RuntimeError as error:
        # Raise the error below, on all ranks together. If only this rank raised, the other ranks
        # would wait for this rank in the next collective.
        problem = error
    parts = state_dicts_in(model)
    if not parts:
        return None
    shards = ModelShards(model, parts)
    # Pass `caller`, the name of the user's call. Deadlock detection reports the name if the other
    # ranks never make the call (for example under `if rank == 0:`).
    raise_everywhere(problem, shards.world, caller)
    return shards
