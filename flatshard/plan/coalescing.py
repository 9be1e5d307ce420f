"""Coalescing: which small units go together, and which large parameters of the root do not.

Small all-gathers are latency-bound. Units that follow one another in a policy's plan mostly run one
after the other: together they need one collective, and a rank holds a little more for it.

Source: DeepSpeed's ``stage3_module_granularity_threshold`` does likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from flatshard.plan.param_info import ParamInfo
from flatshard.plan.wrap import UnitPlan

# From this size on a collective is bound by bandwidth, and worth one of its own.
LARGE_BYTES = 4 << 20


def coalesce(
    plans: Iterable[UnitPlan],
    owners: Mapping[nn.Module, list[ParamInfo]],
    max_bytes: int,
    settings_of: Mapping[nn.Module, Any],
) -> list[list[UnitPlan]]:
    """Put neighbours together that agree in settings and kinds of parameters.

    ``plans`` are in the order of the model; those that own nothing are left out. ``max_bytes``
    bounds the parameters of units that are coalesced.
    """
    plans = [plan for plan in plans if owners[plan.module]]
    modules = {plan.module for plan in plans}
    groups: list[list[UnitPlan]] = []
    total, last = 0, None
    for plan in plans:
        params = [owned.param for owned in owners[plan.module]]
        nbytes = sum(map(_nbytes, params))
        # Units of different kinds would need more collectives together, not fewer.
        kinds = {(param.dtype, param.requires_grad) for param in params}
        # A unit around others runs while they do, and not before or after them.
        is_around = any(inner in modules for inner in plan.module.modules() if inner != plan.module)
        this = None if is_around else (settings_of[plan.module], kinds)
        if this is not None and this == last and total + nbytes <= max_bytes:
            groups[-1].append(plan)
            total += nbytes
        else:
            groups.append([plan])
            total, last = nbytes, this
    return groups


def is_apart(param: nn.Parameter) -> bool:
    """Whether a parameter of the root is reduced by itself."""
    # The root often holds an embedding, whose gradient comes last, and a head, whose gradient comes
    # first. Apart, the head's is reduced while the units compute.
    return param.requires_grad and _nbytes(param) >= LARGE_BYTES


def _nbytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()
