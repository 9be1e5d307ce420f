"""Measures how long it takes to read all full weights of a sharded model, and what memory it takes.

    python scripts/measure.py weights --model many-small --world-size 2

Builds the same GPT by flatshard and by torch's FSDP1 and FSDP2 in the same processes (gloo, this
machine's CPU), and reads all full parameters in each way, round by round in turn: ``full_tensors``,
a loop over FSDP2's ``full_tensor()``, FSDP1's ``summon_full_params``, and a full state dict. One
all-gather of the model's bytes into one tensor is the lower bound. Then measures a forward and
backward, and the norms of the new gradients. Prints medians in milliseconds, and the peak RSS above
the RSS before the reading, of the rank with the highest peak. The documentation promises a peak of
at most three times the largest unit (with buckets: two buckets and the largest unit) beside the
rank's own shards. The RSS also contains freed memory that glibc keeps for later. To measure only
the tensors, set the environment variable MALLOC_MMAP_THRESHOLD_=1000000; the times are then longer.
"""

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmark import PRESETS, make_batch, make_model, wrap_flatshard, wrap_fsdp1, wrap_fsdp2
from measuring import MIB, figures_of_ranks, reset_peak, resident_bytes

import flatshard
from flatshard import ShardedWrapper


class Models:
    """The same model, sharded by each wrapper, with gradients of one backward."""

    def __init__(self, args: argparse.Namespace) -> None:
        preset = PRESETS[args.model]
        wraps = (wrap_flatshard, wrap_fsdp1, wrap_fsdp2)
        args.strategy, args.bf16 = "FULL_SHARD", False
        cpu = torch.device("cpu")
        self.tokens = make_batch(preset, dist.get_rank(), cpu)
        built = [wrap(make_model(preset, cpu), args) for wrap in wraps]
        for model in built:
            self.step(model)
        self.flatshard, self.fsdp1, self.fsdp2 = built
        self.numel = sum(p.numel() for p in make_model(preset, cpu).parameters())
        self.unit_bytes = max(one.flat_layout.padded_numel for one in self.parts) * 4

    def step(self, model: torch.nn.Module) -> None:
        """Run a forward and a backward, without an optimizer step."""
        model.zero_grad()
        model(self.tokens[:, :-1]).square().mean().backward()

    @property
    def parts(self) -> list[flatshard.FlatParameter]:
        assert isinstance(self.flatshard, ShardedWrapper)
        return self.flatshard.flat_parameters()


def read_full_tensors(models: Models, **keywords: Any) -> None:
    for _ in flatshard.full_tensors(models.flatshard, **keywords):
        pass


def read_fsdp2(models: Models) -> None:
    for param in models.fsdp2.parameters():
        param.full_tensor()  # type: ignore[attr-defined]


def read_fsdp1(models: Models) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in FullyShardedDataParallel.fsdp_modules(models.fsdp1):
        with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
            pass


def read_state_dict(models: Models) -> None:
    models.flatshard.state_dict()


def gather_once(models: Models) -> None:
    """One all-gather of as many bytes as the model has."""
    shard = torch.zeros(-(-models.numel // dist.get_world_size()))
    dist.all_gather_into_tensor(shard.new_empty(shard.numel() * dist.get_world_size()), shard)


def norms_flatshard(models: Models) -> None:
    models.flatshard.norms("grad")  # type: ignore[operator]


def norms_fsdp2(models: Models) -> None:
    for param in models.fsdp2.parameters():
        assert param.grad is not None
        param.grad.norm().full_tensor().item()  # type: ignore[attr-defined]


STEP = "forward and backward"
WAYS: dict[str, Callable[[Models], None]] = {
    "full_tensors": read_full_tensors,
    "full_tensors, bucket": lambda models: read_full_tensors(
        models, bucket_bytes=models.unit_bytes
    ),
    "FSDP2 full_tensor()": read_fsdp2,
    "FSDP1 summon_full_params": read_fsdp1,
    "state_dict()": read_state_dict,
    "one all-gather": gather_once,
    STEP: lambda models: models.step(models.flatshard),
    'norms("grad")': norms_flatshard,
    "norms, FSDP2 loop": norms_fsdp2,
}


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # deprecation warnings of other wrappers
    models = Models(args)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks: dict[str, int] = {}
    models.flatshard.state_dict()  # maps the shards of the other ranks, which counts as RSS
    for _ in range(1 + args.rounds):
        for name, read in WAYS.items():
            gc.collect()
            before = resident_bytes("VmRSS")
            reset_peak()
            dist.barrier()
            begin = time.perf_counter()
            read(models)
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
            peaks[name] = max(peaks.get(name, 0), resident_bytes("VmHWM") - before)
    return {
        "numel": models.numel,
        "shard_bytes": sum(part.nbytes for part in models.parts),
        "unit_bytes": models.unit_bytes,
        "num_parts": len(models.parts),
        "ms": {name: 1000 * statistics.median(some[1:]) for name, some in times.items()},
        "peaks": peaks,
    }


OPTIONS = {
    "model": ("many-small", *(name for name in PRESETS if name != "many-small")),
    "world_size": 2,
    "rounds": 5,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    ranks = figures_of_ranks(measure_rank, args.world_size, args)
    first, rows = ranks[0], []
    for name, ms in first["ms"].items():
        loop = "norms, FSDP2 loop" if "norms" in name else "FSDP2 full_tensor()"
        rows.append(
            {
                "": name,
                "ms": ms,
                "of FSDP2's loop": None if name == STEP else ms / first["ms"][loop],
                "of a step": None if name == STEP else ms / first["ms"][STEP],
                "peak MiB": max(one["peaks"][name] for one in ranks) / MIB,
                "at most MiB": 3 * first["unit_bytes"] / MIB if "full_tensors" in name else None,
            }
        )
    title = (
        f"{args.model} on {args.world_size} ranks: {first['numel']:,} parameters "
        f"({first['numel'] * 4 / MIB:,.0f} MiB, {first['shard_bytes'] / MIB:,.0f} MiB per rank) in "
        f"{first['num_parts']} flat parameters"
    )
    return title, rows
