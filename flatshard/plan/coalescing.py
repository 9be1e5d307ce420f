"""Which small units go together, and which large parameters of the root do not.

A collective of a few kilobytes costs what its beginning and its end cost, on every rank. Units that
follow one another in a policy's plan mostly run one after the other: together they need one
collective, and a rank holds a little more for it.

Source: DeepSpeed's ``stage3_module_granularity_threshold`` does likewise.

[Note: the root's large parameters]
The root holds what no unit inside it does: often an embedding, whose gradient comes last, and a
head, whose gradient comes first. Each has a flat parameter of its own, so that the head's gradient
is reduced while the units compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from torch import nn

from flatshard.plan.param_info import ParamInfo
from flatshard.plan.wrap import UnitPlan

LARGE_BYTES = 4 << 20
"""From which on a collective takes long enough to be worth one of its own."""


def coalesce(
    plans: Iterable[UnitPlan],
    owners: dict[nn.Module, list[ParamInfo]],
    max_bytes: int,
    kind: Callable[[UnitPlan], Any],
) -> list[list[UnitPlan]]:
    """Put neighbours together.

    Args:
        plans: a policy's units, in the order of the model; those that own nothing are left out.
        owners: what each owns.
        max_bytes: the most that the parameters of several units together may take, in bytes.
        kind: what units must have in common to go together.

    Returns:
        The units, each with those that share its collectives; mostly alone.
    """
    plans = [plan for plan in plans if owners[plan.module]]
    around = _around_others(plans)
    groups: list[list[UnitPlan]] = []
    total, last = 0, None
    for plan in plans:
        owned = owners[plan.module]
        nbytes = sum(one.param.numel() * one.param.element_size() for one in owned)
        # One that is around others runs while they do, and not before or after them.
        this = None if plan.module in around else (kind(plan), _kinds(owned))
        if this is not None and this == last and total + nbytes <= max_bytes:
            groups[-1].append(plan)
            total += nbytes
        else:
            groups.append([plan])
            total, last = nbytes, this
    return groups


def is_apart(param: nn.Parameter) -> bool:
    """Whether a parameter of the root is reduced by itself."""
    return param.requires_grad and param.numel() * param.element_size() >= LARGE_BYTES


def _kinds(owned: Sequence[ParamInfo]) -> Hashable:
    """The flat parameters that a unit has; others would be more collectives, not fewer."""
    return frozenset((one.param.dtype, one.param.requires_grad) for one in owned)


def _around_others(plans: Sequence[UnitPlan]) -> set[nn.Module]:
    units = {plan.module for plan in plans}
    return {
        module for module in units if any(one in units for one in module.modules() if one != module)
    }
