"""``start_run``: makes the outermost wrapper the root of a run; ``accumulating``: ``no_sync``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from flatshard.engine.context import RunContext
from flatshard.engine.grad_buffer import Sync
from flatshard.engine.unit import Unit
from flatshard.module.root_checks import RootChecks
from flatshard.module.settings import as_flags
from flatshard.module.sharding import Sharding, outermost_shardings, sharding_of, shardings_in
from flatshard.options.extras import extra
from flatshard.plan.module_proxy import ModuleProxy
from flatshard.plan.module_tree import unit_text


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
    settings = root.settings
    hooks = {one.unit: one.hooks for one in shardings_in(root.wrapper)}
    context = RunContext(
        [hooks[unit] for unit in units],
        RootChecks(root),
        settings.ranks.world,
        number=settings.ranks.world.new_model() if number is None else number,
        forward_prefetch=settings.forward_prefetch,
        backward_prefetch=settings.backward_prefetch,
        broadcast_buffers=settings.broadcast_buffers,
    )
    if divergent := [unit for unit in units if unit.may_diverge]:
        divergence = extra("divergence", "ShardedWrapper(allow_divergence=...)")
        context.extend(divergence.DivergentUnits(context, divergent))
    for one in shardings_in(root.wrapper):
        one.context, one.state_dict.writes = context, context.writes
        one.state_dict.is_apart = one.settings.ranks.world.size < settings.ranks.world.size


@contextlib.contextmanager
def accumulating(
    sharding: Sharding, max_bytes: int | None, *, replicas_only: bool
) -> Iterator[None]:
    as_flags(replicas_only=replicas_only)
    context = sharding.check_between_steps("no_sync()")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"no_sync: expected max_bytes of at least 0, got {max_bytes}")
    before = context.syncs, context.under_no_sync
    context.syncs = _plan_accumulation(context.units, max_bytes, replicas_only)
    context.under_no_sync = True
    try:
        yield
    finally:
        context.syncs, context.under_no_sync = before


def plan_backward(model: nn.Module, *, reduces: bool) -> None:
    """Let the next backward reduce gradients, or accumulate them, whatever the forward planned."""
    for sharding in outermost_shardings(model):
        for unit in sharding.context.units:
            unit.plan_sync(Sync.ALL if reduces else Sync.NONE)
        sharding.context.accumulates = not reduces


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
