"""Measures the time and the peak memory of building a sharded model.

    python scripts/measure/construction.py --layers 24 --width 1792 --world-size 2

Builds a decoder of transformer blocks on the meta device, and wraps it with one unit per block, by
flatshard and by torch's FSDP1 and FSDP2. Each run has new processes on this machine's CPU (gloo).
Prints the seconds from the meta model to a model that can train, and how much the peak RSS is above
the RSS before wrapping. Every implementation needs at least the memory of its shards and of one
unit.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import measuring  # first, because this import may end the script
import torch
import torch.distributed as dist
from benchmark import Block
from measuring import mib, reset_peak, resident_bytes
from offload import Decoder
from rich import print as rich_print
from torch import nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# --------------------------------------------------------------------------------- the three ways


def build_flatshard(model: Decoder) -> nn.Module:
    return ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def build_fsdp1(model: Decoder) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    policy = wrap.ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


def build_fsdp2(model: Decoder) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
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
    with torch.device("meta"):
        tiny = Decoder(1, 16, 16)
    WAYS[way](tiny)
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPES[args.dtype])
    with torch.device("meta"):
        model = Decoder(args.layers, args.width, args.vocabulary)
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    total = sum(p.nbytes for p in model.parameters())
    gc.collect()
    before = resident_bytes("VmRSS")
    reset_peak()
    dist.barrier()
    begin = time.perf_counter()
    built = WAYS[way](model)
    dist.barrier()
    seconds = time.perf_counter() - begin
    assert not any(p.is_meta for p in built.parameters())
    return {
        "way": way,
        "seconds": seconds,
        "peak": resident_bytes("VmHWM") - before,
        "after": resident_bytes("VmRSS") - before,
        "shards": total / args.world_size,
        "largest_unit": max(*blocks, total - sum(blocks)),
        "numel": total // DTYPES[args.dtype].itemsize,
    }


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one implementation; returns the figures of the rank with the highest peak."""
    ranks = measuring.figures_of_ranks(measure_rank, args.world_size, way, args)
    return max(ranks, key=lambda figures: figures["peak"])


def show(rows: list[dict[str, Any]]) -> None:
    table = measuring.table(
        f"{rows[0]['numel']:,} parameters; MiB of the rank with the highest peak",
        *("", "seconds", "peak", "shards", "largest unit", "peak - shards", "RSS after"),
    )
    for row in rows:
        sizes = (row["peak"], row["shards"], row["largest_unit"], row["peak"] - row["shards"])
        table.add_row(row["way"], f"{row['seconds']:.2f}", *map(mib, (*sizes, row["after"])))
    rich_print(table)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line. Exits with status 2 if an option is wrong."""
    parser = measuring.Parser(__doc__)
    add = parser.add_argument
    parser.add_names("--impl", WAYS, "implementations")
    add("--world-size", type=int, default=2, help="ranks to start on this machine (default: 2)")
    add("--layers", type=int, default=4, help="number of blocks (default: 4)")
    add("--width", type=int, default=512, help="width of the model (default: 512)")
    add("--vocabulary", type=int, default=8192, help="tokens in the vocabulary (default: 8192)")
    add("--dtype", choices=DTYPES, default="float32", help="parameters' dtype (default: float32)")
    add("--rounds", type=int, default=1, help="number of runs; the fastest counts (default: 1)")
    parser.add_json("all figures, in bytes,")
    args = parser.parse_args(arguments)
    args.impl = measuring.choose(parser, "--impl", args.impl, WAYS)
    if min(args.world_size, args.layers, args.width, args.vocabulary, args.rounds) < 1:
        parser.error(
            "--world-size, --layers, --width, --vocabulary and --rounds must be at least 1"
        )
    measuring.require_proc(parser)
    return args


if __name__ == "__main__":
    args = parse_args()
    # Alternate between implementations, so that other load on the machine affects all of them.
    runs = [[measure(way, args) for way in args.impl] for _ in range(args.rounds)]
    rows = [min(of_way, key=lambda run: run["seconds"]) for of_way in zip(*runs, strict=True)]
    show(rows)
    measuring.write_json(args.json, rows)
