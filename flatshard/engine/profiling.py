"""Labels in profiles, which cost nothing while nobody profiles."""

from __future__ import annotations

import contextlib

import torch

_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def profiled(what: str, unit_name: str) -> contextlib.AbstractContextManager[object]:
    """A range ``flatshard::what (unit)`` in the profile under way, if there is one."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"flatshard::{what} ({unit_name or 'root'})")
