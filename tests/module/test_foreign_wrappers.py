"""torch's wrappers around a sharded model, which is every framework's first try."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, on_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, assert_same_state, train, train_steps, trainable

LINEARS = ModuleWrapPolicy({nn.Linear})


def _fsdp(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _data_parallel(module: nn.Module) -> Any:
    return DataParallel(module)(torch.ones(2, 7))  # it looks at parameters only here


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": _fsdp,
    "fully_shard": fully_shard,
    "replicate": replicate,
    "DataParallel": _data_parallel,
}


@pytest.mark.by_turns
@on_ranks(2)
def test_around_a_sharded_model(rank: int, world_size: int) -> None:
    """DistributedDataParallel gave the parameters of all ranks the values of rank 0's."""
    case = CASES["mlp"]
    model = case.wrap(case.model())
    for name, make in MAKERS.items():
        for module in (model, nn.Sequential(nn.Linear(7, 7), model)):
            with (
                naming(name),
                pytest.raises(ValueError, match=f"^{name} cannot wrap a ShardedWrapper: .* leave"),
            ):
                make(module)
    train_steps(model, OPTIMIZERS["sgd"](trainable(model)), case, rank, world_size)
    assert_same_state(model.state_dict(), train(case, world_size).state, 0.0, 1e-12)


@on_ranks(2)
def test_around_a_part_of_a_sharded_model(rank: int, world_size: int) -> None:
    """As a loop over the blocks of a model does, which meets no wrapper."""
    model = CASES["mlp"].wrap(CASES["mlp"].model(), auto_wrap_policy=None)
    for name in ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"):
        with naming(name), pytest.raises(ValueError, match=f"^{name} cannot wrap a ShardedWrapper"):
            MAKERS[name](next(model.module.children()))


@on_ranks(1)
def test_with_policy_around_a_sharded_model(rank: int, world_size: int) -> None:
    inner = ShardedWrapper(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"module is already a ShardedWrapper .*a Sequential; 1"):
        ShardedWrapper(inner, auto_wrap_policy=LINEARS)
    outer = nn.Sequential(nn.Tanh(), inner)
    with pytest.raises(ValueError, match=r"contains, at '1', .* wrap the model once"):
        ShardedWrapper(outer, auto_wrap_policy=LINEARS)
    with pytest.warns(UserWarning, match=r"the module, a Sequential, .*Wrap the module once"):
        ShardedWrapper(inner)
