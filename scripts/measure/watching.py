"""Measures what deadlock detection costs a training step that is not late.

    python scripts/measure/watching.py --model many-small --world-size 2

Trains one of `scripts/benchmark.py`'s GPTs on gloo and this machine's CPU. In half of the blocks of
steps, all ranks keep the thread that looks for deadlocks from looking. Prints the CPU time and the
time of a step in both kinds of blocks, and the ratio of a block with looks to its neighbour without
looks: the median, and the interval that contains the median with a probability of 95 %. Also prints
the CPU time of the looking thread itself, divided by the CPU time of the whole process.
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
    print(f"CPU time of the looks: {looks} of the CPU time of the ranks")
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
