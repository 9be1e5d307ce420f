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
from typing import Any

import torch

from flatshard.extras import show_bytes, tabulate
from flatshard.extras.trial_run.compare import MULTIPLE, Difference, Noise, Records, compare
from flatshard.extras.trial_run.recorder import Record

SAME, DIFFERS, RAISES, NOT_COMPARED = range(4)
_WARM_UP, _TIMED = 2, 5  # steps
_REMEDIES = {
    "state_dict": "state = flatshard.checkpoint.full_state_dict(model) on every rank; rank 0 saves",
    "__call__": "evaluate on every rank, with the same number of batches",
}
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
    options.nproc_per_node = int(os.environ.get("WORLD_SIZE", options.nproc_per_node))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks, too
    torch.set_num_threads(1)  # ranks are forked, and threads of this process would be missing
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as folder:
        options.folder = Path(options.keep or folder).resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        verdict, text, figures = judge(options)
    if os.environ.get("RANK", "0") == "0":
        print(text)
        if options.json:
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


def judge(options: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Run the script up to three times. Returns the verdict, a text and the figures.

    ``options.folder``: an empty folder for the records of all ranks.
    """
    # Imports torch's compiler and FSDP, for which other commands should not wait.
    from flatshard.extras.trial_run.forked_ranks import failure_of, run

    options.lone_calls = {}
    reference = run(options, "ddp")
    num_steps = max([0, *(key[0] for key in reference[0].events if key[1] == "value")])
    if (failed := failure_of(reference)) is not None:
        text = f"Your script fails under DistributedDataParallel, too: {_failure(failed)}"
    elif not reference[0].wrapped:
        text = "The script used no DistributedDataParallel, FSDP or ShardedWrapper. "
        text += "To wrap the models that its optimizers step: --wrap."
    else:
        text = "" if num_steps else "The script ended without an optimizer step."
    if text:
        return NOT_COMPARED, text, {}
    lone = options.lone_calls = _lone_calls(reference)
    sharded = run(options, "sharded")
    wrapped = [one for one in reference[0].wrapped.items() if one[1] != "ShardedWrapper"]
    found = {(line, f"wraps the model ({name})"): _REMEDY for line, name in wrapped}
    found |= {(line, what): _REMEDIES[method] for (line, method), what in lone.items()}
    found |= {warned: "" for record in sharded.values() for warned in record.warned}
    lines = [{"line": at, "what": what, "write": found[at, what]} for at, what in found]
    figures: dict[str, Any] = {"steps": num_steps, "lines": lines}
    changes = "\n\nTo keep it, change:" * bool(lines) + "".join(map(_change, lines))
    if num_steps >= options.steps:
        changes += (
            f"\n\nLines that the script runs after step {num_steps} are not listed (--steps)."
        )
    if (failed := failure_of(sharded)) is not None:
        text = f"Raises under flatshard, not under DistributedDataParallel: {_failure(failed)}"
        return RAISES, text + changes, figures
    noise = None
    _drop(reference, lone)
    if differences := compare(reference, sharded, None):
        again = run(options, "noise")
        if (failed := failure_of(again)) is not None:
            return NOT_COMPARED, f"The second run with DDP failed: {_failure(failed)}", figures
        _drop(again, lone)
        noise = Noise(reference, again)
        if noise.last_step < 1:
            return NOT_COMPARED, _unstable(noise.unstable, reference), figures
        differences = compare(reference, sharded, noise)
    last = min(num_steps, noise.last_step) if noise else num_steps
    figures |= {"compared": last, "ddp": _costs(reference), "flatshard": _costs(sharded)}
    figures["largest"] = max((one.units for one in differences), default=0.0)
    worst = next((one for one in differences if one.units > MULTIPLE), None)
    figures["first"] = worst and worst._asdict()
    verdict, text = SAME, "The same numbers, within rounding."
    if worst is not None:
        verdict, text = DIFFERS, f"Differs: {_described(worst, sharded)}."
    elif num_steps < options.steps:
        verdict = NOT_COMPARED
        text += f" But the script ended after {num_steps} steps: give --steps {num_steps}."
    elif lone:
        verdict = RAISES
        text += " But as it is, the script raises where not all ranks call the model (see below)."
    if last < num_steps:
        text += f" From step {last + 1} on, rounding alone changes too much to compare."
        text += "" if options.exact else " More steps can be compared with --exact."
    title = f"{options.script}, {options.nproc_per_node} ranks, {num_steps} steps each: "
    title += "DistributedDataParallel, then ShardedWrapper in its place"
    table = _table(reference[0], sharded[0], differences, last)
    return verdict, f"{title}\n\n{table}\n\n{text}\n\n{_cost_table(figures)}{changes}", figures


def _failure(record: Record) -> str:
    return record.failure + (f"\n  at {record.line}" if record.line else "")


def _change(one: dict[str, str]) -> str:
    write = f"\n      write: {one['write']}" if one["write"] else ""
    return f"\n  {one['line']}\n      {one['what']}{write}"


def _lone_calls(reference: Records) -> dict[tuple[str, str], str]:
    """Return the line and method of calls that not all ranks make, and texts that say so."""
    found = {}
    for call in dict.fromkeys(one for record in reference.values() for one in record.calls):
        counts = {rank: record.calls[call] for rank, record in reference.items()}
        most, least = max(counts.values()), min(counts.values())
        ranks = ", ".join(f"{rank}" for rank, count in counts.items() if count == most)
        who = f"ranks make {least} to {most} calls of" if least else f"only rank {ranks} calls"
        name = "state_dict()" if call[1] == "state_dict" else "the model's forward"
        if least < most:
            found[call] = f"{who} {name}, which needs every rank"
    return found


def _drop(records: Records, lone: dict[tuple[str, str], str]) -> None:
    """Drop records of the calls that only some ranks make: the run under flatshard lacks them."""
    for record in records.values():
        for key in [key for key in record.events if any(line in key[2] for line, _ in lone)]:
            del record.events[key]


def _unstable(one: Difference | None, records: Records) -> str:
    if one is None:
        return "Cannot be compared: rounding alone changes the first gradients by 5 %. Try --exact."
    return (
        f"Cannot be compared: {one.kind} {one.name!r} of rank {one.rank} at step {one.step} "
        f"differs between two runs of the same program{_line(one, records)}.\nSeed the "
        "random numbers that the program draws (torch.manual_seed, random.seed, numpy.random.seed, "
        "generator=... of a DataLoader). Let data not depend on time, on files of an earlier run, "
        "or on threads."
    )


def _line(one: Difference, records: Records) -> str:
    line = records[one.rank].lines.get(one.key, "")
    return "" if one.kind in ("buffer", "random generator") or not line else f", at {line}"


def _described(one: Difference, records: Records) -> str:
    return (
        f"step {one.step}, {one.kind} {one.name!r}, rank {one.rank}: {one.size:.1e} of its norm, "
        f"{one.units:.3g} times the rounding noise (limit: {MULTIPLE:.0f}){_line(one, records)}"
    )


def _table(one: Record, other: Record, differences: list[Difference], last: int) -> str:
    rows = [["step", "loss, DDP", "loss, flatshard", "largest difference, in units of noise"]]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        losses = [record.events.get((step, "loss", "loss")) for record in (one, other)]
        here = [each for each in differences if each.step == step]
        most = max(here, key=lambda each: each.units, default=None)
        text = f"{most.units:.2g}  {most.kind} {most.name}" if most else "0"
        shown = [f"{float(loss.sums[0]):.6f}" if loss else "-" for loss in losses]
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
    for name, text, show in (
        ("memory", "peak memory per rank, without imports", show_bytes),
        ("seconds", f"time per step, median of {_TIMED} or more", lambda s: f"{1e3 * s:.1f} ms"),
        ("written", "bytes written to sockets and files, last step", show_bytes),
    ):
        both = figures["ddp"][name], figures["flatshard"][name]
        ratio = f"{both[1] / both[0]:.2f}" if both[0] and both[1] else ""
        rows.append([text, *("-" if one is None else show(one) for one in both), ratio])
    return tabulate(rows, numbers=(1, 2, 3))
