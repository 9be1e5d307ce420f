"""Code that the measures share: ranks that return figures, time and memory."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark import resident_bytes
from gpu_checks.places import Place, in_ranks

MIB = 2**20


def reset_peak() -> None:
    """Reset the peak, so that ``resident_bytes("VmHWM")`` is the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(work: Callable[..., Any], *given: Any) -> tuple[float, float, Any]:
    """Call ``work(*given)`` on all ranks at the same time; returns what it costs, and the result.

    The costs are seconds, and by how many MiB the RSS rose at its peak.
    """
    gc.collect()
    before = resident_bytes("VmRSS")
    reset_peak()
    dist.barrier()
    begin = time.perf_counter()
    result = work(*given)
    dist.barrier()
    seconds = time.perf_counter() - begin
    return seconds, (resident_bytes("VmHWM") - before) / MIB, result


def figures_of_ranks(measure: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call ``measure(*arguments)`` on new ranks of this machine's CPU; returns their figures."""
    return in_ranks(_call, Place("cpu", "gloo", world_size), measure, *arguments)


def _call(
    rank: int, device: torch.device, place: Place, measure: Callable[..., Any], *arguments: Any
) -> Any:
    return measure(*arguments)
