"""``predict``: predicts the memory of each rank, without activations, from parameter shapes.

The prediction allocates no tensors and does not communicate, so the model may be on the meta
device. The prediction excludes activations, and the memory of libraries and of the Python
interpreter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatshard.comm.communicator import ALONE
from flatshard.comm.ranks import Ranks
from flatshard.engine.unit import LOOKUPS
from flatshard.extras.plan.hardware import show
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.module.settings import Settings, read_strategy
from flatshard.module.unit_report import tabulate
from flatshard.options.precision import MixedPrecision, as_mixed_precision
from flatshard.options.strategy import ShardingStrategy
from flatshard.options.transport_options import TransportOptions, as_coalesce_bytes
from flatshard.tensor.sharded_tensor import FlatShardTensor
from flatshard.units.boundary import as_boundary
from flatshard.units.policies import Policy

_ROWS = 24  # maximum number of units in a table; if there are more, the middle is left out


@dataclass(frozen=True)
class UnitMemory:
    """Memory of one unit on one rank, in bytes. Padding is included.

    Attributes:
        name: the unit's name in the unwrapped model; empty for the root.
        strategy: name of the sharding strategy.
        numel: number of elements of the unit's parameters.
        parameter_bytes: bytes of this rank's shard.
        gradient_bytes: bytes of the shard's ``.grad`` after a backward that reduces gradients.
        optimizer_bytes: bytes of the optimizer's state for the shard.
        kept_bytes: bytes of unsharded parameters, or of secondary shards (gathered from fewer
            ranks), between steps.
        gathered_bytes: bytes of the unsharded parameters in the compute dtype; 0 if the shard
            contains all parameters in the compute dtype.
        whole_gradient_bytes: bytes of the unsharded gradients in the reduce dtype.
        crossing_bytes: bytes of the gradients after the reduce-scatter, within a node for HYBRID
            strategies, and otherwise over all ranks.
        reduced_bytes: bytes of the gradients after the reduction over all ranks.
        is_freed: whether the unit reshards between forward and backward.
        secondary_bytes: bytes of the secondary shard, kept between forward and backward, from which
            backward unshards the unit.
    """

    name: str
    strategy: str
    numel: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    gathered_bytes: int
    whole_gradient_bytes: int
    crossing_bytes: int
    reduced_bytes: int
    is_freed: bool
    secondary_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of each rank, in bytes. ``str()`` returns a table of the units.

    Attributes:
        units: all units in the order of forward, the root last.
        buffer_bytes: bytes of the modules' buffers, which are not sharded.
    """

    units: tuple[UnitMemory, ...]
    buffer_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all ``.grad`` after a backward, if no optimizer steps in backward."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(unit.optimizer_bytes for unit in self.units)

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay allocated between two optimizer steps, gradients included."""
        kept = sum(unit.kept_bytes for unit in self.units)
        return self._without_gradients + self.gradient_bytes + kept

    @property
    def peak_gathered_bytes(self) -> int:
        """Peak bytes of unsharded parameters and secondary shards."""
        # The root, and units that do not reshard after forward, stay unsharded through forward and
        # backward. Of the remaining units, three consecutive units may be unsharded at the same
        # time: the unit whose backward ends, the unit whose backward begins, and the unit whose
        # all-gather was prefetched. Units that contain one of these three units (nested units)
        # are then unsharded, too, because the backward of an outer unit ends after the backward of
        # its inner units. Ranks that map each other's shards (shared memory) need less memory than
        # this sum.
        staying = sum(unit.gathered_bytes for unit in self.units if not unit.is_freed)
        secondary = sum(unit.secondary_bytes for unit in self.units)
        resharded = [unit for unit in self.units if unit.is_freed]
        return staying + secondary + max(map(self._unsharded_at_once, _windows(resharded, 3)))

    @property
    def peak_gradient_bytes(self) -> int:
        """Upper bound of the bytes of gradients during backward."""
        reduced = sum(unit.reduced_bytes for unit in self.units)
        # The gradients of two consecutive units may be in memory at the same time: the gradients of
        # one unit are reduced while backward computes the gradients of the next unit. The root is
        # counted by itself, because its reduction begins after all other reductions.
        moments = [*_windows(self.units[:-1], 2), self.units[-1:]]
        return reduced + max(map(self._gradients_at_once, moments))

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the bytes at any moment of a step."""
        in_step = self._without_gradients + self.peak_gathered_bytes + self.peak_gradient_bytes
        return max(in_step, self.persistent_bytes)

    @property
    def _without_gradients(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes

    def _around(self, inner: Sequence[UnitMemory]) -> list[UnitMemory]:
        """Return the units outside of ``inner`` that contain at least one unit of ``inner``."""
        names = set()
        for name in {one.name for one in inner}:
            while name:
                name = name.rpartition(".")[0]
                names.add(name)
        names -= {one.name for one in inner}
        return [unit for unit in self.units if unit.name in names]

    def _unsharded_at_once(self, units: Sequence[UnitMemory]) -> int:
        around = [unit for unit in self._around(units) if unit.is_freed]
        return sum(unit.gathered_bytes for unit in (*units, *around))

    def _gradients_at_once(self, units: Sequence[UnitMemory]) -> int:
        # While the gradients of `units` are reduced, backward still adds gradients to the units
        # that contain `units`, so count these incomplete gradients, too. A reduction under way
        # needs a send buffer and a receive buffer.
        filling = sum(unit.whole_gradient_bytes for unit in self._around(units))
        # With NO_SHARD, the all-reduce works in place, so it needs no buffers.
        in_flight = [unit for unit in units if unit.reduced_bytes < unit.whole_gradient_bytes]
        results = sum(unit.crossing_bytes - unit.reduced_bytes for unit in in_flight)
        return filling + results + 2 * sum(unit.whole_gradient_bytes for unit in in_flight)

    def __str__(self) -> str:
        header = ("unit", "elements", "parameters", "gradients", "optimizer", "unsharded")
        rows = [_row(unit.name or "(root)", unit, show(unit.gathered_bytes)) for unit in self.units]
        if len(rows) > _ROWS:
            rows[_ROWS // 2 : -_ROWS // 2] = [(f"... {len(rows) - _ROWS} more", *5 * ("",))]
        rows.append(_row("total", self, f"peak {show(self.peak_gathered_bytes)}"))
        return (
            f"{tabulate([header, *rows], numbers=range(1, 6))}\n"
            f"each rank: persistent memory {show(self.persistent_bytes)}, peak "
            f"{show(self.peak_bytes)}, without activations"
        )


def _row(name: str, one: UnitMemory | MemoryPlan, unsharded: str) -> tuple[str, ...]:
    sizes = one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes
    return name, f"{one.numel:,}", *map(show, sizes), unsharded


def predict(
    model: nn.Module,
    *,
    world_size: int,
    auto_wrap_policy: Policy | None = None,
    sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | None = None,
    reshard_after_forward: bool | int | None = None,
    coalesce_bytes: int | None = None,
    boundary: str | int = "element",
    ranks_per_node: int | None = None,
    optimizer_bytes: float | None = None,
) -> MemoryPlan:
    """Predict the memory of each rank if ``model`` is wrapped with the same keywords.

    The prediction needs no process group and does not communicate, so ``world_size`` may be any
    number.

    Example:
        ```python
        from flatshard import memory_plan

        with torch.device("meta"):
            planned = Model()
        policy = ModuleWrapPolicy({Block})
        print(memory_plan.predict(planned, world_size=8, auto_wrap_policy=policy))
        ```

    Args:
        model: the unwrapped model, on any device; a model built under ``torch.device("meta")``
            needs no memory. The model is not changed.
        world_size: number of ranks that train the model.
        auto_wrap_policy: selects the submodules that become units; None: one unit.
        sharding_strategy: see ``ShardedWrapper``.
        mixed_precision: see ``ShardedWrapper``.
        reshard_after_forward: see ``ShardedWrapper``.
        coalesce_bytes: see ``ShardedWrapper``.
        boundary: see ``ShardedWrapper``.
        ranks_per_node: for HYBRID strategies: number of ranks that share one copy of the model.
        optimizer_bytes: bytes of the optimizer's state per trained element. None: two tensors of
            the parameter's dtype, as AdamW keeps.

    Raises:
        TypeError: ``auto_wrap_policy`` is no policy, or another keyword has the wrong type.
        ValueError: ``world_size`` is below 1; a HYBRID strategy has no ``ranks_per_node``, or
            ``ranks_per_node`` does not divide ``world_size``; ``boundary`` needs too much padding;
            or the model is already sharded.
    """
    plan = plan_units(
        model,
        world_size=world_size,
        auto_wrap_policy=auto_wrap_policy,
        sharding_strategy=sharding_strategy,
        mixed_precision=mixed_precision,
        reshard_after_forward=reshard_after_forward,
        coalesce_bytes=coalesce_bytes,
        boundary=boundary,
        ranks_per_node=ranks_per_node,
    )
    units = [_unit_memory(unit, world_size, optimizer_bytes) for unit in plan.units]
    # Count a buffer once, even if several modules share the buffer.
    buffers = {id(one): one for one in model.buffers()}.values()
    return MemoryPlan(tuple(units), sum(one.nbytes for one in buffers))


def plan_units(
    model: nn.Module,
    *,
    world_size: int,
    auto_wrap_policy: Policy | None,
    sharding_strategy: ShardingStrategy | str,
    mixed_precision: MixedPrecision | None = None,
    reshard_after_forward: bool | int | None = None,
    coalesce_bytes: int | None = None,
    boundary: str | int = "element",
    ranks_per_node: int | None = None,
) -> ModelPlan:
    """Choose the units of ``model`` as ``ShardedWrapper`` would; for arguments see ``predict``."""
    if world_size < 1:
        raise ValueError(f"predict: world_size must be at least 1, got {world_size}.")
    if any(isinstance(param, FlatShardTensor) for param in model.parameters()):
        raise ValueError("predict: the model is already sharded. Pass the unwrapped model.")
    ranks = Ranks(ALONE, None, ranks_per_node, TransportOptions())
    strategy, placement = read_strategy(sharding_strategy, reshard_after_forward, ranks)
    settings = Settings(
        ranks=ranks,
        strategy=strategy,
        placement=placement,
        precision=as_mixed_precision(mixed_precision),
        coalesce_bytes=as_coalesce_bytes(coalesce_bytes),
        device=torch.device("meta"),
        boundary=as_boundary(boundary),
        policy=auto_wrap_policy,
    )
    return ModelPlan(model, settings, predicts=True)


def group_sizes(settings: Settings, world_size: int) -> tuple[int, int]:
    """Return two numbers: the number of shards of a unit, and the number of ranks in an all-gather.

    With HYBRID strategies, only the ranks of a node take part in an all-gather.
    """
    placement, per_node = settings.placement, settings.ranks.ranks_per_node
    if not placement.sharded:
        return 1, 1
    if not placement.hybrid:
        return world_size, world_size
    if per_node is None or per_node < 1 or world_size % per_node:
        raise ValueError(
            f"predict: {settings.strategy.name} needs ranks_per_node, a divisor of "
            f"world_size={world_size}, got {per_node}."
        )
    return world_size if placement.over_all else per_node, per_node


@dataclass(frozen=True)
class FlatMemory:
    """Memory of one flat parameter on one rank, in bytes. ``UnitMemory`` explains the fields."""

    params: tuple[nn.Parameter, ...]
    is_trained: bool
    reduces_alone: bool  # whether the reduction is separate from the rest of the unit
    is_cast: bool  # whether an all-gather sends a copy of the shard in another dtype
    is_lookup: bool  # whether all parameters are embeddings, which backward does not read
    compute_itemsize: int
    reduce_itemsize: int
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    kept_bytes: int = 0
    gathered_bytes: int = 0
    whole_gradient_bytes: int = 0
    crossing_bytes: int = 0
    reduced_bytes: int = 0
    secondary_bytes: int = 0


def flat_memory(
    unit: PlannedUnit, world_size: int, optimizer_bytes: float | None
) -> list[FlatMemory]:
    """Return the memory of each flat parameter of ``unit``."""
    num_shards, num_gathering = group_sizes(unit.settings, world_size)
    placement = unit.settings.placement
    is_freed = reshards_after_forward(unit)
    found = []
    for kind, layout in unit.lay_out(num_shards).items():
        shard_numel, itemsize = layout.shard_numel, kind.dtype.itemsize
        compute_dtype = kind.precision.unsharded_dtype(kind.dtype)
        unsharded = layout.padded_numel * compute_dtype.itemsize
        # If one rank's shard holds all parameters in the compute dtype, modules compute with the
        # shard, and there is no unsharded buffer.
        is_unsharded = num_shards > 1 or compute_dtype != kind.dtype
        # The root's embeddings are freed after forward, too, because backward does not read them.
        places = [place for info in unit.flat_params[kind] for place in info.locations]
        is_lookup = all(type(place.module) in LOOKUPS for place in places)
        kept = secondary = 0
        if placement.over_all:
            kept = secondary = unsharded // num_gathering
        elif not placement.reshard_after_backward:
            kept = unsharded * is_unsharded
        if placement.regather_size and (is_freed or is_lookup):
            secondary = unsharded // placement.regather_size
        one = FlatMemory(
            tuple(info.param for info in unit.flat_params[kind]),
            kind.requires_grad,
            kind.apart != 0,
            compute_dtype != kind.dtype,
            is_lookup,
            compute_dtype.itemsize,
            kind.precision.grad_dtypes(kind.dtype).reduce_dtype.itemsize,
            parameter_bytes=shard_numel * itemsize,
            gathered_bytes=unsharded * is_unsharded,
            kept_bytes=kept,
            secondary_bytes=secondary,
        )
        if kind.requires_grad:
            each = 2 * itemsize if optimizer_bytes is None else optimizer_bytes
            one = dataclasses.replace(
                one,
                gradient_bytes=shard_numel * itemsize,
                optimizer_bytes=math.ceil(shard_numel * each),
                whole_gradient_bytes=layout.padded_numel * one.reduce_itemsize,
                crossing_bytes=layout.padded_numel * one.reduce_itemsize // num_gathering,
                reduced_bytes=shard_numel * one.reduce_itemsize,
            )
        found.append(one)
    return found


def reshards_after_forward(unit: PlannedUnit) -> bool:
    placement = unit.settings.placement
    return placement.sharded and placement.reshard_after_forward and unit.name != ""


def _unit_memory(unit: PlannedUnit, world_size: int, optimizer_bytes: float | None) -> UnitMemory:
    parts = flat_memory(unit, world_size, optimizer_bytes)
    names = [one.name for one in dataclasses.fields(UnitMemory) if one.name.endswith("_bytes")]
    return UnitMemory(
        name=unit.name,
        strategy=unit.settings.strategy.name,
        numel=sum(one.param.numel() for one in unit.owned),
        is_freed=reshards_after_forward(unit),
        **{name: sum(getattr(part, name) for part in parts) for name in names},
    )


def _windows(units: Sequence[UnitMemory], length: int) -> list[Sequence[UnitMemory]]:
    """Return all runs of ``length`` consecutive units, or one run of all units if fewer."""
    return [units[i : i + length] for i in range(max(1, len(units) - length + 1))]
