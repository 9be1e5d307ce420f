"""Modules, parameters and buffers ignored by ``ShardedWrapper``, by the user's choice.

A tensor is ignored in all modules that hold it, or in none. So if an ignored module shares a
parameter with another module (tied weights), the parameter is ignored in both modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Ignored:
    """Modules and tensors that are not sharded, moved, compared between ranks or synchronised."""

    # Ignored modules, with all descendants. All tensors of these modules are ignored.
    modules: frozenset[nn.Module] = frozenset()
    # Ignored parameters and buffers of modules that are not ignored. Stored as module and
    # attribute, and not as tensors, because a conversion (`.to()`, for example) may replace the
    # tensors.
    places: frozenset[tuple[nn.Module, str]] = frozenset()
    # Names, in the unwrapped model, of the modules and tensors that the user chose.
    names: tuple[str, ...] = ()
    # Whether the user chose modules or parameters, but all of them are outside of the wrapped
    # module. Then `ShardedWrapper` warns.
    is_elsewhere: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the ignored parameters and buffers, as the modules hold them now."""
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
        """Return the ignored modules and tensors that lie inside of ``module``.

        The field ``names`` of the result is empty: only the selection for the whole model has
        names, which ranks compare when the model is wrapped.
        """
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
    """Return the modules and tensors to be ignored by the wrapper of ``module``.

    The user passes modules and tensors to ignore in a keyword, or lists names in the attribute
    ``_ddp_params_and_buffers_to_ignore``, as for DistributedDataParallel.

    Args:
        module: the module to wrap.
        ignored_modules: modules from the user's keyword of this name, or None.
        ignored_states: modules and parameters from the user's keyword of this name, or None.
        nested: maps each ShardedWrapper inside ``module`` to what that wrapper ignores.
        sharded: ids of the parameters that ShardedWrappers inside ``module`` have sharded.

    Raises:
        TypeError: a keyword is not an iterable of modules (or parameters).
        ValueError: both keywords are given, or a parameter to ignore is already sharded.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ShardedWrapper: pass either ignored_modules or ignored_states, not both. "
            "ignored_states takes modules and parameters."
        )
    chosen = [
        *_read("ignored_modules", ignored_modules, (nn.Module,)),
        *_read("ignored_states", ignored_states, (nn.Parameter, nn.Module)),
    ]
    # Do not raise if some objects are not in `module`: a user may pass the same list to several
    # wrappers, each of which contains only some of the objects.
    present = {*map(id, module.modules()), *map(id, module.parameters())}
    is_elsewhere = bool(chosen) and present.isdisjoint(map(id, chosen))
    tops = {top for top in chosen if isinstance(top, nn.Module)}
    # Compare tensors by id, because `==` of tensors compares their elements.
    single = {id(tensor) for tensor in chosen if isinstance(tensor, Tensor)}
    single |= _named_for_ddp(module)
    names = []
    for name, inner in module.named_modules():
        if inner in tops:
            _check_apart(name, inner, nested)
            names.append(name)
    first_names: dict[int, str] = {}  # keyed by the tensor's id; a tied tensor has several names
    places = set()
    for name, inner, attribute, tensor in places_in(module):
        first_names.setdefault(id(tensor), name)
        if id(tensor) in single:
            places.add((inner, attribute))
    ignored = Ignored(
        frozenset[nn.Module]().union(
            *(inner.modules() for inner in tops), *(ignored.modules for ignored in nested.values())
        ),
        frozenset(places).union(*(ignored.places for ignored in nested.values())),
        (*names, *(name for key, name in first_names.items() if key in single)),
        is_elsewhere,
    )
    # Raise if a wrapper inside the module has sharded an ignored tensor. A tensor that the inner
    # wrapper ignores is not sharded, and may be ignored here, too.
    twice = ignored.ids() & set(sharded)
    for key, name in first_names.items():
        if key in twice:
            raise ValueError(
                f"ShardedWrapper: parameter {name!r} cannot be ignored, because a unit inside the "
                "model has sharded it already. Let the inner ShardedWrapper ignore the parameter."
            )
    return ignored


def _read(keyword: str, values: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return the ``values`` that the user passed in ``keyword``, as a list.

    Raises:
        TypeError: ``values`` is not an iterable, or contains an object of another kind.
    """
    expected = f"expected an iterable of {' or '.join(kind.__name__ for kind in kinds)}"
    try:
        found = [] if values is None else list(values)
    except TypeError:
        raise TypeError(f"{keyword}: {expected}, got a {type(values).__name__}.") from None
    for position, value in enumerate(found):
        if not isinstance(value, kinds):
            name = type(value).__name__
            raise TypeError(f"{keyword}: {expected}, got a {name} at position {position}.")
    return found


def _check_apart(name: str, module: nn.Module, nested: Mapping[nn.Module, Ignored]) -> None:
    """Raise ValueError if an inner ShardedWrapper shards parameters of an ignored module.

    ``module`` must not be a ShardedWrapper or contain a ShardedWrapper. ``module`` may lie inside a
    ShardedWrapper only if the ShardedWrapper ignores the module, too. ``nested``: the ignored
    modules and tensors of each ShardedWrapper in the model.
    """
    below = set(module.modules())
    for unit, ignored in nested.items():
        if unit in below:
            raise ValueError(
                f"ShardedWrapper: module {name!r} cannot be ignored, because it is or contains a "
                "ShardedWrapper. Ignore only modules that contain no ShardedWrapper."
            )
        if module in set(unit.modules()) - ignored.modules:
            raise ValueError(
                f"ShardedWrapper: module {name!r} cannot be ignored, because it is in a "
                "ShardedWrapper inside the model. Let the inner ShardedWrapper ignore the module."
            )


def _named_for_ddp(module: nn.Module) -> set[int]:
    """Return the ids of the tensors whose names the module lists for DDP to ignore.

    A tied tensor is ignored only if all its names are listed.
    """
    listed = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ignored = {id(tensor) for name, _, _, tensor in places_in(module) if name in listed}
    return ignored - {id(tensor) for name, _, _, tensor in places_in(module) if name not in listed}


def places_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, attribute and tensor of each parameter and buffer in each module.

    A tensor that several modules hold is yielded several times.
    """
    for path, inner in module.named_modules():
        for attribute, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{attribute}" if path else attribute, inner, attribute, tensor
