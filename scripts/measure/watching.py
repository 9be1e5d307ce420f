"""Measures how much time deadlock detection adds to a training step when no rank is late.

    python scripts/measure/watching.py --model many-small --world-size 2

Trains one of the GPTs of `scripts/benchmark.py` on this machine's CPU, with gloo. The steps are
divided into blocks, in pairs: in one block of each pair, all ranks stop the deadlock-detection
thread from checking. Prints the CPU time and the wall-clock time of a step with and without checks,
and the ratio of both blocks of a pair: the median, and the median's 95 % confidence interval. Also
prints the CPU time of the deadlock-detection thread, divided by the CPU time of the process.
"""

import argparse
import statistics
from typing import Any

import measuring  # first, because this import may end the script
import torch
import torch.distributed as dist
from benchmark import PRESETS, make_batch, make_model, wrap_flatshard
from lib.watch_cost import MEASURES, cost_of_watching, ratio_of_pairs
from rich import print as rich_print


def main() -> None:
    args = parse_args()
    ranks = measuring.figures_of_ranks(measure_rank, args.world_size, args)
    table = measuring.table(
        f"Deadlock detection: {args.model} on {args.world_size} ranks",
        *("rank", "of a step", "with, ms", "without, ms", "ratio", "95 % interval"),
    )
    for rank, figures in enumerate(ranks):
        for measure in MEASURES:
            with_looks, without = figures["seconds"][measure]
            ratio, low, high = ratio_of_pairs(with_looks, without)
            medians = (f"{statistics.median(one) * 1e3:.2f}" for one in (with_looks, without))
            table.add_row(str(rank), measure, *medians, f"{ratio:.4f}", f"{low:.4f} to {high:.4f}")
    rich_print(table)
    looks = " and ".join(f"{figures['looks']:.3%}" for figures in ranks)
    print(f"CPU time of the deadlock-detection thread: {looks} of the CPU time of the ranks")
    measuring.write_json(args.json, ranks)


def parse_args() -> argparse.Namespace:
    parser = measuring.Parser(__doc__)
    parser.add_argument("--model", default="many-small", choices=PRESETS, help="the GPT")
    parser.add_number("--world-size", 2, "number of ranks")
    parser.add_number("--blocks", 800, "number of blocks of steps", low=4)
    parser.add_number("--steps", 4, "number of steps in a block")
    parser.add_json()
    return parser.parse_args()


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


if __name__ == "__main__":
    main()
