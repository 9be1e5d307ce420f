"""``ModelPlan``: the units that a module will consist of, and their flat parameters.

It changes nothing, reads no values and does not communicate: the model may be on the meta device.
``construction`` makes the planned units, and ``memory_plan`` sums up their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from flatshard.module.inspection import UnwrappedModel
from flatshard.module.settings import Settings
from flatshard.options.precision import ParamPrecision
from flatshard.plan.boundary import check_padding
from flatshard.plan.coalescing import coalesce, is_apart
from flatshard.plan.layout import FlatLayout
from flatshard.plan.module_tree import name_of
from flatshard.plan.param_info import ParamInfo, find_owners, layout_of
from flatshard.plan.wrap import UnitPlan, find_units
from flatshard.precision.overrides import PrecisionPlan


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
