"""Code that the measures share: ranks that return figures, and memory."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MIB = 2**20


def reset_peak() -> None:
    """Reset the peak, so that ``resident_bytes("VmHWM")`` is the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def figures_of_ranks(
    measure: Callable[..., dict[str, Any]], world_size: int, *arguments: Any
) -> list[dict[str, Any]]:
    """Call ``measure(*arguments)`` on new ranks; returns each rank's figures."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (measure, world_size, folder, arguments), nprocs=world_size)
        return [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(world_size)]


def _run_rank(
    rank: int,
    measure: Callable[..., dict[str, Any]],
    world_size: int,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    Path(folder, f"{rank}.json").write_text(json.dumps(measure(*arguments)))
    # Wait for all ranks: the first rank that ends removes the store's file, which the other ranks
    # still need.
    dist.barrier()
    dist.destroy_process_group()
