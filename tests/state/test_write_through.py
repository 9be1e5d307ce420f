"""What is written into a state dict's tensors reaches the model, as in an unwrapped one."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import ShardedWrapper
from flatshard.wrap import always_wrap_policy
from tests.harness import on_ranks
from tests.oracle import assert_identical, assert_same, snapshot
from tests.side import pair
from tests.ways import on_ranks_each_way


@on_ranks_each_way(3)
def test_collectives_of_the_program(rank: int, world_size: int, way: str) -> None:
    """Collectives write without a change of the version counter; their results reach the model."""
    sharded, plain = pair(rank, world_size, way)
    for value in sharded.model.state_dict().values():
        dist.all_reduce(value)
    for value in plain.model.state_dict().values():
        value.mul_(world_size)
    sharded.train(0, 2), plain.train(0, 2)
    state = sharded.model.state_dict()
    if rank == 0:
        state["fc1.weight"].fill_(0.5)
    dist.broadcast(state["fc1.weight"], 0)
    plain.model.state_dict()["fc1.weight"].fill_(0.5)
    sharded.train(2, 4), plain.train(2, 4)
    assert_same(sharded.model, plain.model, 1e-12)


@on_ranks_each_way(2)
def test_of_a_model_that_trains(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.train(0, 2)
        for value in run.model.state_dict().values():
            value.mul_(0.5)
        run.train(2, 4)
    assert_same(sharded.model, plain.model, 1e-12)
    # A copy that is kept is of before: writing it back would undo the steps since.
    before = sharded.model.state_dict()
    sharded.train(4, 5)
    now = snapshot(sharded.model)
    before["fc2.weight"].add_(1.0)
    with pytest.raises(RuntimeError, match=r"'fc2.weight': .*had changed after.*clone"):
        sharded.model.state_dict()
    assert_identical(sharded.model, now)
    del before
    # It can be loaded, and is its own where users asked for that.
    loaded = sharded.model.state_dict()
    loaded["fc2.weight"].add_(1.0)
    sharded.model.load_state_dict(loaded)
    expected = now["fc2.weight"] + 1.0
    assert torch.equal(sharded.model.state_dict()["fc2.weight"], expected)
    apart = copy.deepcopy(loaded)
    apart["fc2.weight"].zero_()
    loaded.clear()
    assert torch.equal(snapshot(sharded.model)["fc2.weight"], expected)


@on_ranks(2)
def test_reads_of_a_written_parameter(rank: int, world_size: int) -> None:
    for read in (
        lambda p: p.full_tensor(),
        lambda p: p.sum() / 6,
        lambda p: p.data.clone().full_tensor(),
        lambda p: p.data.mul_(1).full_tensor(),
        lambda p: p.to_local(),
        lambda p: torch._foreach_mul([p], 1.0)[0].full_tensor(),
    ):
        model = ShardedWrapper(nn.Linear(3, 2))
        nn.init.ones_(model.weight)
        state = model.state_dict()
        torch._foreach_mul_([*state.values()], 2)
        with torch.no_grad():
            assert (read(model.weight) == 2).all()


@on_ranks(2)
def test_data_of_another_model(rank: int, world_size: int) -> None:
    """`q.data = p.data`: the second model follows the first, until both are trained."""
    online, target = (pair(rank, world_size, "full")[0] for _ in range(2))
    for p, q in zip(online.model.parameters(), target.model.parameters(), strict=True):
        q.data = p.data
    online.train(0, 2)
    assert_identical(target.model, snapshot(online.model))
    online.train(2, 3), target.train(2, 3)
    with pytest.raises(RuntimeError, match=r"had changed after .*instead of q\.data = p\.data"):
        online.train(3, 4), target.train(3, 4)
    first, second = (pair(rank, world_size, "full")[0] for _ in range(2))
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        q.data = p.data
    second.train(0, 1)  # `first` would have to follow
    with pytest.raises(RuntimeError, match=r"had changed after .*instead of q\.data = p\.data"):
        second.train(1, 2)


@on_ranks(2)
def test_written_on_one_rank(rank: int, world_size: int) -> None:
    number = r"The number for parameter '0.weight' of unit .* is 1 on rank 0, nothing on rank 1\."
    for writes in (
        [(0, "0.weight")],
        [(0, "0.weight"), (1, "0.bias"), (1, "0.bias")],
        # As many writes on both ranks, but to parameters of different units.
        [(0, "0.weight"), (1, "1.weight")],
    ):
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = ShardedWrapper(layers, auto_wrap_policy=always_wrap_policy)
        for writer, name in writes:
            state = model.state_dict()
            if rank == writer:
                state[name].mul_(0.5)
            del state
        with pytest.raises(RuntimeError, match=f"different numbers of times. {number} The model"):
            model(torch.ones(1, 3)).sum().backward()
    model = ShardedWrapper(nn.Linear(3, 3))
    average = copy.deepcopy(model)
    state = average.state_dict()
    if rank == 0:
        state["weight"].mul_(0.5)
    del state
    model(torch.ones(1, 3)).sum().backward()  # no rank wrote to this model


def test_a_state_dict_in_a_global_variable_ends_with_the_program() -> None:
    program = """
import torch, torch.distributed as dist
from flatshard import ShardedWrapper
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = ShardedWrapper(torch.nn.Linear(4, 4))
state = model.state_dict()
"""
    # A real interpreter: in programs forked by `PYTHON`, the error did not appear.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "Exception ignored" not in done.stderr
