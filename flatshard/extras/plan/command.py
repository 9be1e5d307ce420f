"""The command ``flatshard plan``. Its options are the keywords of ``plan``."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields
from typing import Any

import torch

from flatshard.extras.plan import report
from flatshard.extras.plan.hardware import DEVICES, calibrate
from flatshard.extras.plan.report import Target, plan

_CHOICES = {
    "device": DEVICES,
    "dtype": report.DTYPES,
    "optimizer": report.OPTIMIZERS,
    "checkpoint": ("none", "block", "selective"),
    "strategy": report.STRATEGIES,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("spec", nargs="?", help="a preset (llama3-8b), a config.json, or package.module:function")
    # The docstring of `plan` explains each option in an item of a list: "- ``name``: text".
    items = re.findall(r"- ``(\w+)``: (.*?)(?=\n +- ``|\n\n)", plan.__doc__ or "", re.DOTALL)
    texts = {name: " ".join(text.replace("`", "").split()) for name, text in items}
    for one in fields(Target):
        name, kind = one.name, {"int": int, "bool": bool}.get(str(one.type), str)
        if name in ("build", "step", "auto_wrap_policy"):
            continue  # no value of this field can be written on a command line
        more: Any = {"choices": _CHOICES[name]} if name in _CHOICES else {"type": kind}
        more |= {"nargs": "+"} if name == "strategy" else {}
        more = {"action": "store_true"} if kind is bool else more
        add(f"--{name.replace('_', '-')}", default=one.default, help=texts.get(name), **more)
    add("--json", action="store_true", help="print JSON")
    add("--calibrate", action="store_true", help="measure this machine's speed, and print --flops")


def run(options: dict[str, Any]) -> None:
    """Print the plan for ``options``. Raises ValueError if the options cannot be used."""
    as_json, measures, spec = (options.pop(name) for name in ("json", "calibrate", "spec"))
    if measures:
        if spec is not None:
            raise ValueError("--calibrate measures this machine and takes no SPEC. Leave out SPEC.")
        name = "cuda" if torch.cuda.is_available() else "cpu"
        found = calibrate(name)
        print(f"{name}: --flops {found.flops / 1e12:.2f}T")
        print(f"{name}: attention {found.attention_flops / 1e12:.2f} TFLOP/s")
        print(f"{name}: memory {found.memory_rate / 1e9:.1f} GB/s")
    elif spec is None:
        raise ValueError("expected a SPEC or --calibrate. Option --help lists the kinds of SPEC.")
    else:
        made = plan(spec, **options)
        print(json.dumps(made.to_dict(), indent=1) if as_json else made)
