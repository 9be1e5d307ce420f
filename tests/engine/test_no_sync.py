"""Reads of gradients that are accumulated under `no_sync` and not reduced."""

from typing import Any

import pytest
import torch
from torch import nn

from flatshard import FlatShardTensor, MixedPrecision
from tests.harness import naming, on_ranks
from tests.models import CASES
from tests.oracle import local_loss
from tests.side import pair

READS: dict[str, Any] = {
    "norm": lambda grad, _: grad.norm(),
    "pow": lambda grad, _: grad.pow(2).sum(),
    "clone": lambda grad, _: grad.clone().max(),
    "detach": lambda grad, _: grad.detach().mean(),
    "with the parameter": lambda grad, param: (param.detach() * grad).sum(),
    "in place": lambda grad, _: torch.zeros_like(grad).add_(grad).sum(),
    "foreach": lambda grad, _: torch._foreach_mul([grad], 2.0)[0].norm(),
}


@on_ranks(2)
def test_numbers_computed_from_unreduced_gradients_are_refused(rank: int, world_size: int) -> None:
    """The sum of their squares added up the gradients of different batches, without an error."""
    sharded, plain = pair(rank, world_size, "full")
    weights: Any = [run.model.fc2.weight for run in (sharded, plain)]
    with sharded.no_sync():
        sharded.loss(0).backward()
        for name, read in READS.items():
            with naming(name), pytest.raises(RuntimeError, match="under no_sync and not reduced"):
                read(weights[0].grad, weights[0])
    with plain.no_sync():
        plain.loss(0).backward()
    for run in (sharded, plain):
        run.loss(1).backward()
    for name, read in READS.items():
        with naming(name):
            found, expected = (read(weight.grad, weight) for weight in weights)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_accumulated_gradients_that_the_program_reads(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    """Reading is no edit, also where the shown values are a copy; a tensor that is kept stays."""
    case = CASES["mlp"]
    policy = MixedPrecision(param_dtype=dtype)
    model = case.wrap(case.model(), mixed_precision=policy)
    params = [param for param in model.parameters() if isinstance(param, FlatShardTensor)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(3):
        with model.no_sync():
            local_loss(model, case, step, rank, world_size).backward()
            once = [_grad(param).local.clone() for param in params]
            kept = _grad(params[0])
            local_loss(model, case, step, rank, world_size).backward()
        for param, first in zip(params, once, strict=True):
            torch.testing.assert_close(_grad(param).local, 2 * first, rtol=1e-2, atol=1e-3)
        local_loss(model, case, step, rank, world_size).backward()
        assert kept.local.isfinite().all()
        assert _grad(params[0]) is not kept
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        local_loss(model, case, 0, rank, world_size).backward()
    _grad(params[0]).mul_(2.0)
    with pytest.raises(RuntimeError, match="were edited"):
        local_loss(model, case, 0, rank, world_size).backward()


def _grad(param: nn.Parameter) -> FlatShardTensor:
    grad = param.grad
    assert isinstance(grad, FlatShardTensor)
    return grad
