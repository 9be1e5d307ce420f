"""``ModuleHook``: how the modules of a unit call it."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch


class Hooked(Protocol):
    """What a hook asks of the unit that it calls."""

    def refuse_to_part(self) -> NoReturn:
        """Raise for a copy of the module without its wrapper."""


class ModuleHook:
    """A method of a unit as a hook of its module; copies with the unit, or not at all."""

    def __init__(self, unit: Hooked, method: str) -> None:
        self._unit = unit
        self._method = method
        # Compiled callers run it as it is, between two graphs.
        self._call = torch.compiler.disable(getattr(unit, method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        unit = memo.get(id(self._unit))
        return ModuleHook(unit if unit is not None else self._unit.refuse_to_part(), self._method)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._unit.refuse_to_part()
