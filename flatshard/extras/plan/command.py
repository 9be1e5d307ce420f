"""The command ``flatshard plan``. Its options are the keywords of ``plan``."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from typing import Any

import torch

from flatshard.extras.plan.hardware import DEVICES, amount, calibrate
from flatshard.extras.plan.report import (
    DTYPES,
    OPTIMIZERS,
    STRATEGIES,
    Target,
    counts,
    plan,
    stages,
)

_HELP = {
    "ranks": "numbers of ranks to compare: 8, or 8,64, or 8..64 (8, 16, 32, 64)",
    "per_node": "ranks in one node",
    "device": "kind of GPU",
    "memory": "memory per device, such as 80GB (powers of 1000) or 80GiB",
    "flops": "sustained FLOP/s of matrix products, such as 600T",
    "link": "bytes per second that one rank sends to other nodes, if all ranks of the node send",
    "node_link": "bytes per second that one rank sends to ranks of its node",
    "batch": "sequences per rank",
    "seq": "tokens per sequence",
    "dtype": "dtype in which the model computes",
    "optimizer": "optimizer, which determines the bytes of optimizer state",
    "checkpoint": "forwards that backward recomputes",
    "accumulate": "backwards per step; all but the last under no_sync",
}
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "optimizer": OPTIMIZERS,
    "checkpoint": ("none", "block", "selective"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    text = "a preset such as llama3-8b, a config.json, or package.module:function"
    add("spec", nargs="?", help=text)
    defaults = {one.name: one.default for one in fields(Target)}
    for name, text in _HELP.items():
        kind = int if name in ("per_node", "batch", "seq", "accumulate") else str
        more = {"choices": _CHOICES[name]} if name in _CHOICES else {"type": kind}
        add(f"--{name.replace('_', '-')}", default=defaults[name], help=text, **more)
    add("--compile", action="store_true", help="compile each block")
    add("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    add("--plot", metavar="FILE", help="plot memory over a step, and speed against memory")
    add("--json", action="store_true", help="print JSON")
    add("--calibrate", action="store_true", help="measure this machine's speed, and print --flops")


def run(options: dict[str, Any]) -> None:
    """Print the plan for ``options``. Raises ValueError if the options cannot be used."""
    plot, as_json, measures = (options.pop(name) for name in ("plot", "json", "calibrate"))
    spec = options.pop("spec")
    if measures:
        if spec is not None:
            raise ValueError("--calibrate measures this machine and takes no SPEC. Leave out SPEC.")
        name = "cuda" if torch.cuda.is_available() else "cpu"
        found = calibrate(name)
        print(f"{name}: --flops {found.flops / 1e12:.2f}T")
        print(f"{name}: attention {found.attention_flops / 1e12:.2f} TFLOP/s")
        print(f"{name}: memory {found.memory_rate / 1e9:.1f} GB/s")
    elif spec is None:
        raise ValueError(
            "expected a SPEC or --calibrate. SPEC is a preset, a config.json or a function."
        )
    elif re.fullmatch(r"[0-9.]+[MBT]", spec):
        print(stages(amount(spec.replace("B", "G")), counts(options["ranks"])))
    else:
        made = plan(spec, **options)
        if plot:
            made.plot(plot)
        print(json.dumps(made.to_dict(), indent=1) if as_json else made)
