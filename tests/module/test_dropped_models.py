"""Models that are dropped leave nothing behind: no files, maps, threads or objects of ours."""

import copy
import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper
from flatshard.comm import work
from flatshard.comm.transports import Transport
from flatshard.comm.work import History
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import on_ranks
from tests.oracle import step_and_zero
from tests.ways import BASIC, WAYS


def _wrapped(collectives: str, policy: Any = "auto", **keywords: str) -> ShardedWrapper:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    settings = {"auto_wrap_policy": policy, "collectives": collectives, **keywords}
    return ShardedWrapper(nn.Sequential(*layers), coalesce_bytes=0, **settings)


def _settle(count: Callable[[], Counter[str]]) -> Counter[str]:
    """Return what ``count`` still finds once flatshard's threads have run what they were given."""
    deadline = time.monotonic() + 10
    while (found := count()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("collectives", ["auto", "sockets", "native"])
@on_ranks(2, fresh=True)
def test_nothing_grows(rank: int, world_size: int, collectives: str) -> None:
    """Loops that make models, copy models or catch errors keep no object, file, thread or map."""
    base = _wrapped(collectives)

    def train(model: ShardedWrapper) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        step_and_zero(optimizer)

    def fail(model: ShardedWrapper) -> None:
        output = model(torch.ones(2, 8))
        output.register_hook(_raise)
        with pytest.raises(MemoryError):
            output.sum().backward()

    def evaluate_a_copy() -> None:
        with torch.no_grad():
            copy.deepcopy(base)(torch.ones(2, 8))
        train(base)

    def accumulate() -> None:
        with base.no_sync():
            base(torch.ones(2, 8)).sum().backward()
        train(base)

    def read_norms() -> None:
        model = _wrapped(collectives)
        train(model)
        model.norms("param")

    def summon() -> None:
        with ShardedWrapper.summon_full_params(base):
            pass
        base.load_state_dict(base.state_dict())
        train(base)

    loops: list[Callable[[], object]] = [
        lambda: _wrapped(collectives),
        lambda: _wrapped(collectives)(torch.ones(2, 8)),
        lambda: train(_wrapped(collectives)),
        lambda: train(_wrapped(collectives, sharding_strategy="NO_SHARD")),
        lambda: train(copy.deepcopy(base)),
        # The all-gather of a unit is under way when the model is dropped.
        lambda: fail(_wrapped(collectives, ModuleWrapPolicy({nn.Sequential}))),
        lambda: (fail(base), train(base)),
        evaluate_a_copy,
        accumulate,
        read_norms,
        summon,
    ]
    _grown(_census())  # fills caches of Python's abstract classes
    with mock.patch.object(work, "_KNOWN", 4):
        for number, loop in enumerate(loops):
            for count in range(13):
                if count == 2:  # the first times may fill caches
                    before = _census()
                loop()
                gc.collect()
            grown = _settle(partial(_grown, before))
            assert not grown, (number, grown)


def _raise(_: torch.Tensor) -> None:
    raise MemoryError


def _grown(before: Counter[str]) -> Counter[str]:
    """Return the types of which nearly each of the eleven loops since ``before`` left an object."""
    return Counter({kind: n for kind, n in (_census() - before).items() if n >= 10})


def _census() -> Counter[str]:
    """Count objects by type, entries in the records of collectives, and what the system counts."""
    # Collect again: during an earlier collection, a thread may have referred to a model.
    gc.collect()
    found = gc.get_objects()
    count = Counter(type(one).__name__ for one in found)
    count["files"] = len(os.listdir("/proc/self/fd"))
    count["threads"] = threading.active_count()
    count["maps"] = Path("/proc/self/maps").read_text().count("memfd")
    for one in found:
        # Not `isinstance`: abstract classes keep a weak reference to each type ever asked for.
        if {History, Transport} & {*type(one).__mro__}:
            for name, part in vars(one).items():
                if hasattr(part, "__len__") and name != "_recent":  # `_recent` has a maximum
                    count[f"{type(one).__name__}.{name}"] += len(part)
    return count


class _Memory(bytearray):
    """Bytes that a tensor can lie in and a weak reference can watch."""


@pytest.mark.parametrize("way", BASIC)
@on_ranks(2)
def test_originals_are_given_back(rank: int, world_size: int, way: str) -> None:
    """A graph over the flattening, and the list of originals, kept a whole model on each rank."""
    model = nn.Linear(7, 5)
    memory = _Memory(4 * model.weight.numel())
    watched = weakref.ref(memory)
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(5, 7).fill_(1)
    del memory
    wrapped = ShardedWrapper(model, **WAYS[way].keywords)
    assert watched() is None
    assert torch.equal(wrapped.state_dict()["weight"], torch.ones(5, 7))
