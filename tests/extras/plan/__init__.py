"""Tests of `flatshard.extras.plan`, and a block that they share."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, factor: int = 3) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))
