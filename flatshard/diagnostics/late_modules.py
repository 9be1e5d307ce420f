"""Counts what is assigned to the modules of models: one may have parts that it had not before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_count = 0
_installed = False


def watch(modules: Iterable[nn.Module]) -> None:
    """Count what is assigned to these from now on."""
    global _installed
    _watched.update(modules)
    if not _installed:
        register_module_module_registration_hook(_registered)
        register_module_parameter_registration_hook(_registered)
        _installed = True


def count() -> int:
    """How many modules and parameters were assigned to any that are watched."""
    return _count


def _registered(module: nn.Module, name: str, value: object) -> None:
    """Global hook: torch is about to register ``value``."""
    global _count
    if module in _watched:
        _count += 1
