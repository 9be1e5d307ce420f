"""Measures how long it takes to read all full weights of a sharded model, and what memory it takes.

    python scripts/measure.py weights --model gpt-120m --world-size 2

Shards the same GPT by flatshard and by torch's FSDP2 in the same ranks (gloo, this machine's CPU),
and reads all full parameters by turns: by ``full_tensors``, and by a loop over FSDP2's
``full_tensor()``. One all-gather of the model's bytes into one tensor is the lower bound. Prints
medians, and the peak RSS above the RSS before the reading. It also contains freed memory that glibc
keeps for later: set MALLOC_MMAP_THRESHOLD_=1000000 to measure only the tensors, in longer times.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from benchmark import PRESETS, make_model, resident_bytes, wrap_flatshard, wrap_fsdp2
from measuring import MIB, figures_of_ranks, reset_peak

import flatshard

OPTIONS = {
    "model": ("many-small", *(name for name in PRESETS if name != "many-small")),
    "world_size": 2,
    "rounds": 5,
}


def read(tensors: Iterable[Any]) -> None:
    for _ in tensors:
        pass


def gather_once(numel: int) -> None:
    """One all-gather of as many bytes as the model has."""
    shard = torch.zeros(-(-numel // dist.get_world_size()))
    dist.all_gather_into_tensor(shard.new_empty(shard.numel() * dist.get_world_size()), shard)


def measure_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # deprecation warnings of torch
    args.strategy, args.bf16, cpu = "FULL_SHARD", False, torch.device("cpu")
    ours: Any = wrap_flatshard(make_model(PRESETS[args.model], cpu), args)
    theirs: Any = wrap_fsdp2(make_model(PRESETS[args.model], cpu), args)
    numel = sum(param.numel() for param in theirs.parameters())
    unit_bytes = 4 * max(one.flat_layout.padded_numel for one in ours.flat_parameters())
    ways = {
        "full_tensors": lambda: read(flatshard.full_tensors(ours)),
        "full_tensors, bucket": lambda: read(flatshard.full_tensors(ours, bucket_bytes=unit_bytes)),
        "FSDP2 full_tensor()": lambda: read(one.full_tensor() for one in theirs.parameters()),
        "one all-gather": lambda: gather_once(numel),
    }
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    ours.state_dict()  # maps the shards of the other ranks, which counts as RSS
    for _ in range(1 + args.rounds):  # the first round is a warm-up
        for name, way in ways.items():
            gc.collect()
            before = resident_bytes("VmRSS")
            reset_peak()
            dist.barrier()
            begin = time.perf_counter()
            way()
            dist.barrier()
            seconds = time.perf_counter() - begin
            runs[name].append((seconds, resident_bytes("VmHWM") - before))
    rows = []
    for name, some in runs.items():
        seconds, peaks = zip(*some[1:], strict=True)
        rows.append({"": name, "ms": 1e3 * statistics.median(seconds), "MiB": max(peaks) / MIB})
    return rows


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows, *_ = figures_of_ranks(measure_rank, args.world_size, args)
    return f"Full weights of {args.model} on {args.world_size} ranks", rows
