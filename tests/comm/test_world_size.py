"""What a rank does, sends and keeps does not grow with the number of ranks, beyond a list of them.

torch's "fake" process group makes this process rank 0 of any number. Work is counted, not timed:
lines of flatshard that run, bytes that ranks exchange in small, and Python's memory.
"""

import gc
import importlib
import os
import pickle
import sys
import tracemalloc
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard import ShardedWrapper
from flatshard.comm.process_groups import ranks_text
from flatshard.comm.ranks import forget_destroyed
from flatshard.extras import deadlock
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, run_ranks

FEW, MANY = 64, 1024
PACKAGE = os.path.dirname(flatshard.__file__)


class Work(NamedTuple):
    """What a call did."""

    lines: int  # of flatshard
    sent: int  # bytes that this rank gave to small exchanges
    received: int  # bytes that it got in small all-gathers
    memory: int  # the peak of Python's allocations, in bytes


def measured(call: Callable[[], Any]) -> tuple[Any, Work]:
    counts = {"lines": 0, "sent": 0, "received": 0}

    def in_package(frame: types.FrameType, event: str, _: Any) -> Any:
        counts["lines"] += event == "line"
        return in_package

    def on_call(frame: types.FrameType, event: str, _: Any) -> Any:
        return in_package if frame.f_code.co_filename.startswith(PACKAGE) else None

    def all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        counts["sent"] += tensor.nbytes

    def all_gather(everyone: list[Any], mine: Any, **_: Any) -> None:
        nbytes = len(pickle.dumps(mine))
        counts["sent"] += nbytes
        counts["received"] += nbytes * len(everyone)
        everyone[:] = [mine] * len(everyone)

    gc.collect()
    before = sys.gettrace()
    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "all_gather_object", all_gather),
        # A check for deadlocks, in its own thread, would allocate memory in between.
        deadlock.WATCH._looking,
    ):
        tracemalloc.start()
        sys.settrace(on_call)
        try:
            result = call()
        finally:
            sys.settrace(before)
            memory = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return result, Work(**counts, memory=memory)


class Whole(torch.optim.SGD):
    """Looks at all of a parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    with torch.no_grad():
                        param -= param.grad / (1 + param.grad.norm(dim=-1, keepdim=True).max())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(3)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with model.no_sync():
        model(torch.ones(2, 96)).sum().backward()
    model(torch.ones(2, 96)).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    sum(param.norm() for param in model.parameters())
    model.state_dict()
    ShardedWrapper.optim_state_dict(model, optimizer)


def pair() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    size, per_node = dist.get_world_size(), 8
    rows, columns = list(range(per_node)), list(range(0, size, per_node))
    made = [dist.new_group(ranks, use_local_synchronization=True) for ranks in (rows, columns)]
    return made[0], made[1]


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "FULL_SHARD": dict,
    "HYBRID_SHARD_OP": lambda: {"sharding_strategy": "HYBRID_SHARD_OP"},
    "grid": lambda: {"sharding_strategy": "HYBRID_SHARD", "process_group": pair()},
    "rank 0's weights": lambda: {"sync_module_states": True},
    "whole tensors": dict,
}


def _works(rank: int, world_size: int, way: str) -> list[dict[str, Work]]:
    return [_work(way, size) for size in (FEW, MANY)]


def _work(way: str, size: int) -> dict[str, Work]:
    fake_pg = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=size)
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    keywords = {"process_group": dist.group.WORLD, "coalesce_bytes": 0, **WAYS[way]()}
    policy = ModuleWrapPolicy({nn.Sequential})
    works = {}
    with allow_warnings():  # fake collectives give ranks what others should have had
        wrap = partial(ShardedWrapper, net(), auto_wrap_policy=policy, **keywords)
        model, works["wrapping"] = measured(wrap)
        kind = Whole if way == "whole tensors" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        step = partial(train, model, optimizer)
        _, works["first"] = measured(step)
        step()
        _, works["later"] = measured(step)
    dist.destroy_process_group()
    forget_destroyed()
    return works


@pytest.mark.parametrize("way", WAYS)
def test_work_does_not_grow_with_the_number_of_ranks(way: str) -> None:
    (few, many), *_ = run_ranks(_works, 1, way, init_group=False)
    more = MANY - FEW
    for moment in few:
        # A list of the ranks, and a loop over it, are allowed where groups are made and where an
        # owner of parameters gets their parts from many ranks. Lists of lists are not.
        lists = moment != "later" or way == "whole tensors"
        before, after = few[moment], many[moment]
        text = f"{way}, {moment}: {before} for {FEW} ranks, {after} for {MANY}"
        assert after.lines <= before.lines * 1.01 + 100 * more * lists, text
        assert after.sent == before.sent, text
        assert after.received <= before.received + 512 * more * lists, text
        assert after.memory <= before.memory * 1.1 + 1024 * more * lists, text


def test_messages_do_not_grow_with_the_number_of_ranks() -> None:
    assert ranks_text(range(3)) == "0, 1, 2"
    assert ranks_text(range(0, 64, 2)) == "0, 2, 4, 6, ..., 62 (32 ranks)"
    assert len(ranks_text(range(1 << 14))) < 50
