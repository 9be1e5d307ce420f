"""Trains a random model of ``tests/parity/random_models.py`` under DistributedDataParallel."""

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3]))

# Ranks may skip none of these. A checkpoint of the reentrant kind fails under
# DistributedDataParallel with `find_unused_parameters`.
NOT_FOR_DDP = ("by_rank", "reentrant", "reader")


def main(seed: int) -> None:
    from tests.parity.random_models import BOXES, LEAVES, WIDTH, Box, build

    choices = random.Random(seed)

    def node(depth: int) -> dict[str, Any]:
        made = {"unit": False, "of": choices.randrange(6), "every": choices.randrange(2, 4)}
        if depth and choices.random() < 0.4:
            made["kind"] = choices.choice([one for one in BOXES if one not in NOT_FOR_DDP])
            made["body"] = [node(depth - 1) for _ in range(choices.randrange(1, 4))]
        else:
            made["kind"] = choices.choice([*LEAVES, "shared", "tied"])
        return made

    case = {"seed": seed, "tree": [node(2) for _ in range(choices.randrange(1, 5))]}
    dist.init_process_group("gloo")
    model: Any = build(case)
    if choices.random() < 0.5:
        model.float()
    boxes = [one for one in model.modules() if type(one) is Box]
    dtype = next(model.parameters()).dtype
    model = DistributedDataParallel(model, find_unused_parameters=True)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    if choices.random() < 0.5:
        optimizer = torch.optim.AdamW(params, lr=0.01)
    clips = choices.random() < 0.5
    for step in range(4):
        for box in boxes:
            box.step, box.rank = step, 0
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
