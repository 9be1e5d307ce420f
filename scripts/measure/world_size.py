"""Measures how time and memory grow with the number of ranks, by simulating rank 0.

    python scripts/measure.py world_size --world-sizes 64,1024,4096,16384 --impl flatshard,fsdp2

The process group has torch's "fake" backend, whose collectives move nothing. So a single process
does the work of one rank of many, and waits for no other rank. Each row is measured in a new
process, which wraps a decoder of transformer blocks with one unit per block, and trains it with
SGD.

Prints the CPU seconds to wrap the model, of the first step and of a later step (the median), and
the peak RSS. The column "torch" is the time that torch itself needs to run the collectives of a
later step: the fake backend copies a chunk for each rank.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import resident_bytes, wrap_flatshard
from measuring import MIB
from offload import Decoder
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

from flatshard import collectives

TOKENS = 16  # few tokens, so that a step has little arithmetic beside the measured overhead
RANKS_PER_NODE = 8


def wrap_fsdp2(model: Decoder, args: argparse.Namespace) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    shape = (size // RANKS_PER_NODE, RANKS_PER_NODE) if "HYBRID" in args.strategy else (size,)
    mesh = init_device_mesh("cpu", shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Any] = {"flatshard": wrap_flatshard, "fsdp2": wrap_fsdp2}

# ------------------------------------------------------------------------------------- one process


def measure_rank(way: str, world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Wrap and train a decoder as rank 0 of ``world_size`` ranks; returns the figures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # deprecation warnings
    torch.manual_seed(0)
    args.bf16 = False
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)  # for HYBRID strategies
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    model = Decoder(args.layers, args.width, args.vocabulary)
    numel = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.randint(args.vocabulary, (1, TOKENS))
    # Train an unwrapped model first, so that torch's imports and first allocations do not count.
    warm_up = Decoder(1, args.width, args.vocabulary)
    step(warm_up, tokens, torch.optim.SGD(warm_up.parameters(), lr=1e-3, momentum=0.9))
    wrapped, wrap_seconds = timed(WAYS[way], model, args)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
    first, *later = (timed(step, wrapped, tokens, optimizer)[1] for _ in range(1 + args.steps))
    peak = resident_bytes("VmHWM")
    with collectives.record() as events:
        step(wrapped, tokens, optimizer)
    return {
        "": way,
        "N": world_size,
        "parameters": numel,
        "wrap s": wrap_seconds,
        "first step s": first,
        "later step s": statistics.median(later),
        "torch, step s": replay(events) if events else None,
        "peak MiB": peak / MIB,
    }


def step(model: nn.Module, tokens: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(work: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    begin = time.process_time()
    result = work(*given)
    return result, time.process_time() - begin


def replay(events: list[collectives.Event]) -> float:
    """Seconds that torch needs to run the recorded collectives, without flatshard."""
    groups = {
        ranks: dist.new_group(list(ranks), use_local_synchronization=True)
        for ranks in {event.ranks for event in events}
    }
    full = {event.nbytes: torch.empty(event.nbytes, dtype=torch.uint8) for event in events}
    begin = time.process_time()
    for event in events:
        whole, group = full[event.nbytes], groups[event.ranks]
        part = whole[: event.nbytes // len(event.ranks)]
        if event.kind == "gather":
            dist.all_gather_into_tensor(whole, part, group=group)
        elif event.kind == "reduce":
            dist.reduce_scatter_tensor(part, whole, group=group)
        else:
            dist.all_reduce(whole, group=group)
    return time.process_time() - begin


# ----------------------------------------------------------------------------------------- rows


OPTIONS = {
    "world_sizes": "64,1024,4096",
    "impl": list(WAYS),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_OP"),
    "layers": 24,
    "width": 256,
    "vocabulary": 256,
    "steps": 10,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows = []
    for size in map(int, args.world_sizes.split(",")):
        for way in args.impl:
            with mp.get_context("spawn").Pool(1) as pool:  # a new process for each row
                rows.append(pool.apply(measure_rank, (way, size, args)))
    return "Rank 0 of N", rows
