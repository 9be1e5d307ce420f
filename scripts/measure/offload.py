"""Measures the memory that disk offload saves and the time that it costs.

    python scripts/measure.py offload --layers 16 --width 768 --world-size 2

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

import torch
import torch.distributed as dist
from benchmark import resident_bytes
from lib.gpt import Block, Preset, loss_of
from measuring import MIB, figures_of_ranks, reset_peak
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
        loss = loss_of(model(tokens[:, :-1]), tokens)
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
        "numel": numel,
        "formula": STATE_BYTES * numel / args.world_size,
        "building": building,
        "first_step": first,
        "peak": max(resident_bytes("VmHWM") - before, first),
        "between": between,
        "seconds": (time.perf_counter() - begin) / args.steps,
        "losses": losses,
    }


OPTIONS = {
    "offload": list(WAYS),
    "path": Path(tempfile.gettempdir()),
    "world_size": 2,
    "layers": 4,
    "width": 512,
    "vocabulary": 512,
    "rows": 2,
    "length": 32,
    "steps": 3,
    "check": False,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows, losses, over = [], [], []
    for way in args.offload:
        ranks = figures_of_ranks(measure_rank, args.world_size, way, args)
        worst = max(ranks, key=lambda figures: figures["peak"])
        allowed = worst["formula"] / 3
        losses.append(sorted(figures["losses"] for figures in ranks))
        over += [way] if way in WAYS[2:] and worst["peak"] > allowed else []
        sizes = {name: worst[name] / MIB for name in ("building", "first_step", "peak", "between")}
        rows.append({"offload": way, **sizes, "steps a minute": 60 / worst["seconds"]})
    if any(one != losses[0] for one in losses):
        sys.exit("error: the losses differ between the kinds of offload")
    if args.check and over:
        sys.exit(f"error: the peak RSS is more than allowed: {', '.join(over)}: {rows}")
    sizes = f"{3 * allowed / MIB:,.0f} MiB of state per rank, allowed {allowed / MIB:,.0f}"
    return f"{worst['numel']:,} parameters, {sizes}", rows
