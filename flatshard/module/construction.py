"""``Construction``: turns a module into units, and puts a wrapper in the place of each module."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from flatshard.comm import consistency
from flatshard.engine.gather import HandleOptions
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.handle_making import make_handle
from flatshard.engine.hooks import UnitHooks, surround
from flatshard.engine.unit import Unit
from flatshard.memory.offload_target import OffloadTargets
from flatshard.module import meta_init, unit_report
from flatshard.module.initial_values import InitialValues, compare_values
from flatshard.module.inspection import UnwrappedModel
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.module.run import start_run
from flatshard.module.settings import Settings
from flatshard.module.sharding import (
    Sharding,
    initialising,
    modules_apart,
    sharding_of,
    shardings_in,
    units_in,
)
from flatshard.optimizer import step as optimizer_step
from flatshard.options.extras import extra
from flatshard.options.offload import OffloadError
from flatshard.plan.module_proxy import ModuleProxy, put_in_place
from flatshard.plan.policies import explain_no_match
from flatshard.state.model_state import UnitStateDict

_A_DTENSOR = "ShardedWrapper of a model with a DTensor among its parameters"


def local_parts(model: UnwrappedModel, settings: Settings) -> AbstractContextManager[None]:
    """Inside, parameters that are DTensors are plain ones of this rank's part; see the extra."""
    if not any(hasattr(param, "_spec") for _, param in model.params()):
        return nullcontext()
    parts: AbstractContextManager[None] = extra("tensor_parallel", _A_DTENSOR).local_parts(
        model, settings
    )
    return parts


class Construction:
    """Wraps one module: plans its units, compares the plan between ranks, then makes them."""

    def __init__(
        self,
        model: UnwrappedModel,
        settings: Settings,  # for the whole module; the policy may change them for a unit
        init_fn: meta_init.InitFn | None,
    ) -> None:
        settings.check()
        apart = modules_apart(model.module, settings.ranks.world.size)
        own = {id(buffer) for module in apart for buffer in module.buffers(recurse=False)}
        model = dataclasses.replace(model, left_alone=own.union(model.left_alone))
        is_sharded = settings.ranks.world.size > 1 and settings.placement.sharded
        model.check_params(drops_gradients=is_sharded)
        model.check_apart()
        self._model, self._settings = model, settings
        self._init_fn = init_fn and meta_init.sparing(init_fn, model.ignored)
        self._plan = ModelPlan(model, settings)
        self._offload = OffloadTargets()

    def wrap(
        self, root: ModuleProxy, kind: type[ModuleProxy], sync: bool | None, notes: Iterable[str]
    ) -> None:
        """Let ``root``, which is empty, wrap the module, and wrappers of class ``kind`` its units.

        Collective: all ranks. ``sync`` is ``sync_module_states``; ``notes`` are further warnings.
        Raises ValueError, on all ranks, if they build different models, their number does not fit a
        strategy, or nothing initialises tensors on the meta device.
        """
        initial_values = self._agree(sync)
        is_first = self._settings.ranks.world.rank == 0
        messages = [*notes, *self._warnings()] if is_first else []
        self._make_units(root, kind, initial_values)
        optimizer_step.install()
        # After the last collective: where warnings are errors, no other rank waits for rank 0.
        for message in [*initial_values.warnings(), *messages] if is_first else []:
            warnings.warn(message, stacklevel=3)

    def _agree(self, sync: bool | None) -> InitialValues:
        """Compare the plan with other ranks, and give buffers their values. Collective."""
        model, settings, plan = self._model, self._settings, self._plan
        ranks = settings.ranks
        named = [*model.params(), *model.buffers()]
        # First of all: ranks that plan different units would wait in different collectives.
        if ranks.world.size > 1:
            described = f"{settings.describe()}{plan.precision.describe()}"
            units = [f"{p.name}: {plan.settings_of[p.module].describe()}" for p in plan.chosen]
            # Other ranks may have other experts there, but as large ones.
            units += [one.summary() for one in shardings_in(model.module)]
            consistency.check_same_model(named, described, units, model.ignored.names, ranks.world)
        # Creating process groups is collective, so only after all ranks agree on the strategies.
        for one in plan.settings_of.values():
            ranks.resolve(one.placement)
        if any(hasattr(one.param, "tensor_parallel") for unit in plan.units for one in unit.owned):
            extra("tensor_parallel", _A_DTENSOR).check_units(plan.units)
        self._reserve_offload()
        initial_values = compare_values(named, sync, ranks.world)
        if initial_values.any_missing:
            self._resets = meta_init.find_resets(model, initial_values, self._init_fn)
        model.move_buffers(settings.device)
        meta_init.broadcast_buffers(model, initial_values, settings.device)
        return initial_values

    def _reserve_offload(self) -> None:
        """Choose the offload targets, and reserve room for shards that live on disk.

        Collective if they do: all ranks. Raises ValueError where a unit has too much padding.
        """
        offload, world = self._settings.offload, self._settings.ranks.world
        units = self._plan.units
        layouts_of = [unit.lay_out(unit.settings.topology.shard.size) for unit in units]
        error: Exception | None = None
        try:
            self._offload = OffloadTargets.find(offload, self._settings.device)
            for unit, layouts in zip(units, layouts_of, strict=True):
                numels = [(kind, one.shard_numel) for kind, one in layouts.items()]
                nbytes = [n * kind.dtype.itemsize * (1 + kind.requires_grad) for kind, n in numels]
                self._offload.reserve(unit.name, nbytes)
        except (ValueError, NotImplementedError, OffloadError) as found:
            error = found
        # Without a path no rank can fail alone.
        if offload.path is not None:
            consistency.raise_everywhere(error, world)

    def _warnings(self) -> list[str]:
        """What rank 0 warns of: settings without effect, and units that will be slow or large."""
        module, policy, ignored = self._model.module, self._model.policy, self._model.ignored
        settings = self._settings
        found = self._plan.precision.warnings()
        # "auto" may choose no unit, in a small model.
        if policy not in (None, "auto") and not self._plan.chosen:
            found.append(explain_no_match(module, policy, ignored))
        if module in ignored.modules:
            found.append(
                "ShardedWrapper: the wrapped module itself is ignored, so no parameter is sharded"
            )
        units = [one.module for one in self._plan.chosen]
        units += [one.wrapper.module for one in shardings_in(module)]
        divergent = self._model.divergent
        if divergent and module not in divergent and divergent.isdisjoint(units):
            found.append(
                "allow_divergence has no effect: none of these modules is in a unit of its own, so "
                "their parameters are all-gathered with the module around them"
            )
        if ignored.is_elsewhere:
            found.append(
                "ignored_modules, ignored_states: nothing of them is in the "
                f"{type(module).__name__} that is wrapped, so they have no effect there"
            )
        if isinstance(module, ModuleProxy):
            found.append(
                f"ShardedWrapper: the module, a {module.module.__class__.__name__}, is in a "
                "ShardedWrapper already, and the outer one adds nothing. Wrap it once, with all "
                "settings"
            )
        if settings.offload.is_on and not settings.offload.path and settings.device.type == "cpu":
            found.append("cpu_offload: the parameters are on the CPU already; nothing changes")
        # Not `settings.topology`: where all units may diverge, no other rank makes its groups.
        if self._plan.units[-1].settings.topology.shard.size > 1:
            found.extend(self._lint())
        return found

    def _lint(self) -> list[str]:
        inside = units_in(self._model.module)
        if self._model.policy is None and not inside:
            return unit_report.lint_one_unit(self._model.module, self._model.ignored)
        *units, root = [
            _unit_size(unit.names, [one.param.numel() for one in unit.owned])
            for unit in self._plan.units
        ]
        empty = [_unit_size([plan.name], []) for plan in self._plan.without_params]
        older = [
            _unit_size(unit.names, [span.numel for h in unit.handles for span in h.layout.spans])
            for unit in inside
        ]
        tied = [
            (one.param.numel(), [location.name for location in one.locations])
            for unit in self._plan.units
            for one in unit.owned
            if len(one.locations) > 1
        ]
        return unit_report.lint([*units, *empty, root, *older], tied)

    def _make_units(
        self, root: ModuleProxy, kind: type[ModuleProxy], initial_values: InitialValues
    ) -> None:
        """Change the module: make the units inside it, then let ``root`` wrap it. Collective."""
        wrappers: dict[nn.Module, ModuleProxy] = {}
        units = []
        *planned_units, planned_root = self._plan.units
        for planned in planned_units:
            for plan in planned.members:
                wrappers[plan.module] = wrapper = kind.__new__(kind)
                nn.Module.__init__(wrapper)
            units.append(self._make_unit(planned, wrappers, initial_values))
        _replace_children(self._model.module, wrappers)
        wrappers = {self._model.module: root}
        units.insert(0, self._make_unit(planned_root, wrappers, initial_values))
        self._make_values(initial_values, root, [one for unit in units for one in unit.handles])
        # Connecting is collective: all ranks in the same order of units and kinds.
        for unit in units:
            for fixed_order in sorted({handle.reduce_plan.fixed_order for handle in unit.handles}):
                unit.topology.connect(self._settings.device, fixed_order=fixed_order)
        self._plan.precision.install()
        for one in shardings_in(root):
            if one.wrapper.module in self._model.divergent:  # also those that were wrapped before
                one.unit.placement = one.unit.placement.diverging()
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
                    reduces_alone=kind.apart != 0,
                ),
                layout=planned.layouts[kind],
                device=settings.device,
                missing=initial_values.missing,
                source=initial_values.source(topology),
            )
            for kind, params in planned.flat_params.items()
        )
        state_dict = UnitStateDict(unit)
        for plan in planned.members:
            module, wrapper = plan.module, wrappers[plan.module]
            put_in_place(wrapper, module)
            surround(hooks, module)
            ignored = self._model.ignored.within(module)
            wrapper.__dict__["_sharding"] = Sharding(
                wrapper, unit, hooks, state_dict, settings, ignored, plan.reason
            )
        return unit

    def _make_values(
        self, initial_values: InitialValues, root: ModuleProxy, handles: Sequence[FlatParamHandle]
    ) -> None:
        """Initialise what was on the meta device, and fill replicas. Collective."""
        device = self._settings.device
        if initial_values.any_missing:
            init = meta_init.MetaInit(
                root, handles, initial_values, self._resets, self._init_fn, device
            )
            with initialising(root):
                sharding_of(root).is_left_empty = init.run()
        # Replicas copy a shard, so only once every tensor in it has its value.
        for handle in handles:
            source = initial_values.source(handle.topology)
            if source is not None:
                source.replicate(handle.shard)
            handle.page_out()
        self._offload.trim()


def _unit_size(names: Sequence[str], counts: Sequence[int]) -> unit_report.UnitSize:
    return unit_report.UnitSize(tuple(names), sum(counts), max(counts, default=0))


def _replace_children(root: nn.Module, wrappers: dict[nn.Module, ModuleProxy]) -> None:
    """Put each wrapper at every place of its module, which several parents may share."""
    for parent in list(root.modules()):
        if isinstance(parent, ModuleProxy):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]
