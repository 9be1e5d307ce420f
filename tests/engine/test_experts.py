"""Experts with a process group of their own: units that train on some of the model's ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.harness import assert_raises, naming, on_ranks
from tests.oracle import ROWS, assert_same, step_and_zero

pytestmark = pytest.mark.by_turns


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)
        self.expert = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.second = nn.Linear(5, 5)

    def forward(self, x: Tensor, has_second: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.expert(x)
        return self.last(self.second(x) if has_second else x)


def _build(number: int) -> _Model:
    torch.default_generator.manual_seed(3)
    model = _Model().double()
    with torch.no_grad():  # each group has other experts
        for value in (*model.expert.parameters(), model.expert[1].running_mean):
            value.add_(0.1 * number)
    return model


def _loss(model: nn.Module, rank: int, size: int, step: int) -> Tensor:
    rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(rows.double(), rank < size or step == 2).pow(2).mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks(group_timeout=10)
def test_training(rank: int, world_size: int) -> None:
    size = world_size // 2
    members = [list(range(size)), list(range(size, 2 * size))]
    groups = [dist.new_group(ranks) for ranks in members]
    number = rank // size
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = _build(number)
        for name in ("expert", "second"):
            keywords = {"process_group": groups[number], "sharding_strategy": strategy}
            setattr(model, name, ShardedWrapper(getattr(model, name), **keywords))
        sharded = ShardedWrapper(model, sharding_strategy=strategy)
        plain = [_build(n) for n in range(2)]
        optimizers = [_sgd(one) for one in (sharded, *plain)]
        for step in range(4):
            _loss(sharded, rank, size, step).backward()
            _plain_backward(plain, members, step)
            if step == 0 and number == 1:  # one of the others used it
                assert all(param.grad is None for param in sharded.second.parameters())
            step_and_zero(*optimizers)
        with naming(strategy):
            states = [
                {n: v for n, v in one.state_dict().items() if size == 1 or "1." not in n}
                for one in (sharded, plain[number])
            ]  # without the statistics of the other rank's rows
            assert_same(*states)
        assert_raises(RuntimeError, "this unit trains only on ranks", sharded.clip_grad_norm_, 1.0)


@on_ranks(4, group_timeout=10)
def test_frozen(rank: int, world_size: int) -> None:
    """A group may freeze its expert; ranks of one group must freeze the same parameters."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank // 2
    model = _build(number)
    model.expert = ShardedWrapper(model.expert, process_group=groups[number])
    sharded = ShardedWrapper(model)
    model.expert.requires_grad_(number == 0)
    for step in range(2):
        _loss(sharded, rank, 4, step).backward()
    assert all((param.grad is None) == (number == 1) for param in model.expert.parameters())
    model.expert.requires_grad_(True)
    if rank == 3:
        model.expert.module[0].weight.requires_grad_(False)
    whose = "unit 'expert'" if number else "a unit of other ranks"
    with pytest.raises(RuntimeError, match=f"the ranks that train {whose} have frozen different"):
        _loss(sharded, rank, 4, 0).backward()


def _plain_backward(models: list[_Model], members: list[list[int]], step: int) -> None:
    """Each group's model gets its ranks' gradients; what all have, the average over all ranks."""
    for model, ranks in zip(models, members, strict=True):
        for rank in ranks:
            (_loss(model, rank, len(ranks), step) / len(ranks)).backward()
    for name in ("first", "last"):
        for one, other in zip(*(getattr(m, name).parameters() for m in models), strict=True):
            one.grad = (one.grad + other.grad) / 2
            other.grad = one.grad.clone()
