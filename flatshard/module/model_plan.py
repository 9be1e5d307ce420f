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
from functools import cached_property
from itertools import groupby

import torch
from torch import nn

from flatshard.module.inspection import check_tensors
from flatshard.module.settings import Settings
from flatshard.module.sharding import modules_apart, sharded_ids, shardings_in
from flatshard.options.extras import extra
from flatshard.precision import PrecisionPlan
from flatshard.tensor.flat_parameter import FlatParamPlan
from flatshard.units.boundary import check_padding, move
from flatshard.units.ignored import NOTHING, Ignored
from flatshard.units.layout import FlatLayout
from flatshard.units.module_tree import ModuleTree, ParamInfo, find_params, name_of
from flatshard.units.policies import ChosenModule, find_units

# Minimum number of bytes for which a collective is limited by bandwidth, not by latency. Joining a
# collective of this size with other collectives saves little.
LARGE_BYTES = 4 << 20


@dataclass
class PlannedUnit:
    """A unit to make: one module, or several small modules, and the parameters of the unit."""

    members: Sequence[ChosenModule]
    settings: Settings
    number: int  # index of the unit in `ModelPlan.units`

    # The parameters of each flat parameter, by name. `flatten` divides the parameters; `lay_out`
    # puts them in the layout's order.
    flat_params: dict[FlatParamPlan, dict[str, ParamInfo]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]

    @property
    def name(self) -> str:
        """The unit's name in messages; empty for the root."""
        return name_of(self.names)

    def flatten(self, precision_plan: PrecisionPlan) -> None:
        """Divide the unit's parameters into flat parameters."""
        plans: dict[tuple[object, ...], FlatParamPlan] = {}
        # If the model has other units, give each large parameter of the root a separate flat
        # parameter, so that the gradient of the parameter can be reduced while the other units
        # compute. The root's remaining gradients are complete only at the end of backward. With
        # boundary="tensor", keep parameters together: each parameter is whole on one rank, and
        # only parameters of one flat parameter are balanced over the ranks.
        splits = not self.name and self.number > 0 and self.settings.boundary != "tensor"
        for info in (info for member in self.members for info in member.infos):
            param = info.param
            # The root often owns an embedding and a head. In backward, the head's gradient is
            # complete first and the embedding's last. In one flat parameter, the head's gradient
            # would have to wait for the embedding's.
            is_apart = splits and param.requires_grad and param.nbytes >= LARGE_BYTES
            precision = precision_plan.of_param(param, self.settings.precision)
            kind = param.dtype, param.requires_grad, precision
            plan = plans.setdefault(
                (*kind, is_apart and id(param)),
                FlatParamPlan(self.name, self.settings.device, *kind, reduces_alone=is_apart),
            )
            self.flat_params.setdefault(plan, {})[info.name] = info

    def lay_out(self, num_shards: int) -> None:
        """Lay out the flat parameters over ``num_shards`` ranks.

        Raises ValueError if the user's ``boundary`` causes too much padding.
        """
        boundary = self.settings.boundary
        for plan, infos in self.flat_params.items():
            params = {name: info.param for name, info in infos.items()}
            itemsize = plan.dtype.itemsize
            layout = FlatLayout.build(params, world_size=num_shards, itemsize=itemsize)
            plan.layout = move(layout, boundary, itemsize, self.number)
            self.flat_params[plan] = {span.name: infos[span.name] for span in plan.layout.spans}
        if boundary != "element":
            check_padding(self.name, [plan.layout for plan in self.flat_params], boundary)


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

    @cached_property
    def tree(self) -> ModuleTree:
        """The modules that a policy may choose. Made on demand, for policies and warnings."""
        return ModuleTree(self.module, self.ignored)

    def _choose_units(self, infos: Sequence[ParamInfo]) -> None:
        root = ChosenModule("", self.module)
        self.chosen: list[ChosenModule] = []  # modules that the policy chose, in order
        if self.settings.policy is not None:
            self.chosen = find_units(self.tree, self.settings.policy)
        # For each module that becomes a unit, its settings. The root comes first.
        members = {member.module: member for member in (root, *self.chosen)}
        self.settings_of = {
            module: self.settings.override(member, self.divergent)
            for module, member in members.items()
        }
        plan_class = PrecisionPlan
        if any(settings.precision.overrides for settings in self.settings_of.values()):
            plan_class = extra("overrides", "MixedPrecision(overrides=...)").OverridesPlan
        self.precision_plan = plan_class(
            self.module,
            {module: settings.precision for module, settings in self.settings_of.items()},
            self.left_alone,
        )
        for info in infos:
            members[info.owner(members)].infos.append(info)
        # The units in registration order, the root last.
        self.units: list[PlannedUnit] = []
        for group in [*self._coalesce(), [root]]:
            unit = PlannedUnit(group, self.settings_of[group[0].module], len(self.units))
            unit.flatten(self.precision_plan)
            self.units.append(unit)

    def _coalesce(self) -> list[list[ChosenModule]]:
        """Join small neighbouring modules with the same settings and kinds of parameters.

        Small all-gathers are latency-bound. Neighbours in a policy's plan mostly run one after the
        other. If several modules are one unit, they need one all-gather instead of several, and a
        rank needs only a little more memory. Modules that own no parameter do not become units.
        Source: DeepSpeed's ``stage3_module_granularity_threshold`` has the same purpose.
        """
        members = {member.module: member for member in self.chosen if member.infos}

        def key_of(member: ChosenModule) -> tuple[Settings, set[tuple[torch.dtype, bool]]] | None:
            """Return the properties that joined modules have in common; None: never join."""
            # Do not join a module that contains other units. Joined modules should run one after
            # the other, but the module runs while the units inside the module run.
            module = member.module
            if any(inner in members for inner in module.modules() if inner != module):
                return None
            # A unit needs one collective per kind of parameter. So joining two modules would save
            # no collective if their parameters are of different kinds.
            return self.settings_of[module], {
                (info.param.dtype, info.param.requires_grad) for info in member.infos
            }

        groups: list[list[ChosenModule]] = []
        for key, neighbours in groupby(members.values(), key_of):
            groups.append([])
            total = 0
            for member in neighbours:
                nbytes = sum(info.param.nbytes for info in member.infos)
                total += nbytes
                if groups[-1] and (key is None or total > self.settings.coalesce_bytes):
                    groups.append([])
                    total = nbytes
                groups[-1].append(member)
        return groups
