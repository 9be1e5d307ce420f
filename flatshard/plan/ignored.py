"""Modules, parameters and buffers that a wrapper ignores.

A tensor is ignored wherever it appears: if a parameter of an ignored module is also in another
module (tied weights), it is ignored there, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Ignored:
    """Modules and tensors that are not sharded, moved, compared between ranks, or synchronised."""

    # Ignored modules with all their tensors. The set contains their descendants as well.
    modules: frozenset[nn.Module] = frozenset()
    # Single parameters and buffers, by module and attribute: a conversion such as `.to()` replaces
    # the tensor objects.
    places: frozenset[tuple[nn.Module, str]] = frozenset()
    # The user's choice, by names in the unwrapped model.
    names: tuple[str, ...] = ()
    # Whether the user chose objects of which none is in the wrapped module.
    is_elsewhere: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the present ignored parameters and buffers."""
        for module in self.modules:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
        for module, attribute in self.places:
            tensor = module._parameters.get(attribute, module._buffers.get(attribute))
            if tensor is not None:
                yield tensor

    def ids(self) -> set[int]:
        return {id(tensor) for tensor in self.tensors()}

    def within(self, module: nn.Module) -> Ignored:
        """The part of this within ``module``, without the user's names."""
        inside = set(module.modules())
        places = frozenset(place for place in self.places if place[0] in inside)
        return Ignored(self.modules & inside, places)


NOTHING = Ignored()


def find_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None,
    *,
    nested: Mapping[nn.Module, Ignored],
    sharded: Collection[int],
) -> Ignored:
    """Collect the modules and tensors that the user and DistributedDataParallel's attribute ignore.

    ``nested`` maps each wrapper inside ``module`` to its ignored objects. ``sharded`` holds the ids
    of the parameters that units inside ``module`` own.

    Raises:
        TypeError: a keyword is no iterable of such objects.
        ValueError: both keywords are given; a parameter to ignore is already sharded.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ShardedWrapper: pass either ignored_modules or ignored_states, not both; "
            "ignored_states takes modules and parameters"
        )
    chosen = [
        *_read("ignored_modules", ignored_modules, (nn.Module,)),
        *_read("ignored_states", ignored_states, (nn.Parameter, nn.Module)),
    ]
    # A user may pass one list to several wrappers, each of which contains only a part of the listed
    # objects.
    present = {id(one) for one in (*module.modules(), *module.parameters())}
    is_elsewhere = bool(chosen) and not any(id(one) in present for one in chosen)
    tops = {one for one in chosen if isinstance(one, nn.Module)}
    # Compare ids: `==` of tensors compares element by element.
    single = {id(one) for one in chosen if isinstance(one, Tensor)} | _named_for_ddp(module)
    names = []
    for name, inner in module.named_modules():
        if inner in tops:
            _check_apart(name, inner, nested)
            names.append(name)
    first_names: dict[int, str] = {}  # a tied tensor is named once
    places = set()
    for name, inner, attribute, tensor in _places(module):
        first_names.setdefault(id(tensor), name)
        if id(tensor) in single:
            places.add((inner, attribute))
    ignored = Ignored(
        frozenset(below for inner in tops for below in inner.modules()).union(
            *(inner.modules for inner in nested.values())
        ),
        frozenset(places).union(*(inner.places for inner in nested.values())),
        (*names, *(name for key, name in first_names.items() if key in single)),
        is_elsewhere,
    )
    # `ignored` includes the ignored tensors of inner wrappers, which are not sharded. Only tensors
    # that inner wrappers own are an error.
    twice = ignored.ids() & set(sharded)
    for key, name in first_names.items():
        if key in twice:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} is to be ignored, but a unit inside the model "
                "has sharded it already. Let the inner ShardedWrapper ignore it."
            )
    return ignored


def _read(keyword: str, values: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Check and return the objects of a keyword."""
    expected = f"expected an iterable of {' or '.join(kind.__name__ for kind in kinds)}"
    try:
        found = [] if values is None else list(values)
    except TypeError:
        raise TypeError(f"{keyword}: {expected}, got a {type(values).__name__}") from None
    for position, value in enumerate(found):
        if not isinstance(value, kinds):
            name = type(value).__name__
            raise TypeError(f"{keyword}: {expected}, got a {name} at position {position}")
    return found


def _check_apart(name: str, module: nn.Module, nested: Mapping[nn.Module, Ignored]) -> None:
    """Raise ValueError if a module to ignore contains a unit, or is part of a unit."""
    below = set(module.modules())
    for unit, theirs in nested.items():
        if unit in below:
            raise ValueError(
                f"ShardedWrapper: module {name!r} is to be ignored, but it is or contains a "
                "ShardedWrapper. Ignore what is beside that instead."
            )
        if module in set(unit.modules()) - theirs.modules:
            raise ValueError(
                f"ShardedWrapper: module {name!r} is to be ignored, but it is in a ShardedWrapper "
                "inside the model. Let that one ignore it."
            )


def _named_for_ddp(module: nn.Module) -> set[int]:
    """Ids of the tensors that DistributedDataParallel must ignore under all their names."""
    listed = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ignored = {id(tensor) for name, _, _, tensor in _places(module) if name in listed}
    return ignored - {id(tensor) for name, _, _, tensor in _places(module) if name not in listed}


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every place of a parameter or buffer: its name, the module, the attribute, the tensor."""
    for path, inner in module.named_modules():
        for attribute, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{attribute}" if path else attribute, inner, attribute, tensor
