"""``optimizer.step(closure)``: what the closure does, the step finds."""

import pytest
import torch
from torch import Tensor

from tests.harness import on_ranks
from tests.side import Run, assert_same_model, pair

pytestmark = pytest.mark.by_turns


class _Outside(torch.optim.SGD):
    """An optimizer that is not known to be element-wise: it sees true-shape parameters."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        return super().step(closure)


@on_ranks(2)
def test_a_closure_reduces_what_was_accumulated(rank: int, world_size: int) -> None:
    """The gradients that the step uses are those after the closure, not those before it."""
    for kind in (torch.optim.SGD, _Outside):
        losses = []
        runs = pair(rank, world_size, "full")
        for run in runs:
            run.optimizer = kind(run.model.parameters(), lr=0.1, momentum=0.9)
            losses.append([_step(run, number) for number in range(0, 6, 2)])
        assert_same_model(*runs)
        totals = torch.tensor(losses[0])
        torch.distributed.all_reduce(totals)
        torch.testing.assert_close(totals / world_size, torch.tensor(losses[1]))
        _refused(runs[0])


def _step(run: Run, number: int) -> float:
    def closure() -> Tensor:
        loss = run.loss(number)
        loss.backward()
        return loss

    with run.no_sync():
        run.loss(number + 1).backward()
    loss = run.optimizer.step(closure).item()
    run.optimizer.zero_grad()
    return loss


def _refused(run: Run) -> None:
    """The closure's own backward only accumulates."""

    def closure() -> None:
        with run.no_sync():
            run.loss(0).backward()

    with pytest.raises(RuntimeError, match="accumulated under no_sync and not reduced"):
        run.optimizer.step(closure)
