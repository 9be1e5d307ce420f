"""Part `overlap`: how long NCCL's kernels overlap with other kernels, from a profile."""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmark import Clock

from gpu_checks.places import FAIL, NO_GPU, PASS, SKIP, Outcome, Place, in_ranks
from gpu_checks.training import MEDIUM, SMALL, WARMUP, Stepper

Span = tuple[float, float]


def profile_step(rank: int, device: torch.device, place: Place, path: str) -> None:
    stepper = Stepper(MEDIUM if place.is_cuda else SMALL, rank, device, None)
    clock = Clock(device)
    for _ in range(WARMUP + 1):
        stepper.step()
    clock.wait()
    dist.barrier()
    if rank > 0:
        stepper.step()
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        stepper.step()
        clock.wait()
    profiler.export_chrome_trace(path)


def kernels(trace: dict[str, Any]) -> tuple[list[Span], list[Span]]:
    """Times, in microseconds, at which the kernels of collectives ran, and all other kernels."""
    collectives, others = [], []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            of_kind = collectives if "nccl" in event["name"].lower() else others
            of_kind.append((start, start + float(event["dur"])))
    return collectives, others


def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch or overlap; returns sorted spans."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Total time that is in both lists of spans."""
    first, second = union(first), union(second)
    return length(first) + length(second) - length(union([*first, *second]))


def part_overlap(place: Place, args: argparse.Namespace) -> Outcome:
    if place.ranks == 1:
        return Outcome(SKIP, args.why_no_nccl)
    with tempfile.TemporaryDirectory() as folder:
        path = str(args.trace or f"{folder}/trace.json")
        in_ranks(profile_step, place, path)
        collectives, others = kernels(json.loads(Path(path).read_text()))
    if not place.is_cuda:
        return Outcome(SKIP, f"{NO_GPU}, so there are no kernels to overlap; the step itself ran")
    if not collectives or not others:
        return Outcome(
            FAIL, f"{len(collectives)} kernels of NCCL and {len(others)} other kernels in a step"
        )
    busy, shared = length(union(collectives)), overlap(collectives, others)
    figures = {
        "collectives_us": busy,
        "compute_us": length(union(others)),
        "overlap_us": shared,
        "fraction": shared / busy,
        "ranks_share_gpu": place.shares_gpu,
    }
    text = (
        f"{place.describe()}: {100 * shared / busy:.0f} % of {busy / 1000:.1f} ms of NCCL overlap "
        f"with computation ({figures['compute_us'] / 1000:.1f} ms)"
    )
    if place.shares_gpu:
        text += "; the ranks take turns on the GPU, so NCCL's time includes waiting"
    return Outcome(PASS if shared > 0 else FAIL, text, figures)
