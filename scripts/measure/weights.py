"""Measures how long it takes to read all full weights of a sharded model, and what memory it takes.

    python scripts/measure.py weights --model gpt-120m --world-size 2

Shards the same GPT by flatshard and by torch's FSDP2 in the same ranks (gloo, this machine's CPU),
and reads all full parameters by turns: by ``full_tensors``, and by a loop over FSDP2's
``full_tensor()``. One all-gather of the model's bytes into one tensor is the lower bound. Then
changes a share of the values before each turn, and reads them by ``WeightChanges``, beside
``full_tensors`` in the same dtype, bfloat16.

Prints medians, what a rank sends by flatshard's collectives, and the peak RSS above the RSS before
the reading. It also contains freed memory that glibc keeps for later: set
MALLOC_MMAP_THRESHOLD_=1000000 to measure only the tensors, in longer times.
"""

import argparse
import statistics
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from benchmark import PRESETS, make_model, wrap_flatshard, wrap_fsdp2
from measuring import MIB, figures_of_ranks, measured

import flatshard

OPTIONS = {
    "model": ("many-small", *(name for name in PRESETS if name != "many-small")),
    "collectives": ("auto", "sockets", "native"),
    "world_size": 2,
    "rounds": 5,
}
SHARES = {f"WeightChanges, {share:.0%}": share for share in (0.01, 0.03, 0.3, 1.0)}
"""Shares of the values that change before some of the ways to read."""


def read(tensors: Iterable[Any]) -> None:
    for _ in tensors:
        pass


def gather_once(numel: int) -> None:
    """One all-gather of as many bytes as the model has."""
    shard = torch.zeros(-(-numel // dist.get_world_size()))
    dist.all_gather_into_tensor(shard.new_empty(shard.numel() * dist.get_world_size()), shard)


def change(model: Any, share: float) -> None:
    with torch.no_grad():
        for part in model.flat_parameters():
            values = part.detach()
            values[torch.rand(values.shape) < share] += 0.1


def measure_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # deprecation warnings of torch
    args.strategy, args.bf16, cpu = "FULL_SHARD", False, torch.device("cpu")
    plain = make_model(PRESETS[args.model], cpu)
    ours: Any = wrap_flatshard(plain, args, collectives=args.collectives)
    theirs: Any = wrap_fsdp2(make_model(PRESETS[args.model], cpu), args)
    numel = sum(param.numel() for param in theirs.parameters())
    changes = flatshard.WeightChanges(ours)
    ways = {
        "full_tensors": lambda: read(flatshard.full_tensors(ours)),
        "FSDP2 full_tensor()": lambda: read(one.full_tensor() for one in theirs.parameters()),
        "one all-gather": lambda: gather_once(numel),
        "full_tensors, bfloat16": lambda: read(flatshard.full_tensors(ours, dtype=torch.bfloat16)),
        **dict.fromkeys(SHARES, lambda: read(changes.changes())),
    }
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    ours.state_dict()  # maps the shards of the other ranks, which counts as RSS
    for _ in range(1 + args.rounds):  # the first round is a warm-up
        for name, way in ways.items():
            change(ours, SHARES.get(name, 0))
            with flatshard.collectives.record() as events:
                seconds, peak, _ = measured(way)
            runs[name].append((1e3 * seconds, sum(one.nbytes for one in events) / MIB, peak))
    rows = []
    for name, some in runs.items():
        ms, sent, peaks = zip(*some[1:], strict=True)
        row = {"": name, "ms": statistics.median(ms), "sent MiB": statistics.median(sent)}
        rows.append({**row, "peak MiB": max(peaks)})
    return rows


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows, *_ = figures_of_ranks(measure_rank, args.world_size, args)
    return f"Full weights of {args.model} on {args.world_size} ranks", rows
