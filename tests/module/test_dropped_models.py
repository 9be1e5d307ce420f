"""Models that are dropped leave nothing behind: no files, maps, threads or objects of ours."""

import copy
import gc
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper
from tests.harness import run_ranks
from tests.ways import BASIC, WAYS


def _wrapped(collectives: str) -> ShardedWrapper:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    return ShardedWrapper(
        nn.Sequential(*layers), auto_wrap_policy="auto", coalesce_bytes=0, collectives=collectives
    )


def _left() -> Counter[str]:
    gc.collect()
    ours = (type(one) for one in gc.get_objects())
    left = Counter(kind.__name__ for kind in ours if kind.__module__.startswith("flatshard."))
    # Of a tag's last publication, some hundred bytes: a slow rank may still read it.
    for kept in ("Publication", "Awaited", "WaitCondition"):
        left.pop(kept, None)
    left["files"] = len(os.listdir("/proc/self/fd"))
    left["threads"] = threading.active_count()
    left["maps"] = Path("/proc/self/maps").read_text().count("memfd")
    return left


@pytest.mark.parametrize("collectives", ["auto", "sockets", "native"])
def test_nothing_is_left(collectives: str) -> None:
    run_ranks(_drop, 2, collectives, fresh=True)


def _drop(rank: int, world_size: int, collectives: str) -> None:
    base = _wrapped(collectives)

    def use() -> None:
        for model in (copy.deepcopy(base), _wrapped(collectives)):
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()

    base(torch.ones(2, 8)).sum().backward()
    for _ in range(3):
        use()
    before = _left()
    for _ in range(5):
        use()
    deadline = time.monotonic() + 10
    # Threads of ours may still look at the last waits.
    while (after := _left()) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not after - before, after - before


class _Memory(bytearray):
    """Bytes that a tensor can lie in and a weak reference can watch."""


@pytest.mark.parametrize("way", BASIC)
def test_originals_are_given_back(way: str) -> None:
    """A graph over the flattening, and the list of originals, kept a whole model on each rank."""
    run_ranks(_originals, 2, way)


def _originals(rank: int, world_size: int, way: str) -> None:
    model = nn.Linear(7, 5)
    memory = _Memory(4 * model.weight.numel())
    watched = weakref.ref(memory)
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(5, 7).fill_(1)
    del memory
    wrapped = ShardedWrapper(model, **WAYS[way].keywords)
    assert watched() is None
    assert torch.equal(wrapped.state_dict()["weight"], torch.ones(5, 7))
