"""The command ``flatshard plan``. Its options are the keywords of ``plan``."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import torch

from flatshard.extras.plan.hardware import DEVICES, amount, calibrate
from flatshard.extras.plan.planning import DTYPES, OPTIMIZERS, STRATEGIES
from flatshard.extras.plan.report import counts, plan, stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add(
        "spec",
        nargs="?",
        help="a preset such as llama3-8b, a config.json, or package.module:function",
    )
    add("--ranks", default="8", help="numbers of ranks: 8, or 8,64, or 8..64 (doubling)")
    add("--per-node", type=int, default=8, help="ranks in one node")
    add("--device", choices=DEVICES, default="h100")
    add("--memory", help="memory per device, such as 80GB (powers of 1000) or 80GiB")
    add("--flops", help="sustained FLOP/s of matrix products, such as 600T")
    add(
        "--link",
        default="50GB/s",
        help="bytes per second that one rank sends to other nodes, if all ranks of the node send",
    )
    add(
        "--node-link",
        default="450GB/s",
        help="bytes per second that one rank sends to ranks of its node",
    )
    add("--batch", type=int, default=1, help="sequences per rank")
    add("--seq", type=int, default=2048, help="tokens per sequence")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype in which the model computes")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--checkpoint", choices=("none", "block", "selective"), default="none")
    add("--compile", action="store_true", help="compile each block")
    add(
        "--accumulate",
        type=int,
        default=1,
        help="backwards per step; all but the last under no_sync",
    )
    add("--strategy", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    add("--plot", metavar="FILE", help="plot memory over a step, and speed against memory")
    add("--json", action="store_true", help="print JSON")
    add("--calibrate", action="store_true", help="measure this machine's speed, and print --flops")


def run(options: dict[str, Any]) -> None:
    """Print the plan for ``options``. Raises ValueError if the options cannot be used."""
    plot, as_json, measures = (options.pop(name) for name in ("plot", "json", "calibrate"))
    if measures:
        if options["spec"] is not None:
            raise ValueError("--calibrate measures this machine and takes no SPEC. Leave out SPEC.")
        name = "cuda" if torch.cuda.is_available() else "cpu"
        found = calibrate(name)
        print(f"{name}: --flops {found.flops / 1e12:.2f}T")
        print(f"{name}: attention {found.attention_flops / 1e12:.2f} TFLOP/s")
        print(f"{name}: memory {found.memory_rate / 1e9:.1f} GB/s")
        return
    if options["spec"] is None:
        raise ValueError(
            "expected a SPEC or --calibrate. SPEC is a preset, a config.json or a function."
        )
    if re.fullmatch(r"[0-9.]+[MBT]", options["spec"]):
        print(stages(amount(options["spec"].replace("B", "G")), counts(options["ranks"])))
        return
    made = plan(**options)
    if plot:
        made.plot(plot)
    print(json.dumps(made.to_dict(), indent=1) if as_json else made)
