"""`WAYS`: the named ways to wrap a model that tests are crossed with."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.harness import naming, on_ranks

Keywords = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How a model is wrapped, and by how many ranks.

    Attributes:
        keywords: those of `flatshard.ShardedWrapper`.
        world_size: the number of ranks.
        ranks_per_node: how many of them say that they share a node; 0 for all.
    """

    keywords: Keywords
    world_size: int = 2
    ranks_per_node: int = 0

    @property
    def strategy(self) -> str:
        return self.keywords.get("sharding_strategy", "FULL_SHARD")

    def set_nodes(self) -> None:
        """Make this process one of a node's ranks."""
        os.environ["LOCAL_WORLD_SIZE"] = str(self.ranks_per_node or self.world_size)


def _way(
    sharding_strategy: str, world_size: int = 2, ranks_per_node: int = 0, **keywords: Any
) -> Way:
    return Way({"sharding_strategy": sharding_strategy, **keywords}, world_size, ranks_per_node)


WAYS = {
    "full": _way("FULL_SHARD"),
    "full-3": _way("FULL_SHARD", 3),
    "grad_op": _way("SHARD_GRAD_OP"),
    "no_shard": _way("NO_SHARD"),
    "no_shard-3": _way("NO_SHARD", 3),
    "op": _way("SHARD_OP", 3),
    "hybrid": _way("HYBRID_SHARD", 4, 2),
    "hybrid-zero2": _way("HYBRID_SHARD_ZERO2", 4, 2),
    "hybrid-op": _way("HYBRID_SHARD_OP", 4, 2),
    "hybrid-op-nodes-of-one": _way("HYBRID_SHARD_OP", 2, 1),
    "hybrid-nodes-of-one": _way("HYBRID_SHARD", 2, 1),
    "regather": Way({"reshard_after_forward": 2}, 4),
    "keep": Way({"reshard_after_forward": False}),
    "native-hybrid": _way("HYBRID_SHARD", 4, 2, collectives="native"),
    "native-hybrid-op": _way("HYBRID_SHARD_OP", 4, 2, collectives="native"),
}


def ranks_of(way: str) -> int:
    """The number of ranks of a way, for `on_ranks`."""
    return WAYS[way].world_size


def select(*names: str) -> dict[str, Way]:
    return {name: WAYS[name] for name in names}


BASIC = select("full", "grad_op", "no_shard")
"""What is told apart on any two ranks."""


def on_ranks_each_way(world_size: int | None = None) -> Callable[..., Callable[..., None]]:
    """`on_ranks` for a function with a parameter ``way``.

    One launch takes all basic ways; a failure says which.
    """

    def decorate(script: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(script)
        def all_ways(rank: int, world_size: int, **parameters: Any) -> None:
            for way in BASIC:
                torch.default_generator.manual_seed(0)
                with naming(way):
                    script(rank, world_size, way=way, **parameters)

        given = [one for one in inspect.signature(script).parameters.values() if one.name != "way"]
        all_ways.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        return on_ranks(world_size)(all_ways)

    return decorate
