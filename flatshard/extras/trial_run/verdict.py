"""The command ``flatshard try``: its options, the verdict and the report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch

from flatshard.extras import show_bytes, tabulate
from flatshard.extras.trial_run.compare import MULTIPLE, Difference, Noise, Records, compare
from flatshard.extras.trial_run.launch import failure_of, run
from flatshard.extras.trial_run.recorder import Record

SAME, DIFFERS, RAISES, NOT_COMPARED = range(4)
_WARM_UP, _TIMED = 2, 5  # steps
_REMEDY = 'from flatshard import ShardedWrapper; ShardedWrapper(model, auto_wrap_policy="auto")'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flatshard try``."""
    add: Any = parser.add_argument
    add("--nproc-per-node", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    add("--steps", type=int, default=10, metavar="K", help="optimizer steps per run (default: 10)")
    add("--exact", action="store_true", help="float64 and deterministic algorithms")
    add("--strategy", metavar="S", help="sharding strategy (default: FULL_SHARD)")
    add("--policy", default="auto", choices=("auto", "none"), help="auto_wrap_policy")
    add("--wrap", action="store_true", help="wrap the models that optimizers step")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="limit of one run")
    add("--json", metavar="FILE", help="write the verdict and all figures")
    add("--keep", metavar="DIR", help="keep records and the output of all ranks")
    add("-m", "--module", dest="is_module", action="store_true", help="SCRIPT is a module")
    add("script", help="a training script for DistributedDataParallel, FSDP or flatshard")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def start(given: dict[str, Any]) -> int:
    """Run the command. Returns the exit code: 0 same, 1 differs, 2 raises, 3 not compared."""
    options = argparse.Namespace(**given)
    if refused := _refused(options):
        print(f"flatshard try: {refused}", file=sys.stderr)
        return NOT_COMPARED
    rank = os.environ.get("RANK", "0")
    options.nproc_per_node = int(os.environ.get("WORLD_SIZE", options.nproc_per_node))
    signal.signal(signal.SIGTERM, _interrupt)  # ends the ranks, too
    torch.set_num_threads(1)  # ranks are forked, and threads of this process would be missing
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as folder:
        options.folder = Path(options.keep or folder).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        for old in [*options.folder.iterdir()] if "RANK" not in os.environ else []:
            if old.suffix in (".pt", ".log", ".stack") or old.name.startswith("call-"):
                old.unlink()
        verdict, text, figures = judge(options)
    if rank == "0":
        print(text)
    if options.json and rank == "0":
        name = ("same", "differs", "raises", "not compared")[verdict]
        report = {"verdict": name, "text": text, **figures}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return verdict


def _refused(options: argparse.Namespace) -> str:
    """Return why the options cannot be used, or an empty string."""
    script = options.script
    if options.is_module and find_spec(script.partition(".")[0]) is None:
        return f"no module named {script!r}."
    if not options.is_module and not Path(script).is_file():
        return f"no such script: {script!r}. Give the path of a Python file."
    if "RANK" in os.environ and not options.keep:
        return "under torchrun, give --keep DIR: a new folder that all hosts share."
    too_few = min(options.nproc_per_node, options.steps) < 1
    return "--nproc-per-node and --steps must be at least 1." if too_few else ""


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def judge(options: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Run the script up to three times. Returns the verdict, a text and the figures.

    ``options.folder``: an empty folder for the records of all ranks.
    """
    reference = run(options, "ddp")
    if (failed := failure_of(reference)) is not None:
        text = f"Your script fails under DistributedDataParallel, too: {_failure(failed)}"
        return NOT_COMPARED, text, {}
    num_steps = max([0, *(key[0] for key in reference[0].events if key[1] == "value")])
    if not reference[0].wrapped:
        text = "The script used no DistributedDataParallel, FSDP or ShardedWrapper."
        return NOT_COMPARED, f"{text} To wrap the models that its optimizers step: --wrap.", {}
    if not num_steps:
        return NOT_COMPARED, "The script ended without an optimizer step.", {}
    sharded = run(options, "sharded")
    figures: dict[str, Any] = {"steps": num_steps, "lines": _lines(sharded)}
    lines = _change_text(figures["lines"])
    if (failed := failure_of(sharded)) is not None:
        text = f"Raises under flatshard, not under DistributedDataParallel: {_failure(failed)}"
        return RAISES, text + lines, figures
    noise = None
    if differences := compare(reference, sharded, None):
        again = run(options, "noise")
        if (failed := failure_of(again)) is not None:
            return NOT_COMPARED, f"The second run with DDP failed: {_failure(failed)}", figures
        noise = Noise(reference, again)
        if noise.last_step < 1:
            return NOT_COMPARED, _unstable(noise.unstable), figures
        differences = compare(reference, sharded, noise)
    last = min(num_steps, noise.last_step) if noise else num_steps
    figures |= {"compared": last, "ddp": _costs(reference), "flatshard": _costs(sharded)}
    figures["largest"] = max((one.units for one in differences), default=0.0)
    worst = next((one for one in differences if one.units > MULTIPLE), None)
    figures["first"] = worst and worst._asdict()
    verdict, text = SAME, "The same numbers, within rounding."
    if worst is not None:
        verdict, text = DIFFERS, f"Differs: {_described(worst)}."
    elif num_steps < options.steps:
        verdict = NOT_COMPARED
        text += f" But the script ended after {num_steps} steps: give --steps {num_steps}."
    if last < num_steps:
        text += f" From step {last + 1} on, rounding alone changes too much to compare."
        text += "" if options.exact else " More steps can be compared with --exact."
    size = f"{options.script}, {options.nproc_per_node} ranks, {num_steps} steps each:"
    title = f"{size} DistributedDataParallel, then ShardedWrapper in its place\n\n"
    table = _table(reference[0], sharded[0], differences, last)
    return verdict, f"{title}{table}\n\n{text}\n\n{_cost_table(figures)}{lines}", figures


def _failure(record: Record) -> str:
    return record.failure + (f"\n  at {record.line}" if record.line else "")


def _lines(records: Records) -> list[dict[str, str]]:
    """Return the lines that a program that stays with flatshard changes."""
    found = {
        (line, f"wraps the model ({name})"): _REMEDY
        for record in records.values()
        for line, name in record.wrapped.items()
        if name != "ShardedWrapper"
    }
    for record in records.values():
        found |= record.findings
    return [{"line": line, "what": what, "write": found[line, what]} for line, what in found]


def _change_text(lines: list[dict[str, str]]) -> str:
    rows = ["\n\nTo keep it, change:"] if lines else []
    for one in lines:
        write = f"\n      write: {one['write']}" if one["write"] else ""
        rows.append(f"  {one['line']}\n      {one['what']}{write}")
    return "\n".join(rows)


def _unstable(one: Difference | None) -> str:
    if one is None:
        return "Cannot be compared: rounding alone changes the first gradients by 5 %. Try --exact."
    return (
        f"Cannot be compared: {one.kind} {one.name!r} of rank {one.rank} at step {one.step} "
        f"differs between two runs of the same program. {one.line}\nSeed the random numbers that "
        "the program draws (torch.manual_seed, random.seed, numpy.random.seed, generator=... of a "
        "DataLoader). Let data not depend on time, on files of an earlier run, or on threads."
    )


def _described(one: Difference) -> str:
    place = f", at {one.line}" if one.line else ""
    return (
        f"step {one.step}, {one.kind} {one.name!r}, rank {one.rank}: {one.size:.1e} of its largest "
        f"element, {one.units:.3g} times the rounding noise (limit: {MULTIPLE:.0f}){place}"
    )


def _table(one: Record, other: Record, differences: list[Difference], last: int) -> str:
    rows = [["step", "loss, DDP", "loss, flatshard", "largest difference, in units of noise"]]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        losses = [record.events.get((step, "loss", "loss")) for record in (one, other)]
        here = [each for each in differences if each.step == step]
        most = max(here, key=lambda each: each.units, default=None)
        text = f"{most.units:.2g}  {most.kind} {most.name}" if most else "0"
        shown = [f"{float(loss.values[0]):.6f}" if loss else "-" for loss in losses]
        rows.append([f"{step}", *shown, text])
    return tabulate(rows, numbers=(0, 1, 2))


def _costs(records: Records) -> dict[str, Any]:
    times = records[0].times[_WARM_UP - 1 :]
    return {
        "memory": max(one.memory for one in records.values()),
        "seconds": median(times) if len(times) >= _TIMED else None,
        "written": max(one.written for one in records.values()),
    }


def _cost_table(figures: dict[str, Any]) -> str:
    rows = [["", "DDP", "flatshard", ""]]
    for name, text in (
        ("memory", "peak memory per rank, without imports"),
        ("seconds", f"time per step, median of {_TIMED} or more"),
        ("written", "bytes written to sockets and files, last step"),
    ):
        both = figures["ddp"][name], figures["flatshard"][name]
        shown = ["-" if one is None else show_bytes(one) for one in both]
        if name == "seconds" and None not in both:
            shown = [f"{1000 * one:.1f} ms" for one in both]
        rows.append([text, *shown, f"{both[1] / both[0]:.2f}" if both[0] and both[1] else ""])
    return tabulate(rows, numbers=(1, 2, 3))
