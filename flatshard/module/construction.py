"""``Construction``: how a module becomes units, each with a wrapper in its module's place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard.comm import consistency
from flatshard.diagnostics import unit_report
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.offload import OffloadTargets
from flatshard.engine.unit import Unit
from flatshard.module import initial_values, inspection, meta_init
from flatshard.module.run import start_run
from flatshard.module.settings import Settings, check_quantised
from flatshard.module.sharding import Sharding, handles_in, sharding_of, shardings_in, units_in
from flatshard.options.offload import OffloadError
from flatshard.options.precision import ParamPrecision
from flatshard.plan.coalescing import coalesce, is_apart
from flatshard.plan.ignored import Ignored, find_ignored
from flatshard.plan.layout import ParamSpan
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.module_tree import name_of
from flatshard.plan.param_info import ParamInfo, find_owners
from flatshard.plan.wrap import Policy, UnitPlan, check_policy, explain_no_match, find_units
from flatshard.precision.overrides import PrecisionPlan
from flatshard.state.model_state import UnitStateDict


def check_module(module: nn.Module, policy: Policy | None) -> None:
    """Can this module be wrapped, with this policy?

    Raises:
        TypeError: it is no module, or the policy none.
        ValueError: a policy over a model that already contains units; a part of it is wrapped in
            DistributedDataParallel.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardedWrapper: expected an nn.Module, got {type(module).__name__}")
    if policy is not None:
        check_policy(policy)
    for name, inner in module.named_modules():
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                f"ShardedWrapper: {name or 'the module'!r} is a {type(inner).__name__}, which "
                "would reduce gradients by itself. Pass what it wraps: its .module."
            )
    inside = shardings_in(module)
    if any(one.context.stepping.is_active for one in inside):
        raise ValueError(
            "ShardedWrapper: optimizers step in the backward of a part of the module. Call "
            "step_in_backward() on the outermost wrapper, once it is made."
        )
    if inside and policy is not None:
        raise ValueError(
            f"ShardedWrapper: auto_wrap_policy over a model that already contains {len(inside)} "
            "units. Wrap it without a policy, or pass the unwrapped model."
        )
    if isinstance(module, ModuleProxy):
        warnings.warn(
            "ShardedWrapper: the module is a ShardedWrapper already; the outer one adds nothing",
            stacklevel=3,
        )


def read_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter | nn.Module] | None,
) -> Ignored:
    """What the user, and the units inside, leave alone."""
    nested: dict[nn.Module, Ignored] = {one.wrapper: one.ignored for one in shardings_in(module)}
    return find_ignored(
        module, ignored_modules, ignored_states, nested=nested, sharded=_owned_ids(module)
    )


def left_alone(module: nn.Module, ignored: Ignored) -> set[int]:
    """Ids of the parameters and buffers that are not to be sharded, or are already."""
    return _owned_ids(module) | ignored.ids()


def _owned_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters that units inside a module own already."""
    return {id(param) for handle in handles_in(module) for param in handle.sharded}


class Construction:
    """One module on its way to units: planned when this is made, compared, and then changed.

    Args:
        module: what to wrap; may contain units.
        policy: which submodules become units.
        settings: for the whole module; the policy may change them for a unit.
        ignored: what stays as it is.
        init_fn: the user's ``param_init_fn``.

    Raises:
        ValueError: the policy asks for what units of one model cannot differ in.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy | None,
        settings: Settings,
        ignored: Ignored,
        init_fn: meta_init.InitFn | None,
    ) -> None:
        self._module, self._policy, self._settings = module, policy, settings
        self._ignored, self._init_fn = ignored, init_fn
        self._left_alone = left_alone(module, ignored)
        self._plans = [] if policy is None else find_units(module, policy, **_left_out(ignored))
        self._of_unit = {plan.module: settings.override(plan) for plan in self._plans}
        check_quantised("", settings)
        for plan in self._plans:
            check_quantised(plan.name, self._of_unit[plan.module])
        units = [plan.module for plan in self._plans]
        self._owners = find_owners(module, units, self._left_alone)
        policies = {unit: one.precision for unit, one in self._of_unit.items()}
        self._precision = PrecisionPlan(
            module, {module: settings.precision, **policies}, self._left_alone
        )
        # Apart where a flat parameter is what users see.
        together = settings.coalesce_bytes if settings.use_orig_params else 0
        self._groups = coalesce(
            self._plans, self._owners, together, kind=lambda plan: self._of_unit[plan.module]
        )
        self._offload = OffloadTargets()

    def agree(self, sync: bool | None) -> initial_values.InitialValues:
        """Compare with other ranks what is to be made, and give buffers their values.

        Collective: all ranks.

        Args:
            sync: whether all ranks take rank 0's weights; see ``sync_module_states``.

        Returns:
            What the units start with.

        Raises:
            ValueError: on all ranks: they build different models, ranks do not divide as a strategy
                asks, or nothing makes values that are missing.
        """
        module, settings, ranks = self._module, self._settings, self._settings.ranks
        named = inspection.named_tensors(module, self._left_alone)
        if ranks.world.size > 1:
            described = f"{settings.describe()}{self._precision.describe()}"
            units = [
                f"{plan.name}: {self._of_unit[plan.module].describe()}" for plan in self._plans
            ]
            consistency.check_same_model(named, described, units, self._ignored.names, ranks.world)
        # Only now do all ranks agree on what to ask for.
        for one in (settings, *self._of_unit.values()):
            ranks.resolve(one.placement)
        self._open_homes()
        start = initial_values.agree(named, sync, ranks.world)
        meta_init.check_initialisable(module, start, self._init_fn, self._ignored.modules)
        inspection.move_buffers(module, self._left_alone, settings.device)
        meta_init.give_buffers(module, start, settings.device)
        return start

    def _open_homes(self) -> None:
        """Find where shards live, and keep room for them on a disk, if they live there.

        Collective if so: all ranks.

        Raises:
            OffloadError: on all ranks, where the disk of one is full.
            ValueError: likewise, where nothing can be written there.
        """
        offload, world = self._settings.offload, self._settings.ranks.world
        error: Exception | None = None
        try:
            self._offload = OffloadTargets.find(offload, self._settings.device)
            for members in [*self._groups, [UnitPlan("", self._module)]]:
                topology = self._of_unit.get(members[0].module, self._settings).topology
                params = [one.param for one in self._owned(members)]
                name = name_of([plan.name for plan in members])
                self._offload.reserve(name, params, topology.shard.size)
        except (ValueError, NotImplementedError, OffloadError) as found:
            error = found
        if offload.path is not None:
            consistency.raise_everywhere(error, world)

    def remarks(self) -> list[str]:
        """What may not be as the user meant it, for rank 0 to say."""
        module, policy, ignored = self._module, self._policy, self._ignored
        found = self._precision.remarks()
        # "auto" finds a small model to be one unit.
        if policy not in (None, "auto") and not self._plans:
            found.append(explain_no_match(module, policy, **_left_out(ignored)))
        if module in ignored.modules:
            found.append(
                "ShardedWrapper: the module that is wrapped is itself to be ignored, so no "
                "parameter is sharded"
            )
        if self._settings.topology.shard.size > 1:
            found.extend(self._judge())
        return found

    def _judge(self) -> list[str]:
        """What about the units will be slow or large."""
        inside = units_in(self._module)
        if self._policy is None and not inside:
            return unit_report.judge_one_unit(self._module, **_left_out(self._ignored))
        empty = [[plan] for plan in self._plans if not self._owners[plan.module]]
        sizes = [
            _unit_size([plan.name for plan in members], [one.param for one in self._owned(members)])
            for members in [*self._groups, *empty, [UnitPlan("", self._module)]]
        ]
        for unit in inside:
            sizes.append(_unit_size(unit.names, [s for h in unit.handles for s in h.layout.spans]))
        tied = [
            (one.param.numel(), [site.name for site in one.locations])
            for owned in self._owners.values()
            for one in owned
            if len(one.locations) > 1
        ]
        return unit_report.lint(sizes, tied)

    def make_units(
        self, root: ModuleProxy, kind: type[ModuleProxy], start: initial_values.InitialValues
    ) -> None:
        """Change the module: ``root`` becomes the outermost unit, and holds new ones inside.

        Collective: all ranks.

        Args:
            root: an empty wrapper.
            kind: the class of those inside.
            start: what the ranks agreed on.

        Raises:
            ValueError: a unit that was there before trains on other ranks.
            RuntimeError: something else holds on to a parameter's memory.
        """
        wrappers: dict[nn.Module, ModuleProxy] = {}
        units = []
        for members in self._groups:
            for plan in members:
                wrappers[plan.module] = wrapper = kind.__new__(kind)
                nn.Module.__init__(wrapper)
            settings = self._of_unit[members[0].module]
            units.append(self._make_unit(members, wrappers, settings, start))
        _replace_children(self._module, wrappers)
        whole = [UnitPlan("", self._module)]
        units.insert(0, self._make_unit(whole, {self._module: root}, self._settings, start))
        self._make_values(start, root, units)
        for unit in units:
            for fixed_order in sorted({handle.reduce_plan.fixed_order for handle in unit.handles}):
                unit.topology.connect(self._settings.device, fixed_order=fixed_order)
        self._precision.install()
        start_run(sharding_of(root))

    def _owned(self, members: Sequence[UnitPlan]) -> list[ParamInfo]:
        """What units that go together own."""
        return [one for plan in members for one in self._owners[plan.module]]

    def _make_unit(
        self,
        members: Sequence[UnitPlan],
        wrappers: Mapping[nn.Module, ModuleProxy],
        settings: Settings,
        start: initial_values.InitialValues,
    ) -> Unit:
        """Make one unit of ``members``, and of their wrappers what stands for them."""
        precision, topology = settings.precision, settings.topology
        modules = [plan.module for plan in members]
        unit = Unit(
            {module: self._precision.of_unit(module, precision) for module in modules},
            [plan.name for plan in members],
            placement=settings.placement,
            topology=topology,
        )
        segments: dict[_Kind, list[ParamInfo]] = {}
        may_part = unit.name == "" and bool(self._groups) and settings.use_orig_params
        for one in self._owned(members):
            param = one.param
            kind = _Kind(
                param.dtype,
                param.requires_grad,
                self._precision.of_param(param, precision),
                id(param) if may_part and is_apart(param) else 0,
            )
            segments.setdefault(kind, []).append(one)
        unit.own(
            FlatParamHandle(
                params,
                unit.name,
                topology=topology,
                device=settings.device,
                homes=self._offload,
                start=start,
                precision=kind.precision,
                use_orig_params=settings.use_orig_params,
                reduces_alone=kind.apart != 0,
                on_grad=unit.on_grad,
                on_outside_grad=unit.on_outside_grad,
            )
            for kind, params in segments.items()
        )
        state_dict = UnitStateDict(unit)
        flat = [] if settings.use_orig_params else [h.sharded[0] for h in unit.handles]
        for plan in members:
            module, wrapper = plan.module, wrappers[plan.module]
            wrapper.module = module
            wrapper.training = module.training
            ignored = self._ignored.within(module)
            Sharding(wrapper, unit, state_dict, settings, ignored, plan.reason).attach()
            for number, param in enumerate(flat):
                wrapper.register_parameter(f"_flat_param_{number}", param)
        return unit

    def _make_values(
        self, start: initial_values.InitialValues, root: ModuleProxy, units: Iterable[Unit]
    ) -> None:
        """Give new units the values that are missing. Collective."""
        handles = [handle for unit in units for handle in unit.handles]
        if start.any_missing:
            made = meta_init.Materialiser(
                root, handles, start, self._init_fn, self._settings.device
            )
            sharding_of(root).is_left_empty = made.run()
        for handle in handles:
            start.give_replicas(handle.topology, handle.shard)
            handle.rest()
        self._offload.settle()


class _Kind(NamedTuple):
    """What the parameters of a flat parameter have in common.

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


def _unit_size(
    names: Sequence[str], owned: Iterable[nn.Parameter | ParamSpan]
) -> unit_report.UnitSize:
    counts = [one.numel if isinstance(one, ParamSpan) else one.numel() for one in owned]
    return unit_report.UnitSize(tuple(names), sum(counts), max(counts, default=0))


def _left_out(ignored: Ignored) -> dict[str, Any]:
    """The keywords that tell ``wrap`` what to ignore."""
    return {"ignored_modules": ignored.modules, "ignored_params": ignored.params()}


def _replace_children(root: nn.Module, wrappers: dict[nn.Module, ModuleProxy]) -> None:
    """Put wrappers at every place of the modules they wrap."""
    for parent in list(root.modules()):
        if isinstance(parent, ModuleProxy):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]
