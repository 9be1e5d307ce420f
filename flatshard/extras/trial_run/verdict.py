"""The command ``flatshard try``: its options, the verdict and the report."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flatshard.extras import tabulate
from flatshard.extras.trial_run.compare import MULTIPLE, Difference, differences, units_of
from flatshard.extras.trial_run.recorder import Record

VERDICTS = SAME, DIFFERS, RAISES, NOT_COMPARED = "same", "differs", "raises", "not compared"
"""Verdicts. The index of a verdict is the exit code."""

_WRITE = {
    # for the first word of what a line does, what to write instead
    "wraps": 'from flatshard import ShardedWrapper; ShardedWrapper(model, auto_wrap_policy="auto")',
    "state_dict()": "state = flatshard.checkpoint.full_state_dict(model) on every rank",
    "forward()": "evaluate on every rank, with the same number of batches",
}
_COSTS = "peak memory without imports, MiB", "time per step, ms", "bytes sent and written, KiB"
_WARM_UP, _TIMED = 2, 5  # number of steps not measured, and minimum number of steps measured
_TITLE = "{}, {} ranks, {} steps each: DistributedDataParallel, then ShardedWrapper in its place"
_NO_WRAPPER = "The script used no DistributedDataParallel, FSDP or ShardedWrapper: add --wrap."
_UNSEEDED = (
    "Cannot be compared: {0.kind} {0.name!r} of rank {0.rank} at step {0.step} differs between two "
    "runs of the same program, at {1}.\nSeed its random numbers (torch, random, numpy, "
    "generator=... of a DataLoader). Let data not depend on time, earlier runs, or threads."
)
_SENSITIVE = (
    "Cannot be compared: {0.kind} {0.name!r} of rank {0.rank} at step {0.step} depends on the last "
    "digit of the weights, at {1}.\nTwo runs with equal weights agree. But with noise in the "
    "weights, the program takes other steps (an adaptive solver, for example). Fix its step sizes."
)
_NOISY = " From step {} on, rounding alone changes too much to compare (--exact compares more)."
_DIFFERS = (
    "Differs: step {0.step}, {0.kind} {0.name!r}, rank {0.rank}: {0.size:.1e} of its norm, "
    "{0.units:.3g} times the rounding noise (limit: {2:.0f}), at {1}."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flatshard try``."""
    add: Any = parser.add_argument
    add("--nproc-per-node", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    add("--steps", type=int, default=10, metavar="K", help="steps of all optimizers (default: 10)")
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
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the process of this host's first rank starts all ranks of this host
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
    """Run the script up to four times. Returns the verdict, a text and figures.

    ``options.folder``: an empty folder for the records of all ranks.
    """
    # Import here: other commands should not wait for the import of torch's compiler and FSDP.
    from flatshard.extras.trial_run import forked_ranks

    options.lone_calls = {}
    reference = forked_ranks.run(options, "ddp")
    steps = {kind: step for step, kind, _ in sorted(reference[0].events)}
    last = num_steps = steps.get("value", 0)
    if failure := _failure(reference):
        return NOT_COMPARED, f"Your script fails under DistributedDataParallel, too: {failure}", {}
    if "initial value" not in steps:
        return NOT_COMPARED, _NO_WRAPPER, {}
    if not num_steps:
        return NOT_COMPARED, "The script ended without an optimizer step.", {}
    calls = {key: [one.remarks[key] for one in reference] for key in _remarks(reference)}
    lone = options.lone_calls = {key: n for key, n in calls.items() if len({*n}) > 1}
    sharded = forked_ranks.run(options, "sharded")
    lines = []
    for line, what in _remarks(reference + sharded):
        if (line, what) in lone or not what.endswith("calls by rank:"):
            write = _WRITE.get(what.partition(" ")[0], "")
            shown = f"{line}\n      {what} {lone.get((line, what), '')}".rstrip()
            lines.append(shown + f"\n      write: {write}" * bool(write))
    report: dict[str, Any] = {"steps": num_steps, "lines": lines}
    changes = "\n\nTo keep it, change (lines that run after the last step are not listed):\n  "
    changes = (changes + "\n  ".join(lines)) * bool(lines)
    if failure := _failure(sharded):
        return RAISES, f"Raises under flatshard, not under DDP: {failure}{changes}", report
    where = {key: line for one in reference + sharded for key, line in one.lines.items()}
    if found := [one for one in differences(reference, sharded, lone) if one.gap]:
        noise = forked_ranks.run(options, "noise")
        if failure := _failure(noise):
            return NOT_COMPARED, f"The second run with DDP failed: {failure}", report
        units, last, other = units_of(differences(reference, noise, lone))
        if other and last < 1:
            again = differences(reference, forked_ranks.run(options, "again"), lone)
            text = _UNSEEDED if any(one.gap for one in again) else _SENSITIVE
            return NOT_COMPARED, text.format(other, where.get(other[:3], "")), report
        last = min(last, num_steps)
        found = [one.in_units(units) for one in found if one.step <= last]
    worst = next((one for one in found if one.units > MULTIPLE), None)
    report |= {"compared": last, "largest": max([0.0, *(one.units for one in found)])}
    report |= {"first": worst and worst._asdict(), "costs": {}}
    verdict, text = SAME, "The same numbers, within rounding."
    if worst is not None:
        verdict, text = DIFFERS, _DIFFERS.format(worst, where[worst[:3]], MULTIPLE)
    elif last < 1:
        verdict, text = NOT_COMPARED, "Cannot be compared."
    elif num_steps < options.steps:
        verdict = NOT_COMPARED
        text += f" But the script ended after {num_steps} steps: give --steps {num_steps}."
    elif lone:
        verdict = RAISES
        text += " But as it is, the script raises where not all ranks call the model (see below)."
    text += _NOISY.format(last + 1) * (last < num_steps)
    title = _TITLE.format(options.script, options.nproc_per_node, num_steps)
    parts = [title, _table(reference[0], sharded[0], found, last), text]
    if min(len(one.costs) for one in reference + sharded) > _WARM_UP + _TIMED:
        both = zip(_COSTS, _costs(reference), _costs(sharded), strict=True)
        report["costs"] = {name: costs for name, *costs in both}
        parts.append(_cost_table(report["costs"]))
    return verdict, "\n\n".join(parts) + changes, report


def _remarks(records: list[Record]) -> dict[tuple[str, str], None]:
    return dict.fromkeys(key for record in records for key in record.remarks)


def _failure(records: list[Record]) -> str:
    """Return the cause of a failed run, or an empty string."""
    return min(records, key=lambda one: one.failed_at).failure


def _costs(records: list[Record]) -> list[float]:
    """Return the figures that _COSTS names, each of the rank where it is largest."""
    costs = [torch.tensor(one.costs, dtype=torch.float64) for one in records]
    memory = max(one[-1, 1].item() - one[0, 1].item() for one in costs)
    per_step = torch.stack([one.diff(dim=0)[_WARM_UP:].median(0).values for one in costs]).amax(0)
    return [memory / 2**20, 1e3 * per_step[0].item(), per_step[2].item() / 2**10]


def _table(one: Record, other: Record, found: list[Difference], last: int) -> str:
    rows = [["step", "loss, DDP", "loss, flatshard", "largest difference, in units of noise"]]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        losses = [record.events.get((step, "loss", "loss")) for record in (one, other)]
        shown = [f"{float(loss.sums[0]):.6f}" if loss else "-" for loss in losses]
        here = [each for each in found if each.step == step]
        most = max(here, key=lambda each: each.units, default=None)
        text = f"{most.units:.2g}  {most.kind} {most.name}" if most else "0"
        rows.append([f"{step}", *shown, text])
    return tabulate(rows, numbers=(0, 1, 2))


def _cost_table(costs: dict[str, list[float]]) -> str:
    rows = [["largest of all ranks", "DDP", "flatshard", ""]]
    for name, (one, other) in costs.items():
        rows.append([name, f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}" if one else ""])
    return tabulate(rows, numbers=(1, 2, 3))
