"""Every strategy, topology and way to accumulate trains as one process does."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import CollectiveError, ShardedWrapper, ShardingStrategy, sharded_modules
from flatshard.wrap import CustomPolicy
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES, Case, Composed, Mlp
from tests.oracle import assert_same_state, snapshot
from tests.side import Run, assert_same_model
from tests.ways import Keywords


def _train_and_compare(
    rank: int, world_size: int, wrap: Callable[[Any], ShardedWrapper]
) -> tuple[Run, Run]:
    case = CASES["mlp"]
    sharded = Run(wrap(case), case, rank, world_size)
    plain = Run(case.model(), case, rank, world_size)
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same_model(sharded, plain)
    state = sharded.model.state_dict()
    bare = case.model()
    bare.load_state_dict(state)
    again = wrap(case)
    again.load_state_dict(snapshot(plain.model))
    assert_same_state(again.state_dict(), snapshot(plain.model), 0.0, 0.0)
    return sharded, plain


# ---------------------------------------------------------------- where the groups come from


def _pair() -> Keywords:
    rank = dist.get_rank()
    shard = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    replicate = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return {"process_group": (shard, replicate)}


def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> Keywords:
    return {"device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}


GROUPS: dict[str, tuple[Callable[[], Keywords], tuple[int, int]]] = {
    "pair": (_pair, (2, 2)),
    "mesh": (lambda: _mesh((2, 2), None), (2, 2)),
    "mesh-4x1": (lambda: _mesh((4, 1), None), (1, 4)),
    "mesh-1x4": (lambda: _mesh((1, 4), None), (4, 1)),
    "mesh-named": (lambda: _mesh((1, 4), ("dp_shard", "dp_replicate")), (1, 4)),
    "mesh-1d": (lambda: _mesh((4,), None), (4, 1)),
    "mesh-1d-hybrid": (
        lambda: {**_mesh((4,), ("dp",)), "sharding_strategy": "HYBRID_SHARD"},
        (2, 2),
    ),
    "nodes": (lambda: {"sharding_strategy": "HYBRID_SHARD_ZERO2"}, (2, 2)),
}


@on_ranks(4)
def test_groups(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name, (make, expected) in GROUPS.items():
        wrap = partial(_wrapped_with, make())
        with naming(name):
            sharded, _ = _train_and_compare(rank, world_size, wrap)
            topology = sharded.model._sharded_unit.topology
            assert (topology.shard.size, topology.replicate.size) == expected
            assert name != "pair" or topology.shard.ranks == (rank % 2, rank % 2 + 2)


def _wrapped_with(keywords: Keywords, case: Case) -> ShardedWrapper:
    return case.wrap(**keywords)


# ---------------------------------------------------------------- a strategy for each unit


CHOICES: dict[str, Keywords] = {
    "fc1": {"sharding_strategy": "HYBRID_SHARD"},
    "fc2": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "fc3": {"reshard_after_forward": 2},
}


@on_ranks(4)
def test_units_of_different_strategies(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"

    def by_policy(case: Any) -> ShardedWrapper:
        model = case.model()
        names = {module: name for name, module in model.named_modules()}
        policy = CustomPolicy(lambda module: CHOICES.get(names[module], False))
        return ShardedWrapper(model, auto_wrap_policy=policy)

    def by_hand(case: Any) -> ShardedWrapper:
        model = case.model()
        for name, keywords in CHOICES.items():
            setattr(model, name, ShardedWrapper(getattr(model, name), **keywords))
        return ShardedWrapper(model, sharding_strategy="HYBRID_SHARD_OP")

    for wrap in (by_policy, by_hand):
        run, plain = _train_and_compare(rank, world_size, wrap)
        units = [sharded_modules(run.model.get_submodule(name))[0] for name in CHOICES]
        names = [unit.sharding_strategy.name for unit in units]
        assert names == ["HYBRID_SHARD", "NO_SHARD", "FULL_SHARD"]
        # One norm over units of three groups.
        for one in (run, plain):
            one.loss(7).backward()
        expected = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        actual = nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0.0)


# ---------------------------------------------------------------- bad input


SHARDED, REPLICATED, HYBRID = (
    {"sharding_strategy": name} for name in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD")
)


def _model_with(**keywords: Any) -> ShardedWrapper:
    return ShardedWrapper(Mlp(), **keywords)


# By the message.
VALUE_ERRORS: dict[str, Callable[[], Keywords]] = {
    "reshard_after_forward=3: expected a divisor of 4": lambda: {"reshard_after_forward": 3},
    r"equally many ranks on every node, but with LOCAL_WORLD_SIZE=3 .* \[3, 1\]": lambda: HYBRID,
    "positive number of ranks": lambda: {"reshard_after_forward": 0},
    "NO_SHARD never reshards": lambda: {**REPLICATED, "reshard_after_forward": True},
    "is for HYBRID strategies, got FULL_SHARD": lambda: {**_pair(), **SHARDED},
    "share 4 ranks": lambda: {"process_group": (dist.group.WORLD,) * 2},
    "got 3": lambda: _mesh((2, 2, 1), None),
    "either process_group or device_mesh": lambda: {
        **_mesh((4,), None),
        "process_group": dist.group.WORLD,
    },
}
TYPE_ERRORS: dict[str, Callable[[], Keywords]] = {
    "number of ranks": lambda: {"reshard_after_forward": "yes"},
    "expected a ProcessGroup": lambda: {"process_group": "world"},
    "expected a DeviceMesh": lambda: {"device_mesh": 4},
    "a pair": lambda: {"process_group": (None, None, None)},
}


@on_ranks(4)
def test_bad_input(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    for error, table in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)):
        for message, make in table.items():
            assert_raises(error, message, _model_with, **make())


@on_ranks(4)
def test_groups_that_make_no_grid(rank: int, world_size: int) -> None:
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1], [3])]
    column = {0: 0, 2: 0, 1: 1, 3: 2}[rank]
    with pytest.raises(ValueError, match="have different sizes"):
        _model_with(process_group=(rows[rank // 2], columns[column]))
    both = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = (rows[rank // 2], both[rank % 2])
    with pytest.raises(ValueError, match="share 2 ranks"):  # rank 2 itself sees nothing wrong
        _model_with(process_group=groups[::-1] if rank == 1 else groups)


@on_ranks(2)
def test_hybrid_without_nodes(rank: int, world_size: int) -> None:
    del os.environ["LOCAL_WORLD_SIZE"]
    for tasks in ({}, {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "1"}):  # of a job's shell
        with mock.patch.dict(os.environ, tasks):
            assert_raises(ValueError, r"LOCAL_WORLD_SIZE\s+is not set", _model_with, **HYBRID)
    with mock.patch.dict(os.environ, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1"):
        _model_with(**HYBRID)


@on_ranks(3)
def test_nodes_of_different_sizes(rank: int, world_size: int) -> None:
    """Two ranks on one node and one on another: only strategies that go by nodes mind."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "1"
    for keywords in (REPLICATED, SHARDED):
        _train_and_compare(rank, world_size, partial(_wrapped_with, keywords))
    expected = r"2 ranks per node.* on rank 0, .*1 ranks per node.* on rank 2"
    assert_raises(ValueError, expected, _model_with, **HYBRID)


@on_ranks(2)
def test_no_sync_inside_forward(rank: int, world_size: int) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            return net.fc(x)

    model = ShardedWrapper(Composed(forward, fc=nn.Linear(3, 3)))
    assert_raises(RuntimeError, r"no_sync\(\) was called while a forward", model, torch.ones(1, 3))
    with pytest.raises(ValueError, match="max_bytes of at least 0"), model.no_sync(max_bytes=-1):
        pass


@on_ranks(2)
def test_units_on_other_ranks(rank: int, world_size: int) -> None:
    alone = [dist.new_group([one]) for one in range(2)][rank]
    model = Mlp()
    model.fc1 = ShardedWrapper(model.fc1)
    with pytest.raises(ValueError, match="unit 'fc1' trains on ranks"):
        ShardedWrapper(model, process_group=alone)


@on_ranks(4, group_timeout=4, expendable=[3])
def test_failing_second_stage_names_the_unit(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    case = CASES["mlp"]
    run = Run(case.wrap(sharding_strategy="HYBRID_SHARD"), case, rank, world_size)
    run.train(0, 1)
    if rank == 3:
        os._exit(1)
    assert_raises(CollectiveError, f"rank {rank}: ", run.train, 1, 2)
