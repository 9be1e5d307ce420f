"""Measures saving and loading of a model and its AdamW state, beside the speed of the disk.

    python scripts/measure.py checkpoints --world-size 2 --folder /tmp

These implementations take turns on this machine's CPU (gloo): flatshard.checkpoint (`unverified`:
with verify=False), FSDP1 and FSDP2 (both with sharded torch.distributed.checkpoint), and torch.save
of an unwrapped model on rank 0. `dd` writes and syncs the same number of bytes. Files are dropped
from the page cache before they are loaded. Prints seconds and GB/s of the fastest run, the CPU
seconds of all ranks, and how much the peak RSS is above the RSS before.
"""

import argparse
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from construction import build_flatshard, build_fsdp1, build_fsdp2
from measuring import MIB, figures_of_ranks, reset_peak, resident_bytes
from offload import Decoder
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from flatshard import checkpoint

Way = tuple[Callable[..., nn.Module], Callable[..., None], Callable[..., None]]

# ----------------------------------------------------------------------------------------- the ways


def save_flatshard(path: Path, model: nn.Module, optimizer: Any) -> None:
    checkpoint.save(path, model, optimizer)


def load_flatshard(path: Path, model: nn.Module, optimizer: Any) -> None:
    checkpoint.load(path, model, optimizer)


def load_unverified(path: Path, model: nn.Module, optimizer: Any) -> None:
    checkpoint.load(path, model, optimizer, verify=False)


def save_dcp(path: Path, model: nn.Module, optimizer: Any) -> None:
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=path,
    )


def load_dcp(path: Path, model: nn.Module, optimizer: Any) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def save_file(path: Path, model: nn.Module, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        with (path / "all.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())


def load_file(path: Path, model: nn.Module, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        states = torch.load(path / "all.pt", weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])


def build_unwrapped(model: Decoder) -> nn.Module:
    model.to_empty(device="cpu")
    return model if dist.get_rank() == 0 else Decoder(1, 16, 16)


WAYS: dict[str, Way] = {
    "flatshard": (build_flatshard, save_flatshard, load_flatshard),
    "unverified": (build_flatshard, save_flatshard, load_unverified),
    "fsdp1": (build_fsdp1, save_dcp, load_dcp),
    "fsdp2": (build_fsdp2, save_dcp, load_dcp),
    "torch.save": (build_unwrapped, save_file, load_file),
}

# -------------------------------------------------------------------------------------------- ranks


def evict(path: Path) -> None:
    """Drop files from the page cache, so that the next read comes from the disk."""
    for one in path.rglob("*") if path.is_dir() else [path]:
        if one.is_file():
            with one.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(work: Callable[..., None], *given: Any) -> dict[str, float]:
    """Run ``work``; returns seconds of the slowest rank, and this rank's CPU seconds and peak RSS.

    The peak RSS is the increase over the RSS before.
    """
    dist.barrier()
    reset_peak()
    before, start, cpu = resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    work(*given)
    peak = resident_bytes("VmHWM") - before
    cpu = time.process_time() - cpu
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {"seconds": seconds.item(), "cpu_seconds": cpu, "peak_bytes": peak}


def run_dd(path: Path, num_bytes: int) -> dict[str, dict[str, float]]:
    """Figures of `dd` on rank 0, for writing and syncing ``num_bytes``, and for reading them."""

    def run(*arguments: str) -> None:
        if dist.get_rank() == 0:
            subprocess.run(["dd", *arguments, "bs=16M"], check=True, stderr=subprocess.DEVNULL)

    count = f"count={-(-num_bytes // 2**24)}"
    save = measured(lambda: run("if=/dev/zero", f"of={path}", count, "conv=fsync"))
    if dist.get_rank() == 0:
        evict(path)
    load = measured(lambda: run(f"if={path}", "of=/dev/null"))
    if dist.get_rank() == 0:
        path.unlink()
    return {"save": save, "load": load}


def measure_rank(args: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # deprecation warnings of other wrappers
    folder = args.folder / "flatshard-measured"
    sides: dict[str, tuple[nn.Module, Any]] = {}
    for build in {WAYS[name][0] for name in args.impl}:
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Decoder(args.layers, args.width, args.width)
        model = build(model)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.02)
        optimizer = torch.optim.AdamW(model.parameters())
        # Use random gradients, so that the state is not zeros. Pages of zeros might not exist in
        # memory.
        for param in model.parameters():
            param.grad = torch.zeros_like(param).normal_()
        optimizer.step()
        optimizer.zero_grad()
        sides[build.__name__] = model, optimizer
    num_bytes = 0
    figures: dict[str, list[dict[str, dict[str, float]]]] = {
        name: [] for name in ["dd", *args.impl]
    }
    for repeat in range(args.repeat + 1):  # the first round is a warm-up
        # Rotate the order, because the first implementation of a round finds another page cache.
        names = args.impl
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            build, save, load = WAYS[name]
            side, path = sides[build.__name__], folder / name
            dist.barrier()
            if dist.get_rank() == 0:
                folder.mkdir(exist_ok=True)
                os.sync()
            figure = {"save": measured(save, path, *side)}
            dist.barrier()
            if name == "flatshard":
                num_bytes = sum(one.stat().st_size for one in path.iterdir())
            evict(path)
            figure["load"] = measured(load, path, *side)
            figures[name] += [figure] if repeat else []
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
        if repeat:
            figures["dd"].append(run_dd(folder / "dd", num_bytes))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {"figures": figures, "bytes": num_bytes}


# --------------------------------------------------------------------------------------------- rows

OPTIONS = {
    "impl": list(WAYS),
    "layers": 10,
    "width": 1024,
    "world_size": 2,
    "repeat": 5,
    "folder": Path("."),
}


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    return rows_of(figures_of_ranks(measure_rank, args.world_size, args), args)


def rows_of(
    ranks: list[dict[str, Any]], args: argparse.Namespace
) -> tuple[str, list[dict[str, Any]]]:
    num_bytes, rows = ranks[0]["bytes"], []
    for name, own in ranks[0]["figures"].items():
        row: dict[str, Any] = {"": name}
        for action in ("save", "load"):
            of_ranks = [[one[action] for one in rank["figures"][name]] for rank in ranks]
            seconds = min(one[action]["seconds"] for one in own)
            row[f"{action} s"], row[f"{action} GB/s"] = seconds, num_bytes / seconds / 1e9
            row[f"{action} CPU s"] = min(
                sum(run["cpu_seconds"] for run in runs) for runs in zip(*of_ranks, strict=True)
            )
            row[f"{action} MiB"] = max(run["peak_bytes"] for some in of_ranks for run in some) / MIB
        rows.append(row)
    title = f"{num_bytes / 1e9:.2f} GB, {args.world_size} ranks, fastest of {args.repeat}"
    return title, rows
