"""``ModelPlan``: a module that is being wrapped, the user's settings, and the units to make.

The constructor of ``ShardedWrapper`` makes the plan, and ``construction.wrap`` only reads the plan:
the plan lists the module's parameters and buffers, and the wrappers that the module contains
already. Making a plan changes no module and does not communicate, so the model may be on the meta
device.
``construction`` makes the planned units, and ``memory_plan`` sums up their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from flatshard.module.inspection import check_tensors
from flatshard.module.settings import Settings
from flatshard.module.sharding import modules_apart, sharded_ids, shardings_in
from flatshard.options.extras import extra
from flatshard.options.precision import ParamPrecision
from flatshard.precision import PrecisionPlan
from flatshard.units.boundary import check_padding, move
from flatshard.units.ignored import NOTHING, Ignored
from flatshard.units.layout import FlatLayout
from flatshard.units.module_tree import ParamInfo, find_owners, find_params, name_of
from flatshard.units.policies import ChosenModule, find_units

# Minimum number of bytes for which a collective is limited by bandwidth, not by latency. Joining a
# collective of this size with other collectives saves little.
LARGE_BYTES = 4 << 20


class FlatParamKind(NamedTuple):
    """Properties that all parameters in one flat parameter share."""

    dtype: torch.dtype
    requires_grad: bool
    precision: ParamPrecision
    # Id of a large parameter whose gradient is reduced separately from the rest of the root's
    # gradients; 0 for all other parameters.
    apart: int


@dataclass
class PlannedUnit:
    """A unit to make: one module, or several small modules, and the parameters of the unit."""

    members: Sequence[ChosenModule]
    settings: Settings
    owned: Sequence[ParamInfo]
    number: int  # index of the unit in `ModelPlan.units`

    # The parameters of each flat parameter. `lay_out` puts the parameters in the layout's order.
    flat_params: dict[FlatParamKind, list[ParamInfo]] = field(default_factory=dict)
    layouts: dict[FlatParamKind, FlatLayout] = field(default_factory=dict)  # set by `lay_out`

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def name(self) -> str:
        """The unit's name in messages; empty for the root."""
        return name_of(self.names)

    def lay_out(self, num_shards: int) -> dict[FlatParamKind, FlatLayout]:
        """Lay out the flat parameters over ``num_shards`` ranks, and return the layouts.

        Raises ValueError if the user's ``boundary`` causes too much padding.
        """
        boundary = self.settings.boundary
        for kind, infos in self.flat_params.items():
            params, itemsize = {info.name: info.param for info in infos}, kind.dtype.itemsize
            layout = FlatLayout.build(params, world_size=num_shards, itemsize=itemsize)
            layout = move(layout, boundary, itemsize, self.number)
            by_name = {info.name: info for info in infos}
            self.flat_params[kind] = [by_name[span.name] for span in layout.spans]
            self.layouts[kind] = layout
        if boundary != "element":
            check_padding(self.name, self.layouts.values(), boundary)
        return self.layouts


class ModelPlan:
    """The plan of a model's construction: the module, and the units to make of the module.

    Raises:
        TypeError: a tensor cannot be flattened, or ``auto_wrap_policy`` is not a policy.
        ValueError: a parameter cannot be sharded, or a policy sets a keyword that must be the same
            for all units of a model.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        ignored: Ignored = NOTHING,
        *,
        predicts: bool = False,  # True: only to predict memory, so tensors may be fake
    ) -> None:
        settings.check()
        self.module, self.settings, self.ignored = module, settings, ignored
        # The shardings of the wrappers that the module contains already, outermost first.
        self.shardings = shardings_in(module)
        world_size = settings.ranks.world.size
        # Ids of the tensors that construction neither shards nor synchronises.
        self.left_alone = sharded_ids(self.shardings) | ignored.ids()
        # Do not synchronise buffers of modules that the user wrapped with fewer ranks (experts):
        # these buffers differ between groups of ranks.
        for inner in modules_apart(self.shardings, world_size):
            self.left_alone.update(id(buffer) for buffer in inner.buffers(recurse=False))
        infos = find_params(module, self.left_alone)
        # The parameters to shard, and the buffers to move to the device and broadcast, by name.
        self.params = {info.name: info.param for info in infos}
        self.buffers = {
            name: buffer
            for name, buffer in module.named_buffers()
            if id(buffer) not in self.left_alone
        }
        if not predicts:
            is_sharded = world_size > 1 and settings.placement.sharded
            check_tensors(self.params, self.buffers, drops_gradients=is_sharded)
        self.divergent: Set[nn.Module] = frozenset()  # modules that ranks may skip
        if settings.allow_divergence is not False:
            divergence = extra("divergence", "ShardedWrapper(allow_divergence=...)")
            self.divergent = divergence.find_divergent(module, settings.allow_divergence)
        self._choose_units(infos)

    def _choose_units(self, infos: Sequence[ParamInfo]) -> None:
        module, settings, root = self.module, self.settings, ChosenModule("", self.module)
        self.chosen: list[ChosenModule] = []  # modules that the policy chose, in order
        if settings.policy is not None:
            self.chosen = find_units(module, settings.policy, self.ignored)
        # For each module that becomes a unit, its settings. The root comes first.
        self.settings_of = {
            member.module: settings.override(member, may_diverge=member.module in self.divergent)
            for member in (root, *self.chosen)
        }
        policies = {inner: settings.precision for inner, settings in self.settings_of.items()}
        precision_plan = PrecisionPlan
        if any(policy.overrides for policy in policies.values()):
            precision_plan = extra("overrides", "MixedPrecision(overrides=...)").OverridesPlan
        self.precision = precision_plan(module, policies, self.left_alone)
        owned = find_owners(infos, self.settings_of)
        # The units in registration order, the root last.
        self.units: list[PlannedUnit] = []
        for members in [*self._coalesce(owned), [root]]:
            self._plan_unit(members, [info for member in members for info in owned[member.module]])

    def _coalesce(self, owned: dict[nn.Module, list[ParamInfo]]) -> list[list[ChosenModule]]:
        """Join small neighbouring modules with the same settings and kinds of parameters.

        Small all-gathers are latency-bound. Neighbours in a policy's plan mostly run one after the
        other. If several modules are one unit, they need one all-gather instead of several, and a
        rank needs only a little more memory. Modules that own no parameter do not become units.
        Source: DeepSpeed's ``stage3_module_granularity_threshold`` has the same purpose.
        """
        found = [member for member in self.chosen if owned[member.module]]
        modules = {member.module for member in found}
        groups: list[list[ChosenModule]] = []
        total, last = 0, None
        for member in found:
            module, params = member.module, [info.param for info in owned[member.module]]
            nbytes = sum(param.nbytes for param in params)
            # A unit needs one collective per kind of parameter. So joining two modules would save
            # no collective if their parameters are of different kinds.
            kinds = {(param.dtype, param.requires_grad) for param in params}
            # Do not join a module that contains other units. Joined modules should run one after
            # the other, but the module runs while the units inside the module run.
            is_around = any(inner in modules for inner in module.modules() if inner != module)
            this = None if is_around else (self.settings_of[module], kinds)
            fits = total + nbytes <= self.settings.coalesce_bytes
            if this is not None and this == last and fits:
                groups[-1].append(member)
                total += nbytes
            else:
                groups.append([member])
                total, last = nbytes, this
        return groups

    def _plan_unit(self, members: list[ChosenModule], owned: list[ParamInfo]) -> None:
        settings = self.settings_of[members[0].module]
        unit = PlannedUnit(members, settings, owned, len(self.units))
        # If the model has other units, give each large parameter of the root a separate flat
        # parameter, so that the gradient of the parameter can be reduced while the other units
        # compute. The root's remaining gradients are complete only at the end of backward. With
        # boundary="tensor", keep parameters together: each parameter is whole on one rank, and
        # only parameters of one flat parameter are balanced over the ranks.
        is_root = members[0].module is self.module
        splits = is_root and bool(self.units) and settings.boundary != "tensor"
        for info in owned:
            param = info.param
            # The root often owns an embedding and a head. In backward, the head's gradient is
            # complete first and the embedding's last. In one flat parameter, the head's gradient
            # would have to wait for the embedding's.
            is_apart = splits and param.requires_grad and param.nbytes >= LARGE_BYTES
            kind = FlatParamKind(
                param.dtype,
                param.requires_grad,
                self.precision.of_param(param, settings.precision),
                id(param) if is_apart else 0,
            )
            unit.flat_params.setdefault(kind, []).append(info)
        self.units.append(unit)
