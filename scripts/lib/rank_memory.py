"""Memory of a rank's model, optimizer and process."""

import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.training_job import say


def held_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of `tensors` on this rank; a sharded tensor counts with its local part."""
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Returns the bytes of parameters, gradients and optimizer state on this rank, and the peak."""
    states = (value for state in optimizer.state.values() for value in state.values())
    if dist.get_backend() == "nccl":
        peak = torch.cuda.max_memory_allocated()
    else:
        # Peak RSS of the whole process, with Python, torch and the data. Linux reports KiB, macOS
        # reports bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {
        "parameter_bytes": held_bytes(model.parameters()),
        "gradient_bytes": held_bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer_bytes": held_bytes(value for value in states if isinstance(value, Tensor)),
        "peak_bytes": peak,
    }


def memory_of_ranks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns and prints the memory report of each rank. Collective."""
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, memory_report(model, optimizer))
    for rank, report in enumerate(reports):
        sizes = (f"{name.split('_')[0]} {size / 2**20:,.2f}" for name, size in report.items())
        say(f"Rank {rank}, MiB: {', '.join(sizes)}")
    return reports
