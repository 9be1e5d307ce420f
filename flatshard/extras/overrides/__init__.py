"""Extra: gives chosen modules and parameters another dtype (``MixedPrecision(overrides=...)``).

Without this folder, ``MixedPrecision(overrides=...)`` raises MissingExtraError. The option
``MixedPrecision.module_classes_to_ignore`` does not need this extra.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from flatshard.options.precision import MixedPrecision, is_float_dtype
from flatshard.precision import Override
from flatshard.units.module_proxy import is_sharded
from flatshard.units.module_tree import paths


def as_overrides(value: object) -> dict[str, torch.dtype]:
    """Check a value of ``MixedPrecision.overrides``, and return a copy."""
    if not isinstance(value, Mapping):
        raise TypeError(
            "MixedPrecision: overrides must be a mapping of name patterns to dtypes, got "
            f"{value!r}. To use a function, call it for each name in model.named_parameters()."
        )
    for pattern, dtype in value.items():
        if not isinstance(pattern, str) or not is_float_dtype(dtype):
            raise TypeError(
                "MixedPrecision: overrides must map name patterns to floating point dtypes, "
                f"got {pattern!r}: {dtype!r}."
            )
    return dict(value)


class ChosenDtypes:
    """The dtypes that ``MixedPrecision(overrides=...)`` chooses for modules and parameters."""

    def __init__(self, module: nn.Module, precisions: Iterable[MixedPrecision]) -> None:
        """Find the names of the modules in ``module``. ``precisions``: all units' settings."""
        self._unmatched = {  # patterns that have matched no name yet
            pattern for precision in precisions for pattern in precision.overrides or ()
        }
        # All names of each module. A pattern may match any of the names of a shared module.
        self._names: dict[nn.Module, list[str]] = {}
        for name, modules in paths(module):
            if not any(map(is_sharded, modules)):
                self._names.setdefault(modules[-1], []).append(name)

    def of_module(self, module: nn.Module, precision: MixedPrecision) -> Override | None:
        """Return the ``Override`` that a pattern chooses for ``module``, or None."""
        return self._by_name(self._names[module], precision, module.parameters())

    def of_param(
        self, module: nn.Module, attribute: str, param: nn.Parameter, precision: MixedPrecision
    ) -> Override | None:
        """Return the ``Override`` that a pattern chooses for ``param``, or None."""
        names = [f"{name}.{attribute}" if name else attribute for name in self._names[module]]
        return self._by_name(names, precision, [param])

    def _by_name(
        self, names: list[str], precision: MixedPrecision, params: Iterable[nn.Parameter]
    ) -> Override | None:
        for pattern, dtype in (precision.overrides or {}).items():
            if any(fnmatchcase(name, pattern) for name in names):
                self._unmatched.discard(pattern)
                # Two parameters can share a flat parameter only if their overrides are equal. So
                # every parameter that already has its pattern's dtype gets the same `Override`.
                dtypes = {param.dtype for param in params if param.is_floating_point()}
                return Override(None if dtypes == {dtype} else dtype)
        return None

    def warnings(self) -> list[str]:
        """Return warnings about settings without an effect, such as patterns without a match."""
        return [
            f"mixed_precision: overrides names {pattern!r}, which matches no module or parameter. "
            "Use names as in named_parameters() before wrapping."
            for pattern in sorted(self._unmatched)
        ]
