"""The command ``flatshard try``: its options, the verdict and the report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from flatshard.extras import show_bytes, tabulate
from flatshard.extras.trial_run.compare import MULTIPLE, Difference, differences, in_units
from flatshard.extras.trial_run.recorder import Record

VERDICTS = SAME, DIFFERS, RAISES, NOT_COMPARED = "same", "differs", "raises", "not compared"
"""Verdicts. Each one's index is the exit code."""

_WARM_UP, _TIMED = 2, 5  # steps


def _step_time(costs: list[tuple[float, int, int]]) -> float:
    times = [b[0] - a[0] for a, b in pairwise(costs)][_WARM_UP:]
    return median(times) if len(times) >= _TIMED else 0.0


_WRITE = {
    # first word of what a line does: what to write instead
    "wraps": 'from flatshard import ShardedWrapper; ShardedWrapper(model, auto_wrap_policy="auto")',
    "state_dict()": "state = flatshard.checkpoint.full_state_dict(model) on every rank",
    "forward()": "evaluate on every rank, with the same number of batches",
}
_COSTS: dict[str, tuple[Any, Any]] = {
    # For each measurement: a function that computes it from the costs that a rank recorded (0 if it
    # is not known), and a function that formats it.
    "peak memory per rank, without imports": (lambda costs: costs[-1][1], show_bytes),
    f"time per step, median of {_TIMED} or more": (_step_time, lambda s: f"{1e3 * s:.1f} ms"),
    "bytes sent and written, last step": (lambda c: c[-1][2] - c[-2:][0][2], show_bytes),
}
_TITLE = "{}, {} ranks, {} steps each: DistributedDataParallel, then ShardedWrapper in its place"
_NO_WRAPPER = "The script used no DistributedDataParallel, FSDP or ShardedWrapper: add --wrap."
_UNSTABLE = (
    "Cannot be compared: {0.kind} {0.name!r} of rank {0.rank} at step {0.step} differs between two "
    "runs of the same program, at {1}.\nSeed its random numbers (torch, random, numpy, "
    "generator=... of a DataLoader). Let data not depend on time, earlier runs, or threads."
)
_NOISY = "Cannot be compared: rounding alone changes the first gradients by 5 %. Try --exact."
_DIFFERS = (
    "Differs: step {0.step}, {0.kind} {0.name!r}, rank {0.rank}: {0.size:.1e} of its norm, "
    "{0.units:.3g} times the rounding noise (limit: {2:.0f}), at {1}."
)


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
    options.nproc_per_node = int(os.environ.get("WORLD_SIZE", options.nproc_per_node))
    for is_wrong, text in (
        (not (options.is_module or Path(options.script).is_file()), "SCRIPT is not a file."),
        (min(options.nproc_per_node, options.steps) < 1, "--nproc-per-node, --steps: at least 1."),
        ("RANK" in os.environ and not options.keep, "--keep: a new folder that all hosts share."),
    ):
        if is_wrong:
            print(f"flatshard try: {text}", file=sys.stderr)
            return VERDICTS.index(NOT_COMPARED)
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as folder:
        options.folder = Path(options.keep or folder).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        verdict, text, figures = judge(options)
    if os.environ.get("RANK", "0") == "0":
        print(text)
        if options.json:
            report = {"verdict": verdict, "text": text, **figures}
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return VERDICTS.index(verdict)


def judge(options: argparse.Namespace) -> tuple[str, str, dict[str, Any]]:
    """Run the script up to three times. Returns the verdict, a text and figures.

    ``options.folder``: an empty folder for the records of all ranks.
    """
    # Imports torch's compiler and FSDP, for which other commands should not wait.
    from flatshard.extras.trial_run import forked_ranks

    options.lone_calls = {}
    reference = forked_ranks.run(options, "ddp")
    steps = {kind: step for step, kind, _ in sorted(reference[0].events)}
    num_steps = steps.get("value", 0)
    if failure := _failure(reference):
        return NOT_COMPARED, f"Your script fails under DistributedDataParallel, too: {failure}", {}
    if "initial value" not in steps:
        return NOT_COMPARED, _NO_WRAPPER, {}
    if not num_steps:
        return NOT_COMPARED, "The script ended without an optimizer step.", {}
    calls = {key: [one.remarks[key] for one in reference] for key in _remarks(reference)}
    lone = options.lone_calls = {key: n for key, n in calls.items() if len({*n}) > 1}
    sharded = forked_ranks.run(options, "sharded")
    report: dict[str, Any] = {"steps": num_steps, "lines": []}
    changes = ""
    for line, what in _remarks(reference + sharded):
        if (line, what) in lone or not what.endswith("calls by rank:"):
            shown = f"{what} {lone.get((line, what), '')}".strip()
            write = _WRITE.get(what.partition(" ")[0], "")
            report["lines"].append({"line": line, "what": shown, "write": write})
            changes += f"\n  {line}\n      {shown}" + f"\n      write: {write}" * bool(write)
    changes = f"\n\nTo keep it, change:{changes}" * bool(changes)
    if num_steps >= options.steps:
        changes += f"\n\nLines that run after step {num_steps} are not listed (--steps)."
    if failure := _failure(sharded):
        return RAISES, f"Raises under flatshard, not under DDP: {failure}{changes}", report
    found, last = differences(reference, sharded, lone), num_steps
    if any(one.gap for one in found):
        again = forked_ranks.run(options, "noise")
        if failure := _failure(again):
            return NOT_COMPARED, f"The second run with DDP failed: {failure}", report
        found, last, other = in_units(found, differences(reference, again, lone))
        if last < 1:
            line = reference[other.rank].lines.get(other[:3], "") if other else ""
            return NOT_COMPARED, _UNSTABLE.format(other, line) if other else _NOISY, report
        last = min(last, num_steps)
    worst = next((one for one in found if one.units > MULTIPLE), None)
    largest = max((one.units for one in found), default=0.0)
    report |= {"compared": last, "largest": largest, "first": worst and worst._asdict()}
    report["costs"] = {
        name: [max(measure(one.costs) for one in records) for records in (reference, sharded)]
        for name, (measure, _) in _COSTS.items()
    }
    verdict, text = SAME, "The same numbers, within rounding."
    if worst is not None:
        lines_of_rank = reference[worst.rank].lines | sharded[worst.rank].lines
        verdict, text = DIFFERS, _DIFFERS.format(worst, lines_of_rank[worst[:3]], MULTIPLE)
    elif num_steps < options.steps:
        verdict = NOT_COMPARED
        text += f" But the script ended after {num_steps} steps: give --steps {num_steps}."
    elif lone:
        verdict = RAISES
        text += " But as it is, the script raises where not all ranks call the model (see below)."
    if last < num_steps:
        text += f" From step {last + 1} on, rounding alone changes too much to compare."
        text += "" if options.exact else " More steps can be compared with --exact."
    title = _TITLE.format(options.script, options.nproc_per_node, num_steps)
    parts = title, _table(reference[0], sharded[0], found, last), text, _cost_table(report)
    return verdict, "\n\n".join(parts) + changes, report


def _remarks(records: list[Record]) -> dict[tuple[str, str], None]:
    return dict.fromkeys(key for record in records for key in record.remarks)


def _failure(records: list[Record]) -> str:
    """Return the cause of a failed run, or an empty string."""
    return min(records, key=lambda one: one.failed_at).failure


def _table(one: Record, other: Record, found: list[Difference], last: int) -> str:
    rows = [["step", "loss, DDP", "loss, flatshard", "largest difference, in units of noise"]]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        losses = [record.events.get((step, "loss", "loss")) for record in (one, other)]
        shown = [f"{float(loss.sums[0]):.6f}" if loss else "-" for loss in losses]
        here = [each for each in found if each.step == step]
        most = max(here, key=lambda each: each.units, default=None)
        text = f"{most.units:.2g}  {most.kind} {most.name}" if most and most.gap else "0"
        rows.append([f"{step}", *shown, text])
    return tabulate(rows, numbers=(0, 1, 2))


def _cost_table(figures: dict[str, Any]) -> str:
    rows = [["", "DDP", "flatshard", ""]]
    for name, both in figures["costs"].items():
        ratio = f"{both[1] / both[0]:.2f}" if both[0] and both[1] else ""
        rows.append([name, *(_COSTS[name][1](one) if one else "-" for one in both), ratio])
    return tabulate(rows, numbers=(1, 2, 3))
