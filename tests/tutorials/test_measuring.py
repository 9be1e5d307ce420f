"""Code that the measuring scripts share."""

import os
import signal
import time

import pytest

pytest.importorskip("rich")


def _end_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_dead_rank_ends_the_ranks() -> None:
    from measuring import spawn

    start_time = time.monotonic()
    with pytest.raises(SystemExit, match="rank 1 ended by SIGKILL, the job was stopped"):
        spawn(_end_rank_1, (), 2)
    assert time.monotonic() - start_time < 30
