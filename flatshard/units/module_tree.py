"""``ModuleTree``: the modules of a model that can be units, with the parameters in these modules.

[Note: modules that are never units]
A unit's parameters are unsharded only while the ``forward`` of the unit's module runs. If other
code reads a parameter, the parameter must belong to an outer unit. So three kinds of modules are
never units:

- A module without ``forward`` (``ModuleList``, ``ParameterList``, ...).
- All modules inside a module that reads weights of children instead of calling the children:
  ``MultiheadAttention``, for example, passes ``out_proj.weight`` to a function.
- Modules inserted by ``torch.nn.utils.parametrize``, which run when code reads an attribute.
"""

import inspect
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

# Names of classes that, like their subclasses, read weights of child modules. Names instead of the
# classes: torchvision may not be installed, and older versions of torch lack some of the classes.
_READS_CHILDREN = {
    "torch.nn.modules.activation.MultiheadAttention",
    "torch.nn.modules.loss.LinearCrossEntropyLoss",
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d",
}


@dataclass(frozen=True)
class Ignored:
    """Modules and tensors that are not sharded, moved, compared between ranks or synchronised.

    If an ignored module shares a parameter with another module (tied weights), the parameter is
    ignored in both modules.
    """

    # Ignored modules, with all descendants. All tensors of these modules are ignored.
    modules: frozenset[nn.Module] = frozenset()
    # Ignored parameters and buffers of other modules, as (module, attribute): a conversion such as
    # `.to()` may replace the tensors themselves.
    places: frozenset[tuple[nn.Module, str]] = frozenset()
    names: tuple[str, ...] = ()  # names of the modules and tensors that the user chose
    is_elsewhere: bool = False  # whether the user's choices are all outside of the wrapped module

    def tensors(self) -> Iterator[Tensor]:
        """Yield the ignored parameters and buffers that the modules have now."""
        for module in self.modules:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
        for module, attribute in self.places:
            tensor = module._parameters.get(attribute, module._buffers.get(attribute))
            if tensor is not None:
                yield tensor

    def ids(self) -> set[int]:
        return {id(tensor) for tensor in self.tensors()}

    def within(self, modules: Iterable[nn.Module]) -> "Ignored":
        """Return the ignored modules and tensors inside of ``modules``, without names."""
        inside = {inner for module in modules for inner in module.modules()}
        places = frozenset(place for place in self.places if place[0] in inside)
        return Ignored(self.modules & inside, places)


NOTHING = Ignored()


def places_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, attribute and tensor of each parameter and buffer in each module."""
    for path, inner in module.named_modules():
        for attribute, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{attribute}" if path else attribute, inner, attribute, tensor


class ModuleTree:
    """The modules of a model that a policy may choose as units."""

    def __init__(self, module: nn.Module, ignored: Ignored = NOTHING) -> None:
        self.module, self.ignored = module, ignored
        self._closed = ignored.modules | _read_by_others(module)
        self.ignored_params = {p for p in ignored.tensors() if isinstance(p, nn.Parameter)}

    def candidates(self) -> Iterator[nn.Module]:
        """Yield the modules that can be units, each module once, children before parents."""
        seen = {self.module}

        def visit(module: nn.Module) -> Iterator[nn.Module]:
            for _, child in self.open_children(module):
                if child not in seen:
                    seen.add(child)
                    yield from visit(child)
                    if has_forward(child):
                        yield child

        return visit(self.module)

    def open_children(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the children that may be units or contain units, with their attribute names."""
        children = (pair for pair in module.named_children() if pair[1] not in self._closed)
        return [(name, child) for name, child in children if self.params(child)]

    def params(self, module: nn.Module) -> set[nn.Parameter]:
        return set(module.parameters()) - self.ignored_params


def has_forward(module: nn.Module) -> bool:
    """Whether the module defines ``forward``, so that it can be called."""
    # Use `getattr_static`: in a scripted module, `forward` is a descriptor that cannot be read from
    # the class.
    return inspect.getattr_static(module, "forward", None) is not nn.Module.forward


def numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def paths(
    module: nn.Module, name: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield every path from ``module`` to an inner module: the name, and the path's modules."""
    modules = (*above, module)
    yield name, modules
    # Names do not contain the attribute `module` of a `ModuleProxy`.
    hidden = getattr(module, "hidden_in_names", False)
    for attribute, child in module._modules.items():
        if child is not None and child not in modules:
            below = name if hidden else f"{name}.{attribute}" if name else attribute
            yield from paths(child, below, modules)


@dataclass(frozen=True)
class ParamLocation:
    """A location of a parameter: ``module._parameters[attribute]``, with the FQN ``name``."""

    module: nn.Module
    attribute: str
    name: str


@dataclass
class ParamInfo:
    """An original parameter, and its locations in the model. The first location gives the name."""

    param: nn.Parameter
    locations: list[ParamLocation] = field(default_factory=list)
    # The modules that contain all locations of the parameter, outermost first. The parameter must
    # belong to one of these modules, so that a tied weight is unsharded for all its users.
    containers: Sequence[nn.Module] = ()

    @property
    def name(self) -> str:
        return self.locations[0].name

    def owner(self, units: Container[nn.Module]) -> nn.Module:
        """Return the innermost module of ``units`` that contains all users of the parameter."""
        return next(module for module in reversed(self.containers) if module in units)


def find_params(module: nn.Module, left_alone: Collection[int] = ()) -> list[ParamInfo]:
    """Return a model's parameters in registration order. ``left_alone``: ids of omitted tensors."""
    found: dict[int, ParamInfo] = {}
    for path, modules in paths(module):
        inner = modules[-1]
        for attribute, param in inner._parameters.items():
            if param is None or id(param) in left_alone:
                continue
            # Identify parameters by id, so that a weight with several users is stored once.
            info = found.setdefault(id(param), ParamInfo(param, [], modules))
            info.containers = [module for module in info.containers if module in modules]
            # Add each location once, although a shared module has several paths to the location.
            if all((at.module, at.attribute) != (inner, attribute) for at in info.locations):
                name = f"{path}.{attribute}" if path else attribute
                info.locations.append(ParamLocation(inner, attribute, name))
    return list(found.values())


def _read_by_others(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose parameters other code may read without calling the module."""
    closed: set[nn.Module] = set()
    for inner in module.modules():
        classes = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(inner).mro()}
        if isinstance(inner, ParametrizationList):
            closed.update(inner.modules())
        elif classes & _READS_CHILDREN:
            closed.update({*inner.modules()} - {inner})
    return closed


def name_of(names: Sequence[str]) -> str:
    """Return the name of a unit whose modules have the FQNs ``names``."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def unit_text(name: str) -> str:
    """Return the text by which messages name a unit."""
    return f"unit {name!r}" if name else "the root unit"


def renamed(name: str, before: Sequence[str], after: Sequence[str]) -> str:
    """Return a parameter's name after its modules' names change from ``before`` to ``after``."""
    for old, new in zip(before, after, strict=True):
        if not old or name.startswith(f"{old}."):
            local = name.removeprefix(f"{old}.") if old else name
            return f"{new}.{local}" if new else local
    raise AssertionError(f"internal error: parameter {name!r} is in none of the modules {before}")
