"""What tests of `summon_full_params` share."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flatshard import ShardedWrapper
from tests.harness import naming, on_ranks
from tests.oracle import assert_same
from tests.side import Run
from tests.ways import BASIC

summon = ShardedWrapper.summon_full_params


def on_ranks_each_way(world_size: int | None = None) -> Callable[..., Callable[..., None]]:
    """`on_ranks` for a function that takes a way after the number of ranks.

    One launch takes all basic ways; a failure says which.
    """

    def decorate(script: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(script)
        def all_ways(rank: int, world_size: int, **parameters: Any) -> None:
            for way in BASIC:
                with naming(way):
                    script(rank, world_size, way, **parameters)

        first, second, _, *others = inspect.signature(script).parameters.values()
        all_ways.__signature__ = inspect.Signature([first, second, *others])  # type: ignore[attr-defined]
        return on_ranks(world_size)(all_ways)

    return decorate


def assert_trains_alike(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model)
    for run in (sharded, plain):
        run.train(5, 7)
    assert_same(sharded.model, plain.model)
