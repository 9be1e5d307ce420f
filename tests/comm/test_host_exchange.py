"""Small exchanges carry their name: ranks in different ones all raise, and nobody uses a value."""

import contextlib
import math
import os
import pickle
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import CollectiveError, ShardedWrapper
from flatshard.comm import communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.comm.transports.native import NativeTransport
from flatshard.tensor import operators
from flatshard.tensor.shard_spec import NeedsFullTensor
from tests.harness import assert_raises, on_ranks


def _wrapped(collectives: str = "auto") -> ShardedWrapper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return ShardedWrapper(model, collectives=collectives, process_group=dist.new_group())


@on_ranks(2, group_timeout=60)
def test_swapped_norms_raise(rank: int, world_size: int) -> None:
    """Ranks that ask for norms of different parameters all raise; then they are in step again."""
    model = _wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    weight, other, *_ = model.parameters()
    grad = weight.grad
    state = ShardedWrapper.optim_state_dict  # only element-wise state has two tensors of one shape
    with ShardedWrapper.state_dict_type(model, "SHARDED_STATE_DICT"):
        adam = state(model, optimizer)["state"]["0.weight"]
    pair = [weight, other]
    pairs: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (weight.norm, other.norm),
        (weight.norm, grad.norm),
        (weight.norm, lambda: weight.norm(1)),
        (weight.sum, weight.mean),
        (weight.max, weight.min),
        (weight.full_tensor, grad.full_tensor),
        ((weight * 2).norm, (weight * 3).norm),
        (adam["exp_avg"].full_tensor, adam["exp_avg_sq"].full_tensor),
        (partial(torch._foreach_norm, pair), partial(torch._foreach_norm, pair[::-1])),
    ]
    with torch.no_grad():
        for one, two in pairs:
            for call in (one, two) if rank == 0 else (two, one):
                with pytest.raises(CollectiveError, match="different collectives") as error:
                    call()
                for number in range(2):  # each rank's own line
                    place = rf"rank {number} (in|began) \[.*, at \S*test_host_exchange.py:\d+: "
                    error.match(place)
        # Afterwards the ranks are in step, and values are right.
        torch.testing.assert_close(weight.norm(), torch.linalg.vector_norm(weight.full_tensor()))
        assert weight.detach().norm() == weight.data.norm() == weight.norm()


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(group_timeout=60)
def test_on_a_stream_different_reductions_give_nan(rank: int, world_size: int) -> None:
    """For numbers the host does not wait, so names are compared on the device."""
    model = _wrapped("native")
    model(torch.ones(4, 8)).sum().backward()
    weight, bias, *_ = model.parameters()
    with torch.no_grad():
        expected = [weight.norm(), weight.abs().max(), weight.full_tensor(), weight.sum()]
    streams = mock.patch.object(NativeTransport, "stream_waits", return_value=True)
    with torch.no_grad(), streams:
        for few in (communicator._FEW, 0):
            with mock.patch.object(communicator, "_FEW", few):
                found = [weight.norm(), weight.abs().max(), weight.full_tensor(), weight.sum()]
                for one, two in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, two)
                is_last = rank == world_size - 1
                assert (weight if is_last else bias).norm().isnan()
                assert (weight if is_last else bias).sum().isnan()
                # Full tensors are compared on the host, before any value is sent.
                with pytest.raises(CollectiveError, match="different collectives"):
                    (weight if is_last else weight * 2).full_tensor()
        with contextlib.suppress(CollectiveError):
            model.clip_grad_norm_(math.inf)
    error = r"backward.*The first difference: rank 0.*norm of order 2 of parameter '0.bias'"
    assert_raises(RuntimeError, error, model(torch.ones(4, 8)).sum().backward)


@on_ranks(2)
def test_norms_of_the_same_tensors_have_the_same_name(rank: int, world_size: int) -> None:
    """Ours and torch's clipping compute the same norms, and may meet."""
    model = _wrapped()
    model(torch.ones(4, 8)).sum().backward()
    clip = model.clip_grad_norm_
    if rank == 0:
        clip = lambda most: nn.utils.clip_grad_norm_(model.parameters(), most, foreach=True)  # noqa: E731
    with mock.patch.object(operators, "joined_norms", wraps=operators.joined_norms) as named:
        clip(1.0)
    assert named.called


# ---------------------------------------------------------------- errors of one rank


@on_ranks(2)
def test_errors_that_take_other_arguments(rank: int, world_size: int) -> None:
    class Local(Exception):
        pass

    (param,) = ShardedWrapper(nn.Linear(2, 2, bias=False)).parameters()
    for text, error in (
        ("'a'", KeyError("a")),
        ("UnicodeDecodeError: .*no text", UnicodeDecodeError("utf-8", b"a", 0, 1, "no text")),
        ("Local: of a function", Local("of a function")),
        ("sharded", NeedsFullTensor("sharded")),
    ):
        told = error if rank == 1 else None
        assert_raises(Exception, f"{text}.*rank 1", raise_everywhere, told, param.spec.comm)


@on_ranks(4)
def test_an_error_crosses_groups(rank: int, world_size: int) -> None:
    """Ranks of other replicas raise too, and do not wait for the rank that failed."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model = ShardedWrapper(nn.Linear(2, 2, bias=False), sharding_strategy="HYBRID_SHARD")
    (param,) = model.parameters()
    error = ValueError("no memory") if rank == 3 else None
    with pytest.raises(ValueError, match=r"no memory \(rank 3\)"):
        raise_everywhere(error, param.spec.comm, param.spec.replicas)


def test_needs_full_tensor_between_processes() -> None:
    error = NeedsFullTensor("sharded")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (NeedsFullTensor, "sharded")
