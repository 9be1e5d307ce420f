"""A model whose layers a rank may run in an order of its own, over collectives matched by order."""

import torch
import torch.distributed as dist
from torch import nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

EQUAL, DIFFERENT = (16, 16, 16), (16, 24, 32)


class Net(nn.Module):
    """Layers that a rank may run in an order of its own."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for width in widths
        )
        self.order = range(len(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.layers[index](x)
        return x


def wrapped(*widths: int, collectives: str = "native", strategy: str = "FULL_SHARD") -> Net:
    """One unit for each width, on a group that no case before has used."""
    torch.manual_seed(0)
    group = dist.new_group() if strategy == "FULL_SHARD" else None
    keywords = {"process_group": group, "sharding_strategy": strategy, "collectives": collectives}
    policy = ModuleWrapPolicy({nn.Sequential})
    model: Net = ShardedWrapper(Net(*widths), auto_wrap_policy=policy, coalesce_bytes=0, **keywords)
    for _ in range(2):  # the second has prefetches
        step(model)
    return model


def step(model: Net) -> None:
    model(torch.ones(2, 8)).sum().backward()
