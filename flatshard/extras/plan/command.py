"""The command ``flatshard plan``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import Any

import torch

from flatshard.extras.plan.hardware import DEVICES, calibrate
from flatshard.extras.plan.planning import OPTIMIZERS, STRATEGIES
from flatshard.extras.plan.report import plan, stages
from flatshard.options.precision import MixedPrecision

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def amount(text: str) -> float:
    """Read ``80GB``, ``50GB/s`` or ``990T``."""
    found = re.fullmatch(r"([0-9.]+)\s*([KMGTP]?)(i?)(B|FLOPS)?(/s)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a number such as 80GB or 990T, got {text!r}")
    number, unit, binary = found.group(1, 2, 3)
    scale = 1024 ** (" KMGTP".index(unit)) if binary and unit else _UNITS[unit]
    return float(number) * scale


def counts(text: str) -> list[int]:
    """Read ``8``, ``8,64`` or ``8..1024`` (doubling)."""
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [int(one) for one in text.split(",")]
        start, end = int(first), int(last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 8, 8,64 or 8..1024, got {text!r}") from None
    if not 0 < start <= end:
        raise argparse.ArgumentTypeError(f"expected 1 <= first <= last, got {text!r}")
    return [start << i for i in range((end // start).bit_length())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add(
        "spec",
        nargs="?",
        help="a preset such as llama3-8b, a config.json, or package.module:function",
    )
    add(
        "--ranks",
        type=counts,
        default=[8],
        help="numbers of ranks: 8, or 8,64, or 8..64 (doubling)",
    )
    add("--per-node", type=int, default=8, help="ranks in one node")
    add("--device", choices=DEVICES, default="h100")
    add("--memory", type=amount, help="memory per device, such as 80GB")
    add("--flops", type=amount, help="sustained FLOP/s of matrix products, such as 600T")
    add(
        "--link",
        type=amount,
        default=50e9,
        help="bytes per second that one rank sends to other nodes, if all ranks of the node send",
    )
    add(
        "--node-link",
        type=amount,
        default=450e9,
        help="bytes per second that one rank sends to ranks of its node",
    )
    add("--batch", type=int, default=1, help="sequences per rank")
    add("--seq", type=int, default=2048, help="tokens per sequence")
    add("--dtype", choices=_DTYPES, default="bf16", help="dtype in which the model computes")
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
    name = "cuda" if torch.cuda.is_available() else "cpu"
    if options["calibrate"]:
        if options["spec"] is not None:
            raise ValueError("--calibrate measures this machine and takes no SPEC. Leave out SPEC.")
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
        numel = amount(options["spec"].replace("B", "G"))
        print(stages(numel, options["ranks"]))
        return
    device = DEVICES[options["device"]]
    if options["flops"] is not None:
        device = dataclasses.replace(device, flops=options["flops"])
    dtype = _DTYPES[options["dtype"]]
    made = plan(
        options["spec"],
        ranks=options["ranks"],
        device=device,
        memory=options["memory"],
        per_node=options["per_node"],
        link=options["link"],
        node_link=options["node_link"],
        batch=options["batch"],
        length=options["seq"],
        optimizer=options["optimizer"],
        checkpoint=options["checkpoint"],
        compiles=options["compile"],
        accumulate=options["accumulate"],
        precision=MixedPrecision(dtype, torch.float32 if dtype else None),
        strategies=options["strategy"],
    )
    if options["plot"]:
        made.plot(options["plot"])
    print(json.dumps(made.to_dict(), indent=1) if options["json"] else made)
