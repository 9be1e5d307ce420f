"""``wrap`` carries out a ``ModelPlan``: makes the units, and puts wrappers around their modules.

In this order:

1. Ranks compare their plans, and create the process groups of the strategies.
2. Each unit is laid out: which range of a flat parameter each rank holds. Disk space is reserved.
3. Ranks decide which rank's initial values all ranks use. Buffers move to the device.
4. Each unit is made: its parameters become shards, and wrappers take the place of its modules.
5. Parameters and buffers on the meta device get values.
6. The transports connect. The units get the state of their common steps (``RunContext``). Rank 0
   issues warnings.

Until the buffers move, an error leaves the module unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from flatshard.comm import consistency
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.hooks import surround
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
from flatshard.state.model_state import UnitStateDict
from flatshard.tensor.flat_parameter import OriginalParam
from flatshard.units.ignored import Ignored
from flatshard.units.module_proxy import ModuleProxy, put_in_place, replace_children

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
    targets = _reserve_offload(plan)
    initial_values = compare_values(plan)
    meta_init = None
    if initial_values.any_missing:
        meta_init = extra("meta_init", _ON_META).MetaInit(plan, initial_values)
    move_buffers(plan, initial_values)
    # Collect the warnings before units change the module: the checks read the user's own module.
    ranks = plan.settings.ranks
    messages = [*notes, *unit_report.plan_warnings(plan)] if ranks.world.rank == 0 else []
    units = _make_units(plan, root, kind, initial_values, targets)
    handles = [handle for unit in units for handle in unit.handles]
    if meta_init is not None:
        meta_init.run(root, handles)
    for handle in handles:
        handle.page_out()
    targets.trim()
    # `connect` is collective, so all ranks must make the same calls in the same order. `sorted`
    # gives all ranks the same order of the values of `fixed_order` (False, True).
    for unit in units:
        for fixed_order in sorted({handle.reduce_plan.fixed_order for handle in unit.handles}):
            unit.topology.connect(plan.settings.device, fixed_order=fixed_order)
    plan.precision_plan.install()
    for sharding in shardings_in(root):
        if sharding.wrapper.module in plan.divergent:  # includes modules that were wrapped earlier
            sharding.unit.placement = sharding.unit.placement.diverging()
    start_run(sharding_of(root))
    optimizer_step.install()
    # Warn after the last collective. If the user turns warnings into errors, `warnings.warn` raises
    # on rank 0. If a collective followed, the other ranks would wait there for rank 0.
    for message in [*initial_values.warnings(), *messages]:
        warnings.warn(message, stacklevel=3)


def _compare(plan: ModelPlan) -> None:
    """Compare the plan between ranks, and create the strategies' process groups. Collective."""
    ranks = plan.settings.ranks
    # Compare plans before any other collective: ranks with different plans would call different
    # collectives and deadlock.
    if ranks.world.size > 1:
        described = f"{plan.settings.describe()}{plan.precision_plan.describe()}"
        units = [
            f"{member.name}: {plan.settings_of[member.module].describe()}" for member in plan.chosen
        ]
        # For units that were wrapped before this call, compare only the strategy and the sizes:
        # ranks may hold different experts at the same place in the model.
        units += [sharding.summary() for sharding in plan.shardings]
        tensors = plan.params | plan.buffers
        consistency.check_same_model(tensors, described, units, plan.ignored.names, ranks.world)
    # `resolve` creates the process groups of a strategy, which is collective. So create the groups
    # only after the comparison above, when all ranks have the same strategies.
    for settings in plan.settings_of.values():
        ranks.resolve(settings.placement)
    if any(hasattr(param, "tensor_parallel") for param in plan.params.values()):
        extra("tensor_parallel", _A_DTENSOR).check_units(plan.units)


def _reserve_offload(plan: ModelPlan) -> OffloadTargets:
    """Lay out the units, choose the offload targets, and reserve disk space for offloaded tensors.

    Collective if the user offloads to disk: all ranks. Raises ValueError if the user's ``boundary``
    causes too much padding.
    """
    offload, targets = plan.settings.offload, OffloadTargets()
    for planned in plan.units:
        planned.lay_out(planned.settings.topology.shard.size)
    error: Exception | None = None
    try:
        targets = OffloadTargets.find(offload, plan.settings.device)
        for planned in plan.units:
            nbytes = [
                flat.layout.shard_numel * flat.dtype.itemsize * (1 + flat.requires_grad)
                for flat in planned.flat_params
            ]
            targets.reserve(planned.name, nbytes)
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
    targets: OffloadTargets,
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
        units.append(_make_unit(plan, planned, wrappers, initial_values, targets))
    replace_children(plan.module, wrappers)
    return [units[-1], *units[:-1]]


def _make_unit(
    plan: ModelPlan,
    planned: PlannedUnit,
    wrappers: Mapping[nn.Module, ModuleProxy],
    initial_values: InitialValues,
    targets: OffloadTargets,
) -> Unit:
    """Make one unit, and put the unit's modules into wrappers. Collective: all ranks.

    ``wrappers`` maps each module to its wrapper, which has no module yet.
    """
    settings = planned.settings
    handles = []
    for flat_plan, infos in planned.flat_params.items():
        flat_plan.topology, flat_plan.targets = settings.topology, targets
        params = [
            OriginalParam(info, index, flat_plan) for index, info in enumerate(infos.values())
        ]
        shard = initial_values.shard(flat_plan, params)
        handles.append(FlatParamHandle(flat_plan, params, shard))
    unit = Unit(
        {
            member.module: plan.precision_plan.of_unit(member.module, settings.precision)
            for member in planned.members
        },
        planned.names,
        placement=settings.placement,
        topology=settings.topology,
    )
    unit.own(handles)
    state_dict = UnitStateDict(unit)
    for member in planned.members:
        module, wrapper = member.module, wrappers[member.module]
        surround(unit, module)
        put_in_place(wrapper, module)
        wrapper.__dict__["_sharding"] = Sharding(
            wrapper, unit, state_dict, settings, plan.ignored.within(module), member.reason
        )
    return unit
