"""Many ranks train, save and resume on few: groups and orders that 4 ranks do not show.

By default 3 ranks, which 2 resume; THOROUGH=1 has 32 ranks, as 4 nodes of 8, and 3 that resume.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import THOROUGH
from tests.harness import run_ranks
from tests.models import Residual
from tests.oracle import sgd

WIDTH, LAYERS = 24, 6
SAVED, STEPS = 3, 6  # number of steps before the checkpoint, and of all steps
TOLERANCE = 1e-10  # for losses in float64; the order of sums depends on the number of ranks
MANY, FEW = (32, 3) if THOROUGH else (3, 2)
ROWS, PER_NODE = MANY * FEW, 8
WAYS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "FULL_SHARD, sockets": {"collectives": "sockets"},
    "FULL_SHARD, native": {"collectives": "native"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD_OP, native": {"sharding_strategy": "HYBRID_SHARD_OP", "collectives": "native"},
}


class Block(Residual):
    """With a buffer, whose values must be the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)).double()


def rows_of(step: int) -> Tensor:
    """Inputs of a step for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def losses_of(model: nn.Module, first: int, optimizer: Any, rank: int, size: int) -> Any:
    """Train this rank's rows; yields the mean loss of all ranks for each step."""
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss = model(rows_of(step).chunk(size)[rank]).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        if size > 1:
            dist.all_reduce(loss)
        yield float(loss) / size


def run_rank(rank: int, size: int, way: str, folder: str, resumes: bool) -> list[float]:
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE if size % PER_NODE == 0 else size)
    settings = {"sharding_strategy": "FULL_SHARD"} if size % PER_NODE else {}
    policy = ModuleWrapPolicy({Block})
    # Without coalescing, because coalescing would make this small model a single unit.
    keywords = {**WAYS[way], **settings, "auto_wrap_policy": policy, "coalesce_bytes": 0}
    model = ShardedWrapper(new_model(), **keywords)
    optimizer = sgd(model)
    first = checkpoint.load(folder, model, optimizer)["step"] if resumes else 0
    losses = []
    for loss in losses_of(model, first, optimizer, rank, size):
        losses.append(loss)
        if not resumes and len(losses) == SAVED:
            checkpoint.save(folder, model, optimizer, extra={"step": SAVED})
    return losses


@pytest.mark.timeout(900 if THOROUGH else 300)
@pytest.mark.parametrize("way", WAYS if THOROUGH else ["FULL_SHARD"])
def test_few_ranks_resume_what_many_saved(way: str, tmp_path: Path) -> None:
    model = new_model()
    expected = list(losses_of(model, 0, sgd(model), 0, 1))
    for size, resumes in ((MANY, False), (FEW, True)):
        found = run_ranks(run_rank, size, way, str(tmp_path / "saved"), resumes, timeout=300)
        for losses in found:
            assert losses == pytest.approx(expected[SAVED * resumes :], rel=TOLERANCE)
