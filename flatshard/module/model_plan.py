"""``ModelPlan``: a module that is being wrapped, the user's settings, and the units to make.

Construction builds the plan once and only reads the plan afterwards. A plan changes nothing and
does not communicate: the model may be on the meta device. ``construction`` makes the planned units,
and ``memory_plan`` sums up their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatshard.module.inspection import check_shares_no_memory, check_tensors
from flatshard.module.settings import Settings
from flatshard.module.sharding import handles_in, modules_apart
from flatshard.options.extras import extra
from flatshard.options.precision import ParamPrecision
from flatshard.plan.boundary import check_padding, move
from flatshard.plan.ignored import NOTHING, Ignored
from flatshard.plan.layout import FlatLayout, memory_order
from flatshard.plan.module_tree import ParamInfo, find_owners, name_of
from flatshard.plan.policies import UnitPlan, find_units
from flatshard.precision import PrecisionPlan

# The time of a collective of at least this size depends on bandwidth, and not on latency: to merge
# the collective with others saves little.
LARGE_BYTES = 4 << 20


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
    # Once laid out, in the order of the layout.
    flat_params: dict[FlatParamKind, list[ParamInfo]] = field(default_factory=dict)
    layouts: dict[FlatParamKind, FlatLayout] = field(default_factory=dict)  # once laid out

    @property
    def names(self) -> list[str]:
        return [plan.name for plan in self.members]

    @property
    def name(self) -> str:
        """The unit's name in messages; empty for the root."""
        return name_of(self.names)

    def lay_out(self, num_shards: int) -> dict[FlatParamKind, FlatLayout]:
        """Lay the flat parameters out. Raises ValueError if they would have too much padding."""
        boundary = self.settings.boundary
        for kind, infos in self.flat_params.items():
            layout = FlatLayout.build(
                ((info.name, info.param.shape) for info in infos),
                world_size=num_shards,
                itemsize=kind.dtype.itemsize,
                orders=[memory_order(info.param.shape, info.param.stride()) for info in infos],
            )
            layout = move(layout, boundary, kind.dtype.itemsize, self.number)
            by_name = {info.name: info for info in infos}
            self.flat_params[kind] = [by_name[span.name] for span in layout.spans]
            self.layouts[kind] = layout
        if boundary != "element":
            check_padding(self.name, self.layouts.values(), boundary)
        return self.layouts


class ModelPlan:
    """The plan of a model's construction: the module, and the units to make of the module.

    Raises:
        TypeError: a tensor cannot be flattened, or ``auto_wrap_policy`` is no policy.
        ValueError: parameters that cannot be sharded, or a policy that sets a keyword in which
            units of one model cannot differ.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        ignored: Ignored = NOTHING,
        *,
        predicts: bool = False,  # only shapes count: parameters may be fake tensors
    ) -> None:
        settings.check()
        self.module, self.settings, self.ignored = module, settings, ignored
        world_size = settings.ranks.world.size
        # Each group of fewer ranks has buffers of its own.
        apart = modules_apart(module, world_size)
        left_alone = {id(buffer) for inner in apart for buffer in inner.buffers(recurse=False)}
        left_alone |= {id(param) for handle in handles_in(module) for param in handle.sharded}
        # Ids of the tensors that construction neither shards nor synchronises.
        self.left_alone = left_alone | ignored.ids()
        if not predicts:
            is_sharded = world_size > 1 and settings.placement.sharded
            check_tensors(self.params(), self.buffers(), drops_gradients=is_sharded)
            check_shares_no_memory(self.params())
        self.divergent: Set[nn.Module] = frozenset()  # modules that ranks may skip
        if settings.allow_divergence is not False:
            divergence = extra("divergence", "ShardedWrapper(allow_divergence=...)")
            self.divergent = divergence.find_divergent(module, settings.allow_divergence)
        self._choose_units()

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters to shard, by name."""
        named = self.module.named_parameters()
        return ((name, param) for name, param in named if id(param) not in self.left_alone)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers to move and synchronise, by name."""
        named = self.module.named_buffers()
        return ((name, buffer) for name, buffer in named if id(buffer) not in self.left_alone)

    def _choose_units(self) -> None:
        module, settings, root = self.module, self.settings, UnitPlan("", self.module)
        self.chosen: list[UnitPlan] = []  # by the policy, in the order of the model
        if settings.policy is not None:
            self.chosen = find_units(module, settings.policy, self.ignored)
        # Of the root, then of each chosen module.
        self.settings_of = {
            plan.module: settings.override(plan, may_diverge=plan.module in self.divergent)
            for plan in (root, *self.chosen)
        }
        owners = find_owners(module, [plan.module for plan in self.chosen], self.left_alone)
        policies = {inner: settings.precision for inner, settings in self.settings_of.items()}
        precision_plan = PrecisionPlan
        if any(policy.overrides for policy in policies.values()):
            asked_for = "MixedPrecision(overrides=...)"
            precision_plan = extra("overrides", asked_for).OverridesPlan
        self.precision = precision_plan(module, policies, self.left_alone)
        # In registration order, the root last.
        self.units: list[PlannedUnit] = []
        for members in [*self._coalesce(owners), [root]]:
            self._plan_unit(members, [info for plan in members for info in owners[plan.module]])

    def _coalesce(self, owners: Mapping[nn.Module, list[ParamInfo]]) -> list[list[UnitPlan]]:
        """Put neighbours together that agree in settings and kinds of parameters.

        Small all-gathers are latency-bound. Units that follow one another in a policy's plan mostly
        run one after the other: together they need one collective, and a rank holds a little more
        for it. Modules that own no parameter become no unit.
        Source: DeepSpeed's ``stage3_module_granularity_threshold`` does likewise.
        """
        plans = [plan for plan in self.chosen if owners[plan.module]]
        modules = {plan.module for plan in plans}
        groups: list[list[UnitPlan]] = []
        total, last = 0, None
        for plan in plans:
            params = [info.param for info in owners[plan.module]]
            nbytes = sum(param.nbytes for param in params)
            # Units of different kinds would need more collectives together, not fewer.
            kinds = {(param.dtype, param.requires_grad) for param in params}
            # A unit around others runs while they do, and not before or after them.
            inside = (inner for inner in plan.module.modules() if inner != plan.module)
            is_around = any(inner in modules for inner in inside)
            this = None if is_around else (self.settings_of[plan.module], kinds)
            fits = total + nbytes <= self.settings.coalesce_bytes
            if this is not None and this == last and fits:
                groups[-1].append(plan)
                total += nbytes
            else:
                groups.append([plan])
                total, last = nbytes, this
        return groups

    def _plan_unit(self, members: list[UnitPlan], owned: list[ParamInfo]) -> None:
        settings = self.settings_of[members[0].module]
        unit = PlannedUnit(members, settings, owned, len(self.units))
        # A large parameter of the root is reduced by itself, while units inside compute: the rest
        # of the root is complete only at the end of backward. With boundary="tensor" it is not:
        # whole parameters balance only beside others.
        is_around = members[0].module is self.module and bool(self.units)
        splits = is_around and settings.boundary != "tensor"
        for info in owned:
            param = info.param
            # The root often holds an embedding, whose gradient comes last, and a head, whose
            # gradient comes first. Apart, the head's is reduced while the units compute.
            is_apart = splits and param.requires_grad and param.nbytes >= LARGE_BYTES
            kind = FlatParamKind(
                param.dtype,
                param.requires_grad,
                self.precision.of_param(param, settings.precision),
                id(param) if is_apart else 0,
            )
            unit.flat_params.setdefault(kind, []).append(info)
        self.units.append(unit)
