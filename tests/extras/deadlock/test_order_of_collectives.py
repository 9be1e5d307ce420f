"""Ranks that do different things where collectives match by order: all raise, and say where."""

import atexit
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from flatshard import CollectiveError, ShardedWrapper
from flatshard.comm.host_exchange import HostExchange
from flatshard.extras import deadlock
from flatshard.extras.deadlock import detector
from tests.by_order import DIFFERENT, EQUAL, Net, step, wrapped
from tests.harness import on_ranks
from tests.outcomes import QUICK

SECONDS = 20
"""Far less than the groups' timeout, and more than a loaded machine needs."""


@contextlib.contextmanager
def _raises(expected: str, kind: type[RuntimeError] = CollectiveError) -> Iterator[None]:
    start = time.monotonic()
    with mock.patch.multiple(detector, **QUICK), pytest.raises(kind, match=expected):
        yield
    assert time.monotonic() - start < SECONDS


@on_ranks(2, fresh=True, group_timeout=120)
def test_before_anything_is_mixed_up(rank: int, world_size: int) -> None:
    """Ranks that begin different collectives all raise at once, and say what each began."""
    for widths, order in ((DIFFERENT, [0, 2, 1]), (DIFFERENT, [0, 2]), (EQUAL, [rank])):
        model = wrapped(*widths)
        if rank == 1 or order == [rank]:
            model.module.order = order
        with _raises(r"rank 0 (began|in) \[.*'layers\.\d'.*; rank 1 (began|in) \["):
            step(model)
            step(model)
    model = wrapped(*DIFFERENT)
    model.module.order = [rank]
    with _raises("'layers.0'.*'layers.1'"), torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 8))
    for call in (lambda model: model.clip_grad_norm_(1.0), ShardedWrapper.state_dict, _accumulate):
        model = wrapped(*EQUAL)
        with _raises(r"rank 0 (began|in) \[.*; rank 1 (began|in) \["):
            if rank == 1:
                call(model)
            for _ in range(2):
                step(model)


@on_ranks(2, fresh=True, group_timeout=120)
def test_in_evaluation(rank: int, world_size: int) -> None:
    """No backward compares what ranks have begun."""
    with mock.patch.object(HostExchange, "announce"):
        model = wrapped(*EQUAL)
        model.module.order = [rank]
        with _raises(r"rank 0 began \[all-gather of .*; rank 1 began"), torch.no_grad():
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:  # nothing is asked of other ranks here
                model(torch.ones(2, 8))
                time.sleep(0.01)


def _accumulate(model: Net) -> None:
    with model.no_sync():
        step(model)


# ---------------------------------------------------------------- a program that ends


@pytest.mark.parametrize("end", ["exception", "exit"])
@pytest.mark.parametrize("collectives", ["native", "sockets", "auto"])
@on_ranks(2, expendable=[1], group_timeout=120)
def test_the_end_of_a_rank_is_told(rank: int, world_size: int, collectives: str, end: str) -> None:
    """The other ranks raise at once, with the rank and its exception, or that its program is over.

    An exit handler of another library, or the program itself, takes long afterwards.
    """
    if rank == 1:
        atexit.register(time.sleep, 60)
    model = wrapped(*EQUAL, collectives=collectives)
    step(model)
    if rank == 1 and end == "exception":
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(ValueError, ValueError("a bad batch"), None)
        time.sleep(60)
    elif rank == 1:
        if os.fork() == 0:
            deadlock._tell("a fork's end, which is nobody's")
            os._exit(0)
        os.wait()
        atexit._run_exitfuncs()
    reason = {"exception": "ValueError: a bad batch", "exit": r"sys.exit\(\)"}[end]
    with _raises(f"rank 1 ended by {reason}"):
        step(model)


def test_what_was_in_the_hook_is_called() -> None:
    error = ValueError("one")
    with mock.patch.object(sys, "excepthook") as before:
        deadlock.tell_of_end()
        deadlock.tell_of_end()  # once is enough
        sys.excepthook(ValueError, error, None)
    before.assert_called_once_with(ValueError, error, None)
