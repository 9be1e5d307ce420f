"""Weights that a hook computes before each forward, and parameters that are no weights at all."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, run_ranks

WAYS: tuple[dict[str, Any], ...] = (
    {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "coalesce_bytes": 0},
    {"sharding_strategy": "NO_SHARD"},
)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.columns = nn.Parameter(torch.arange(4), requires_grad=False)  # first in its group
        with allow_warnings(FutureWarning):  # deprecated, and in many models
            self.first = nn.utils.weight_norm(nn.Linear(6, 6))
            self.second = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6), dim=None), nn.Tanh())
            # DINO's last layer: no bias comes first, whose swap would drop the weight's graph.
            self.third = nn.utils.weight_norm(nn.Linear(6, 6, bias=False))
        self.fourth = parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
        self.fifth = parametrizations.spectral_norm(nn.Linear(6, 6, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(torch.tanh(self.first(x))))
        return self.fifth(self.fourth(x))[:, self.columns]


def _train(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(2, 6)).square().sum().backward()
        optimizer.step()
    return model.state_dict()


def _compare(rank: int, world_size: int) -> None:
    expected = _train(_Net())
    for way in WAYS:
        actual = _train(ShardedWrapper(_Net(), **way))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_weight_norm_and_a_frozen_integer_parameter() -> None:
    """The weight that the hook computed last held a graph, and what it holds cannot be sharded."""
    run_ranks(_compare, 2)
