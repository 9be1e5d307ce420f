"""Buffers, groups of ranks, and gradients that the program keeps, beside the unwrapped model."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import ShardedWrapper
from tests.harness import on_ranks
from tests.models import CASES
from tests.oracle import ROWS
from tests.side import Run, assert_same_model

pytestmark = pytest.mark.by_turns


@pytest.mark.parametrize("sync", [None, True])
@on_ranks(2)
def test_buffers_without_broadcast(rank: int, world_size: int, sync: bool | None) -> None:
    """Ranks keep the buffers with which they start, unless ``sync_module_states=True``.

    DistributedDataParallel with ``broadcast_buffers=False`` does the same: torch's DDP passes that
    option to ``_sync_module_states``.
    """
    case = CASES["batch-norm"]
    plain = case.model()
    plain.norm.running_mean.fill_(rank)
    expected = torch.full_like(plain.norm.running_mean, 0 if sync else rank)
    model = case.wrap(plain, broadcast_buffers=False, sync_module_states=sync)
    model.eval()  # so that the forward itself leaves them alone
    model(case.batch(0, ROWS)[0])
    assert torch.equal(model.norm.running_mean, expected)


@on_ranks(3)
def test_subgroup(rank: int, world_size: int) -> None:
    """A model trained by some of the ranks, while the others do nothing."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    case = CASES["mlp"]
    place = dist.get_group_rank(group, rank)
    plain = Run(case.model(), case, place, 2)
    sharded = Run(case.wrap(case.model(), process_group=group), case, place, 2)
    plain.train(0, 3)
    sharded.train(0, 3)
    assert_same_model(sharded, plain)


@on_ranks(2)
def test_gradients_that_the_program_keeps(rank: int, world_size: int) -> None:
    """The objects of gradients are used again, but not those that the program still holds."""
    torch.manual_seed(3)
    model = ShardedWrapper(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    params: list[Any] = list(model.parameters())

    def step() -> None:
        model(torch.randn(4, 6)).square().sum().backward()

    step()
    kept = [param.grad for param in params]
    values = [grad.full_tensor().clone() for grad in kept]
    model.zero_grad()
    step()
    assert all(torch.equal(grad.full_tensor(), one) for grad, one in zip(kept, values, strict=True))
    parts = [param.grad.detach() for param in params]
    values = [part.full_tensor().clone() for part in parts]
    known = [weakref.ref(param.grad) for param in params]
    model.zero_grad()
    assert [one() for one in known] == [None] * len(params)
    step()
    assert all(
        torch.equal(part.full_tensor(), one) for part, one in zip(parts, values, strict=True)
    )
    params[1].grad = torch.zeros(params[1].shape)
    assert not params[1].spec.original.kept_grad.__dict__, "memory is freed"
    params[0].grad.tag = 1
    before = {id(param.grad) for param in params}
    model.zero_grad()
    assert not any(param.spec.original.kept_grad.__dict__ for param in params), "memory is freed"
    step()
    assert id(params[0].grad) in before, "used again"
    assert not hasattr(params[0].grad, "tag")
