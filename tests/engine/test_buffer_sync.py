"""Buffers are broadcast before the same forwards as by DistributedDataParallel, the ones of now."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper
from flatshard.wrap import always_wrap_policy
from tests.harness import naming, run_ranks
from tests.models import CASES

MLP = CASES["mlp"]


class _Statistics(nn.Module):
    """Assigns a buffer anew in each forward, edits another one, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("own", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        self.steps += x.detach().abs().max()
        self.own = self.own + self.steps
        return (x - self.mean) * self.steps


def _models() -> tuple[ShardedWrapper, DistributedDataParallel]:
    torch.manual_seed(0)
    model = nn.Sequential(_Statistics(), nn.Tanh(), _Statistics(), nn.BatchNorm1d(4).double())
    plain = nn.Sequential(_Statistics(), nn.Tanh(), _Statistics(), nn.BatchNorm1d(4).double())
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one[2]._ddp_params_and_buffers_to_ignore = ["own"]
        one._ddp_params_and_buffers_to_ignore = ["2.own"]
    return ShardedWrapper(model, auto_wrap_policy=always_wrap_policy), DistributedDataParallel(
        plain
    )


def test_as_ddp() -> None:
    run_ranks(_as_ddp, 2)


def _as_ddp(rank: int, world_size: int) -> None:
    models = _models()
    torch.manual_seed(rank)
    batches = [torch.randn(5, 4, dtype=torch.float64) for _ in range(20)]
    events = "train train no_sync no_sync train train eval eval train replaced train new train"
    for number, event in enumerate(events.split()):
        outputs = []
        for model in models:
            model.train(event != "eval")
            if event == "replaced":
                model.module[0].mean = torch.full((4,), float(rank), dtype=torch.float64)
            elif event == "new":
                model.module[0].register_buffer("late", torch.full((2,), float(rank)))
            elif event == "no_sync":
                with model.no_sync():
                    outputs.append(model(batches[number]))
                    outputs[-1].square().sum().backward()
            elif event == "eval":
                with torch.no_grad():
                    outputs.append(model(batches[number]))
            else:
                outputs.append(model(batches[number]))
                outputs[-1].square().sum().backward()
        with naming(f"{number} {event}"):
            torch.testing.assert_close(*outputs) if outputs else None
            mine, theirs = (dict(model.module.named_buffers()) for model in models)
            torch.testing.assert_close(mine, theirs)
            assert models[0].will_sync_module_buffers() == models[1].will_sync_module_buffers()


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
def test_buffer_of_another_length_on_each_rank(longer: int) -> None:
    """Rank 0's buffers were sent into ones of other lengths, and the ranks crashed."""
    run_ranks(_growing, 2, longer)


def _growing(rank: int, world_size: int, longer: int) -> None:
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
def test_several_forwards_between_exchanges(longer: int) -> None:
    """Where one rank's buffers changed, no other rank can know it yet."""
    run_ranks(_several_forwards, 2, longer)


def _several_forwards(rank: int, world_size: int, longer: int) -> None:
    model = ShardedWrapper(_Growing())
    for step in range(3):
        for number in range(1, 4):
            model.offset.fill_(rank + number + step)
            output = model(torch.randn(3 * number * (step + 1) if rank == longer else 1, 7))
            assert torch.equal(model.offset, torch.full((4,), float(number + step)))
        output.sum().backward()


def test_two_forwards_through_batch_norm() -> None:
    """The second forward sent rank 0's statistics in place, and backward refused to go on."""
    run_ranks(_batch_norm, 2)


def _batch_norm(rank: int, world_size: int) -> None:
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
