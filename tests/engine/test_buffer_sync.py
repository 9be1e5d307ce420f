"""Buffers of other lengths on each rank, which DistributedDataParallel cannot broadcast."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.wrap import always_wrap_policy
from tests.harness import on_ranks
from tests.models import CASES

MLP = CASES["mlp"]


class _Growing(nn.Module):
    """Has a table that it makes longer when a batch needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("offset", torch.full((4,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() < len(x):
            self.table = torch.arange(float(len(x)))
        return self.linear(x) + self.table[: len(x), None]


@pytest.mark.parametrize("longer", [0, 1])
@on_ranks(2)
def test_buffer_of_another_length_on_each_rank(rank: int, world_size: int, longer: int) -> None:
    """Rank 0's buffers were sent into ones of other lengths, and the ranks crashed."""
    torch.manual_seed(0)
    plain = _Growing()
    model = ShardedWrapper(_Growing())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(8 if rank == longer else 3, 7)
    for step in range(4):
        model.offset.fill_(rank + step)
        output = model(x)
        torch.testing.assert_close(output, plain(x))
        output.sum().backward()
        assert torch.equal(model.offset, torch.full((4,), float(step)))
    assert torch.equal(model.table, torch.arange(float(len(x))))


@pytest.mark.parametrize("longer", [0, 1])
@on_ranks(2)
def test_several_forwards_between_exchanges(rank: int, world_size: int, longer: int) -> None:
    """Where one rank's buffers changed, no other rank can know it yet."""
    model = ShardedWrapper(_Growing())
    for step in range(3):
        for number in range(1, 4):
            model.offset.fill_(rank + number + step)
            output = model(torch.randn(3 * number * (step + 1) if rank == longer else 1, 7))
            assert torch.equal(model.offset, torch.full((4,), float(number + step)))
        output.sum().backward()


@on_ranks(2)
def test_two_forwards_through_batch_norm(rank: int, world_size: int) -> None:
    """The second forward sent rank 0's statistics in place, and backward refused to go on."""
    layers = [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
    model = ShardedWrapper(nn.Sequential(*layers).double(), auto_wrap_policy=always_wrap_policy)
    plain = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    plain.load_state_dict(model.state_dict())
    x = MLP.batch(0, 8)[0].chunk(world_size)[rank]
    for each in (model, plain):
        (each(x).pow(2).sum() + each(2 * x).sum()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / world_size)
