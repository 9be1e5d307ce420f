"""Parameters that are used outside of their unit's forward: right, as with DistributedDataParallel."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import run_ranks
from tests.oracle import assert_same, snapshot
from tests.ways import BASIC, WAYS

each_way = pytest.mark.parametrize("way", BASIC)

D = 6
Use = Callable[["Parent", Tensor], Tensor]


class Child(nn.Linear):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(D, D)


class Chain(nn.Sequential):
    """A unit whose modules the parent calls one by one."""


class Parent(nn.Module):
    """Uses its children as ``use`` says."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.first = nn.Linear(D, D)
        self.child, self.other = Child(), Child()
        self.chain = Chain(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D), nn.Embedding(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.other(self.use(self, x).tanh())


def _calls_all(model: Parent, x: Tensor) -> Tensor:
    for layer in list(model.chain)[:3]:
        x = layer(x)
    return x + model.chain[3](torch.tensor([1, 2, 1])).sum(0)


def _normalised(model: Parent, x: Tensor) -> Tensor:
    weight = model.child.weight
    return F.linear(x, weight / weight.norm(dim=1, keepdim=True))


def _again(model: Parent, x: Tensor) -> Tensor:
    """Before its own forward, after, and the parameter held from before."""
    bias = model.child.bias
    x = model.child(x * model.child.bias) * bias
    return model.child(x) @ model.child.weight


def _without_gradients(model: Parent, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, model.child.weight) * model.other.bias
    return model.child(x + y) * model.other.weight.detach().t()[0] + model.other.weight.data[1]


def _scaled(model: Parent, x: Tensor) -> Tensor:
    """Every rank has a mean of its own, so these are no parts of one tensor."""
    return x + (model.child.weight * x.mean()).sum() + (x.detach()[0] * model.child.bias).sum()


USES: dict[str, Use] = {
    "linear": lambda m, x: F.linear(x, m.child.weight, m.child.bias),
    "elementwise": lambda m, x: x * m.child.bias + m.child.bias.expand(len(x), -1),
    "views": lambda m, x: x @ m.child.weight.t()[:, :D] + m.child.weight[2] + m.child.weight.T[3],
    "joined": lambda m, x: F.linear(x, torch.cat([m.child.weight, m.other.weight]))[:, 2 : D + 2],
    "of two": lambda m, x: x @ (m.child.weight * m.child.bias),
    "computed": lambda m, x: F.linear(x, 0.5 * m.child.weight + (1 + m.child.weight).abs()),
    "reductions": lambda m, x: x * m.child.weight.abs().mean() + m.child.weight.sum(0),
    "embedding": lambda m, x: x + F.embedding(torch.tensor([1, 2]), m.child.weight).mean(0),
    "normalised": _normalised,
    "again": _again,
    "iterated": _calls_all,
    "scaled": _scaled,
    "without gradients": _without_gradients,
    "checkpointed": lambda m, x: checkpoint(
        lambda y: F.linear(y, m.child.weight) + m.chain[0](y), x, use_reentrant=False
    ),
    "reentrant": lambda m, x: checkpoint(
        lambda y: F.linear(y, m.child.weight) + m.chain[0](y), x, use_reentrant=True
    ),
    "frozen": lambda m, x: F.linear(x * m.child.bias, m.child.weight) + m.child(x),
}


def _wrap(model: nn.Module, way: str, *units: type[nn.Module]) -> ShardedWrapper:
    policy = ModuleWrapPolicy(units or (Child, Chain))
    return ShardedWrapper(
        model.double(), auto_wrap_policy=policy, coalesce_bytes=0, **WAYS[way].keywords
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*outside of the unit's forward")
        yield


Step = Callable[[Any, Tensor], Tensor]


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def _train(model: Any, loss: Step, ranks: list[int], steps: int = 3) -> list[float]:
    """Train; with several ranks, on the average of their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        total = sum(loss(model, _batch(step, rank)) for rank in ranks) / len(ranks)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def _compare(rank: int, world: int, way: str, make: Callable[[], nn.Module], loss: Step) -> None:
    torch.manual_seed(0)
    sharded = _wrap(make(), way)
    torch.manual_seed(0)
    plain = make().double()
    with _quiet():
        _train(sharded, loss, [rank])
    _train(plain, loss, list(range(world)))
    assert_same(sharded, plain, 1e-12)


@each_way
def test_uses_of_a_childs_parameters(way: str) -> None:
    run_ranks(_uses, 2, way)


def _uses(rank: int, world: int, way: str) -> None:
    for name, use in USES.items():

        def make(name: str = name, use: Use = use) -> nn.Module:
            model = Parent(use)
            model.child.requires_grad_(name != "frozen")
            return model

        try:
            _compare(rank, world, way, make, lambda m, x: m(x).pow(2).mean())
        except BaseException as error:
            error.add_note(f"use: {name}")
            raise
