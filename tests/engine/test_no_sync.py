"""Reads of gradients that are not reduced, watchers, and buffers of other lengths on each rank."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import FlatShardTensor, MixedPrecision, ShardedWrapper
from flatshard.engine.events import StepExtension
from flatshard.options.extras import EXTRAS, default_extra
from tests.harness import naming, on_ranks
from tests.models import CASES, Case, loss_of
from tests.oracle import ROWS, assert_same, local_loss, sgd, step_and_zero


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_accumulated_gradients_that_the_program_reads(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    """Reading is no edit, also where the shown values are a copy; a kept tensor stays in .grad."""
    case = CASES["mlp"]
    model = case.wrap(mixed_precision=MixedPrecision(param_dtype=dtype))
    params = [param for param in model.parameters() if isinstance(param, FlatShardTensor)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        with model.no_sync():
            local_loss(model, case, step, rank, world_size).backward()
            once = [param.grad.local.clone() for param in params]
            kept = params[0].grad
            local_loss(model, case, step, rank, world_size).backward()
        for param, first in zip(params, once, strict=True):
            torch.testing.assert_close(param.grad.local, 2 * first, rtol=1e-2, atol=1e-3)
        local_loss(model, case, step, rank, world_size).backward()
        assert kept.local.isfinite().all()
        assert params[0].grad is kept
        step_and_zero(optimizer)
    with model.no_sync():
        local_loss(model, case, 0, rank, world_size).backward()
    params[0].grad.mul_(2.0)
    with pytest.raises(RuntimeError, match="were edited"):
        local_loss(model, case, 0, rank, world_size).backward()


# ---------------------------------------------------------------- unequal numbers of micro-batches

_COUNTS = {2: ((3, 1), (1, 2), (1, 1)), 3: ((1, 2, 3), (2, 1, 1))}  # of each rank in each step


def _accumulate(model: Any, case: Case, step: int, rank: int, counts: Sequence[int]) -> None:
    for number in range(counts[rank]):
        inputs, target = case.batch(100 * step + 10 * rank + number, ROWS)
        is_last = number == counts[rank] - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss_of(model(inputs), target).backward()


@pytest.mark.parametrize("strategy", ["SHARD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_with_different_numbers_of_micro_batches(
    rank: int, world_size: int, strategy: str
) -> None:
    """As under DistributedDataParallel: the sums of the ranks' micro-batches are averaged."""
    for name in ("mlp", "batch-norm", "unused", "checkpointed", "tied-across-units", "lstm"):
        case = CASES[name]
        plain = nn.parallel.DistributedDataParallel(case.model(), find_unused_parameters=True)
        model = case.wrap(sharding_strategy=strategy)
        for one in (plain, model):
            optimizer = sgd(one)
            for step, counts in enumerate(_COUNTS[world_size]):
                _accumulate(one, case, step, rank, counts)
                step_and_zero(optimizer)
        with naming(name):
            assert_same(model, plain.module)


# ---------------------------------------------------------------- watchers


def _is_extension(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, StepExtension)


def test_watchers_come_last() -> None:
    """A watcher may raise its warning as an error: no rank may wait for this rank then."""
    found: list[type[StepExtension]] = []
    for name in EXTRAS:
        module = default_extra(name)
        for one in vars(module).values():
            if getattr(one, "__module__", "") == module.__name__ and _is_extension(one):
                found.append(one)
    acting = [one for one in found if not one.watches and "end_backward" in vars(one)]
    watching = [one for one in found if one.watches]
    assert acting
    assert watching
    assert max(map(found.index, acting)) < min(map(found.index, watching))


# ---------------------------------------------------------------- buffers of other lengths


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
    """A buffer of another length stays each rank's own; the other buffers are rank 0's.

    If one rank's buffers changed in a forward, the other ranks know it only after a backward.
    """
    for num_forwards in (1, 3):
        torch.manual_seed(0)
        plain = _Growing()
        model = ShardedWrapper(_Growing())
        model.load_state_dict(plain.state_dict())
        for step in range(4):
            for number in range(1, num_forwards + 1):
                model.offset.fill_(rank + number + step)
                rows, others = (8, 3) if num_forwards == 1 else (3 * number * (step + 1), 1)
                x = torch.randn(rows if rank == longer else others, 7)
                output = model(x)
                torch.testing.assert_close(output, plain(x))
                assert torch.equal(model.offset, torch.full((4,), float(number + step)))
            output.sum().backward()
        assert torch.equal(model.table, torch.arange(float(len(x))))
