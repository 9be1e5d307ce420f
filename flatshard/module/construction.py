"""``wrap`` carries out a ``ModelPlan``: makes the units, and puts wrappers around their modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from flatshard.comm import consistency
from flatshard.engine.gather import HandleOptions
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.hooks import UnitHooks, surround
from flatshard.engine.unit import Unit
from flatshard.memory.offload_target import OffloadTargets
from flatshard.module import unit_report
from flatshard.module.initial_values import InitialValues, compare_values, move_buffers
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.module.run import start_run
from flatshard.module.settings import Settings
from flatshard.module.sharding import Sharding, sharding_of, shardings_in
from flatshard.optimizer import step as optimizer_step
from flatshard.options.extras import extra
from flatshard.options.offload import OffloadError
from flatshard.plan.ignored import Ignored
from flatshard.plan.module_proxy import ModuleProxy, put_in_place
from flatshard.plan.policies import explain_no_match
from flatshard.state.model_state import UnitStateDict
from flatshard.tensor.flat_parameter import OriginalParam

_A_DTENSOR = "ShardedWrapper of a model with a DTensor among its parameters"
_ON_META = "ShardedWrapper of a model with parameters or buffers on the meta device"


def local_parts(
    module: nn.Module, ignored: Ignored, settings: Settings
) -> AbstractContextManager[None]:
    """Return a context that replaces each DTensor parameter by a parameter with its local tensor.

    So construction shards the local tensors. The extra ``tensor_parallel`` implements the context.
    For a model without DTensors, the context does nothing.
    """
    if not any(hasattr(param, "_spec") for param in module.parameters()):
        return nullcontext()
    tensor_parallel = extra("tensor_parallel", _A_DTENSOR)
    parts: AbstractContextManager[None] = tensor_parallel.local_parts(module, ignored, settings)
    return parts


def wrap(plan: ModelPlan, root: ModuleProxy, kind: type[ModuleProxy], notes: Iterable[str]) -> None:
    """Let ``root``, a wrapper that has no module yet, wrap the planned module.

    The modules of the other units get wrappers of class ``kind``. Rank 0 issues ``notes`` and the
    warnings about the plan.

    Collective: all ranks.

    Raises:
        ValueError: on all ranks, if the ranks build different models, the number of ranks does not
            fit a strategy, or no function initialises a tensor on the meta device.
    """
    _compare(plan)
    offload = _reserve_offload(plan)
    initial_values = compare_values(plan)
    meta_init = None
    if initial_values.any_missing:
        meta_init = extra("meta_init", _ON_META).MetaInit(plan, initial_values)
    move_buffers(plan, initial_values)
    is_first = plan.settings.ranks.world.rank == 0
    # Collect the warnings before units change the module: the checks read the user's own module.
    messages = [*notes, *_warnings(plan)] if is_first else []
    units = _make_units(plan, root, kind, initial_values, offload)
    handles = [handle for unit in units for handle in unit.handles]
    if meta_init is not None:
        meta_init.run(root, handles)
    for handle in handles:
        handle.page_out()
    offload.trim()
    # `connect` is collective, so all ranks must make the same calls in the same order. `sorted`
    # gives all ranks the same order of the values of `fixed_order` (False, True).
    for unit in units:
        for fixed_order in sorted({handle.reduce_plan.fixed_order for handle in unit.handles}):
            unit.topology.connect(plan.settings.device, fixed_order=fixed_order)
    plan.precision.install()
    for sharding in shardings_in(root):
        if sharding.wrapper.module in plan.divergent:  # includes modules that were wrapped earlier
            sharding.unit.placement = sharding.unit.placement.diverging()
    start_run(sharding_of(root))
    optimizer_step.install()
    # Warn after the last collective. If the user turns warnings into errors, `warnings.warn` raises
    # on rank 0. If a collective followed, the other ranks would wait there for rank 0.
    for message in [*initial_values.warnings(), *messages] if is_first else []:
        warnings.warn(message, stacklevel=3)


def _compare(plan: ModelPlan) -> None:
    """Compare the plan between ranks, and create the strategies' process groups. Collective."""
    settings, ranks = plan.settings, plan.settings.ranks
    # Compare plans before any other collective: ranks with different plans would call different
    # collectives and deadlock.
    if ranks.world.size > 1:
        described = f"{settings.describe()}{plan.precision.describe()}"
        units = [f"{p.name}: {plan.settings_of[p.module].describe()}" for p in plan.chosen]
        # For units that were wrapped before this call, compare only the strategy and the sizes:
        # ranks may hold different experts at the same place in the model.
        units += [one.summary() for one in shardings_in(plan.module)]
        named = [*plan.params(), *plan.buffers()]
        consistency.check_same_model(named, described, units, plan.ignored.names, ranks.world)
    # `resolve` creates the process groups of a strategy, which is collective. So create the groups
    # only after the comparison above, when all ranks have the same strategies.
    for unit_settings in plan.settings_of.values():
        ranks.resolve(unit_settings.placement)
    if any(hasattr(param, "tensor_parallel") for _, param in plan.params()):
        extra("tensor_parallel", _A_DTENSOR).check_units(plan.units)


def _reserve_offload(plan: ModelPlan) -> OffloadTargets:
    """Lay out the units, choose the offload targets, and reserve disk space for offloaded tensors.

    Collective if the user offloads to disk: all ranks. Raises ValueError if the user's ``boundary``
    causes too much padding.
    """
    offload, targets = plan.settings.offload, OffloadTargets()
    layouts_of = [unit.lay_out(unit.settings.topology.shard.size) for unit in plan.units]
    error: Exception | None = None
    try:
        targets = OffloadTargets.find(offload, plan.settings.device)
        for unit, layouts in zip(plan.units, layouts_of, strict=True):
            numels = [(kind, one.shard_numel) for kind, one in layouts.items()]
            nbytes = [n * kind.dtype.itemsize * (1 + kind.requires_grad) for kind, n in numels]
            targets.reserve(unit.name, nbytes)
    except (ValueError, NotImplementedError, OffloadError) as found:
        error = found
    # An offload to disk may fail on only some ranks, so all ranks raise the error together.
    # Otherwise the remaining ranks would wait in the next collective.
    if offload.path is not None:
        consistency.raise_everywhere(error, plan.settings.ranks.world)
    return targets


def _make_units(
    plan: ModelPlan,
    root: ModuleProxy,
    kind: type[ModuleProxy],
    initial_values: InitialValues,
    offload: OffloadTargets,
) -> list[Unit]:
    """Make the units, the root last, and wrap their modules. Returns the units, the root first.

    Collective: all ranks.
    """
    wrappers: dict[nn.Module, ModuleProxy] = {plan.module: root}
    units: list[Unit] = []
    for planned in plan.units:
        for member in planned.members:
            if member.module is not plan.module:
                wrappers[member.module] = wrapper = kind.__new__(kind)
                nn.Module.__init__(wrapper)
        units.append(_make_unit(plan, planned, wrappers, initial_values, offload))
    _replace_children(plan.module, wrappers)
    return [units[-1], *units[:-1]]


def _make_unit(
    plan: ModelPlan,
    planned: PlannedUnit,
    wrappers: Mapping[nn.Module, ModuleProxy],
    initial_values: InitialValues,
    offload: OffloadTargets,
) -> Unit:
    """Make one unit, and put the unit's modules into wrappers. Collective: all ranks.

    ``wrappers`` maps each module to its wrapper, which has no module yet.
    """
    settings, precision = planned.settings, plan.precision
    topology = settings.topology
    modules = [member.module for member in planned.members]
    handles = []
    for kind, infos in planned.flat_params.items():
        layout = planned.layouts[kind]
        params = [
            OriginalParam(info, index, layout, topology, planned.name, offload.state)
            for index, info in enumerate(infos)
        ]
        shard = initial_values.shard(params, layout.shard_numel, settings.device)
        options = HandleOptions(topology, offload, kind.precision, kind.apart != 0)
        handles.append(FlatParamHandle(params, planned.name, options, layout, shard))
    unit = Unit(
        {module: precision.of_unit(module, settings.precision) for module in modules},
        planned.names,
        placement=settings.placement,
        topology=topology,
    )
    hooks = UnitHooks(unit)
    hooks.own(handles)
    state_dict = UnitStateDict(unit)
    for member in planned.members:
        module, wrapper = member.module, wrappers[member.module]
        surround(hooks, module)
        put_in_place(wrapper, module)
        ignored = plan.ignored.within(module)
        wrapper.__dict__["_sharding"] = Sharding(
            wrapper, unit, hooks, state_dict, settings, ignored, member.reason
        )
    return unit


def _warnings(plan: ModelPlan) -> list[str]:
    """Return warnings for rank 0: settings without effect, and units that are slow or large."""
    module, settings, ignored = plan.module, plan.settings, plan.ignored
    found = plan.precision.warnings()
    # Do not warn if "auto" chose no unit: "auto" keeps a small model in one unit on purpose.
    if settings.policy not in (None, "auto") and not plan.chosen:
        found.append(explain_no_match(module, settings.policy, ignored))
    if module in ignored.modules:
        found.append(
            "ShardedWrapper: the wrapped module itself is ignored, so no parameter is sharded. "
            "Leave the module out of ignored_modules and ignored_states."
        )
    units = [member.module for member in plan.chosen]
    units += [sharding.wrapper.module for sharding in shardings_in(module)]
    if plan.divergent and module not in plan.divergent and plan.divergent.isdisjoint(units):
        found.append(
            "allow_divergence has no effect, because none of its modules is a unit: the modules "
            "around them all-gather their parameters. Make these modules units (auto_wrap_policy)."
        )
    if ignored.is_elsewhere:
        found.append(
            "ignored_modules, ignored_states: none of these is in the wrapped "
            f"{type(module).__name__}, so they have no effect. Pass modules of the wrapped model."
        )
    if isinstance(module, ModuleProxy):
        found.append(
            f"ShardedWrapper: the module, a {module.module.__class__.__name__}, is in a "
            "ShardedWrapper already, and the outer wrapper adds nothing. Wrap the module once, "
            "with all settings."
        )
    if settings.offload.is_on and not settings.offload.path and settings.device.type == "cpu":
        found.append("cpu_offload has no effect on parameters in CPU memory. Omit cpu_offload.")
    # Read the topology (the process groups of a strategy) from the root unit, not from `settings`,
    # the settings of the whole model. With `allow_divergence=True`, ranks may skip any unit, which
    # changes the placement of every unit, so no unit has created the groups for the placement in
    # `settings`. Then `settings.topology` would create these groups, which is collective. But this
    # function runs only on rank 0, so rank 0 would wait forever.
    is_sharded = plan.units[-1].settings.topology.shard.size > 1
    if settings.policy is None and is_sharded and not shardings_in(module):
        found += unit_report.one_unit_warning(module, ignored)
    return found


def _replace_children(root: nn.Module, wrappers: Mapping[nn.Module, ModuleProxy]) -> None:
    """Put each wrapper where its module was. Several parents may share the module."""
    for parent in list(root.modules()):
        if isinstance(parent, ModuleProxy):
            continue
        for name, child in parent._modules.items():
            if child is not None and child in wrappers:
                parent._modules[name] = wrappers[child]
