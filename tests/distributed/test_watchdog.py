"""A rank that waits long says for whom, before anything times out."""

import logging
import time
from unittest import mock

import pytest

from flatshard import CollectiveError, ShardedWrapper, standstill, watchdog
from tests.harness import run_ranks
from tests.models import CASES


def test_long_waits_are_logged() -> None:
    run_ranks(_long_wait, 3, fresh=True)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _long_wait(rank: int, world_size: int) -> None:
    watchdog.PATIENCE_SECONDS = 1.0
    lines = _Lines()
    logging.getLogger("flatshard").addHandler(lines)
    case = CASES["mlp"]
    model = case.wrap(case.model())
    inputs, _ = case.batch(0, 2)
    model(inputs)
    lines.lines.clear()
    if rank == 1:
        time.sleep(2.5)
    model(inputs)
    if rank != 1:
        (line,) = lines.lines
        assert line.startswith("waiting for "), line
        assert "unit 'fc1', rank" in line, line
        expected = (
            "gathering parameters for forward over ranks 0, 1, 2, not heard of rank 1. A rank"
        )
        assert expected in line, line
        assert line.endswith("on every rank, not under `if rank == 0:`")


@pytest.mark.parametrize("phases", [1, 2], ids=["forward", "step"])
def test_one_rank_runs_more(phases: int) -> None:
    run_ranks(_runs_more, 2, phases, group_timeout=3)


def _runs_more(rank: int, world_size: int, phases: int) -> None:
    """Rank 1 begins another forward, or step, before the last backward, and the ranks part."""
    case = CASES["mlp"]
    model = case.wrap(case.model())
    inputs, _ = case.batch(0, 2)

    def go_on() -> None:
        for _ in range(rank):
            more = model(inputs).sum()
            if phases == 2:
                more.backward()
        loss.backward()
        model(inputs)

    model(inputs).sum().backward()
    loss = model(inputs).sum()
    expected = rf"unit 'fc\d', rank {rank}: .* for (forward|backward) over ranks 0, 1.* failed"
    with pytest.raises(CollectiveError, match=expected):
        go_on()


def test_ranks_in_different_collectives_do_not_wait_for_the_timeout() -> None:
    run_ranks(_different_collectives, 3, group_timeout=60)


def _different_collectives(rank: int, world_size: int) -> None:
    """Rank 0 alone calls something collective, and the others go on to their next step."""
    patched = mock.patch.multiple(standstill, FIRST_LOOK_SECONDS=0.3, LOOK_SECONDS=0.1)
    for collectives, alone in (("auto", "norm"), ("sockets", "dict")):
        case = CASES["mlp"]
        model = case.wrap(case.model(), collectives=collectives)
        inputs, _ = case.batch(rank, 2)
        with patched:
            if rank == 1 and alone == "norm":
                time.sleep(0.8)  # being late is not enough
            model(inputs).sum().backward()
            with pytest.raises(CollectiveError, match="for one another in different") as error:
                _alone(model, alone) if rank == 0 else model(inputs)
        where = r"'norms'" if alone == "norm" else ".*all ranks must ask for together"
        for part in (rf"rank 0 in \[{where}", r"rank 1 in \[unit 'fc1', rank 1: .* for forward"):
            error.match(part)


def _alone(model: ShardedWrapper, what: str) -> None:
    if what == "norm":
        model.clip_grad_norm_(1.0)
    model.state_dict()
