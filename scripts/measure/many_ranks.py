"""Trains on many ranks of this machine, and resumes from their checkpoint on a few ranks.

    python scripts/measure/many_ranks.py --ranks 32 --resume-on 3

Wraps a small model in float64 on gloo ranks, trains it with SGD and momentum, saves it, and
continues the training. Then `--resume-on` other ranks load the checkpoint and train the same steps.
Every step has the same rows, divided over the ranks. All losses must equal the losses of the
unwrapped model, which one process trains on all rows.

Prints a line for each setting, with the seconds of the slowest rank and the largest difference of a
loss. The exit status is 1 if a setting fails.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measuring  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
from lib.command_line import Parser
from lib.rank_processes import Ranks
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.wrap import ModuleWrapPolicy

WIDTH, LAYERS = 24, 6
SAVED, STEPS = 3, 6  # number of steps before the checkpoint, and of all steps
TOLERANCE = 1e-10  # for losses in float64; the order of sums depends on the number of ranks
RANKS_PER_NODE = 8  # HYBRID strategies take 8 ranks for a node
WAYS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "FULL_SHARD, sockets": {"collectives": "sockets"},
    "FULL_SHARD, native": {"collectives": "native"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD"},
    "HYBRID_SHARD_OP, native": {"sharding_strategy": "HYBRID_SHARD_OP", "collectives": "native"},
}


class Block(nn.Module):
    """A residual layer with a buffer, whose values must be the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)).double()


def rows_of(step: int, num_rows: int) -> Tensor:
    """Inputs of a step for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def expected_losses(num_rows: int) -> list[float]:
    """Train the unwrapped model on all rows; returns the losses."""
    model = new_model()
    optimizer = new_optimizer(model)
    return [train(model, optimizer, rows_of(step, num_rows)) for step in range(STEPS)]


# ------------------------------------------------------------------------------------------ ranks


def run_rank(way: str, folder: str, num_rows: int, resumes: bool) -> dict[str, Any]:
    """Train on this rank's rows; returns the mean losses of all ranks, and seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds: dict[str, float] = {}
    # Without coalescing, because coalescing would make this small model a single unit.
    settings = {"coalesce_bytes": 0, **WAYS[way]}
    if resumes and size % RANKS_PER_NODE:
        settings.pop("sharding_strategy", None)  # a checkpoint loads into any strategy
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - begin
        return result

    policy = ModuleWrapPolicy({Block})
    model = timed("wrap", lambda: ShardedWrapper(new_model(), auto_wrap_policy=policy, **settings))
    optimizer = new_optimizer(model)
    first = 0
    if resumes:
        first = timed("load", lambda: checkpoint.load(folder, model, optimizer))["step"]
    losses = []
    for step in range(first, STEPS):
        x = rows_of(step, num_rows).chunk(size)[rank]
        loss = timed("step", lambda x=x: train(model, optimizer, x))
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
        if not resumes and step + 1 == SAVED:
            timed("save", lambda: checkpoint.save(folder, model, optimizer, extra={"step": SAVED}))
    return {"losses": losses, "seconds": seconds}


def run_ranks(ranks: Ranks, size: int, limit: float, *arguments: Any) -> list[dict[str, Any]]:
    """Run `run_rank` on all ranks; raises RuntimeError for the first rank that did not return."""
    said = ranks.run(run_rank, size, *arguments, seconds=limit)
    for rank, one in enumerate(said):
        if one.outcome != "returned":
            raise RuntimeError(f"rank {rank} of {size} {one.outcome}: {one.what}")
    return [one.what for one in said]


def check(way: str, ranks: Ranks, options: Any) -> str:
    """Check one setting; returns a line of text. Raises RuntimeError if the check fails."""
    # A number of rows that both numbers of ranks divide.
    num_rows = math.lcm(options.ranks, options.resume_on)
    expected, worst = expected_losses(num_rows), 0.0
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as parent:
        for size, resumes in ((options.ranks, False), (options.resume_on, True)):
            arguments = (way, f"{parent}/checkpoint", num_rows, resumes)
            for rank, one in enumerate(run_ranks(ranks, size, options.timeout, *arguments)):
                losses = expected[SAVED * resumes :]
                errors = [abs(a - b) / b for a, b in zip(one["losses"], losses, strict=True)]
                worst = max(worst, *errors)
                if worst > TOLERANCE:
                    raise RuntimeError(
                        f"rank {rank} of {size}: losses {one['losses']}, expected {losses}"
                    )
                for name, seconds in one["seconds"].items():
                    key = f"{name} on {size}" if resumes else name
                    slowest[key] = max(seconds, slowest.get(key, 0.0))
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in slowest.items())
    return f"{way}: {STEPS} losses correct to {worst:.0e}; {times}"


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_number("--ranks", 32, "ranks that train and save", low=2)
    parser.add_number("--resume-on", 3, "ranks that load the checkpoint and continue")
    add("--way", nargs="+", choices=WAYS, default=list(WAYS), help="settings to try (default: all)")
    parser.add_timeout(300.0, "a run")
    options = parser.parse_args()
    if options.ranks % RANKS_PER_NODE:
        parser.error(f"--ranks must be a multiple of {RANKS_PER_NODE}, for HYBRID strategies")
    failed = 0
    with Ranks(options.ranks, preload=["many_ranks", "torch.distributed.checkpoint"]) as ranks:
        for way in options.way:
            try:
                print(check(way, ranks, options), flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"{way}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
