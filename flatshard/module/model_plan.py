"""``ModelPlan``: the units that a module will consist of, and their flat parameters.

It changes nothing, reads no values and does not communicate: the model may be on the meta device.
``construction`` makes the planned units, and ``memory_plan`` sums up their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard.module.inspection import UnwrappedModel
from flatshard.module.settings import Settings
from flatshard.options.precision import ParamPrecision
from flatshard.plan.boundary import check_padding
from flatshard.plan.layout import FlatLayout
from flatshard.plan.module_tree import name_of
from flatshard.plan.param_info import ParamInfo, find_owners, layout_of
from flatshard.plan.policies import UnitPlan, find_units
from flatshard.precision.casts import PrecisionPlan


class FlatParamKind(NamedTuple):
    """What the parameters of one flat parameter have in common."""

    dtype: torch.dtype
    requires_grad: bool
    precision: ParamPrecision
    apart: int  # the id of the only parameter if it is reduced by itself, else 0


@dataclass
class PlannedUnit:
    """One unit: its modules (several if they are coalesced) and the parameters that they own."""

    members: Sequence[UnitPlan]
    settings: Settings
    owned: Sequence[ParamInfo]
    number: int  # among the units of the model
    flat_params: dict[FlatParamKind, list[ParamInfo]] = field(default_factory=dict)
    layouts: dict[FlatParamKind, FlatLayout] = field(default_factory=dict)  # once laid out

    @property
    def names(self) -> list[str]:
        return [plan.name for plan in self.members]

    @property
    def name(self) -> str:
        """The unit's name in messages; empty for the root."""
        return name_of(self.names)

    def lay_out(self, world_size: int) -> dict[FlatParamKind, FlatLayout]:
        """Of its flat parameters, over so many shards. ValueError: they have too much padding."""
        boundary = self.settings.boundary
        for kind, owned in self.flat_params.items():
            self.layouts[kind] = layout_of(owned, world_size, boundary, self.number)
        if boundary != "element":
            check_padding(self.name, self.layouts.values(), boundary)
        return self.layouts


class ModelPlan:
    """The units of one module.

    Raises ValueError if the policy sets a keyword in which units of one model cannot differ.
    """

    def __init__(self, model: UnwrappedModel, settings: Settings) -> None:
        module, left_alone = model.module, model.left_alone
        root = UnitPlan("", module)
        self.chosen: list[UnitPlan] = []  # by the policy, in the order of the model
        if model.policy is not None:
            self.chosen = find_units(module, model.policy, model.ignored)
        # Of the root, then of each chosen module.
        self.settings_of = {
            plan.module: settings.override(plan, may_diverge=plan.module in model.divergent)
            for plan in (root, *self.chosen)
        }
        owners = find_owners(module, [plan.module for plan in self.chosen], left_alone)
        policies = {unit: one.precision for unit, one in self.settings_of.items()}
        self.precision = PrecisionPlan(module, policies, left_alone)
        # They become no unit.
        self.without_params = [plan for plan in self.chosen if not owners[plan.module]]
        groups = coalesce(self.chosen, owners, settings.coalesce_bytes, self.settings_of)
        # In registration order, the root last.
        self.units: list[PlannedUnit] = []
        for members in groups:
            self._plan_unit(members, [one for plan in members for one in owners[plan.module]])
        # A large parameter of the root is reduced by itself, while units inside compute: the rest
        # of the root is complete only at the end of backward.
        self._plan_unit([root], owners[module], splits=bool(groups))

    def _plan_unit(
        self, members: list[UnitPlan], owned: list[ParamInfo], *, splits: bool = False
    ) -> None:
        settings = self.settings_of[members[0].module]
        unit = PlannedUnit(members, settings, owned, len(self.units))
        for one in owned:
            param = one.param
            kind = FlatParamKind(
                param.dtype,
                param.requires_grad,
                self.precision.of_param(param, settings.precision),
                # Whole parameters balance only beside others.
                id(param) if splits and is_apart(param) and settings.boundary != "tensor" else 0,
            )
            unit.flat_params.setdefault(kind, []).append(one)
        self.units.append(unit)


# The time of a collective of at least this size depends on bandwidth, and not on latency: to merge
# the collective with others saves little.
LARGE_BYTES = 4 << 20


def coalesce(
    plans: Iterable[UnitPlan],
    owners: Mapping[nn.Module, list[ParamInfo]],
    max_bytes: int,
    settings_of: Mapping[nn.Module, Any],
) -> list[list[UnitPlan]]:
    """Put neighbours together that agree in settings and kinds of parameters.

    Small all-gathers are latency-bound. Units that follow one another in a policy's plan mostly run
    one after the other: together they need one collective, and a rank holds a little more for it.
    Source: DeepSpeed's ``stage3_module_granularity_threshold`` does likewise.

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
