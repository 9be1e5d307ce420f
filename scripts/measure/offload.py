"""Measures the memory that disk offload saves and the time that it costs.

    python scripts/measure/offload.py --layers 16 --width 768 --world-size 2

Builds a decoder of transformer blocks on the meta device, wraps it with one unit per block, and
trains it by AdamW on this machine's CPU (gloo). Each kind of offload has new processes:

    none    shards, gradients and optimizer state in memory
    state   optimizer state in files
    all     shards, gradients and optimizer state in files
    early   as `all`, and the optimizer steps every unit in backward

Prints how much the RSS is above the RSS before the model was built, at the peak and between two
steps, for the rank with the highest peak. The state of a parameter is 16 bytes, divided over the
ranks: 4 for the parameter, 4 for its gradient and 8 for Adam. `allowed` is a third of the state.
With `--check`, the script fails if the peak of `all` or `early` is higher.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring  # first, because this import may end the script
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmark import Block, Preset
from measuring import mib, reset_peak, resident_bytes
from rich import print as rich_print
from torch import Tensor, nn

from flatshard import CPUOffload, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

STATE_BYTES = 16  # bytes per parameter: the parameter, its gradient and Adam's two averages
WAYS = ("none", "state", "all", "early")
HEADS = 8


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        preset = Preset(layers, width, HEADS, vocabulary, sequence=0)
        self.blocks = nn.Sequential(*(Block(preset) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


# ------------------------------------------------------------------------------------------ ranks


def build(way: str, args: argparse.Namespace, layers: int, width: int) -> ShardedWrapper:
    offload = {
        "none": None,
        "state": CPUOffload(offload_optimizer=True, path=args.path),
    }.get(way, CPUOffload(offload_params=True, path=args.path))
    with torch.device("meta"):
        model = Decoder(layers, width, args.vocabulary)
    policy = ModuleWrapPolicy({Block, nn.Embedding})
    return ShardedWrapper(model, auto_wrap_policy=policy, cpu_offload=offload)


def optimize(model: ShardedWrapper, way: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if way == "early":
        model.step_in_backward(optimizer)
    return optimizer


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, steps: int
) -> list[float]:
    """Train some steps; returns their losses."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        tokens = torch.randint(args.vocabulary, (args.rows, args.length + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measure_rank(way: str, args: argparse.Namespace) -> dict[str, Any]:
    # Train a tiny model first, so that imports and new threads do not count.
    torch.manual_seed(0)
    tiny = build(way, args, 1, 16)
    train(tiny, optimize(tiny, way), args, 2)
    del tiny
    torch.manual_seed(0)
    gc.collect()
    before = resident_bytes("VmRSS")
    reset_peak()
    model = build(way, args, args.layers, args.width)
    building = resident_bytes("VmHWM") - before
    numel = sum(p.numel() for p in model.parameters())
    optimizer = optimize(model, way)
    losses = train(model, optimizer, args, 1)  # the first step creates the optimizer state
    first = resident_bytes("VmHWM") - before
    between = resident_bytes("VmRSS") - before
    reset_peak()
    dist.barrier()
    begin = time.perf_counter()
    losses += train(model, optimizer, args, args.steps)
    dist.barrier()
    return {
        "way": way,
        "numel": numel,
        "formula": STATE_BYTES * numel / args.world_size,
        "building": building,
        "first_step": first,
        "peak": max(resident_bytes("VmHWM") - before, first),
        "between": between,
        "seconds": (time.perf_counter() - begin) / args.steps,
        "losses": losses,
    }


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind of offload.

    Returns the figures of the rank with the highest peak, and the losses of all ranks.
    """
    ranks = measuring.figures_of_ranks(measure_rank, args.world_size, way, args)
    worst = max(ranks, key=lambda figures: figures["peak"])
    return {**worst, "losses": sorted(figures["losses"] for figures in ranks)}


def show(rows: list[dict[str, Any]]) -> None:
    numel, formula = rows[0]["numel"], rows[0]["formula"] / 2**20
    title = (
        f"{numel:,} parameters, {formula:,.0f} MiB of state per rank, allowed {formula / 3:,.0f}"
    )
    columns = ("building", "first step", "peak", "between steps")
    table = measuring.table(title, "offload", *columns, "steps a minute")
    for row in rows:
        sizes = (mib(row[key]) for key in ("building", "first_step", "peak", "between"))
        table.add_row(row["way"], *sizes, f"{60 / row['seconds']:.1f}")
    rich_print(table)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with status 2 if an option is wrong."""
    parser = measuring.Parser(__doc__)
    add = parser.add_argument
    parser.add_names("--offload", WAYS, "kinds of offload")
    add("--path", type=Path, default=Path(tempfile.gettempdir()), help="directory for the files")
    add("--world-size", type=int, default=2, help="ranks to start on this machine (default: 2)")
    add("--layers", type=int, default=4, help="number of blocks (default: 4)")
    add(
        "--width",
        type=int,
        default=512,
        help=f"width of the model, a multiple of {HEADS} (default: 512)",
    )
    add("--vocabulary", type=int, default=512, help="tokens in the vocabulary (default: 512)")
    add("--rows", type=int, default=2, help="rows of a batch (default: 2)")
    add("--length", type=int, default=32, help="tokens of a row (default: 32)")
    add("--steps", type=int, default=3, help="number of timed steps (default: 3)")
    add("--check", action="store_true", help="fail if the peak is more than allowed")
    parser.add_json("all figures, in bytes,")
    args = parser.parse_args(arguments)
    args.offload = measuring.choose(parser, "--offload", args.offload, WAYS)
    sizes = (args.world_size, args.layers, args.width, args.vocabulary, args.rows, args.length)
    if min(*sizes, args.steps) < 1:
        parser.error("all numbers must be at least 1")
    if args.width % HEADS:
        parser.error(f"--width: must be a multiple of {HEADS}, got {args.width}")
    if not args.path.is_dir():
        parser.error(f"--path: {args.path} is not a directory")
    measuring.require_proc(parser)
    return args


if __name__ == "__main__":
    args = parse_args()
    rows = [measure(way, args) for way in args.offload]
    show(rows)
    if any(row["losses"] != rows[0]["losses"] for row in rows):
        sys.exit("error: the losses differ between the kinds of offload")
    measuring.write_json(args.json, rows)
    over = [r["way"] for r in rows if r["way"] in WAYS[2:] and r["peak"] > r["formula"] / 3]
    if args.check and over:
        sys.exit(f"error: the peak RSS is more than allowed: {', '.join(over)}")
