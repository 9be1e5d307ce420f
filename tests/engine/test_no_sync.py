"""Reads of gradients that are accumulated under `no_sync` and not reduced."""

from typing import Any

import pytest
import torch

from tests.harness import naming, on_ranks
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
