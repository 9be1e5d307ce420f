"""``ModelPlan``: the units that a module will consist of, and their flat parameters.

Changes nothing, needs no values and communicates with nobody: a model on the meta device will do.
``construction`` makes what is planned here, and ``memory_plan`` adds up its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from flatshard.module.settings import Settings, check_quantised
from flatshard.options.precision import ParamPrecision
from flatshard.plan.coalescing import coalesce, is_apart
from flatshard.plan.ignored import Ignored
from flatshard.plan.module_tree import name_of
from flatshard.plan.param_info import ParamInfo, find_owners
from flatshard.plan.wrap import Policy, UnitPlan, find_units
from flatshard.precision.overrides import PrecisionPlan


class FlatParamKind(NamedTuple):
    """What the parameters of one flat parameter have in common.

    Attributes:
        dtype: theirs.
        requires_grad: theirs.
        precision: in which they are gathered and reduced.
        apart: the id of the only one, where that is reduced by itself, else 0.
    """

    dtype: torch.dtype
    requires_grad: bool
    precision: ParamPrecision
    apart: int


@dataclass
class PlannedUnit:
    """One unit.

    Attributes:
        members: the modules that it consists of; several small ones where they are coalesced.
        settings: theirs.
        owned: the parameters that they own.
        flat_params: the same by flat parameter.
    """

    members: Sequence[UnitPlan]
    settings: Settings
    owned: Sequence[ParamInfo]
    flat_params: dict[FlatParamKind, list[ParamInfo]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of its modules."""
        return [plan.name for plan in self.members]

    @property
    def name(self) -> str:
        """The same as one; empty for the root."""
        return name_of(self.names)


class ModelPlan:
    """The units of one module.

    Args:
        module: what to wrap; may contain units.
        policy: which submodules become units.
        settings: for the whole module; the policy may change them for a unit.
        ignored: what stays as it is.
        left_alone: ids of the ignored tensors, and of what units inside own.

    Attributes:
        chosen: the modules that the policy chose, in the order of the model.
        without_params: those of them that own no parameter, and so become no unit.
        units: all units in registration order, the root last.
        precision: what computes in which dtype.
        all_settings: those of the module, then those of each chosen one.

    Raises:
        ValueError: the policy asks for what units of one model cannot differ in.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy | None,
        settings: Settings,
        ignored: Ignored,
        left_alone: set[int],
    ) -> None:
        self.chosen = [] if policy is None else find_units(module, policy, **ignored.keywords())
        of_module = {plan.module: settings.override(plan) for plan in self.chosen}
        self.all_settings = [settings, *of_module.values()]
        for name, one in zip(["", *(p.name for p in self.chosen)], self.all_settings, strict=True):
            check_quantised(name, one)
        owners = find_owners(module, list(of_module), left_alone)
        policies = {unit: one.precision for unit, one in of_module.items()}
        self.precision = PrecisionPlan(module, {module: settings.precision, **policies}, left_alone)
        # Each by itself where a flat parameter is what users see.
        max_bytes = settings.coalesce_bytes if settings.use_orig_params else 0
        groups = coalesce(self.chosen, owners, max_bytes, kind=lambda plan: of_module[plan.module])
        self.without_params = [plan for plan in self.chosen if not owners[plan.module]]
        self.units = [
            PlannedUnit(
                members,
                of_module.get(members[0].module, settings),
                [one for plan in members for one in owners[plan.module]],
            )
            for members in [*groups, [UnitPlan("", module)]]
        ]
        for unit in self.units:
            # Large parameters of the root are reduced while the units inside still compute.
            splits = unit is self.units[-1] and bool(groups) and settings.use_orig_params
            self._divide(unit, splits=splits)

    def _divide(self, unit: PlannedUnit, *, splits: bool) -> None:
        for one in unit.owned:
            param = one.param
            kind = FlatParamKind(
                param.dtype,
                param.requires_grad,
                self.precision.of_param(param, unit.settings.precision),
                id(param) if splits and is_apart(param) else 0,
            )
            unit.flat_params.setdefault(kind, []).append(one)

    def tied(self) -> Iterable[tuple[int, list[str]]]:
        """For each weight with several names, its elements and these."""
        for unit in self.units:
            for one in unit.owned:
                if len(one.locations) > 1:
                    yield one.param.numel(), [location.name for location in one.locations]

    def describe_units(self) -> list[str]:
        """What must be the same of units on every rank."""
        settings = self.all_settings[1:]
        return [f"{p.name}: {s.describe()}" for p, s in zip(self.chosen, settings, strict=True)]
