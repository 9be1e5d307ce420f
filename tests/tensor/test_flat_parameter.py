"""`model.flat_parameters()`: what lies where; and what gathering full tensors sends."""

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import CollectiveError, FlatParameter, FlatShardTensor, ShardedWrapper
from flatshard.collectives import record
from flatshard.tensor import whole
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, on_ranks, run_ranks
from tests.ways import WAYS


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))


def _wrapped(**keywords: Any) -> ShardedWrapper:
    policy = ModuleWrapPolicy({nn.Linear})
    return ShardedWrapper(_model(), auto_wrap_policy=policy, coalesce_bytes=0, **keywords)


def _flat_parameters(rank: int, world_size: int) -> list[torch.Tensor]:
    plain, found = _model(), _wrapped().flat_parameters()
    for flat in found:
        assert isinstance(flat, FlatParameter)
        assert isinstance(flat, nn.Parameter)
        assert flat.shape == (flat.flat_layout.shard_numel,)
        assert flat.rank == rank
        for param in flat.params:
            expected = plain.get_parameter(param.name).detach().reshape(-1)
            start, end = param.spec.offset, param.spec.offset + param.spec.numel
            assert torch.equal(flat[param.spec.range], expected[start:end])
        assert "FlatParameter([" in repr(flat)
    return [flat.detach().clone() for flat in found]


def test_chunks_are_the_padded_parameter() -> None:
    per_rank = run_ranks(_flat_parameters, 2)
    plain = _model()
    flat = torch.cat([chunks[0] for chunks in per_rank])
    weight, bias = plain[0].weight.detach(), plain[0].bias.detach()
    assert torch.equal(flat[:15], weight.reshape(-1))
    # Each parameter, and each chunk, starts at a multiple of 16 bytes.
    assert not flat[15]
    assert torch.equal(flat[16:21], bias)
    assert not flat[21:].any()


def _write(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


def _assign(local: Tensor) -> None:
    local.data = 0.5 * local


@pytest.mark.parametrize("way", ["full", "grad_op"])
@on_ranks(2)
def test_written_between_forward_and_backward(rank: int, world_size: int, way: str) -> None:
    """As an edit of the parameter itself: the error of the edit, and then the edited values."""
    inputs = torch.ones(2, 3)
    for is_flat, write in ((True, _write), (False, _write), (False, _assign)):
        plain, model = _model(), _wrapped(**WAYS[way].keywords)
        loss = model(inputs.clone().requires_grad_()).sum()
        weight = model.get_parameter("0.weight")
        write(model.flat_parameters()[0] if is_flat else weight.to_local())
        assert_raises(RuntimeError, "modified between forward and backward", loss.backward)
        plain[0].weight.data.mul_(0.5)
        if is_flat:
            plain[0].bias.data.mul_(0.5)
        torch.testing.assert_close(model(inputs), plain(inputs))


@on_ranks(2)
def test_local_elements_are_copied_and_pickled_alone(rank: int, world_size: int) -> None:
    local = ShardedWrapper(_model()).get_parameter("2.weight").to_local()
    for twin in (copy.deepcopy(local), pickle.loads(pickle.dumps(local))):
        assert type(twin) is torch.Tensor
        assert torch.equal(twin, local)
    assert copy.deepcopy(local).untyped_storage().nbytes() == local.nbytes


# ---------------------------------------------------------------- what gathering full tensors sends


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
    # To different owners.
    assert_raises(CollectiveError, "different collectives", _gather, [weight], rank)
    assert not events
    torch.testing.assert_close(weight.detach().norm(), weight.full_tensor().detach().norm())
