"""Measures how much time deadlock detection adds to a training step when no rank is late.

    python scripts/measure.py watching --model many-small --world-size 2

Trains one of the GPTs of `scripts/benchmark.py` on this machine's CPU, with gloo. The steps are
divided into blocks, in pairs: in one block of each pair, all ranks stop the deadlock-detection
thread from checking. Prints the CPU time and the wall-clock time of a step with and without checks,
and the ratio of both blocks of a pair: the median, and the median's 95 % confidence interval. Also
prints the CPU time of the deadlock-detection thread, divided by the CPU time of the process.
"""

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from benchmark import PRESETS, make_batch, make_model, wrap_flatshard
from lib.watch_cost import MEASURES, cost_of_watching, ratio_of_pairs
from measuring import figures_of_ranks

OPTIONS = {
    "model": ("many-small", *(name for name in PRESETS if name != "many-small")),
    "world_size": 2,
    "blocks": 800,
    "steps": 4,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows = []
    for rank, figures in enumerate(figures_of_ranks(measure_rank, args.world_size, args)):
        for kind in MEASURES:
            with_looks, without = figures["seconds"][kind]
            ratio, low, high = ratio_of_pairs(with_looks, without)
            rows.append(
                {
                    "of a step": kind,
                    "rank": rank,
                    "with, ms": statistics.median(with_looks) * 1e3,
                    "without, ms": statistics.median(without) * 1e3,
                    "ratio": f"{ratio:.4f}",
                    "95 % interval": f"{low:.4f} to {high:.4f}",
                    "CPU time of the thread": f"{figures['looks']:.3%}",
                }
            )
    return f"Deadlock detection: {args.model} on {args.world_size} ranks", rows


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    cpu = torch.device("cpu")
    args.strategy, args.bf16 = "FULL_SHARD", False
    model = wrap_flatshard(make_model(PRESETS[args.model], cpu), args)
    tokens = make_batch(PRESETS[args.model], dist.get_rank(), cpu)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(tokens[:, :-1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cost_of_watching(step, args.blocks, args.steps)._asdict()
