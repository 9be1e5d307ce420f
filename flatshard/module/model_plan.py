"""``ModelPlan``: the units that a module will consist of, and their flat parameters.

It changes nothing, reads no values and does not communicate: the model may be on the meta device.
``construction`` makes the planned units, and ``memory_plan`` sums up their bytes.
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
        dtype: their dtype.
        requires_grad: their ``requires_grad``.
        precision: the dtypes of their all-gathers and reductions.
        apart: the id of the only parameter if it is reduced by itself, else 0.
    """

    dtype: torch.dtype
    requires_grad: bool
    precision: ParamPrecision
    apart: int


@dataclass
class PlannedUnit:
    """One unit.

    Attributes:
        members: its modules; several if they are coalesced.
        settings: the settings of its modules.
        owned: the parameters that its modules own.
        flat_params: the owned parameters by flat parameter.
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
        """The unit's name in messages; empty for the root."""
        return name_of(self.names)


class ModelPlan:
    """The units of one module.

    Args:
        module: what to wrap; may contain units.
        policy: which submodules become units.
        settings: for the whole module; the policy may change them for a unit.
        ignored: the modules and parameters to ignore.
        left_alone: ids of the ignored tensors, and of parameters that units inside own.

    Attributes:
        chosen: the modules that the policy chose, in the order of the model.
        without_params: chosen modules that own no parameter, and so become no unit.
        units: all units in registration order, the root last.
        precision: the dtypes of all modules and parameters.
        all_settings: the settings of the module, then those of each chosen module.

    Raises:
        ValueError: the policy sets a keyword in which units of one model cannot differ.
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
        # A flat parameter that users see belongs to one module, so nothing is coalesced.
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
            # A large parameter of the root is reduced by itself, while units inside compute: the
            # rest of the root is complete only at the end of backward.
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
        """Elements and names of each weight that has several names."""
        for unit in self.units:
            for one in unit.owned:
                if len(one.locations) > 1:
                    yield one.param.numel(), [location.name for location in one.locations]

    def describe_units(self) -> list[str]:
        """The settings of units that must be the same on every rank."""
        settings = self.all_settings[1:]
        return [f"{p.name}: {s.describe()}" for p, s in zip(self.chosen, settings, strict=True)]
