"""Trains the transformer of train_transformer.py a few steps under every sharding strategy.

    torchrun --standalone --nproc-per-node 4 scripts/compare_strategies.py --steps 4

Prints a table of time, memory and communication volume, beside DistributedDataParallel.
"""

import argparse
import os
import statistics
import time
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lib.command_line import Parser, stop
from lib.output import COLOURS, PEAK, output_file, show, write_json
from lib.rank_memory import held_bytes, memory_report
from lib.training_job import connect, mean_over_ranks, say
from torch import Tensor
from train_transformer import (
    add_model_and_steps,
    build,
    loss_of,
    read_text,
    rows_of_step,
    train_step,
    wrap_model,
)

from flatshard import ShardingStrategy, collectives

WAYS: dict[str, dict[str, Any]] = {
    "DDP": {"ddp": True},
    **{one.name: {"strategy": one.name} for one in ShardingStrategy},
    "FULL_SHARD, bf16": {"strategy": "FULL_SHARD", "bf16": True},
}
"""HYBRID strategies are compared if the ranks form two nodes, or can be split into two."""


WEIGHTS = {"gather": 1, "reduce": 1, "all_reduce": 2}
"""Volume as the ZeRO paper counts it: an all-reduce is a reduce-scatter and an all-gather."""


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add_model_and_steps(parser)
    add = parser.add_argument
    add("--collectives", choices=["auto", "sockets", "native"], default="auto")
    parser.add_json("the comparison")
    add("--plot", type=output_file, metavar="PATH", help="draw the compared memory to PATH")
    args = parser.parse_args(arguments)
    if args.steps < 2:
        stop(f"--steps must be at least 2, got {args.steps}")
    return args


def measure(args: argparse.Namespace, text: Tensor, device: torch.device) -> dict[str, Any]:
    """Returns time, bytes and the last loss of a few steps. Collective."""
    model = wrap_model(build(args), args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    seconds, loss = [], torch.zeros(())

    def step(number: int) -> Tensor:
        rows = rows_of_step(text, number, args).to(device)
        return train_step(model, optimizer, rows, args)

    for number in range(args.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = step(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    last_loss = mean_over_ranks(loss)
    gathered = held_at_most = gathered_now = 0
    moved = 2 * held_bytes(model.parameters())
    if not args.ddp:
        with model.record_steps() as reports:
            step(args.steps)
        held_at_most = max(report.peak_held_bytes for report in reports)
        gathered = max(report.peak_gathered_bytes for report in reports)
        with collectives.record() as events:
            step(args.steps + 1)
        moved = sum(WEIGHTS.get(event.kind, 0) * event.nbytes for event in events)
        gathered_now = reports[-1].memory[-1].gathered_bytes
    rows = rows_of_step(text, 0, args)
    loss_of(model, rows.to(device)).backward()  # the gradients of a step, to count their memory
    held = memory_report(model, optimizer)
    kept = held["parameter_bytes"] + held["optimizer_bytes"]
    between = kept + held["gradient_bytes"] + gathered_now
    return {
        "seconds": statistics.median(seconds[1:]),
        "loss": last_loss,
        **held,  # below, the peak of the whole process is replaced by the peak of a step
        "kept_gathered_bytes": gathered_now,
        "peak_gathered_bytes": gathered,
        "between_bytes": between,
        "peak_bytes": max(between, kept + held_at_most),
        "moved_bytes": moved,
    }


def compare(args: argparse.Namespace, device: torch.device) -> None:
    text, _ = read_text(args)
    world_size = dist.get_world_size()
    # HYBRID strategies take this number of ranks for a node.
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if per_node == world_size and world_size % 2 == 0 and world_size > 2:
        per_node = 2
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    results = {}
    for name, settings in WAYS.items():
        if name.startswith("HYBRID") and not 1 < per_node < world_size:
            continue
        way = argparse.Namespace(**{**vars(args), "ddp": False, "bf16": False, **settings})
        results[name] = measure(way, text, device)
        say(f"{name}: {1000 * results[name]['seconds']:.0f} ms")
    if dist.get_rank() != 0:
        return
    numel = sum(param.numel() for param in build(args).parameters())
    about = {
        "torch": torch.__version__,
        "parameters": numel,
        "world_size": world_size,
        "per_node": per_node,
        "ways": results,
    }
    title = f"{numel:,} parameters, {world_size} ranks, {args.steps} steps, {device.type}"
    show(title, [*starmap(shown, results.items())])
    write_json(args.json, about)
    if args.plot:
        draw(about, args.plot)


def shown(name: str, row: dict[str, Any]) -> dict[str, Any]:
    keys = {"persistent": "between_bytes", "peak": "peak_bytes", "volume": "moved_bytes"}
    sizes = {f"{title} MiB": row[key] / 2**20 for title, key in keys.items()}
    return {"strategy": name, "ms a step": 1000 * row["seconds"], **sizes, "loss": row["loss"]}


def draw(about: dict[str, Any], path: Path) -> None:
    """Draws the persistent memory per rank, and the peak of a step on top of it."""
    from matplotlib.figure import Figure

    ways = about["ways"]
    figure = Figure(figsize=(8, 0.8 + 0.42 * len(ways)), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "this rank's parameters": "parameter_bytes",
        "optimizer state": "optimizer_bytes",
        "gradients": "gradient_bytes",
        "unsharded parameters": "kept_gathered_bytes",
    }
    left, names = [0.0] * len(ways), list(ways)
    for label, key in kinds.items():
        sizes = [row[key] / 2**20 for row in ways.values()]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=label, color=COLOURS[label])
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    rest = [row["peak_bytes"] / 2**20 - at for row, at in zip(ways.values(), left, strict=True)]
    axes.barh(names, rest, left=left, label="peak of a step", **PEAK)
    for index, peak in enumerate(row["peak_bytes"] / 2**20 for row in ways.values()):
        axes.text(peak, index, f" {peak:.0f}", va="center")
    axes.invert_yaxis()
    size = f"{about['parameters'] / 1e6:.1f} M parameters"
    axes.set_xlabel(f"MiB on each of {about['world_size']} ranks; {size}, fp32 AdamW")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    compare(parse_args(), connect())
    dist.destroy_process_group()
