"""``Sharding``: the state of a wrapper, and functions that find all of them in a model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.engine.context import RunContext
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.hooks import UnitHooks
from flatshard.engine.unit import Unit
from flatshard.module.settings import Settings
from flatshard.plan.ignored import Ignored
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.module_tree import unit_text
from flatshard.state.model_shards import ModelShards
from flatshard.state.model_state import UnitStateDict


@dataclass(eq=False)
class Sharding:
    """One wrapper's part of a sharded model. Wrappers of coalesced modules share a unit."""

    wrapper: ModuleProxy
    unit: Unit
    hooks: UnitHooks
    state_dict: UnitStateDict
    settings: Settings
    ignored: Ignored
    reason: str = ""  # why a policy made it a unit; empty if none did
    # Raises before the first forward if `leave_empty` left values to be loaded and they were not.
    check_loaded: Callable[[nn.Module, Communicator], None] | None = None
    # Whether a `param_init_fn` runs, which is called for the modules of each unit by themselves.
    is_initialising: bool = False
    context: RunContext = dataclasses.field(init=False)  # shared by a model; see `run.start_run`

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """For a copied wrapper: its own unit on the same ranks, in the run of the original."""
        twin = copy.copy(self)
        twin.wrapper, twin.unit = memo[id(self.wrapper)], memo[id(self.unit)]
        twin.hooks = memo[id(self.hooks)]
        twin.state_dict = copy.deepcopy(self.state_dict, memo)
        twin.ignored = copy.deepcopy(self.ignored, memo)
        return twin

    def check_between_steps(self, caller: str) -> RunContext:
        """The model's run; raises RuntimeError while a forward or backward is running."""
        context = self.context
        context.recover()
        if context.is_running:
            raise RuntimeError(
                f"{caller} was called while a forward or backward of "
                f"{self.unit.name or 'the model'!r} is running. Call it between steps."
            )
        return context

    def check_not_summoned(self, action: str) -> None:
        """Raise inside ``summon_full_params``."""
        for unit in units_in(self.wrapper):
            if any(handle.summoned is not None for handle in unit.handles):
                raise RuntimeError(
                    f"{unit_text(unit.name)}: the model was {action} under "
                    "summon_full_params(). Leave the context first."
                )

    def check_has_all_modules(self, action: str) -> None:
        """Raise if this wrapper contains only some of the modules of a coalesced unit."""
        inside = set(self.wrapper.modules())
        for unit in units_in(self.wrapper):
            if not inside.issuperset(unit.modules):
                name = self.unit.names[list(self.unit.modules).index(self.wrapper.module)]
                raise RuntimeError(
                    f"{unit_text(unit.name)}: {name!r} cannot be {action} alone: it is small and "
                    "coalesced with its neighbours. Do it with the outermost wrapper, or wrap with "
                    "coalesce_bytes=0."
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


def shardings_in(module: nn.Module) -> list[Sharding]:
    """The shardings in a model, outermost first; none in an unwrapped model."""
    return [sharding_of(inner) for inner in module.modules() if isinstance(inner, ModuleProxy)]


def outermost_shardings(module: nn.Module) -> list[Sharding]:
    """The shardings of wrappers that no other wrapper contains."""
    if isinstance(module, ModuleProxy):
        return [sharding_of(module)]
    found = [one for child in module.children() for one in outermost_shardings(child)]
    return list(dict.fromkeys(found))


def units_in(module: nn.Module) -> list[Unit]:
    return list(dict.fromkeys(sharding.unit for sharding in shardings_in(module)))


def state_dicts_in(module: nn.Module) -> list[UnitStateDict]:
    return list(dict.fromkeys(sharding.state_dict for sharding in shardings_in(module)))


def handles_in(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for unit in units_in(module) for handle in unit.handles]


def modules_apart(module: nn.Module, world_size: int) -> set[nn.Module]:
    """The modules of units that train on fewer ranks: each group has buffers of its own."""
    return {
        inner
        for sharding in shardings_in(module)
        if sharding.settings.ranks.world.size < world_size
        for inner in sharding.wrapper.modules()
    }


def units_between_steps(module: nn.Module, caller: str) -> list[Unit]:
    """The units of a model, after a check that no step or summon is running."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: expected a model first, got {type(module).__name__}")
    for one in shardings_in(module):
        one.check_between_steps(caller)
    for one in outermost_shardings(module):
        one.check_not_summoned(f"asked for {caller}")
    return units_in(module)


def model_shards(model: nn.Module, caller: str) -> ModelShards | None:
    """The shards of a model for its files; None for an unwrapped model.

    Collective: all ranks that train the model. If one rank is inside a step or a summon, all ranks
    raise the error of that rank.
    """
    problem = None
    try:
        units_between_steps(model, caller)
    except RuntimeError as error:
        # Raised here, the error would leave the other ranks waiting for this rank.
        problem = error
    parts = state_dicts_in(model)
    if not parts:
        return None
    shards = ModelShards(model, parts)
    # If other ranks never call this (`if rank == 0:`), deadlock detection finds it here.
    raise_everywhere(problem, shards.world, caller)
    return shards
