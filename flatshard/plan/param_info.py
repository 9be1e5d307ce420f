"""Which unit owns which parameter, and at which places in the model a parameter stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from flatshard.plan.layout import FlatLayout, memory_order
from flatshard.plan.module_tree import paths


@dataclass(frozen=True)
class ParamLocation:
    """One place of a parameter: ``module._parameters[attribute]``, and its name in the model."""

    module: nn.Module
    attribute: str
    name: str


@dataclass
class ParamInfo:
    """An original parameter with all its places; the first one names it."""

    param: nn.Parameter
    locations: list[ParamLocation] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.locations[0].name


def layout_of(owned: Sequence[ParamInfo], world_size: int) -> FlatLayout:
    """The layout of a flat parameter of these, over ``world_size`` shards."""
    params = [one.param for one in owned]
    return FlatLayout.build(
        ((one.name, one.param.shape) for one in owned),
        world_size=world_size,
        itemsize=params[0].element_size(),
        orders=[memory_order(param.shape, param.stride()) for param in params],
    )


def find_owners(
    root: nn.Module, unit_modules: Collection[nn.Module], taken: Collection[int] = ()
) -> dict[nn.Module, list[ParamInfo]]:
    """Give every parameter to the lowest unit that contains all its users.

    Ties are found by identity, so a weight shared by two units is stored once, in the unit that
    contains both.

    Args:
        root: the outermost unit.
        unit_modules: the units below it.
        taken: ids of parameters that a unit owns already.

    Returns:
        For every unit, ``root`` first, what it owns in registration order; may be nothing.
    """
    owners: dict[nn.Module, list[ParamInfo]] = {unit: [] for unit in (root, *unit_modules)}
    found: dict[int, ParamInfo] = {}
    common: dict[int, list[nn.Module]] = {}
    for path, chain in paths(root):
        module = chain[-1]
        enclosing = [ancestor for ancestor in chain if ancestor in owners]
        for attribute, param in module._parameters.items():
            if param is None or id(param) in taken:
                continue
            owned = found.setdefault(id(param), ParamInfo(param))
            name = f"{path}.{attribute}" if path else attribute
            # A shared module is on several paths, and is one place.
            if all((at.module, at.attribute) != (module, attribute) for at in owned.locations):
                owned.locations.append(ParamLocation(module, attribute, name))
            # Outermost first, so the last unit that all places have in common is the lowest.
            before = common.get(id(param), enclosing)
            common[id(param)] = [unit for unit in before if unit in enclosing]
    for key, owned in found.items():
        owners[common[key][-1]].append(owned)
    return owners
