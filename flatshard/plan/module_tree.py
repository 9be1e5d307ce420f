"""``ModuleTree``: the modules of a model that can be units, and the parameters in them.

[Note: modules that are never units]
A unit's parameters are unsharded only while its own ``forward`` runs. Parameters that other code
reads must belong to an outer unit, whatever a policy chooses. So these modules are never units:

- a module without ``forward`` (``ModuleList``, ``ParameterList``, ...): nothing would unshard it;
- all modules inside a module that passes its children's weights to a function instead of calling
  the children (``MultiheadAttention`` does so with ``out_proj.weight``). The outer module may be a
  unit;
- the modules that ``torch.nn.utils.parametrize`` inserts: an attribute access on the owner runs
  them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from flatshard.plan.ignored import NOTHING, Ignored

# Classes are matched by name along the class hierarchy: torchvision need not be installed, and a
# class may be newer than the oldest torch supported.
_READS_CHILDREN = frozenset(
    {
        "torch.nn.modules.activation.MultiheadAttention",
        "torch.nn.modules.loss.LinearCrossEntropyLoss",
        "torchvision.models.swin_transformer.ShiftedWindowAttention",
        "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d",
    }
)


class ModuleTree:
    """The modules of a model from which a policy may choose units."""

    def __init__(self, root: nn.Module, ignored: Ignored = NOTHING) -> None:
        self.root = root
        self._closed = ignored.modules | _read_by_others(root)
        self.ignored_params = {p for p in ignored.tensors() if isinstance(p, nn.Parameter)}

    def candidates(self) -> Iterator[nn.Module]:
        """Yield each module that can be a unit, once and in post-order."""
        seen = {self.root}

        def visit(module: nn.Module) -> Iterator[nn.Module]:
            for _, child in self.open_children(module):
                if child not in seen:
                    seen.add(child)
                    yield from visit(child)
                    if has_forward(child):
                        yield child

        return visit(self.root)

    def open_children(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Children with parameters that may contain units, with their attribute names."""
        return [
            (name, child)
            for name, child in module.named_children()
            if child not in self._closed
            and any(param not in self.ignored_params for param in child.parameters())
        ]

    def params(self, module: nn.Module) -> set[nn.Parameter]:
        """The parameters of a module and its descendants that are not ignored."""
        return set(module.parameters()) - self.ignored_params


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called."""
    # Static lookup: a scripted module's `forward` is a descriptor that can't be read from its
    # class.
    return inspect.getattr_static(module, "forward", None) is not nn.Module.forward


def numel(params: Iterable[nn.Parameter]) -> int:
    """Elements in all of ``params``."""
    return sum(param.numel() for param in params)


def paths(
    module: nn.Module, name: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield every path to every module: the path's name, and the modules on the path.

    A shared module has several paths.
    """
    chain = (*above, module)
    yield name, chain
    # A module that replaces another module adds nothing to names; see `ModuleProxy`.
    hidden = getattr(module, "hidden_in_names", False)
    for attribute, child in module._modules.items():
        if child is not None and child not in chain:
            below = name if hidden else f"{name}.{attribute}" if name else attribute
            yield from paths(child, below, chain)


@dataclass(frozen=True)
class ParamLocation:
    """One place of a parameter, ``module._parameters[attribute]``, with its name in the model."""

    module: nn.Module
    attribute: str
    name: str


@dataclass
class ParamInfo:
    """An original parameter with all its places. The first place gives the name."""

    param: nn.Parameter
    locations: list[ParamLocation] = field(default_factory=list)
    # The modules that contain all places of the parameter, outermost first. Only these modules can
    # own the parameter: a tied weight belongs to a module around both of its users.
    containers: Sequence[nn.Module] = ()

    @property
    def name(self) -> str:
        return self.locations[0].name


def find_params(module: nn.Module, left_alone: Collection[int] = ()) -> list[ParamInfo]:
    """The parameters of a model in registration order, except those with ids in ``left_alone``."""
    found: dict[int, ParamInfo] = {}
    for path, chain in paths(module):
        inner = chain[-1]
        for attribute, param in inner._parameters.items():
            if param is None or id(param) in left_alone:
                continue
            # Ties are found by identity, so a weight that two units share is stored once.
            info = found.setdefault(id(param), ParamInfo(param, [], chain))
            info.containers = [outer for outer in info.containers if outer in chain]
            # A shared module is on several paths, but counts as one place.
            if all((at.module, at.attribute) != (inner, attribute) for at in info.locations):
                name = f"{path}.{attribute}" if path else attribute
                info.locations.append(ParamLocation(inner, attribute, name))
    return list(found.values())


def find_owners(
    module: nn.Module, unit_modules: Collection[nn.Module], left_alone: Collection[int] = ()
) -> dict[nn.Module, list[ParamInfo]]:
    """Give every parameter to the lowest unit that contains all its users.

    Returns:
        For every unit, ``module`` first, the parameters that the unit owns, in registration order.
        The list may be empty.
    """
    owners: dict[nn.Module, list[ParamInfo]] = {inner: [] for inner in (module, *unit_modules)}
    for info in find_params(module, left_alone):
        owners[next(inner for inner in reversed(info.containers) if inner in owners)].append(info)
    return owners


def _read_by_others(root: nn.Module) -> set[nn.Module]:
    """The modules whose parameters other code may read outside of the modules' own forward."""
    closed: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, ParametrizationList):
            closed.update(module.modules())
        elif any(f"{c.__module__}.{c.__qualname__}" in _READS_CHILDREN for c in type(module).mro()):
            closed.update(inner for inner in module.modules() if inner is not module)
    return closed


def name_of(names: Sequence[str]) -> str:
    """Name of a unit whose modules have these FQNs."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def unit_text(name: str) -> str:
    """Text for a unit of this name in messages; the outermost unit has an empty name."""
    return f"unit {name!r}" if name else "the root unit"


def renamed(name: str, before: Sequence[str], after: Sequence[str]) -> str:
    """Rename a parameter after its unit was renamed.

    ``before`` and ``after`` are the old and the new names of the unit's modules.
    """
    for old, new in zip(before, after, strict=True):
        if not old or name.startswith(f"{old}."):
            local = name.removeprefix(f"{old}.") if old else name
            return f"{new}.{local}" if new else local
    raise AssertionError(f"{name} belongs to none of {', '.join(before)}")
