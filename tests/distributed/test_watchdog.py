"""A rank that waits long says for whom, before anything times out."""

import logging
import time

import pytest

from flatshard import CollectiveError, watchdog
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
        assert line.endswith(
            "gathering parameters for forward over ranks 0, 1, 2, not heard of rank 1"
        )


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
