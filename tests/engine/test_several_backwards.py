"""Several forwards and backwards of one step, and losses of gradients and parameters."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.combinations import usual_and_every
from tests.harness import run_ranks
from tests.models import Mlp
from tests.oracle import assert_same
from tests.side import Net, Side, SideScript, pair, run_both, sgd, step_and_clear
from tests.ways import BASIC, each_way

pytestmark = pytest.mark.by_turns


@each_way
def test_gradient_penalty_with_a_backward_of_its_own(way: str) -> None:
    """The first backward freed parameters that the penalty's graph still had to read."""
    run_ranks(_penalty, 2, way)


def _penalty(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        for step in range(3):
            x = run.inputs(step)
            leaf = x.clone().requires_grad_()
            output = run.model(leaf).sum()
            (slope,) = torch.autograd.grad(output, leaf, create_graph=True)
            run.model(x).mean().backward()
            (slope.norm(dim=1) - 1).pow(2).mean().backward()
            run.step()
    assert_same(sharded.model, plain.model, 1e-12)


class TwoHeads(nn.Module):
    """Two outputs from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.trunk(x))
        return [head(x) for head in self.heads]


def backward_per_head(side: Side) -> list[Any]:
    """One forward, a backward for each output; the trunk's gradient comes twice."""
    model = side.wrap(TwoHeads())
    optimizer = sgd(model)
    for step in range(3):
        first, second = model(side.draw(step, 7))
        first.pow(2).mean().backward(retain_graph=True)
        second.pow(2).mean().backward()
        step_and_clear(optimizer)
    return [model]


def one_head_at_a_time(side: Side) -> list[Any]:
    """The other head's gradient stays None."""
    model = side.wrap(TwoHeads())
    optimizer = sgd(model)
    for step in range(4):
        model(side.draw(step, 7))[step % 2].pow(2).mean().backward()
        assert all(p.grad is None for p in model.heads[1 - step % 2].parameters())
        step_and_clear(optimizer)
    return [model]


def three_backwards_of_one_graph(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(2):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        step_and_clear(optimizer)
    return [model]


def retained_graph_with_a_forward_between(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(2):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(side.draw(70, 7))
        other = side.loss(model, 50 + step)
        loss.backward()
        other.backward()
        step_and_clear(optimizer)
    return [model]


def inference_between_all(side: Side) -> list[Any]:
    """Evaluation before, between forward and backward, and between backward and step."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    outputs = []

    def evaluate() -> None:
        with torch.inference_mode():
            outputs.append(model(torch.ones(2, 7, dtype=torch.float64)).clone())

    for step in range(2):
        evaluate()
        loss = side.loss(model, step)
        evaluate()
        loss.backward()
        evaluate()
        step_and_clear(optimizer)
    return [model, *outputs]


class Energy(nn.Module):
    """Returns an energy and, from a backward inside its forward, the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(7, 5)
        self.head = nn.Linear(5, 1)
        self.shift = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.head(torch.tanh(self.body(x + self.shift)))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy * self.shift.sum().exp(), -slope + self.shift


def forces(side: Side) -> list[Any]:
    """A force field learns from forces, and is evaluated without a graph."""
    model = side.wrap(Energy(), Net, nn.Linear)
    optimizer = sgd(model)
    outputs = []
    for step in range(3):
        model.train()
        energy, force = model(side.draw(step, 7))
        (
            F.mse_loss(energy, side.draw(50 + step, 1)) + F.mse_loss(force, side.draw(60 + step, 7))
        ).backward()
        step_and_clear(optimizer)
        model.eval()
        with torch.no_grad():
            outputs += model(torch.ones(2, 7, dtype=torch.float64))
    return [model, *[output.detach() for output in outputs]]


def adversarial_inputs(side: Side) -> list[Any]:
    """A gradient of the input, found by a backward that reaches no parameter, changes it."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(3):
        x, target = side.draw(step, 7).requires_grad_(), side.draw(50 + step, 3)
        (slope,) = torch.autograd.grad(F.mse_loss(model(x), target), x)
        F.mse_loss(model(x.detach() + 0.1 * slope.sign()), target).backward()
        step_and_clear(optimizer)
    return [model]


def penalties(side: Side) -> list[Any]:
    """Of several kinds, in the same loss as the data."""
    return _penalised(
        side,
        [0.1, 0.1],
        lambda p: p.pow(2).sum(),
        lambda p: p.abs().sum(),
        lambda p: (p - 1).square().sum() / 2,
        lambda p: p.exp().sum(),
    )


def norm_penalties(side: Side) -> list[Any]:
    """Weighted differently by each rank.

    Of a flat parameter, a norm or mean would be that of the rank's part of the unit, and the
    rank's weight that of its part.
    """
    return _penalised(
        side,
        [0.1, 0.3],
        lambda p: p.pow(2).sum(),
        torch.norm,
        lambda p: p.norm(1),
        lambda p: torch.linalg.vector_norm(p, 3),
        lambda p: (p * p).mean(),
    )


def _penalised(side: Side, weights: list[float], *kinds: Callable[[Tensor], Tensor]) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model, lr=0.01)
    weight = side.by_rank(weights)
    for step, kind in enumerate(kinds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # norms: the parameters are all-gathered for them
            penalty = sum(kind(p) for p in model.parameters())
        (side.loss(model, step) + weight * penalty).backward()
        step_and_clear(optimizer)
    return [model]


def penalty_by_itself(side: Side) -> list[Any]:
    """In a backward of its own: before, after, and without the loss's."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)

    def penalty() -> Tensor:
        return 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    for step in range(3):
        if step != 1:
            penalty().backward()
        if step != 2:
            side.loss(model, step).backward()
        if step == 1:
            penalty().backward()
        step_and_clear(optimizer)
    return [model]


def penalty_with_accumulation(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for first in (0, 2):
        with side.no_sync(model):
            side.loss(model, first).backward()
        penalty = 0.1 * sum(p.abs().sum() for p in model.parameters())
        (side.loss(model, first + 1) + penalty).backward()
        step_and_clear(optimizer)
    return [model]


SCRIPTS: list[SideScript] = [
    backward_per_head,
    three_backwards_of_one_graph,
    retained_graph_with_a_forward_between,
    inference_between_all,
    forces,
    adversarial_inputs,
    penalties,
    penalty_by_itself,
    penalty_with_accumulation,
    one_head_at_a_time,
    norm_penalties,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: SideScript) -> None:
    run_ranks(run_both, 2, script, usual_and_every(4, BASIC, SCRIPTS.index(script)))
