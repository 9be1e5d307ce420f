"""``plan_flats``: the memory of each flat parameter on one rank, from shapes only."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard.comm.communicator import ALONE
from flatshard.comm.ranks import Ranks
from flatshard.engine.handle import LOOKUPS
from flatshard.module.model_plan import ModelPlan, PlannedUnit
from flatshard.module.settings import Settings, read_strategy, read_values
from flatshard.options import TransportOptions
from flatshard.tensor.flat_parameter import FlatParamPlan
from flatshard.tensor.sharded_tensor import FlatShardTensor


class Held(NamedTuple):
    """A block of memory that is currently allocated."""

    category: str
    nbytes: int


class FlatMemory:
    """A flat parameter on one rank: its sizes, with padding, and its state during a replay.

    Attributes:
        name: the unit's name in the unwrapped model; empty for the root.
        gathered_bytes: bytes of the unsharded parameters in the compute dtype; 0 if the shard
            contains all parameters in the compute dtype.
        whole_gradient_bytes: bytes of the unsharded gradients in the reduce dtype.
        crossing_bytes: bytes of the gradients after the first stage of a reduction, which is a
            reduce-scatter over ``gather_size`` ranks.
        reduced_bytes: bytes of the gradients after the reduction over all ranks.
        secondary_bytes: bytes of the secondary shard, kept between forward and backward, from which
            backward unshards the unit.
        is_cast: whether an all-gather sends a copy of the shard in another dtype.
        is_lookup: whether all parameters are embeddings, which backward does not read.
        is_single: whether the flat parameter is a single parameter without padding.
        gather_size, regather_size: numbers of ranks in an all-gather of forward, and of backward.
        replicas: number of ranks in the second stage of a reduction.
        source: copy of the shard in the compute dtype, while an all-gather sends the copy.
        ends: time at which the current all-gather ends.
        is_stale: whether the optimizer has changed the shard, but ``unsharded`` has old values.
        arrived: number of gradients that this backward has computed.
        slots: the memory of each arrived gradient; None for gradients copied to ``buffer``.
        buffer: memory from which all gradients are reduced. ``result``: reduced gradients.
        sent: buffers that are freed when the running reduction ends, at the time ``reduced_at``.
        crosses: whether the reduction must still begin its second stage, over the replicas.
    """

    def __init__(
        self, unit: PlannedUnit, plan: FlatParamPlan, world_size: int, optimizer_bytes: float
    ) -> None:
        layout, placement = plan.layout, unit.settings.placement
        num_shards, per_node = layout.world_size, unit.settings.ranks.ranks_per_node or 1
        # With `over_all`, shards are split over all ranks, but all-gathers run within a node.
        self.gather_size = per_node if placement.over_all else num_shards
        self.compute_dtype = plan.precision.unsharded_dtype(plan.dtype)
        self.name, self.unit, self.placement = unit.name, unit.number, placement
        self.params = tuple(info.param for info in plan.infos)
        self.is_single = layout.padded_numel == layout.spans[0].numel
        self.is_trained = plan.requires_grad
        self.is_cast = self.compute_dtype != plan.dtype
        modules = (place.module for info in plan.infos for place in info.locations)
        self.is_lookup = all(type(module) in LOOKUPS for module in modules)
        self.is_freed_after = placement.reshard_after_backward or num_shards == 1
        self.regather_size = placement.regather_size or self.gather_size
        self.replicas = world_size // self.gather_size
        reduce_dtype = plan.precision.grad_dtypes(plan.dtype).reduce_dtype
        self.parameter_bytes = layout.shard_numel * plan.dtype.itemsize
        self.gradient_bytes = self.parameter_bytes * plan.requires_grad
        self.optimizer_bytes = math.ceil(layout.shard_numel * plan.requires_grad * optimizer_bytes)
        whole = layout.padded_numel * reduce_dtype.itemsize * plan.requires_grad
        self.whole_gradient_bytes, self.reduced_bytes = whole, whole // num_shards
        self.crossing_bytes = whole // self.gather_size
        # If one rank's shard holds all parameters in the compute dtype, modules compute with the
        # shard, and there is no unsharded buffer.
        unsharded = layout.padded_numel * self.compute_dtype.itemsize
        self.gathered_bytes = unsharded if num_shards > 1 or self.is_cast else 0
        self.secondary_bytes = unsharded // self.gather_size if placement.over_all else 0
        is_freed = self.is_lookup or (placement.reshard_after_forward and unit.name)
        if placement.regather_size and is_freed:
            self.secondary_bytes = unsharded // placement.regather_size
        self.is_stale = self.crosses = False
        self.unsharded: Held | None = None
        self.source: Held | None = None
        self.secondary: Held | None = None
        self.ends: float | None = None
        self.arrived, self.reduced_at = 0, 0.0
        self.slots: list[Held | None] = []
        self.buffer: Held | None = None
        self.result: Held | None = None
        self.sent: list[Held | None] = []

    @property
    def is_complete(self) -> bool:
        return self.arrived == len(self.params)


# Keywords of ``ShardedWrapper`` that determine units and flat parameters, with their defaults.
_DEFAULTS: dict[str, Any] = {"sharding_strategy": "FULL_SHARD", "boundary": "element"}
_DEFAULTS |= dict.fromkeys(("mixed_precision", "coalesce_bytes"))


def plan_flats(
    model: nn.Module,
    *,
    world_size: int,
    ranks_per_node: int = 1,
    optimizer_bytes: float = 0.0,
    **keywords: Any,
) -> tuple[ModelPlan, list[FlatMemory]]:
    """Choose the units of ``model`` as ``ShardedWrapper`` with these ``keywords`` would.

    Returns the plan with the units, and the memory of each flat parameter of all units.
    ``ranks_per_node``, for HYBRID strategies: number of ranks that share one copy of the model.
    ``optimizer_bytes``: bytes of the optimizer's state per trained element.
    """
    if any(isinstance(param, FlatShardTensor) for param in model.parameters()):
        raise ValueError("plan: the model is already sharded. Pass the unwrapped model.")
    given = {**_DEFAULTS, **keywords}
    ranks = Ranks(ALONE, None, ranks_per_node, TransportOptions())
    strategy = read_strategy(given, ranks)
    settings = Settings(ranks, *strategy, torch.device("meta"), **read_values(given))
    plan = ModelPlan(model, settings, predicts=True)
    flats: list[FlatMemory] = []
    for unit in plan.units:
        placement, name = unit.settings.placement, unit.settings.strategy.name
        if placement.hybrid and world_size % ranks_per_node:
            raise ValueError(
                f"plan: {name} needs a per_node that divides the number of ranks, {world_size}, "
                f"got {ranks_per_node}."
            )
        shares_in_node = placement.hybrid and not placement.over_all
        num_shards = ranks_per_node if shares_in_node else world_size
        unit.lay_out(num_shards if placement.sharded else 1)
        flats += [FlatMemory(unit, flat, world_size, optimizer_bytes) for flat in unit.flats]
    return plan, flats
