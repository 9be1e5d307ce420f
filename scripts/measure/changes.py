"""Measures ``WeightChanges`` beside ``full_tensors``: bytes and time, by the share that changed.

    python scripts/measure.py changes --collectives sockets

Shards one of the GPTs of `scripts/benchmark.py`, changes a share of its values, and sends the
weights in bfloat16 in both ways, in turn. Prints medians of rank 0.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmark import PRESETS, make_model
from measuring import figures_of_ranks

import flatshard

OPTIONS = {
    "model": ("gpt-20m", *(name for name in PRESETS if name != "gpt-20m")),
    "collectives": ("auto", "sockets", "native"),
    "world_size": 2,
    "rounds": 7,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows, *_ = figures_of_ranks(measure_rank, args.world_size, args)
    return f"Changes of weights: {args.model}, {args.collectives}, {args.world_size} ranks", rows


def measure_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    plain = make_model(PRESETS[args.model], torch.device("cpu"))
    model = flatshard.ShardedWrapper(plain, auto_wrap_policy="auto", collectives=args.collectives)
    changes = flatshard.WeightChanges(model)
    read(changes.changes())
    rows = []
    for share in (0.01, 0.03, 0.3, 1.0):
        both = []
        for _ in range(args.rounds):
            change(model, share)
            full = flatshard.full_tensors(model, dtype=torch.bfloat16)
            both.append((*read(changes.changes()), *read(full)))
        ms, mib, full_ms, full_mib = map(statistics.median, zip(*both, strict=True))
        row = {"changed": f"{share:.0%}", "MiB": mib, "ms": ms}
        rows.append({**row, "full_tensors, MiB": full_mib, "full_tensors, ms": full_ms})
    return rows


def read(items: Iterator[Any]) -> tuple[float, float]:
    """Read to the end; return the milliseconds, and the MiB of the collectives of this rank."""
    dist.barrier()
    begin = time.perf_counter()
    with flatshard.collectives.record() as events:
        for _ in items:
            pass
    dist.barrier()
    return 1e3 * (time.perf_counter() - begin), sum(event.nbytes for event in events) / 2**20


def change(model: flatshard.ShardedWrapper, share: float) -> None:
    with torch.no_grad():
        for part in model.flat_parameters():
            values = part.detach()
            values[torch.rand(values.shape) < share] += 0.1
