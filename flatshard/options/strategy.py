"""``ShardingStrategy`` and ``BackwardPrefetch``; the runtime asks a strategy's ``Placement``."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Placement:
    """A strategy as the runtime sees it, which never asks for the strategy's name."""

    # Parameters, gradients and optimizer state are split over the shard group.
    sharded: bool
    # Units are resharded between forward and backward.
    reshard_after_forward: bool
    # After backward too; otherwise they stay unsharded until their parameters change or a
    # forward without gradients is over.
    reshard_after_backward: bool = True
    # The shard group is one node's ranks; nodes hold replicas.
    hybrid: bool = False
    # With `hybrid`: gradients and optimizer state are split over all ranks, only what parameters
    # are all-gathered from is replicated.
    over_all: bool = False
    # After forward each rank keeps one part in so many of the parameters, which backward
    # all-gathers, from as many ranks only. None: backward does as forward.
    regather_size: int | None = None
    # Ranks may skip the unit in a step, or run it in another order: it stays unsharded from the
    # beginning of the outermost forward on.
    may_diverge: bool = False

    def diverging(self) -> Placement:
        """The same for a unit that ranks may skip."""
        return dataclasses.replace(
            self, reshard_after_forward=False, regather_size=None, may_diverge=True
        )


class _SameAsTorchs(enum.Enum):
    """An enum whose members equal those of the same name in torch's enum of its name."""

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ != type(self).__name__ or not isinstance(other, enum.Enum):
            return NotImplemented
        return type(self).__members__.get(other.name) is self

    __hash__ = enum.Enum.__hash__  # of the name: the same as torch's


class ShardingStrategy(_SameAsTorchs):
    """How parameters, gradients and optimizer state are placed over the ranks."""

    NO_SHARD = "NO_SHARD"
    """Everything on every rank, gradients all-reduced: as DistributedDataParallel."""
    SHARD_OP = "SHARD_OP"
    """Optimizer state and reduced gradients are sharded, parameters stay unsharded until the
    optimizer changes them: ZeRO stage 1."""
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    """Parameters stay unsharded from forward until their backward is over: ZeRO stage 2."""
    FULL_SHARD = "FULL_SHARD"
    """Parameters are resharded after forward, unsharded again for backward: ZeRO stage 3."""
    HYBRID_SHARD = "HYBRID_SHARD"
    """``FULL_SHARD`` within each node, replicated over nodes."""
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    """``SHARD_GRAD_OP`` within each node, replicated over nodes."""
    _HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    """The same, as torch spells it."""
    HYBRID_SHARD_OP = "HYBRID_SHARD_OP"
    """As ``HYBRID_SHARD``, with gradients and optimizer state sharded over all ranks: parameters
    cross nodes once after each optimizer step, and are all-gathered within the node after that."""

    @property
    def placement(self) -> Placement:
        """The strategy as data."""
        return _PLACEMENTS[self]


_PLACEMENTS = {
    ShardingStrategy.NO_SHARD: Placement(sharded=False, reshard_after_forward=False),
    ShardingStrategy.SHARD_OP: Placement(
        sharded=True, reshard_after_forward=False, reshard_after_backward=False
    ),
    ShardingStrategy.SHARD_GRAD_OP: Placement(sharded=True, reshard_after_forward=False),
    ShardingStrategy.FULL_SHARD: Placement(sharded=True, reshard_after_forward=True),
    ShardingStrategy.HYBRID_SHARD: Placement(sharded=True, reshard_after_forward=True, hybrid=True),
    ShardingStrategy.HYBRID_SHARD_ZERO2: Placement(
        sharded=True, reshard_after_forward=False, hybrid=True
    ),
    ShardingStrategy.HYBRID_SHARD_OP: Placement(
        sharded=True, reshard_after_forward=True, hybrid=True, over_all=True
    ),
}

# Strategies that `reshard_after_forward=False` turns into others.
_WITHOUT_RESHARDING = {
    ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy.HYBRID_SHARD_ZERO2,
}


def resharding(
    strategy: ShardingStrategy, after_forward: bool | int | None
) -> tuple[ShardingStrategy, Placement]:
    """Apply ``reshard_after_forward`` to a strategy.

    None: as the strategy says. True or False: reshard after forward or not. An int k: keep one
    part in k, which k ranks all-gather for backward.
    """
    placement = strategy.placement
    if after_forward is None:
        return strategy, placement
    if not isinstance(after_forward, int):
        raise TypeError(
            f"reshard_after_forward: expected True, False or a number of ranks, "
            f"got {after_forward!r}"
        )
    # By identity: 0 equals False, and is an error.
    if after_forward is not False and (after_forward < 1 or not placement.reshard_after_forward):
        raise ValueError(
            f"reshard_after_forward={after_forward}: expected at least 1, with FULL_SHARD or a "
            f"HYBRID strategy that reshards after forward; the strategy is {strategy.name}"
        )
    if after_forward is True:
        return strategy, placement
    if placement.over_all and after_forward > 1:
        raise ValueError(
            f"reshard_after_forward={after_forward}: {strategy.name} keeps a part of the "
            "parameters within the node anyway; use True or False"
        )
    if after_forward is False or after_forward == 1:
        strategy = _WITHOUT_RESHARDING.get(strategy, strategy)
        return strategy, dataclasses.replace(strategy.placement, reshard_after_forward=False)
    return strategy, dataclasses.replace(placement, regather_size=after_forward)


class BackwardPrefetch(_SameAsTorchs):
    """When the next unit's all-gather starts in backward; ``None`` means never."""

    AUTO = "AUTO"
    """``END_OF_FORWARD`` where backward's all-gathers use gloo's sockets, else ``BACKWARD_PRE``."""
    BACKWARD_PRE = "BACKWARD_PRE"
    """Before this unit's gradients are computed: most overlap."""
    BACKWARD_POST = "BACKWARD_POST"
    """After this unit was resharded: one unit less in memory."""
    END_OF_FORWARD = "END_OF_FORWARD"
    """As ``BACKWARD_PRE``; also, when forward ends, its last unit stays unsharded and the next
    all-gather starts. For slow networks, which are idle then; saves one unit's all-gather. After a
    forward without backward both units stay unsharded."""


def as_strategy(value: object, *, has_grid: bool = False) -> ShardingStrategy:
    """Read a strategy: ours, torch's enum of the same member name, a name, or None.

    None: sharded over all ranks, or within the shard group of a grid, if the user passed one.
    """
    if value is None:
        return ShardingStrategy.HYBRID_SHARD if has_grid else ShardingStrategy.FULL_SHARD
    return _as_member(ShardingStrategy, value, "sharding_strategy")


def as_backward_prefetch(value: object) -> BackwardPrefetch | None:
    """Read ``backward_prefetch``: ours, torch's enum, a name, or None (no prefetch)."""
    return None if value is None else _as_member(BackwardPrefetch, value, "backward_prefetch")


def _as_member(kind: type[enum.Enum], value: object, keyword: str) -> Any:
    if isinstance(value, kind):
        return value
    # Torch's enums have the same member names.
    name = value.name if isinstance(value, enum.Enum) else value
    choices = ", ".join(kind.__members__)
    if not isinstance(name, str):
        raise TypeError(
            f"{keyword}: expected a {kind.__name__}, got {value!r}. Use one of {choices}."
        )
    if name not in kind.__members__:
        raise ValueError(f"{keyword}: unknown or unsupported {name!r}. Use one of {choices}.")
    return kind[name]
