"""Measures ``WeightChanges`` beside ``full_tensors``: bytes and time, by the share that changed.

    torchrun --standalone --nproc-per-node 2 scripts/measure/changes.py --collectives sockets

Shards the GPT of 20 million parameters of ``scripts/benchmark.py``, changes a share of its values,
and sends the weights in bfloat16 in both ways, in turn. Prints medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmark import PRESETS, make_model

import flatshard

ROUNDS = 7


def read(items: Iterator[Any]) -> tuple[float, int]:
    """Read to the end; return the seconds, and the bytes of the collectives of this rank."""
    dist.barrier()
    begin = time.perf_counter()
    with flatshard.collectives.record() as events:
        for _ in items:
            pass
    dist.barrier()
    return time.perf_counter() - begin, sum(event.nbytes for event in events)


def change(model: flatshard.ShardedWrapper, share: float) -> None:
    with torch.no_grad():
        for part in model.flat_parameters():
            values = part.detach()
            values[torch.rand(values.shape) < share] += 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collectives", default="auto", help="how bytes are moved (default: auto)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plain = make_model(PRESETS["gpt-20m"], torch.device("cpu"))
    model = flatshard.ShardedWrapper(plain, auto_wrap_policy="auto", collectives=args.collectives)
    changes = flatshard.WeightChanges(model)
    list(changes.changes())
    for share in (0.01, 0.03, 0.3, 1.0):
        rows = []
        for _ in range(ROUNDS):
            change(model, share)
            full = flatshard.full_tensors(model, dtype=torch.bfloat16)
            rows.append((*read(changes.changes()), *read(full)))
        seconds, nbytes, full_seconds, full_nbytes = map(statistics.median, zip(*rows, strict=True))
        if dist.get_rank() == 0:
            print(
                f"{share:4.0%}: changes {1e3 * seconds:4.0f} ms, {nbytes / 2**20:5.1f} MiB; "
                f"full_tensors {1e3 * full_seconds:4.0f} ms, {full_nbytes / 2**20:5.1f} MiB"
            )


main()
