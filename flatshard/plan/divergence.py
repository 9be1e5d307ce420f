"""Divergence: modules that ranks may skip in a step, or run in another order than other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TypeAlias

from torch import nn

Divergence: TypeAlias = bool | Iterable[type[nn.Module] | str | nn.Module]
"""All units, or what contains them: classes, names in the unwrapped model, modules."""


def find_divergent(root: nn.Module, allowed: Divergence) -> Set[nn.Module]:
    """The modules that ``allow_divergence`` names, with all inside them.

    Raises:
        TypeError: ``allowed`` is none of these.
        ValueError: a class or a name is not in the model.
    """
    expected = "allow_divergence: expected True, or a list of classes, names and modules"
    if isinstance(allowed, bool):
        return set(root.modules()) if allowed else set()
    if isinstance(allowed, str | type) or not isinstance(allowed, Iterable):
        raise TypeError(f"{expected}, got {allowed!r}")
    named = dict(root.named_modules())
    found: set[nn.Module] = set()
    for one in allowed:
        if isinstance(one, str):
            tops = [named[one]] if one in named else []
        elif isinstance(one, type) and issubclass(one, nn.Module):
            tops = [module for module in named.values() if isinstance(module, one)]
        elif isinstance(one, nn.Module):
            tops = [module for module in named.values() if module is one]
        else:
            raise TypeError(f"{expected}, got {one!r} in it")
        if not tops:
            what = f"the {type(one).__name__}" if isinstance(one, nn.Module) else repr(one)
            raise ValueError(
                f"allow_divergence: {what} is not in the {type(root).__name__} that is wrapped. "
                "Names are those of named_modules() before wrapping."
            )
        found.update(inner for module in tops for inner in module.modules())
    return found
