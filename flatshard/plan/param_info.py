"""Which unit owns which parameter, and at which places in the model a parameter stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from flatshard.plan.boundary import Boundary, move
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
    # The modules that contain all its places, outermost first. Only these can hold it: a tied
    # weight belongs to none of the modules that it is tied between.
    containers: Sequence[nn.Module] = ()

    @property
    def name(self) -> str:
        return self.locations[0].name


def layout_of(
    owned: Sequence[ParamInfo], world_size: int, boundary: Boundary, first: int
) -> FlatLayout:
    """The layout of a flat parameter of these, over ``world_size`` shards; see ``move``."""
    params = [one.param for one in owned]
    layout = FlatLayout.build(
        ((one.name, one.param.shape) for one in owned),
        world_size=world_size,
        itemsize=params[0].element_size(),
        orders=[memory_order(param.shape, param.stride()) for param in params],
    )
    return move(layout, boundary, params[0].element_size(), first)


def find_params(root: nn.Module, left_alone: Collection[int] = ()) -> list[ParamInfo]:
    """The parameters of a model in registration order, without those whose ids are given."""
    found: dict[int, ParamInfo] = {}
    for path, chain in paths(root):
        module = chain[-1]
        for attribute, param in module._parameters.items():
            if param is None or id(param) in left_alone:
                continue
            # Ties are found by identity, so a weight that two units share is stored once.
            one = found.setdefault(id(param), ParamInfo(param, [], chain))
            one.containers = [container for container in one.containers if container in chain]
            # A shared module is on several paths, and is one place.
            if all((at.module, at.attribute) != (module, attribute) for at in one.locations):
                name = f"{path}.{attribute}" if path else attribute
                one.locations.append(ParamLocation(module, attribute, name))
    return list(found.values())


def find_owners(
    root: nn.Module, unit_modules: Collection[nn.Module], left_alone: Collection[int] = ()
) -> dict[nn.Module, list[ParamInfo]]:
    """Give every parameter to the lowest unit that contains all its users.

    Returns:
        For every unit, ``root`` first, what it owns in registration order; may be nothing.
    """
    owners: dict[nn.Module, list[ParamInfo]] = {unit: [] for unit in (root, *unit_modules)}
    for one in find_params(root, left_alone):
        owners[next(unit for unit in reversed(one.containers) if unit in owners)].append(one)
    return owners
