"""What gathering full tensors sends."""

import os

import pytest
import torch
from torch import Tensor, nn

from flatshard import CollectiveError, FlatShardTensor, ShardedWrapper
from flatshard.collectives import record
from flatshard.tensor import whole
from tests.harness import on_ranks


def _params(width: int, **keywords: str) -> list[FlatShardTensor]:
    torch.manual_seed(0)
    model = ShardedWrapper(nn.Linear(width, width), **keywords)
    return [param for param in model.parameters() if isinstance(param, FlatShardTensor)]


def _gather(params: list[FlatShardTensor], owner: int | None) -> list[Tensor | None]:
    parts = [(param.spec, param.local.detach(), owner) for param in params]
    return whole.start_gather(parts, "full tensors")()


@on_ranks(3)
def test_each_element_is_sent_once_to_each_rank(rank: int, world_size: int) -> None:
    params = _params(64)
    held = sum(param.local.nbytes for param in params)
    with record() as events:
        _gather(params, None)
        _gather(params, 0)
        # Of a tensor that one rank holds, a sum sends less per rank.
        params[1].full_tensor()
    assert [(event.kind, event.nbytes) for event in events] == [
        ("all_to_all", held * (world_size - 1)),
        ("all_to_all", held if rank > 0 else 0),
        ("scalars", params[1].numel() * 4),
    ]


@on_ranks(4)
def test_the_first_exchange_of_a_hybrid_model_goes_to_one_rank(rank: int, world_size: int) -> None:
    """It also finds out which rank holds which shard."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    params = _params(5, sharding_strategy="HYBRID_SHARD_OP")
    found = _gather(params, 0)
    for param, full in zip(params, found, strict=True):
        expected = param.full_tensor()
        assert full is None if rank else torch.equal(full, expected)  # type: ignore[arg-type]


@on_ranks(2, group_timeout=60)
def test_ranks_that_gather_different_tensors_raise(rank: int, world_size: int) -> None:
    """Before any value is sent; the ranks are in step afterwards."""
    weight, bias = _params(8)
    with record() as events, pytest.raises(CollectiveError, match="different collectives"):
        _gather([weight] if rank else [bias, weight], None)
    with pytest.raises(CollectiveError, match="different collectives"):
        _gather([weight], rank)  # to different owners
    assert not events
    torch.testing.assert_close(weight.detach().norm(), weight.full_tensor().detach().norm())
