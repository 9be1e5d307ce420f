"""What tests of `summon_full_params` share."""

from flatshard import ShardedWrapper
from tests.oracle import assert_same
from tests.side import Run

summon = ShardedWrapper.summon_full_params


def assert_trains_alike(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model)
    for run in (sharded, plain):
        run.train(5, 7)
    assert_same(sharded.model, plain.model)


def backward(*runs: Run, step: int = 0) -> None:
    for run in runs:
        run.loss(step).backward()


def step_alike(sharded: Run, plain: Run) -> None:
    sharded.step()
    plain.step()
    assert_same(sharded.model, plain.model)
