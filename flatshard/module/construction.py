"""``wrap`` carries out a ``ModelPlan``: it makes the units of a model.

If an error is raised before ``move_buffers``, the module is unchanged.

[Note: initial values]
The initial values of a tensor are each rank's own, or rank 0's. If all ranks take rank 0's values,
rank 0 broadcasts one parameter after the other, and every rank copies only its part to its shard.
So only rank 0 needs memory for the full model's values.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import agreed
from flatshard.comm.host_exchange import differ, digest_of, with_complements
from flatshard.engine.backward import Backward
from flatshard.engine.forward import surround_calls
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.memory import Checksum, HostMemory, OffloadTargets, checksum
from flatshard.module.model_plan import ModelPlan
from flatshard.module.run import start_run
from flatshard.module.settings import Settings
from flatshard.module.wrappers import units_in
from flatshard.optimizer import step as optimizer_step
from flatshard.options.extras import default_extra, extra
from flatshard.state.model_state import UnitStateDict
from flatshard.tensor.flat_parameter import FlatParamPlan, OriginalParam
from flatshard.units.layout import memory_order, strides_of
from flatshard.units.module_proxy import UNIT, ModuleProxy, put_in_place
from flatshard.units.module_tree import Ignored

_A_DTENSOR = "ShardedWrapper of a model with a DTensor among its parameters"
_ON_META = "ShardedWrapper of a model with parameters or buffers on the meta device"


def local_parts(module: nn.Module, ignored: Ignored, settings: Settings) -> Any:
    """Return a context that replaces the DTensors among the parameters by their local tensors."""
    if not any(hasattr(param, "_spec") for param in module.parameters()):
        return nullcontext()
    return extra("tensor_parallel", _A_DTENSOR).local_parts(module, ignored, settings)


def wrap(plan: ModelPlan, root: ModuleProxy, notes: Iterable[str]) -> None:
    """Put the planned module into ``root``, a wrapper that has no module yet, and make the units.

    Rank 0 issues ``notes`` and the warnings about the plan. Collective: all ranks.
    """
    _compare(plan)
    targets = _offload_targets(plan)
    initial_values = InitialValues(plan)
    meta_init = None
    if initial_values.any_missing:
        meta_init = extra("meta_init", _ON_META).MetaInit(plan, initial_values)
    move_buffers(plan, initial_values)
    is_first = plan.settings.ranks.world.rank == 0
    messages = list(notes) if is_first else []
    if is_first and (advice := default_extra("advice")):
        # Collect advice about the user's module now, before making units changes the module.
        messages += advice.about(plan)
    units = _make_units(plan, initial_values, targets)
    put_in_place(root, plan.module)
    handles = [handle for unit in units for handle in unit.handles]
    if meta_init is not None:
        meta_init.run(root, handles)
    for handle in handles:
        handle.page_out()
    if targets.state is not None:
        targets.state.trim()
    # Sort, because `connect` is collective, and all ranks must call it in the same order.
    for unit in units:
        for fixed_order in sorted({handle.grads.plan.fixed_order for handle in unit.handles}):
            unit.topology.connect(plan.settings.device, fixed_order=fixed_order)
    plan.precision_plan.install()
    for unit in units_in(root):  # also the units that the module contained before
        if not plan.divergent.isdisjoint(unit.modules):
            unit.placement = unit.placement.diverging()
    start_run(root)
    optimizer_step.install()
    # Warn after the last collective: only rank 0 warns, and the user may turn warnings into errors.
    for message in [*initial_values.warnings(), *messages]:
        warnings.warn(message, stacklevel=3)


def _compare(plan: ModelPlan) -> None:
    """Check that all ranks plan the same model, and make the process groups. Collective."""
    ranks = plan.settings.ranks
    # Compare before any other collective: ranks with different plans would deadlock.
    if ranks.world.size > 1:
        units = [f"{one.name}: {plan.settings_of[one.module].describe()}" for one in plan.chosen]
        # For units that the module contained before, compare only strategies and sizes: modules
        # with the same name may be different experts on different ranks.
        units += map(summary, plan.sharded_before.values())
        described = plan.settings.describe().split(", ")
        # The names of facts contain positions, so that ranks also compare the order.
        facts = {f"setting {number}": text for number, text in enumerate(described)}
        facts["the list of ignored tensors"] = repr(list(plan.ignored.names))
        tensors = (f"{n!r} ({_describe(one)})" for n, one in (plan.params | plan.buffers).items())
        facts |= {f"tensor {number}": text for number, text in enumerate(tensors)}
        facts |= {f"unit {number}": text for number, text in enumerate(units)}
        remedy = "Every rank must wrap the same modules in the same order with the same settings."
        start = "the ranks build different models. First difference"
        agreed(lambda: (True, facts), [ranks.world.host], "ShardedWrapper", remedy, differ=start)
    # Call `resolve` after the comparison: it creates process groups, and would deadlock if the
    # ranks had different strategies.
    for settings in plan.settings_of.values():
        ranks.resolve(settings.placement)
    if any(hasattr(param, "dtensor_split") for param in plan.params.values()):
        extra("tensor_parallel", _A_DTENSOR).check_units(plan.units)


def _describe(tensor: Tensor) -> str:
    shape = tuple(tensor.shape)
    text = f"shape {shape}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
    if isinstance(tensor, nn.Parameter):
        # Compare strides, which determine the order of the elements in the flat parameter.
        text += f", strides {strides_of(shape, memory_order(tensor))}"
    return text


def summary(unit: Unit) -> str:
    """Return a text with the sharding strategy and the sizes of a unit."""
    strategy = unit.settings.strategy.name
    if len(unit.modules) > 1:
        return f"{strategy}: part of unit {unit.name}"
    numel = sum(handle.layout.numel for handle in unit.handles)
    padding = sum(handle.layout.padding_numel for handle in unit.handles)
    ranks = unit.settings.topology.shard.size
    over = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{strategy}: {numel:,} elements + {padding:,} padding over {over}"


def _offload_targets(plan: ModelPlan) -> OffloadTargets:
    """Lay out the flat parameters, and choose where to offload shards. Collective for disks."""
    for planned in plan.units:
        planned.lay_out(planned.settings.topology.shard.size)
    offload = plan.settings.cpu_offload
    if offload.path is not None:
        return extra("disk", "CPUOffload(path=...)").find_targets(plan)  # type: ignore[no-any-return]
    if not offload.is_on or plan.settings.device.type == "cpu":
        return OffloadTargets()
    host = HostMemory(pinned=offload.pin_memory)
    return OffloadTargets(host, host, keeps_copy=not offload.takes_params)


def _make_units(plan: ModelPlan, values: "InitialValues", targets: OffloadTargets) -> list[Unit]:
    """Make the units. Returns the units, the root first. Collective."""
    units: list[Unit] = []
    for planned in plan.units:
        settings, handles = planned.settings, []
        for flat in planned.flats:
            flat.topology, flat.targets = settings.topology, targets
            params = flat.take_params()
            handles.append(FlatParamHandle(flat, params, values.shard(flat, params)))
        modules = [member.module for member in planned.members]
        casts = {module: plan.precision_plan.of_unit(module) for module in modules}
        unit = Unit(casts, planned.names, settings, plan.ignored.within(modules))
        unit.reasons = [member.reason for member in planned.members]
        unit.own(handles, Backward.receive)
        unit.state_dict = UnitStateDict(unit)
        for module in modules:
            module.__dict__[UNIT] = unit
            surround_calls(unit, module)
        units.append(unit)
    return [units[-1], *units[:-1]]


# ------------------------------------------------------------ initial values

LEFT_EMPTY = "_flatshard_left_empty"


def leave_empty(module: nn.Module) -> None:
    """Let a module on the meta device have no values until the program calls ``load_state_dict``.

    Pass this function as ``param_init_fn``, or call it inside of a ``param_init_fn``. Only the
    shards get memory. The first forward raises an error if a tensor still has no values.

    Example:
        ```python
        with torch.device("meta"):
            model = Model()
        model = ShardedWrapper(model, param_init_fn=flatshard.leave_empty)
        model.load_state_dict(torch.load("model.pt", mmap=True))
        ```
    """
    module.__dict__[LEFT_EMPTY] = True


class InitialValues:
    """Decides which initial values of parameters and buffers the ranks use.

    All ranks take rank 0's values if ``sync_module_states`` is True, or if the keyword is None and
    the checksums of the values differ between ranks. With ``broadcast_buffers=False`` and
    ``sync_module_states=None``, each rank keeps its own buffers, as in DistributedDataParallel.
    """

    def __init__(self, plan: ModelPlan) -> None:
        """Compare the values, and find the tensors on the meta device. Collective: all ranks."""
        settings, world = plan.settings, plan.settings.ranks.world
        sync = settings.sync_module_states
        tensors = plan.params | plan.buffers
        kept = {} if sync is not None or settings.broadcast_buffers else plan.buffers
        # The checksum of each tensor. None: on the meta device. 0: no checksum is needed, because
        # rank 0 broadcasts the values anyway, or each rank uses its own values.
        mine = {
            name: None if one.is_meta else 0 if sync or name in kept else checksum(one.detach())
            for name, one in tensors.items()
        }
        self.settings, self.world = settings, world
        self.different = different = names_of_different(mine, world)
        # Whether rank 0 broadcasts parameters (`sends`) and buffers (`sends_buffers`). Buffers in
        # `kept` are broadcast only if some ranks have them on the meta device, and others do not.
        self.sends = world.size > 1 and (bool(different) if sync is None else sync)
        self.sends_buffers = self.sends and (not kept or not kept.keys().isdisjoint(different))
        marks = bytes(value is None for value in mine.values())
        # `marks` has a 1 for each tensor without values. If rank 0 sends its values, only rank 0's
        # marks count, so the other ranks pass zeros to the maxima.
        counted = bytes(len(marks)) if self.sends and world.rank != 0 else marks
        everywhere = world.maxima(counted, op_name="comparing weights")
        self.any_missing = any(everywhere)  # whether some rank must initialise tensors
        # Ids of tensors that have no values on rank 0 (if rank 0 sends), otherwise on this rank.
        lacking = compress(tensors.values(), everywhere if self.sends else marks)
        self.missing = {id(tensor) for tensor in lacking}

    def shard(self, plan: FlatParamPlan, params: Sequence[OriginalParam]) -> Tensor:
        """Return this rank's shard, ``(shard_numel,)``, with the values of ``params``.

        Parameters without values become zeros. Collective if all ranks take rank 0's values.
        """
        with torch.inference_mode(False), torch.no_grad():
            shard = torch.zeros(plan.layout.shard_numel, dtype=plan.dtype, device=plan.device)
            for param in params:
                if id(param.sharded) not in self.missing:
                    self.take_part(shard, param, param.sharded)
        return shard

    def take_part(self, shard: Tensor, param: OriginalParam, value: Tensor | None) -> None:
        """Copy this rank's part of ``value``, the full tensor of ``param``, into ``shard``.

        If all ranks take rank 0's values, rank 0 broadcasts its ``value``, and the other ranks may
        pass None. Then the call is collective: all ranks.
        """
        spec = param.spec
        part = shard[spec.range]
        if self.sends:
            # Broadcast each parameter separately: a whole unit may not fit in memory.
            if self.world.rank == 0:
                assert value is not None, "rank 0 has the values"
                whole = value.permute(spec.order).reshape(-1).to(part.device, part.dtype)
            else:
                whole = torch.empty(spec.span.numel, dtype=part.dtype, device=part.device)
            self.world.broadcast(whole, op_name=spec.name)
            part.copy_(whole[spec.offset : spec.offset + spec.numel])
        else:
            assert value is not None, "every rank has the values"
            part.copy_(spec.slice(value))

    def take_buffer(self, buffer: Tensor, name: str) -> Tensor:
        """Broadcast rank 0's ``buffer``, and return a buffer with its values. Collective."""
        if buffer.is_meta:
            buffer = torch.empty_like(buffer, device=self.settings.device)
        contiguous = buffer.detach().contiguous()
        self.world.broadcast(contiguous, op_name=name)
        # If the buffer is not contiguous, the broadcast wrote into a copy.
        if contiguous.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(contiguous)
        return buffer

    def warnings(self) -> list[str]:
        """Return a warning on rank 0 if ranks start with different weights, otherwise nothing."""
        if self.world.rank != 0 or not self.different or self.settings.sync_module_states:
            return []
        first, *others = self.different
        listed = f"{first!r} and {len(others)} more" if others else repr(first)
        outcome = (
            "Every rank now takes the weights of rank 0. Call torch.manual_seed() with one seed on "
            "all ranks before making the model, or pass sync_module_states=True."
            if self.settings.sync_module_states is None
            else "With sync_module_states=False each rank keeps its own part, so the weights are a "
            "mixture. Pass sync_module_states=True, or load the same weights on all ranks."
        )
        what = f"ShardedWrapper: the ranks start from different weights ({listed})."
        return [f"{what} {outcome} [FS-WEIGHTS]"]


def names_of_different(sums: Mapping[str, Checksum | None], world: Communicator) -> list[str]:
    """Return the names of tensors whose checksums differ between ranks. Collective: all ranks."""
    # Compare the digests by a maximum over the ranks, because a gather's messages would grow with
    # the number of ranks.
    digests = b"".join(digest_of(repr(one).encode()) for one in sums.values())
    flags = differ(world.maxima(with_complements(digests), op_name="comparing weights"))
    size = len(digests) // max(len(sums), 1)
    return [name for n, name in enumerate(sums) if any(flags[n * size : (n + 1) * size])]


def move_buffers(plan: ModelPlan, start: InitialValues) -> None:
    """Move buffers to the device. If ``start.sends_buffers``, broadcast rank 0's. Collective."""
    device = plan.settings.device
    # New buffers, keyed by the id of the old buffer, because several modules may share a buffer.
    received: dict[int, Tensor] = {}
    for name, buffer in plan.buffers.items():
        if not buffer.is_meta and buffer.device != device:
            buffer.data = buffer.data.to(device)
        if start.sends_buffers and id(buffer) not in start.missing:
            received[id(buffer)] = start.take_buffer(buffer, name)
    for inner in plan.module.modules() if received else ():
        for attribute, held in inner._buffers.items():
            inner._buffers[attribute] = received.get(id(held), held)
