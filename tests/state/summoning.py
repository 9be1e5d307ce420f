"""What tests of `summon_full_params` share."""

from collections.abc import Callable
from typing import Any

from flatshard import ShardedWrapper
from tests.harness import naming
from tests.oracle import assert_same
from tests.side import Run
from tests.ways import BASIC

summon = ShardedWrapper.summon_full_params


def each_way(rank: int, world_size: int, script: Callable[..., None], *args: Any) -> None:
    """One launch for all strategies; a failure says which."""
    for way in BASIC:
        with naming(way):
            script(rank, world_size, way, *args)


def assert_trains_alike(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model)
    for run in (sharded, plain):
        run.train(5, 7)
    assert_same(sharded.model, plain.model)
