"""Compares training steps with and without checks for deadlocks."""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flatshard.extras import deadlock

MEASURES = ("CPU time", "time")


class WatchCost(NamedTuple):
    """Seconds of a step, in blocks of steps with checks for deadlocks and in blocks without."""

    seconds: dict[str, tuple[list[float], list[float]]]  # keyed by a string in `MEASURES`
    # In blocks with checks: CPU time of the deadlock-detection thread, divided by the CPU time of
    # the whole process.
    looks: float


def cost_of_watching(step: Callable[[], None], blocks: int, steps: int) -> WatchCost:
    """Time ``blocks`` blocks of steps, half of them without checks for deadlocks.

    A block calls ``step`` ``steps`` times. CPU times include all threads of this process.
    **Collective.**
    """
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in MEASURES}
    # The deadlock-detection thread holds this lock during a check. So a block without checks
    # acquires the lock.
    looking = deadlock.WATCH._looking
    thread_seconds = 0.0
    for _ in range(10):
        step()
    order = random.Random(0)
    kinds = [kind for _ in range(blocks // 2) for kind in order.sample((False, True), 2)]
    for is_without in kinds:
        if is_without:
            looking.acquire()
        began = time.process_time(), time.perf_counter()
        thread_began = _thread_seconds()
        for _ in range(steps):
            step()
        ended = time.process_time(), time.perf_counter()
        if is_without:
            looking.release()
        else:
            thread_seconds += _thread_seconds() - thread_began
        for name, start, end in zip(MEASURES, began, ended, strict=True):
            seconds[name][is_without].append((end - start) / steps)
    with_looks = sum(seconds[MEASURES[0]][0]) * steps
    return WatchCost(seconds, thread_seconds / with_looks)


def _thread_seconds() -> float:
    """Return the CPU time so far of the thread that detects deadlocks."""
    thread = deadlock.WATCH._thread
    assert thread is not None
    # The first number of this file of Linux is the thread's time on a CPU in nanoseconds.
    schedstat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(schedstat.read_text().split()[0]) / 1e9


def ratio_of_pairs(first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Return the median ratio of ``first`` to ``second``, and the median's 95 % interval.

    The interval is found by drawing the pairs again at random (bootstrap).
    """
    ratios = [a / b for a, b in zip(first, second, strict=False)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]
