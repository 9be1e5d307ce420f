"""Measures saving and loading of a model and its AdamW state, beside FSDP2 with torch's DCP.

    python scripts/measure.py checkpoints --world-size 2 --folder /tmp

Both take turns in the same ranks on this machine's CPU (gloo). Prints the seconds of the fastest
run, and how much the peak RSS is above the RSS before. The system may keep the files in memory.
"""

import argparse
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from construction import build_flatshard, build_fsdp2
from measuring import figures_of_ranks, measured
from offload import Decoder
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from flatshard import checkpoint

OPTIONS = {"layers": 10, "width": 1024, "world_size": 2, "repeat": 5, "folder": Path(".")}


def save_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)


def load_dcp(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


WAYS = {
    "flatshard": (build_flatshard, checkpoint.save, checkpoint.load),
    "fsdp2": (build_fsdp2, save_dcp, load_dcp),
}


def trained(
    build: Callable[[Decoder], nn.Module], args: argparse.Namespace
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step with random gradients: zeros might need no memory."""
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = Decoder(args.layers, args.width, args.width)
    model = build(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param).normal_()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure_rank(args: argparse.Namespace) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # deprecation warnings of torch
    sides = {name: trained(build, args) for name, (build, *_) in WAYS.items()}
    runs: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    path = args.folder / "flatshard-measured"
    for _ in range(args.repeat):
        for name, (_, save, load) in WAYS.items():
            works = (measured(work, path, *sides[name]) for work in (save, load))
            runs[name].append([cost for *costs, _ in works for cost in costs])
            if dist.get_rank() == 0:
                shutil.rmtree(path)
    columns = "save s", "save MiB", "load s", "load MiB"
    return [
        {"": name, **dict(zip(columns, map(min, zip(*of_name, strict=True)), strict=True))}
        for name, of_name in runs.items()
    ]


def measure(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    rows, *_ = figures_of_ranks(measure_rank, args.world_size, args)
    return f"Checkpoints on {args.world_size} ranks, fastest of {args.repeat}", rows
