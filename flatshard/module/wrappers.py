"""Finds the units, their modules and flat parameters, and the wrappers in a model."""

from collections.abc import Callable, Iterable, Iterator, Set

from torch import nn

from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.state.model_state import UnitStateDict
from flatshard.units.module_proxy import UNIT, ModuleProxy
from flatshard.units.module_tree import paths, unit_text


def unit_of(wrapper: ModuleProxy) -> Unit:
    # `_orig_mod`: the program may have set `model.module = torch.compile(model.module)`.
    return wrapper.module.__dict__.get(UNIT) or wrapper.module._orig_mod.__dict__[UNIT]


def modules_below(module: nn.Module, ends: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield ``module`` and all modules and wrappers in it, outermost first.

    A shared module may be yielded several times. Does not enter modules for which ``ends`` is true.
    """
    # `module.modules()` would take three times as long, because it builds all modules' names.
    waiting = [module]
    while waiting:
        inner = waiting.pop()
        yield inner
        if not ends(inner):
            waiting += [one for one in reversed(inner._modules.values()) if one is not None]


def wrappers_in(module: nn.Module) -> list[ModuleProxy]:
    """Return the wrappers in a model, outermost first. Units made by a policy have no wrapper."""
    found = modules_below(module, lambda _: False)
    return list(dict.fromkeys(one for one in found if isinstance(one, ModuleProxy)))


def unit_modules(module: nn.Module, *, nested: bool = True) -> dict[nn.Module, Unit]:
    """Return the modules of units in a model, outermost first, with their units.

    ``nested=False``: leave out the modules that are inside of another module of a unit.
    """
    found = modules_below(module, lambda one: not nested and UNIT in one.__dict__)
    return {one: one.__dict__[UNIT] for one in found if UNIT in one.__dict__}


def named_unit_modules(module: nn.Module) -> dict[nn.Module, str]:
    """Return the names of the modules of units, the outermost module first."""
    found: dict[nn.Module, str] = {}
    for name, path in paths(module):
        if UNIT in path[-1].__dict__:
            found.setdefault(path[-1], name)
    return found


def other_roots(module: nn.Module) -> dict[Unit, Set[nn.Module]]:
    """Return the units that are also in other models, with the other models' outermost wrappers."""
    inside = wrappers_in(module)
    # Use a dict, which has the same order on all ranks. Then all ranks' errors name the same unit.
    return {unit: others for unit in units_in(module) if (others := unit.roots.difference(inside))}


def units_in(module: nn.Module, *, nested: bool = True) -> list[Unit]:
    return list(dict.fromkeys(unit_modules(module, nested=nested).values()))


def state_dicts_in(module: nn.Module) -> list[UnitStateDict]:
    return [unit.state_dict for unit in units_in(module)]


def handles_in(module: nn.Module) -> list[FlatParamHandle]:
    return [handle for unit in units_in(module) for handle in unit.handles]


def modules_apart(units: Iterable[Unit], world_size: int) -> set[nn.Module]:
    """Return the modules that groups of fewer than ``world_size`` ranks train separately."""
    apart = (unit for unit in units if unit.topology.world.size < world_size)
    return {inner for unit in apart for module in unit.modules for inner in module.modules()}


def check_not_summoned(units: Iterable[Unit], action: str) -> None:
    """Raise RuntimeError if any of ``units`` is inside of ``summon_full_params``."""
    for unit in units:
        if any(handle.summoned is not None for handle in unit.handles):
            raise RuntimeError(
                f"{unit_text(unit.name)}: the model was {action} under summon_full_params(). "
                "Leave the context first."
            )


def units_between_steps(module: nn.Module, caller: str, *, nested: bool = True) -> list[Unit]:
    """Return a model's units. Raises RuntimeError during a step or in ``summon_full_params``."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: the model must be an nn.Module, got {type(module).__name__}.")
    units = units_in(module, nested=nested)
    for context in dict.fromkeys(unit.context for unit in reversed(units)):
        context.check_between_steps(caller)
    check_not_summoned(units, f"asked for {caller}")
    return units
