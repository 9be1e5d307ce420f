"""Counts assignments of modules and parameters to watched modules, which may add parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_count = 0


def watch(modules: Iterable[nn.Module]) -> None:
    """Count assignments to these modules from now on."""
    _watched.update(modules)
    _install()


@functools.cache
def _install() -> None:
    # At the first call, not at import: the hooks slow down every assignment to any module.
    register_module_module_registration_hook(_registered)
    register_module_parameter_registration_hook(_registered)


def count() -> int:
    """Number of modules and parameters assigned to watched modules so far."""
    return _count


def _registered(module: nn.Module, name: str, value: object) -> None:
    """Global hook of torch, which is about to register ``value``."""
    global _count
    # Traced by Dynamo, the look into the set would be an error; what is traced adds no parameters.
    if not torch.compiler.is_compiling() and module in _watched:
        _count += 1
