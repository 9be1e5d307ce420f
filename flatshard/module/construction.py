"""``Construction``: turns a module into units, and puts a wrapper in the place of each module."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from flatshard.comm import consistency
from flatshard.diagnostics import unit_report
from flatshard.engine.handle import HandleOptions
from flatshard.engine.handle_making import make_handle
from flatshard.engine.hooks import UnitHooks
from flatshard.engine.offload import OffloadTargets
from flatshard.engine.unit import Unit
from flatshard.module import inspection, meta_init
from flatshard.module.initial_values import InitialValues, compare_values
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.module.run import start_run
from flatshard.module.settings import Settings
from flatshard.module.sharding import Sharding, handles_in, sharding_of, shardings_in, units_in
from flatshard.optimizer import in_backward
from flatshard.options.offload import OffloadError
from flatshard.plan.ignored import Ignored, find_ignored
from flatshard.plan.layout import ParamSpan
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.wrap import Policy, check_policy, explain_no_match
from flatshard.state.model_state import UnitStateDict


def check_module(module: nn.Module, policy: Policy | None) -> None:
    """Raise if this module cannot be wrapped with this policy.

    Raises:
        TypeError: it is no module, or the policy is no policy.
        ValueError: a policy over a model that already contains units; a part of it is wrapped in
            DistributedDataParallel; an optimizer steps in the backward of a part.
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
    if any(in_backward.is_active(one.context) for one in inside):
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
    """The modules and parameters that the user, and the units inside, ignore."""
    nested: dict[nn.Module, Ignored] = {one.wrapper: one.ignored for one in shardings_in(module)}
    return find_ignored(
        module, ignored_modules, ignored_states, nested=nested, sharded=_owned_ids(module)
    )


def left_alone(module: nn.Module, ignored: Ignored) -> set[int]:
    """Ids of the parameters and buffers that are ignored or sharded already."""
    return _owned_ids(module) | ignored.ids()


def _owned_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters that units inside a module own."""
    return {id(param) for handle in handles_in(module) for param in handle.sharded}


class Construction:
    """Wraps one module: plans its units, compares the plan between ranks, then makes them.

    Args:
        module: what to wrap; may contain units.
        policy: which submodules become units.
        settings: for the whole module; the policy may change them for a unit.
        ignored: the modules and parameters to ignore.
        init_fn: the user's ``param_init_fn``.

    Raises:
        ValueError: the policy sets a keyword in which units of one model cannot differ.
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
        self._plan = ModelPlan(module, policy, settings, ignored, self._left_alone)
        self._offload = OffloadTargets()

    def agree(self, sync: bool | None) -> InitialValues:
        """Compare the plan with other ranks, and give buffers their values.

        Collective: all ranks.

        Args:
            sync: whether all ranks take rank 0's weights; see ``sync_module_states``.

        Returns:
            The initial values of the units.

        Raises:
            ValueError: on all ranks: they build different models, the number of ranks does not fit
                a strategy, or nothing initialises tensors on the meta device.
        """
        module, settings, plan = self._module, self._settings, self._plan
        ranks = settings.ranks
        named = inspection.named_tensors(module, self._left_alone)
        if ranks.world.size > 1:
            described = f"{settings.describe()}{plan.precision.describe()}"
            consistency.check_same_model(
                named, described, plan.describe_units(), self._ignored.names, ranks.world
            )
        # Creating process groups is collective, so only after all ranks agree on the strategies.
        for one in plan.all_settings:
            ranks.resolve(one.placement)
        self._reserve_offload()
        initial_values = compare_values(named, sync, ranks.world)
        meta_init.check_initialisable(module, initial_values, self._init_fn, self._ignored.modules)
        inspection.move_buffers(module, self._left_alone, settings.device)
        meta_init.broadcast_buffers(module, initial_values, settings.device)
        return initial_values

    def _reserve_offload(self) -> None:
        """Choose the offload targets, and reserve room for shards that live on disk.

        Collective if they do: all ranks.

        Raises:
            OffloadError: on all ranks: the disk of one is full.
            ValueError: on all ranks: the disk of one cannot be written.
        """
        offload, world = self._settings.offload, self._settings.ranks.world
        error: Exception | None = None
        try:
            self._offload = OffloadTargets.find(offload, self._settings.device)
            for unit in self._plan.units:
                params = [one.param for one in unit.owned]
                self._offload.reserve(unit.name, params, unit.settings.topology.shard.size)
        except (ValueError, NotImplementedError, OffloadError) as found:
            error = found
        if offload.path is not None:
            consistency.raise_everywhere(error, world)

    def warnings(self) -> list[str]:
        """Warnings that rank 0 gives: the plan may not be what the user meant."""
        module, policy, ignored = self._module, self._policy, self._ignored
        found = self._plan.precision.warnings()
        # "auto" may choose no unit, in a small model.
        if policy not in (None, "auto") and not self._plan.chosen:
            found.append(explain_no_match(module, policy, **ignored.keywords()))
        if module in ignored.modules:
            found.append(
                "ShardedWrapper: the wrapped module itself is ignored, so no parameter is sharded"
            )
        if self._settings.topology.shard.size > 1:
            found.extend(self._lint())
        return found

    def _lint(self) -> list[str]:
        """Warnings about units that will be slow or large."""
        inside = units_in(self._module)
        if self._policy is None and not inside:
            return unit_report.lint_one_unit(self._module, **self._ignored.keywords())
        *units, root = self._plan.units
        sizes = [_unit_size(unit.names, [one.param for one in unit.owned]) for unit in units]
        sizes += [_unit_size([plan.name], []) for plan in self._plan.without_params]
        sizes.append(_unit_size(root.names, [one.param for one in root.owned]))
        for unit in inside:
            sizes.append(_unit_size(unit.names, [s for h in unit.handles for s in h.layout.spans]))
        return unit_report.lint(sizes, self._plan.tied())

    def make_units(
        self, root: ModuleProxy, kind: type[ModuleProxy], initial_values: InitialValues
    ) -> None:
        """Change the module: make the units inside it, then let ``root`` wrap it.

        Collective: all ranks.

        Args:
            root: an empty wrapper.
            kind: the class of the wrappers inside.
            initial_values: the result of ``agree``.

        Raises:
            ValueError: a unit that was there before trains on other ranks.
            RuntimeError: something else refers to a parameter's memory.
        """
        wrappers: dict[nn.Module, ModuleProxy] = {}
        units = []
        *planned_units, planned_root = self._plan.units
        for planned in planned_units:
            for plan in planned.members:
                wrappers[plan.module] = wrapper = kind.__new__(kind)
                nn.Module.__init__(wrapper)
            units.append(self._make_unit(planned, wrappers, initial_values))
        _replace_children(self._module, wrappers)
        units.insert(0, self._make_unit(planned_root, {self._module: root}, initial_values))
        self._make_values(initial_values, root, units)
        # Connecting is collective: all ranks in the same order of units and kinds.
        for unit in units:
            for fixed_order in sorted({handle.reduce_plan.fixed_order for handle in unit.handles}):
                unit.topology.connect(self._settings.device, fixed_order=fixed_order)
        self._plan.precision.install()
        start_run(sharding_of(root))

    def _make_unit(
        self,
        planned: PlannedUnit,
        wrappers: Mapping[nn.Module, ModuleProxy],
        initial_values: InitialValues,
    ) -> Unit:
        """Make one unit, and complete the wrappers of its modules."""
        settings = planned.settings
        precision, topology = self._plan.precision, settings.topology
        modules = [plan.module for plan in planned.members]
        unit = Unit(
            {module: precision.of_unit(module, settings.precision) for module in modules},
            planned.names,
            placement=settings.placement,
            topology=topology,
        )
        hooks = UnitHooks(unit)
        hooks.own(
            make_handle(
                params,
                unit.name,
                HandleOptions(
                    topology,
                    self._offload,
                    kind.precision,
                    use_orig_params=settings.use_orig_params,
                    reduces_alone=kind.apart != 0,
                ),
                device=settings.device,
                missing=initial_values.missing,
                source=initial_values.source(topology),
            )
            for kind, params in planned.flat_params.items()
        )
        state_dict = UnitStateDict(unit)
        flat = [] if settings.use_orig_params else [h.sharded[0] for h in unit.handles]
        for plan in planned.members:
            module, wrapper = plan.module, wrappers[plan.module]
            wrapper.module = module
            wrapper.training = module.training
            ignored = self._ignored.within(module)
            Sharding(wrapper, unit, hooks, state_dict, settings, ignored, plan.reason).attach()
            for number, param in enumerate(flat):
                wrapper.register_parameter(f"_flat_param_{number}", param)
        return unit

    def _make_values(
        self, initial_values: InitialValues, root: ModuleProxy, units: Iterable[Unit]
    ) -> None:
        """Initialise what was on the meta device, and fill replicas. Collective."""
        handles = [handle for unit in units for handle in unit.handles]
        if initial_values.any_missing:
            made = meta_init.MetaInit(
                root, handles, initial_values, self._init_fn, self._settings.device
            )
            sharding_of(root).is_left_empty = made.run()
        # Replicas copy a shard, so only once every tensor in it has its value.
        for handle in handles:
            source = initial_values.source(handle.topology)
            if source is not None:
                source.replicate(handle.shard)
            handle.page_out()
        self._offload.trim()


def _unit_size(
    names: Sequence[str], owned: Iterable[nn.Parameter | ParamSpan]
) -> unit_report.UnitSize:
    counts = [one.numel if isinstance(one, ParamSpan) else one.numel() for one in owned]
    return unit_report.UnitSize(tuple(names), sum(counts), max(counts, default=0))


def _replace_children(root: nn.Module, wrappers: dict[nn.Module, ModuleProxy]) -> None:
    """Put each wrapper at every place of its module, which several parents may share."""
    for parent in list(root.modules()):
        if isinstance(parent, ModuleProxy):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]
