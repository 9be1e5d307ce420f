"""Makes the state of a model's training steps, and checks it before each forward; ``no_sync``."""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flatshard.engine.backward import Backward
from flatshard.engine.buffer_sync import Buffers, BufferSync
from flatshard.engine.forward import Forward
from flatshard.engine.gradients import GradSync
from flatshard.engine.handle import CHANGE_MODEL
from flatshard.engine.prefetch import Prefetch
from flatshard.engine.run_state import RunState, temporarily
from flatshard.engine.unit import Unit
from flatshard.memory import prepare_allocator
from flatshard.module import wrappers
from flatshard.module.model_plan import check_frozen
from flatshard.module.settings import as_flag
from flatshard.optimizer.adapter import stepping
from flatshard.optimizer.step import restore_all
from flatshard.options.extras import default_extra, extra
from flatshard.state.model_state import WriteThrough
from flatshard.units.module_proxy import UNIT, ModuleProxy
from flatshard.units.module_tree import unit_text

# The modules of all sharded models, and how often a module or parameter was assigned to one of
# these modules. Such an assignment may add a parameter that no unit shards.
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_num_registered = 0


def start_run(root: ModuleProxy, *, number: int | None = None) -> None:
    """Make the ``RunState`` of a model, which all wrappers of the model share."""
    names: dict[Unit, list[str]] = {}
    for module, name in wrappers.named_unit_modules(root).items():
        names.setdefault(module.__dict__[UNIT], []).append(name)
    for unit, own_names in names.items():
        unit.rename(own_names, is_root=unit is wrappers.unit_of(root))
    # Guess that the units run in registration order, and the root last. The first forward records
    # the real order.
    first, *rest = names
    units = [*rest, first]
    _check_ranks(units)
    settings, world = first.settings, first.settings.ranks.world
    number = world.new_model() % 256 if number is None else number  # fits in a byte
    root_checks, context = RootChecks(root, units), RunState(units, world, number)
    # As in DistributedDataParallel, a model that has no buffers when it is wrapped never broadcasts
    # buffers.
    if settings.broadcast_buffers and root_checks.shared_buffers():
        context.buffers = BufferSync(world, context.span, root_checks.shared_buffers, number)
    prefetch = Prefetch(context, settings.forward_prefetch, settings.backward_prefetch)
    backward = Backward(context, prefetch)
    forward = Forward(context, backward, prefetch, root_checks)
    context.connect(forward, backward, prefetch)
    if outside := default_extra("out_of_forward"):
        context.outside_use = outside.OutOfForwardUse(context, forward, backward)
    if divergent := [unit for unit in units if unit.may_diverge]:
        divergence = extra("divergence", "ShardedWrapper(allow_divergence=...)")
        context.extend(divergence.DivergentUnits(context, divergent))
    if any(handle.grads.plan.hook is not None for handle in context.handles):
        extra("reduction", "register_comm_hook()").call_hooks(context)
    if world.size > 1 and (compared := default_extra("compared_steps")):
        context.steps = compared.ComparedSteps(context)
    if torch.accelerator.is_available() and (checks := default_extra("device_checks")):
        root_checks.writes = checks.install(context)
    root_checks.context = context
    for unit in units:
        unit.roots.add(root)
        unit.context, unit.state_dict.writes = context, root_checks.writes


def _check_ranks(units: Sequence[Unit]) -> None:
    """Raise ValueError if a unit's ranks or groups do not fit the root unit's ranks or groups."""
    expected = units[-1].topology.world
    for unit in units:
        world = unit.topology.world
        if not set(world.ranks) <= set(expected.ranks):
            raise ValueError(
                f"ShardedWrapper: {unit_text(unit.name)} trains on ranks {world.ranks_text}, but "
                f"the module around it trains on {expected.ranks_text}. Pass the same ranks to "
                "both, or pass a subset of the outer module's ranks to the unit."
            )
    groups = [(unit, unit.topology.intra_group, unit.topology.second_group) for unit in units]
    grids = [one for one in groups if min(one[1].size, one[2].size) > 1]
    # Compare without communication: if a unit has the root's groups in reverse order on one rank,
    # the unit has them in reverse order on every rank.
    for unit, shard, replicate in grids:
        outermost, *its = grids[-1]
        if [group.ranks for group in its] == [replicate.ranks, shard.ranks]:
            raise ValueError(
                f"ShardedWrapper: {unit_text(unit.name)} shards over ranks {shard.ranks_text} and "
                f"replicates over {replicate.ranks_text}, but {unit_text(outermost.name)} does the "
                "opposite. Pass the same pair of groups (shard group, replicate group) to both."
            )


# Notes to add to torch's errors in forward. The keys are parts of torch's messages.
_NOTES = {
    # torch.func refuses saved-tensor hooks, even if the user's function reads no parameter.
    "don't yet support saved tensor hooks": (
        "called torch.func.grad, vjp, jacrev or hessian in forward, but flatshard needs "
        "saved-tensor hooks there. In forward, use torch.autograd.grad() (with "
        "torch.enable_grad() and inputs that require a gradient). Or call the transform outside "
        "of forward, with p.full_tensor() for each parameter."
    ),
    "a parametrized element with name": (
        "registered a parametrization on the ShardedWrapper of an inner unit, which has no "
        "parameters of its own. Register it before wrapping. If a library registers it in forward "
        "(LoRA on target_parameters), pass auto_wrap_policy='auto', or choose units that contain "
        "the parametrized module and its caller."
    ),
}


# ------------------------------------------------------------ before each forward


class RootChecks:
    """Checks a model before each forward of its outermost wrapper. Lists buffers to broadcast."""

    context: RunState

    def __init__(self, root: ModuleProxy, units: Sequence[Unit]) -> None:
        # The outermost wrapper may be freed while the program uses one of its units elsewhere.
        self._root = weakref.ref(root)
        self._ignored, self._shared = units[-1].ignored, wrappers.other_roots(root)
        self.writes = WriteThrough()
        # The modules that only some of the model's ranks train.
        self._apart = wrappers.modules_apart(units, units[-1].topology.world.size)
        self._num_registered = -1  # the global `_num_registered` at the last check
        self._added: list[nn.Parameter] = []  # frozen parameters that were added after wrapping
        self._modules = list(root.module.modules())

    def recover(self) -> None:
        """Undo a failed optimizer step, and copy users' writes to state dicts into the shards."""
        if stepping:
            restore_all()
        if self.writes.given:
            self.writes.take_over([*self.writes.given.values()])

    def shared_buffers(self) -> Buffers:
        """Return the buffers to broadcast. A buffer that several modules share is returned once."""
        # Do not call ``named_buffers()``: it builds names, which takes too long for every step.
        ignored = self._ignored
        left_alone = ignored.modules.union(self._apart)
        seen = {id(buffer) for module in left_alone for buffer in module._buffers.values()}
        seen.update(id(module._buffers.get(attribute)) for module, attribute in ignored.places)
        shared: Buffers = {}
        for module in self._modules:
            for attribute, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    shared[module, attribute] = buffer
        return shared

    def check(self) -> None:
        """Check the model before a forward of its outermost wrapper."""
        if self.writes.lost:
            self.writes.raise_lost()
        if (device := self.context.device) is not None and device.type == "cuda":
            _check_not_captured(device)
        if torch._C._is_tracing() or torch.compiler.is_exporting():
            self._check_not_exported()
        # Checking all modules is slow. So check only if a module or parameter was assigned since
        # the last check, or if a parameter that was added after wrapping is trained.
        trains_added = any(param.requires_grad for param in self._added)
        if trains_added or self._num_registered != _num_registered:
            self._check_modules()
            self._num_registered = _num_registered
        if self._shared:
            check_frozen(self._shared)

    def _check_not_exported(self) -> None:
        """Raise RuntimeError while torch traces or exports the model, if parameters are sharded."""
        # The trace would contain views of unsharded buffers, which are freed after the forward.
        if not all(handle.is_whole for handle in self.context.handles):
            raise RuntimeError(
                "ShardedWrapper: torch.jit.trace and torch.export cannot read sharded parameters. "
                "Load checkpoint.full_state_dict(model) into an unwrapped model, and export that."
            )

    def explain(self, error: BaseException, unit_name: str) -> None:
        """Add a note with the cause and the remedy to an error of torch, if ``_NOTES`` has one."""
        for text, note in _NOTES.items():
            if text in str(error) and not hasattr(error, "__notes__"):
                error.add_note(f"{unit_text(unit_name)} {note}")

    def _check_modules(self) -> None:
        """Raise if a parameter was added after wrapping: its gradients would not be averaged."""
        if (root := self._root()) is None:
            return
        handles, world = wrappers.handles_in(root), self.context.world
        if not self.context.has_run:
            for unit in wrappers.units_in(root):
                if unit.check_loaded is not None:
                    unit.check_loaded(root, world)
            if any(handle.flat_param.device.type == "cpu" for handle in handles):
                prepare_allocator()
        # List the modules again, because modules may have been added since the last check.
        self._modules = list(root.module.modules())
        _watched.update((root, *self._modules))
        _install()
        if world.size == 1 or any(handle.summoned is not None for handle in handles):
            return
        for handle in handles:
            handle.check_places()
        known = self._ignored.ids() | {id(param) for one in handles for param in one.sharded}
        added = {name: one for name, one in root.named_parameters() if id(one) not in known}
        self._added = list(added.values())
        for name, param in added.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added after wrapping: its gradients would not be "
                    f"averaged over ranks. Add it before wrapping, or freeze it. {CHANGE_MODEL}"
                )


@functools.cache
def _install() -> None:
    # Register the hooks at a model's first check, not at import: they slow down every assignment to
    # any module of the process.
    nn.modules.module.register_module_module_registration_hook(_registered)
    nn.modules.module.register_module_parameter_registration_hook(_registered)


def _registered(module: nn.Module, name: str, value: object) -> None:
    """Count an assignment to a module of a sharded model."""
    global _num_registered
    # Skip the lookup while compiling: Dynamo cannot trace it, and traced code adds no parameters.
    if not torch.compiler.is_compiling() and module in _watched:
        _num_registered += 1


def _check_not_captured(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph captures the current stream."""
    # A replay of a CUDA graph does not run the Python code that starts collectives. Query only
    # the current device, because a query about another device would make torch initialise it.
    is_current = torch.cuda.current_device() == device.index
    if is_current and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ShardedWrapper: the forward of a sharded model cannot be captured in a CUDA graph: "
            "replays would neither unshard parameters nor reduce gradients. Train without the "
            "graph. To launch fewer kernels, call block.compile() before wrapping."
        )


# ------------------------------------------------------------ no_sync


@contextlib.contextmanager
def accumulating(state: RunState, max_bytes: int | None, *, replicas_only: bool) -> Iterator[None]:
    """Context in which backwards accumulate unreduced gradients; see ``ShardedWrapper.no_sync``."""
    as_flag("replicas_only", replicas_only)
    state.check_between_steps("no_sync()")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"no_sync: expected max_bytes of at least 0, got {max_bytes}.")
    syncs = _plan_syncs(state.units, max_bytes, replicas_only)
    with temporarily([state], syncs=syncs, under_no_sync=True):
        yield


def plan_backward(model: nn.Module, *, reduces: bool) -> None:
    """Make the next backward reduce or accumulate gradients, even if forward planned otherwise."""
    for root in wrappers.units_in(model, nested=False):
        for unit in root.context.units:
            unit.sync = GradSync.FULL if reduces else GradSync.ACCUMULATE
        root.context.accumulates = not reduces


def _plan_syncs(units: Sequence[Unit], limit: int | None, replicas_only: bool) -> list[GradSync]:
    """Return, for each unit, which reductions a backward under ``no_sync`` does."""
    if limit is None:
        return [GradSync.SHARD_ONLY if replicas_only else GradSync.ACCUMULATE] * len(units)
    syncs = [GradSync.SHARD_ONLY if replicas_only else GradSync.FULL] * len(units)
    # Begin with the smallest units: then ``limit`` saves the collectives of the most units.
    for nbytes, index in sorted((_gradient_bytes(unit), unit.index) for unit in units):
        if nbytes <= limit:
            limit -= nbytes
            syncs[index] = GradSync.ACCUMULATE
    return syncs


def _gradient_bytes(unit: Unit) -> int:
    """Return the bytes of the unsharded gradients that a unit accumulates under ``no_sync``."""
    trained = (one for one in unit.handles if one.num_trainable)
    return sum(one.layout.padded_numel * one.grads.dtypes.accum_dtype.itemsize for one in trained)
