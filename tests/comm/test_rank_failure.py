"""A rank that dies or does not come: the others raise, in time, and say where they waited."""

import os
import re
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.combinations import diagonal
from tests.harness import run_ranks
from tests.models import CASES
from tests.oracle import local_loss, sgd, step_and_zero

pytestmark = pytest.mark.by_turns

GROUP_TIMEOUT = 2.0
SLACK = 8.0
"""Seconds more that a loaded machine may take; far less than the default timeouts."""

BAD_RANK = 1

NAMED = (
    r"units? 'fc\d( to fc\d)?', rank \d: "
    r"(all-gathering parameters for \w+|(reduce-scatter|all-reduc)ing gradients)"
    r"|used parameters of all units, backward, rank \d: exchanging values"
)
"""The unit, the rank and the collective; one at the end of backward is for all units."""


def _die() -> None:
    os._exit(7)


def _oversleep() -> None:
    time.sleep(60)


def _in_forward(module: nn.Module, fail: Callable[[], None]) -> None:
    module.register_forward_pre_hook(lambda *_: fail())


def _in_backward(module: nn.Module, fail: Callable[[], None]) -> None:
    def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda _: fail())

    module.register_forward_hook(hook)


FAILURES = [_die, _oversleep]
CASES_OF_FAILURE = [
    *diagonal(2, ["NO_SHARD", "FULL_SHARD"], [_in_forward, _in_backward], FAILURES, ["auto"]),
    # A prefetch, or an average, fails as well: no second error.
    *product(["FULL_SHARD"], [_in_forward, _in_backward], [_die], ["sockets"]),
]


def _messages(function: Callable[..., str], *failure: Any) -> list[str]:
    """The errors of ranks 0 and 2, between which the bad rank fails."""
    options = {"group_timeout": GROUP_TIMEOUT, "expendable": [BAD_RANK]}
    return run_ranks(function, 3, *failure, **options)[::2]


@pytest.mark.parametrize("case", CASES_OF_FAILURE)
@pytest.mark.uncoalesced  # the message names one layer
def test_in_the_middle_of_a_step(case: tuple[Any, ...]) -> None:
    for message in _messages(_step_with_a_bad_rank, *case):
        assert re.search(NAMED, message), message


def _step_with_a_bad_rank(rank: int, world_size: int, *failure: Any) -> str:
    strategy, where, fail, collectives = failure
    case = CASES["mlp"]
    model = case.wrap(sharding_strategy=strategy, collectives=collectives)
    optimizer = sgd(model)

    def step(number: int) -> None:
        local_loss(model, case, number, rank, world_size).backward()
        step_and_zero(optimizer)

    step(0)
    if rank == BAD_RANK:
        where(model.module.fc2, fail)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012 in this step or the next
        for number in range(1, 4):
            step(number)
    assert time.monotonic() - start < GROUP_TIMEOUT + SLACK
    return str(caught.value)


@pytest.mark.parametrize("fail", FAILURES)
def test_before_construction(fail: Callable[[], None]) -> None:
    for message in _messages(_construct_with_a_bad_rank, fail):
        assert re.search("ShardedWrapper|comparing models", message), message


def _construct_with_a_bad_rank(rank: int, world_size: int, fail: Callable[[], None]) -> str:
    dist.barrier()
    if rank == BAD_RANK:
        fail()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        ShardedWrapper(CASES["mlp"].model())
    assert time.monotonic() - start < GROUP_TIMEOUT + SLACK
    return str(caught.value)
