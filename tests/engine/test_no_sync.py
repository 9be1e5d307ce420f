"""Gradients that are accumulated under `no_sync`, and steps that would miss them."""

from typing import Any

import pytest
import torch

from tests.harness import naming, run_ranks
from tests.oracle import assert_same
from tests.side import pair
from tests.ways import each_way


@pytest.mark.parametrize("set_to_none", [True, False])
@each_way
def test_zero_grad_after_no_sync(way: str, set_to_none: bool) -> None:
    """Gradients not reduced yet survived zero_grad() and were added to the next step's."""
    run_ranks(_zeroed, 2, way, set_to_none)


def _zeroed(rank: int, world_size: int, way: str, set_to_none: bool) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        for first in (0, 10):
            with run.no_sync():
                run.loss(first).backward()
                run.loss(first + 1).backward()
            run.optimizer.zero_grad(set_to_none)
            with run.no_sync():
                run.loss(first + 2).backward()
            run.loss(first + 3).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none)
            run.loss(first + 4).backward()
            with run.no_sync():
                run.loss(first + 5).backward()
            run.optimizer.zero_grad(set_to_none)
            run.loss(first + 6).backward()
            run.step()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_step_under_no_sync_is_refused(way: str) -> None:
    """An optimizer stepped on no gradients at all, and said nothing."""
    run_ranks(_stepped_without_sync, 2, way)


def _stepped_without_sync(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    with sharded.no_sync():
        sharded.loss(0).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    for run in (sharded, plain):
        run.train()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_step_on_the_reduced_part_alone_is_refused(way: str) -> None:
    """What was reduced before no_sync was stepped on without what came under it."""
    run_ranks(_stepped_on_a_part, 2, way)


def _stepped_on_a_part(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.loss(0).backward()
        with run.no_sync():
            run.loss(1).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        sharded.optimizer.step()
    for run in (sharded, plain):
        run.loss(2).backward()
        run.step()
    assert_same(sharded.model, plain.model, 1e-12)
    sharded.loss(3).backward()
    with sharded.no_sync():
        sharded.loss(4).backward()
    sharded.optimizer.zero_grad(set_to_none=False)
    # fc1's gradient, dropped in place, is the same object, and nothing is missing in it now.
    sharded.model.fc3(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    sharded.optimizer.step()


READS: dict[str, Any] = {
    "norm": lambda grad, _: grad.norm(),
    "pow": lambda grad, _: grad.pow(2).sum(),
    "clone": lambda grad, _: grad.clone().max(),
    "detach": lambda grad, _: grad.detach().mean(),
    "with the parameter": lambda grad, param: (param.detach() * grad).sum(),
    "in place": lambda grad, _: torch.zeros_like(grad).add_(grad).sum(),
    "foreach": lambda grad, _: torch._foreach_mul([grad], 2.0)[0].norm(),
}


def test_numbers_computed_from_unreduced_gradients_are_refused() -> None:
    """The sum of their squares added up the gradients of different batches, without an error."""
    run_ranks(_read_without_sync, 2)


def _read_without_sync(rank: int, world_size: int) -> None:
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
