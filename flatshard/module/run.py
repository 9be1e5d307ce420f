"""``start_run``: makes the outermost wrapper the root, and adds the checks of its forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from flatshard.diagnostics import late_modules
from flatshard.diagnostics.forward_edits import ForwardEdits
from flatshard.engine.buffer_sync import Buffers, BufferSync
from flatshard.engine.context import RunContext
from flatshard.engine.divergence import DivergentUnits
from flatshard.engine.events import StepObserver
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.unit import Unit
from flatshard.memory.buffer_cache import prepare_allocator
from flatshard.module import meta_init
from flatshard.module.sharding import Sharding, handles_in, modules_apart, sharding_of, shardings_in
from flatshard.optimizer import step
from flatshard.options.flags import as_flags
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.module_tree import unit_text
from flatshard.state.write_through import WriteThrough


def start_run(root: Sharding, *, number: int | None = None) -> None:
    """Make the wrapper of ``root`` the outermost one; all wrappers inside share its run.

    ``number`` identifies the model, the same on all ranks; None: a new one. Raises ValueError if
    units inside train on other ranks.
    """
    names: dict[Unit, list[str]] = {}
    for name, module in root.wrapper.named_modules():
        if isinstance(module, ModuleProxy):
            names.setdefault(sharding_of(module).unit, []).append(name)
    for unit, own_names in names.items():
        unit.rename(own_names, is_root=unit is root.unit)
    # Registration order, the root last: a first guess at the order of execution.
    first, *rest = names
    units = [*rest, first]
    _check_ranks(units)
    settings, checks = root.settings, _ForwardChecks(root)
    hooks = {one.unit: one.hooks for one in shardings_in(root.wrapper)}
    context = RunContext(
        [hooks[unit] for unit in units],
        settings.ranks.world,
        number=settings.ranks.world.new_model() if number is None else number,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=settings.backward_prefetch,
    )
    context.observers.add(checks)
    if settings.broadcast_buffers:
        context.observers.add(BufferSync(context.state, checks.synced_buffers))
    context.observers.add(ForwardEdits())
    if divergent := [unit for unit in units if unit.may_diverge]:
        context.observers.add(DivergentUnits(context.state, divergent))
    writes = WriteThrough()
    context.observers.add(writes)
    for one in shardings_in(root.wrapper):
        one.context, one.state_dict.writes = context, writes
        one.state_dict.is_apart = one.settings.ranks.world.size < settings.ranks.world.size


@contextlib.contextmanager
def accumulating(
    sharding: Sharding, max_bytes: int | None, *, replicas_only: bool
) -> Iterator[None]:
    as_flags(replicas_only=replicas_only)
    context = sharding.check_between_steps("no_sync()")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"no_sync: expected max_bytes of at least 0, got {max_bytes}")
    state = context.state
    before = state.syncs, state.under_no_sync
    state.syncs = _plan_accumulation(context.units, max_bytes, replicas_only)
    state.under_no_sync = True
    try:
        yield
    finally:
        state.syncs, state.under_no_sync = before


def _plan_accumulation(
    units: Sequence[Unit], max_bytes: int | None, replicas_only: bool
) -> list[Sync]:
    """What ``no_sync`` means for each unit; see ``ShardedWrapper.no_sync``."""
    rest = Sync.INTRA if replicas_only else Sync.ALL
    if max_bytes is None:
        return [Sync.INTRA if replicas_only else Sync.NONE] * len(units)
    syncs = [rest] * len(units)
    # Small ones first: for as many bytes kept unsharded, they save the most collectives.
    for nbytes, index in sorted((_gradient_bytes(unit), unit.index) for unit in units):
        if nbytes <= max_bytes:
            max_bytes -= nbytes
            syncs[index] = Sync.NONE
    return syncs


def _gradient_bytes(unit: Unit) -> int:
    """Bytes of the unit's unsharded gradients while they are accumulated."""
    return sum(
        handle.layout.padded_numel * handle.grad_buffer.dtypes.accum_dtype.itemsize
        for handle, count in unit.num_trainable.items()
        if count
    )


class _ForwardChecks(StepObserver):
    def __init__(self, root: Sharding) -> None:
        self._root = root
        self._apart = modules_apart(root.wrapper, root.settings.ranks.world.size)
        self._num_registered = 0  # modules and parameters assigned until the last check
        self._modules = list(root.wrapper.modules())

    def synced_buffers(self) -> Buffers:
        """The buffers that modules have now, each once, without those that are ignored."""
        # In every step, so not by torch's functions, which make all names.
        ignored = self._root.ignored
        own = ignored.modules.union(self._apart)
        seen = {id(buffer) for module in own for buffer in module._buffers.values()}
        seen.update(id(module._buffers.get(attribute)) for module, attribute in ignored.places)
        found: Buffers = {}
        for module in self._modules:
            for attribute, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[module, attribute] = buffer
        return found

    def recover(self) -> None:
        # An exception may have interrupted an optimizer's step, which has plain tensors.
        step.restore_all()

    def begin_forward(self) -> None:
        root = self._root
        if root.context.state.device is not None:
            _check_not_captured(root.context.state.device)
        is_first = not root.context.state.has_run
        # Looking at all modules takes long, so only when something was assigned to one.
        if is_first or self._num_registered != late_modules.count():
            self._check_all_owned()
        self._num_registered = late_modules.count()
        if is_first and any(one.is_left_empty for one in shardings_in(root.wrapper)):
            world = root.settings.ranks.world
            meta_init.check_loaded(root.wrapper, handles_in(root.wrapper), world)
        if is_first and any(h.shard.device.type == "cpu" for h in handles_in(root.wrapper)):
            prepare_allocator()

    def _check_all_owned(self) -> None:
        """Raise if modules were added since wrapping: nothing would average their gradients."""
        root, handles = self._root, handles_in(self._root.wrapper)
        # Modules that were assigned since the last check are watched from now on, too.
        self._modules = list(root.wrapper.modules())
        late_modules.watch(self._modules)
        is_summoned = any(handle.summoned is not None for handle in handles)
        if root.settings.ranks.world.size == 1 or is_summoned:
            return
        for handle in handles:
            handle.params.check_places()
        known = root.ignored.ids()
        known.update(id(param) for handle in handles for param in handle.sharded)
        for name, param in root.wrapper.named_parameters():
            if id(param) not in known and param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added after wrapping: it would be trained on each "
                    "rank's own gradients. Add modules before wrapping, freeze it, or let "
                    "ShardedWrapper ignore it (ignored_states) and average its gradient yourself."
                )


def _check_ranks(units: Sequence[Unit]) -> None:
    """Raise if units train on ranks without the root, or shard over them the other way round."""
    expected = units[-1].topology.world
    grids = []
    for unit in units:
        topology, world = unit.topology, unit.topology.world
        if world is not expected and not set(world.ranks) <= set(expected.ranks):
            raise ValueError(
                f"ShardedWrapper: {unit_text(unit.name)} trains on ranks {world.ranks_text}, the "
                f"module around it on {expected.ranks_text}. Pass both the same ranks, or the unit "
                "some of them."
            )
        if topology.intra_group.size > 1 and topology.across.size > 1:
            grids.append((unit, topology.intra_group, topology.across))
    # All ranks find the same: a rank's shard and replicate groups share no other rank.
    for unit, shard, replicate in grids:
        outermost, *its = grids[-1]
        if [group.ranks for group in its] == [replicate.ranks, shard.ranks]:
            raise ValueError(
                f"ShardedWrapper: {unit_text(unit.name)} shards over ranks {shard.ranks_text} and "
                f"replicates over {replicate.ranks_text}, "
                f"{outermost.name or 'the module around it'!r} the other way round. Pass both the "
                "same pair of groups (shard group, replicate group)."
            )


def _check_not_captured(device: torch.device) -> None:
    """Raise RuntimeError while a CUDA graph captures the current stream."""
    # What the host does in a step would run once, at the capture, and never again. Asked of
    # another device than the current one, torch would begin to use that.
    is_current = device.type == "cuda" and torch.cuda.current_device() == device.index
    if is_current and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "ShardedWrapper: the forward of a sharded model cannot be captured in a CUDA graph: "
            "replays would neither unshard parameters nor reduce gradients. Train without the "
            "graph; torch.compile(block) before wrapping makes a block's kernels fewer."
        )
