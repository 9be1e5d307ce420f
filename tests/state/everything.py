"""`CASE`, a model with each kind of parameter, and how it is trained."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Case, images, loss_of
from tests.oracle import step_and_zero

ROWS = 12
"""Of all ranks together: one, two, three or four of them."""

StateDict = dict[str, Any]


class Everything(nn.Module):
    """One of each kind of parameter: what an optimizer's state may look like."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.phase = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.frozen = nn.Linear(3, 3)
        self.frozen.bias.requires_grad_(False)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).mean(dim=(2, 3))
        x = torch.tanh(self.first(x)) * self.scale + self.nothing.sum()
        x = torch.tanh(self.frozen(self.second(x)))
        return (x.to(torch.complex128) @ self.phase).real


CASE = Case("everything", Everything, images, (nn.Conv2d, nn.Linear))


def loss_of_rows(model: nn.Module, case: Case, step: int, rank: int, world_size: int) -> Tensor:
    """The loss of this rank's share of a step's rows."""
    inputs, target = (part.chunk(world_size)[rank] for part in case.batch(step, ROWS))
    return loss_of(model(inputs), target)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    case: Case = CASE,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    for step in steps:
        loss_of_rows(model, case, step, rank, world_size).backward()
        step_and_zero(optimizer)
