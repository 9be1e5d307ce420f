"""Ranks that do different things where collectives match by order: all raise, and say where."""

import atexit
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import CollectiveError, ShardedWrapper
from flatshard.comm.transports import Members
from flatshard.comm.watch import History, first_difference
from flatshard.extras.deadlock import detector, watchdog
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import run_ranks

SECONDS = 20
"""Far less than the groups' timeout, and more than a loaded machine needs."""

QUICK = {"FIRST_LOOK_SECONDS": 0.3, "LOOK_SECONDS": 0.1, "LONGEST_LOOK_SECONDS": 0.4}


class Net(nn.Module):
    """Layers that a rank may run in an order of its own."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths
        )
        self.order = range(len(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.layers[index](x)
        return x


def _wrapped(*widths: int, collectives: str = "native", strategy: str = "FULL_SHARD") -> Net:
    """One unit for each width, on a group that no case before has used."""
    torch.manual_seed(0)
    model: Net = ShardedWrapper(
        Net(*widths),
        process_group=dist.new_group() if strategy == "FULL_SHARD" else None,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        coalesce_bytes=0,
        collectives=collectives,
    )
    for _ in range(2):  # the second has prefetches
        _step(model)
    return model


def _step(model: Net) -> None:
    model(torch.ones(2, 8)).sum().backward()


@contextlib.contextmanager
def _raises(expected: str, kind: type[RuntimeError] = CollectiveError) -> Iterator[None]:
    start = time.monotonic()
    with mock.patch.multiple(detector, **QUICK), pytest.raises(kind, match=expected):
        yield
    assert time.monotonic() - start < SECONDS


EQUAL, DIFFERENT = (16, 16, 16), (16, 24, 32)


def test_before_anything_is_mixed_up() -> None:
    """gloo ended the process by SIGABRT, or the ranks waited until the group's timeout."""
    run_ranks(_before, 2, fresh=True, group_timeout=120)


def _before(rank: int, world_size: int) -> None:
    for widths, order in ((DIFFERENT, [0, 2, 1]), (DIFFERENT, [0, 2]), (EQUAL, [rank])):
        model = _wrapped(*widths)
        if rank == 1 or order == [rank]:
            model.module.order = order
        with _raises(r"rank 0 (began|in) \[.*'layers\.\d'.*; rank 1 (began|in) \["):
            _step(model)
            _step(model)
    model = _wrapped(*DIFFERENT)
    model.module.order = [rank]
    with _raises("'layers.0'.*'layers.1'"), torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 8))
    for call in (lambda model: model.clip_grad_norm_(1.0), ShardedWrapper.state_dict, _accumulate):
        model = _wrapped(*EQUAL)
        with _raises(r"rank 0 (began|in) \[.*; rank 1 (began|in) \["):
            if rank == 1:
                call(model)
            for _ in range(2):
                _step(model)


def test_only_what_is_unusual_is_announced() -> None:
    """Each all-gather was preceded by two small ones: a fifth of a step of small layers."""
    run_ranks(_announced, 2)


def _announced(rank: int, world_size: int) -> None:
    model = _wrapped(*DIFFERENT)
    for _ in range(2):
        _step(model)
    with mock.patch.object(History, "learn", side_effect=AssertionError):
        _step(model)
    with torch.no_grad():
        for _ in range(2):  # another order, on all ranks
            model(torch.ones(2, 8))
    for _ in range(2):
        _step(model)


def _accumulate(model: Net) -> None:
    with model.no_sync():
        _step(model)


def test_before_the_optimizer_can_step() -> None:
    """Where the host waits for nothing, as with NCCL, each had half of one and half of another."""
    run_ranks(_after, 2, fresh=True, group_timeout=120)


def _after(rank: int, world_size: int) -> None:
    with mock.patch.object(Members, "announce"):
        for order in ([0, 2, 1], [rank]):
            model = _wrapped(*EQUAL)
            if rank == 1 or order == [rank]:
                model.module.order = order
            with _raises(r"the first difference: .*'layers\.\d'.*'layers\.\d'", RuntimeError):
                _step(model)
        model = _wrapped(*EQUAL)
        model.module.layers[1].requires_grad_(rank == 0)
        with _raises("reduce the gradients of different parameters", RuntimeError):
            _step(model)
        model = _wrapped(*EQUAL)
        model.module.order = [rank]
        with _raises(r"rank 0 began \[all-gather of .*; rank 1 began"), torch.no_grad():
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:  # nothing is asked of other ranks here
                model(torch.ones(2, 8))
                time.sleep(0.01)


def test_within_a_node() -> None:
    """Each group of a hybrid strategy has an order of its own, and a rank is in one of them."""
    run_ranks(_within_a_node, 4, fresh=True, group_timeout=120)


def _within_a_node(rank: int, world_size: int) -> None:
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        mock.patch.object(Members, "announce"),
    ):
        model = _wrapped(*EQUAL, strategy="HYBRID_SHARD")
    model.module.order = [0, 2, 1] if rank == 3 else [0, 1, 2]
    with (
        mock.patch.object(Members, "announce"),
        _raises(r"rank 2 began \[.*'layers.\d'.*; rank 3 began", RuntimeError),
    ):
        _step(model)


# ---------------------------------------------------------------- a program that ends


@pytest.mark.parametrize("collectives", ["native", "sockets", "auto"])
def test_an_exception_that_ends_a_rank_is_told_at_once(collectives: str) -> None:
    """The others heard of it when its process had ended, and of no rank."""
    run_ranks(_ends, 2, collectives, expendable=[1], group_timeout=120)


def _ends(rank: int, world_size: int, collectives: str) -> None:
    model = _wrapped(*EQUAL, collectives=collectives)
    if rank == 1:
        error = ValueError("a bad batch")
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(ValueError, error, None)
        time.sleep(60)  # what else the program does
    with _raises("rank 1 ended by ValueError: a bad batch"):
        _step(model)


@pytest.mark.parametrize("collectives", ["native", "sockets", "auto"])
def test_a_program_that_is_over_is_told_at_once(collectives: str) -> None:
    """The others heard of it from their backend, without a reason, once its process had ended."""
    run_ranks(_is_over, 2, collectives, expendable=[1], group_timeout=120)


def _is_over(rank: int, world_size: int, collectives: str) -> None:
    if rank == 1:
        atexit.register(time.sleep, 60)  # by another library
    model = _wrapped(*EQUAL, collectives=collectives)
    if rank == 1:
        if os.fork() == 0:
            watchdog._tell("a fork's end, which is nobody's")
            os._exit(0)
        os.wait()
        _step(model)
        atexit._run_exitfuncs()
    _step(model)
    with _raises(r"rank 1 ended by sys.exit\(\)"):
        _step(model)


def test_what_was_in_the_hook_is_called() -> None:
    called: list[str] = []
    before: Callable[..., None] = lambda kind, error, trace: called.append(str(error))  # noqa: E731
    with mock.patch.object(sys, "excepthook", before):
        watchdog.tell_of_end()
        watchdog.tell_of_end()  # once is enough
        sys.excepthook(ValueError, ValueError("one"), None)
    assert called == ["one"]


def test_first_difference() -> None:
    one, two = (History(name, (0, 1), 0) for name in ("one", "two"))
    for number in range(1, 101):
        one.begin("gather", "a")
        two.begin("gather", "b" if number == 70 else "a")
    assert one.digest != two.digest
    known = first_difference({0: one.recent(), 1: two.recent(), 2: one.recent()})
    assert known == "the first difference: rank 0, 2 began [a]; rank 1 began [b]"
    assert first_difference({0: one.recent()[:5], 1: two.recent()[-5:]}) is None
