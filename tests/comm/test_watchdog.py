"""A rank that waits long says for whom, before anything times out."""

import functools
import logging
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch.distributed as dist

from flatshard import CollectiveError
from flatshard.comm.deadlock import detector, watchdog
from tests.harness import ROOT, run_ranks
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
    """Rank 0 calls something collective, and the others something else."""
    patched = mock.patch.multiple(detector, FIRST_LOOK_SECONDS=0.3, LOOK_SECONDS=0.1)
    step, whole = "unit 'fc1', rank .* for forward", ".*all ranks must ask for together"
    buffers = ".*buffers.*: broadcasting from rank 0"
    barrier = r"the program's own barrier\(\), test_watchdog.py:\d+, over ranks 0, 1, 2"
    for name, collectives, alone, others, expected in (
        ("mlp", "auto", "summon", "barrier", (whole, barrier)),
        ("mlp", "sockets", "dict", "barrier", (whole, barrier)),
        ("mlp", "auto", "norm", "forward", ("'norms'", step)),
        ("mlp", "sockets", "dict", "forward", (whole, step)),
        ("batch-norm", "auto", "forward", "dict", (buffers, whole)),
    ):
        case = CASES[name]
        ranks = dist.new_group()  # no message passes the last one's any more
        model = case.wrap(case.model(), collectives=collectives, process_group=ranks)
        inputs, _ = case.batch(rank, 2)
        call = {
            "norm": functools.partial(model.clip_grad_norm_, 1.0),
            "dict": model.state_dict,
            "forward": functools.partial(model, inputs),
            "summon": lambda: model.apply(lambda _: None),  # noqa: B023
        }
        with patched:
            if rank == 1 and alone == "norm":
                time.sleep(0.8)  # being late is not enough
            if rank == 1 and (alone, others) == ("dict", "forward"):
                time.sleep(1.5)  # the other two have found out and left
            model(inputs).sum().backward()
            if rank > 0 and others == "barrier":
                dist.barrier()  # which rank 0 ends, after the error
                continue
            start = time.monotonic()
            with pytest.raises(CollectiveError, match="for one another in different") as error:
                call[alone if rank == 0 else others]()
            assert time.monotonic() - start < 20
            if others == "barrier":
                dist.barrier()
        for number, where in zip(("0", "[12]"), expected, strict=True):  # two may be enough
            error.match(rf"rank {number} in \[{where}")


def test_the_programs_own_collectives_may_last() -> None:
    run_ranks(_barrier_of_its_own, 3)


def _barrier_of_its_own(rank: int, world_size: int) -> None:
    """Ranks wait for ours and for the program's, and one that is late ends both."""
    patched = mock.patch.multiple(detector, FIRST_LOOK_SECONDS=0.1, LOOK_SECONDS=0.02)
    case = CASES["mlp"]
    model = case.wrap(case.model())
    inputs, _ = case.batch(rank, 2)
    later = dist.new_group([1, 2])
    with patched:
        model(inputs)
        for group in (None, later):  # rank 0 has begun the first, and is not of the second
            if rank == 2:  # the first time longer than the watchdog sleeps before the patch
                time.sleep(1.5 if group is None else 0.5)
            if rank != 0:
                dist.barrier(group)
            elif group is None:
                under_way = dist.barrier(async_op=True)
            model(inputs)
        if rank == 0:
            under_way.wait()


LOOKS_AT_THE_END = """
import threading, time
from flatshard.comm.deadlock import detector as standstill, watchdog

def look(self, wait):
    begun.set()
    time.sleep(0.5)
    print("looked", flush=True)

begun = threading.Event()
standstill.LOOK_SECONDS = 0.01
standstill.Deadlock.look = look
with watchdog.watched(lambda: "something"):
    begun.wait()
"""


def test_the_end_of_the_program_waits_for_a_look() -> None:
    """One in the middle of gloo's code ended the process with SIGABRT."""
    command = [sys.executable, "-c", LOOKS_AT_THE_END]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "looked\n"
