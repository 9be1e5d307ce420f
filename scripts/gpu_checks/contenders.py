"""Part `fake`: time and memory of a step, beside FSDP1, FSDP2 and the unwrapped model."""

import argparse
import gc
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import benchmark
import torch
from benchmark import Trainer, make_batch
from lib.gpt import GPT, Preset
from torch import nn

from gpu_checks.places import (
    FAIL,
    FAKE_RANKS,
    PASS,
    Outcome,
    Place,
    group_without_cpu,
    one_line,
    simulate,
)
from gpu_checks.training import BILLION, WARMUP, build_gpt

ROUNDS, STEPS_PER_TURN = 5, 3


def wrap_without_cpu(model: GPT, args: argparse.Namespace) -> nn.Module:
    group = group_without_cpu(next(model.parameters()).device)
    return benchmark.wrap_flatshard(model, args, process_group=group)


CONTENDERS: dict[str, Callable[[GPT, argparse.Namespace], nn.Module]] = {
    "flatshard": benchmark.wrap_flatshard,
    # Without a backend for the CPU, the ranks exchange numbers in GPU memory, as with NCCL only.
    "flatshard, no CPU group": wrap_without_cpu,
    "fsdp1": benchmark.wrap_fsdp1,
    "fsdp2": benchmark.wrap_fsdp2,
    "plain": lambda model, args: model,
}


class Contender(Trainer):
    """One implementation in training. Measures its time and memory beside other contenders."""

    def __init__(self, name: str, preset: Preset, device: torch.device) -> None:
        before = allocated(device)
        options = argparse.Namespace(strategy="FULL_SHARD", bf16=True)
        model = CONTENDERS[name](build_gpt(preset, device), options)
        super().__init__(model, make_batch(preset, 0, device), "adamw", autocast=name == "plain")
        self.train(WARMUP)
        gc.collect()
        self.bytes_between_steps = allocated(device) - before

    def turn(self) -> dict[str, Any]:
        """Train some steps; returns seconds per step on device and host, and peak memory."""
        gc.collect()
        of_others = allocated(self.batch.device) - self.bytes_between_steps
        if self.clock.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = self.train(STEPS_PER_TURN)["seconds"]
        begin = time.perf_counter()
        self.step()  # only one step, because a full queue of kernels would delay the host
        host_seconds = time.perf_counter() - begin
        self.clock.wait()
        peak = torch.cuda.max_memory_allocated() - of_others if self.clock.is_cuda else None
        return {"seconds": seconds, "host_seconds": host_seconds, "peak_bytes": peak}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def preset_for(device: torch.device) -> Preset:
    if device.type == "cpu":
        return benchmark.PRESETS["tiny"]
    # All contenders are in GPU memory at the same time, and the plain model is not sharded.
    fits = torch.cuda.get_device_properties(device).total_memory > 60 << 30
    return BILLION if fits else benchmark.PRESETS["gpt-120m"]


def part_fake(place: Place, args: argparse.Namespace) -> Outcome:
    device = torch.device("cuda", 0) if place.is_cuda else torch.device("cpu")
    preset = preset_for(device)
    deadline = time.monotonic() + 0.8 * args.limit
    simulate(device, FAKE_RANKS)
    warnings.simplefilter("ignore")  # deprecation warnings of other wrappers
    contenders, missing = build_contenders(preset, device)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for first in range(ROUNDS):
        # Rotate the order, because a contender may be slow after a contender that uses much memory
        # or keeps the GPU busy.
        names = list(contenders)
        for name in names[first % len(names) :] + names[: first % len(names)]:
            turns[name].append(contenders[name].turn())
        if time.monotonic() > deadline:
            break
    rows = summarize(turns, units=preset.layers + 1)
    lines = [f"{preset.layers} layers of width {preset.width}, rank 0 of {FAKE_RANKS}"]
    lines += [describe_row(name, row) for name, row in rows.items()]
    lines += [f"{name}: {why}" for name, why in missing.items()]
    # Only the plain model may be too large for the GPU.
    failed = set(missing) - {"plain"}
    return Outcome(FAIL if failed else PASS, "\n".join(lines), {"rows": rows, "missing": missing})


def build_contenders(
    preset: Preset, device: torch.device
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Build all contenders, the largest last; returns them, and errors of the missing ones."""
    contenders, missing = {}, {}
    for name in CONTENDERS:
        try:
            contenders[name] = Contender(name, preset, device)
        except torch.cuda.OutOfMemoryError:
            missing[name] = "does not fit"
        except Exception as error:
            traceback.print_exc()
            missing[name] = one_line(error)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return contenders, missing


def summarize(turns: dict[str, list[dict[str, Any]]], units: int) -> dict[str, dict[str, Any]]:
    baseline = turns.get("fsdp1")
    rows = {}
    for name, of_name in turns.items():
        host = statistics.median(turn["host_seconds"] for turn in of_name)
        row = {
            "seconds": statistics.median(turn["seconds"] for turn in of_name),
            "host_seconds": host,
            "host_seconds_per_unit": host / units,
            "peak_bytes": of_name[-1]["peak_bytes"],
            "ratio": None,
        }
        if baseline:
            pairs = zip(of_name, baseline, strict=True)
            row["ratio"] = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        rows[name] = row
    return rows


def describe_row(name: str, row: dict[str, Any]) -> str:
    text = f"{name}: {1000 * row['seconds']:.1f} ms"
    if row["ratio"] is not None:
        text += f", {row['ratio']:.2f} x fsdp1"
    text += f", host {1000 * row['host_seconds']:.1f} ms"
    text += f" ({1e6 * row['host_seconds_per_unit']:.0f} us per unit)"
    return text + (f", {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else "")
