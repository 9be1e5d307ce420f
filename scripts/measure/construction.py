"""Measures the time and the peak memory of building a sharded model.

    python scripts/measure.py construction --layers 24 --width 1792 --world-size 2

Builds a decoder of transformer blocks on the meta device, and wraps it with one unit per block, by
flatshard and by torch's FSDP1 and FSDP2. Each run has new processes on this machine's CPU (gloo).
Prints the seconds from the meta model to a model that can train (the fastest of `--rounds`), and
how much the peak RSS is above the RSS before wrapping, of the rank with the highest peak. Every
implementation needs at least the memory of its shards and of one unit.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from benchmark import wrap_flatshard, wrap_fsdp2
from lib.gpt import Block
from measuring import figures_of_ranks, measured
from offload import Decoder
from torch import nn

# --------------------------------------------------------------------------------- the three ways


# `benchmark.py` wraps blocks with these options.
USUAL = argparse.Namespace(strategy="FULL_SHARD", bf16=False)


def build_flatshard(model: Decoder) -> nn.Module:
    return wrap_flatshard(model, USUAL)


def build_fsdp1(model: Decoder) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    policy = wrap.ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


def build_fsdp2(model: Decoder) -> nn.Module:
    wrap_fsdp2(model, USUAL)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


WAYS: dict[str, Callable[[Decoder], nn.Module]] = {
    "flatshard": build_flatshard,
    "fsdp1": build_fsdp1,
    "fsdp2": build_fsdp2,
}

# ------------------------------------------------------------------------------------------ ranks


def measure_rank(way: str, args: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # deprecation warnings of other wrappers
    # Wrap a tiny model first, so that imports and new threads do not count.
    torch.manual_seed(0)
    with torch.device("meta"):
        tiny = Decoder(1, 16, 16)
    WAYS[way](tiny)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(args.layers, args.width, args.vocabulary)
    numel = sum(p.numel() for p in model.parameters())
    seconds, peak, built = measured(WAYS[way], model)
    assert not any(p.is_meta for p in built.parameters())
    return {"seconds": seconds, "peak": peak, "numel": numel}


OPTIONS = {
    "impl": list(WAYS),
    "world_size": 2,
    "layers": 4,
    "width": 512,
    "vocabulary": 8192,
    "rounds": 1,
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in args.impl}
    # Alternate between implementations, so that other load on the machine affects all of them.
    for way in args.impl * args.rounds:
        ranks = figures_of_ranks(measure_rank, args.world_size, way, args)
        runs[way].append(max(ranks, key=lambda figures: figures["peak"]))
    rows = []
    for way, some in runs.items():
        best = min(some, key=lambda run: run["seconds"])
        rows.append({"": way, "seconds": best["seconds"], "peak MiB": best["peak"]})
    return f"{best['numel']:,} parameters, on the rank with the highest peak", rows
