"""The command ``flatshard try``: its options, the verdict and the report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from flatshard.extras import show_bytes
from flatshard.extras.trial_run.compare import MULTIPLE, Difference, Noise, compare
from flatshard.extras.trial_run.launch import Job, Run, log_tail, run

SAME, DIFFERS, RAISES, NOT_COMPARED = range(4)
_WARM_UP, _TIMED = 2, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flatshard try``."""
    add: Any = parser.add_argument
    add("--nproc-per-node", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    add("--steps", type=int, default=10, metavar="K", help="optimizer steps per run (default: 10)")
    add("--exact", action="store_true", help="float64 and deterministic algorithms")
    add("--strategy", metavar="S", help="sharding strategy (default: FULL_SHARD)")
    add("--policy", default="auto", choices=("auto", "none"), help="auto_wrap_policy")
    add("--wrap", action="store_true", help="wrap the model that the first optimizer steps")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="limit of one run")
    add("--json", metavar="FILE", help="write the verdict and all figures")
    add("--keep", metavar="DIR", help="keep records and the output of all ranks")
    add("-m", "--module", dest="is_module", action="store_true", help="SCRIPT is a module")
    add("script", help="a training script for DistributedDataParallel, FSDP or flatshard")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


@dataclass
class Report:
    """The verdict and what leads to it."""

    verdict: int
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def start(options: dict[str, Any]) -> int:
    """Run the command. Returns the exit code: 0 same, 1 differs, 2 raises, 3 not compared.

    Raises:
        ValueError: the options, or the script, cannot be used.
    """
    script, is_module = options["script"], options["is_module"]
    if is_module and find_spec(script.partition(".")[0]) is None:
        raise ValueError(f"no module named {script!r}.")
    if not is_module and not Path(script).is_file():
        raise ValueError(f"no such script: {script!r}. Give the path of a Python file.")
    for name in ("nproc_per_node", "steps"):
        if options[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1.")
    signal.signal(signal.SIGTERM, _interrupt)  # ends the ranks, too
    keywords = {"sharding_strategy": options["strategy"]} if options["strategy"] else {}
    if options["policy"] == "auto":
        keywords["auto_wrap_policy"] = "auto"
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as temporary:
        folder = Path(options["keep"] or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.suffix in (".pt", ".stack", ".log") or old.name.startswith("call-"):
                old.unlink()
        job = Job(
            [script, *options["arguments"]],
            is_module=is_module,
            world_size=int(os.environ.get("WORLD_SIZE", options["nproc_per_node"])),
            folder=folder,
            timeout=options["timeout"],
            settings={name: options[name] for name in ("steps", "exact", "wrap")}
            | {"keywords": keywords},
        )
        ranks, steps = job.world_size, options["steps"]
        print(
            f"{script}, {ranks} ranks, {steps} steps each: DistributedDataParallel, then "
            "ShardedWrapper in its place\n",
            flush=True,
        )
        report = _try(job, steps)
    print(report.text)
    if options["json"]:
        verdict = ("same", "differs", "raises", "not compared")[report.verdict]
        facts = {"verdict": verdict, "text": report.text, **report.figures}
        Path(options["json"]).write_text(json.dumps(facts, indent=1) + "\n")
    return report.verdict


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _try(job: Job, steps: int) -> Report:
    reference = run(job, "ddp")
    if (failure := reference.failure) is not None:
        text = f"Your script fails under DistributedDataParallel, too: {_show(job, 'ddp', failure)}"
        return Report(NOT_COMPARED, text)
    first = reference.records[0]
    num_steps = _num_steps(reference)
    if not first["wrapped"]:
        text = "The script made no DistributedDataParallel, FSDP or ShardedWrapper. Give --wrap to wrap the model that its optimizer steps."
        return Report(NOT_COMPARED, text)
    if not num_steps:
        return Report(NOT_COMPARED, "The script ended without an optimizer step.")
    sharded = run(job, "sharded")
    lines = _lines_to_change(sharded, job)
    if (failure := sharded.failure) is not None:
        text = f"Raises under flatshard, not under DistributedDataParallel:\n{_show(job, 'sharded', failure)}\n{lines}"
        return Report(RAISES, text, {"lines": _findings(sharded)})
    noise = None
    differences = compare(reference.records, sharded.records, None)
    if differences:
        again = run(job, "noise")
        if (failure := again.failure) is not None:
            return Report(
                NOT_COMPARED,
                f"The second run under DistributedDataParallel failed: {_show(job, 'noise', failure)}",
            )
        noise = Noise(reference.records, again.records)
        if noise.last_step < 1 and noise.unstable is not None:
            return Report(NOT_COMPARED, _unstable(noise.unstable))
        differences = compare(reference.records, sharded.records, noise)
    last_step = num_steps if noise is None else min(num_steps, noise.last_step)
    figures = {
        "steps": last_step,
        "largest": max((one.units for one in differences), default=0.0),
        "ddp": _costs(reference, job),
        "flatshard": _costs(sharded, job),
        "lines": _findings(sharded),
        "differences": [one._asdict() for one in differences if one.units > MULTIPLE][:100],
    }
    table = _table(reference, sharded, differences, last_step)
    worst = next((one for one in differences if one.units > MULTIPLE), None)
    if worst is not None:
        text = f"{table}\n\nDiffers: {_described(worst)}.\n{_cost_table(figures)}\n{lines}"
        return Report(DIFFERS, text, figures)
    noted = ""
    if last_step < num_steps:
        noted = (
            f" From step {last_step + 1} on, rounding alone changes the run too much to compare."
        )
    text = f"{table}\n\nThe same numbers, within rounding.{noted}\n{_cost_table(figures)}\n{lines}"
    if num_steps < steps:
        text += f"\nThe script ended after {num_steps} of {steps} steps. Give --steps {num_steps} if that is all."
        return Report(NOT_COMPARED, text, figures)
    return Report(SAME, text, figures)


def _num_steps(one: Run) -> int:
    return max((key[0] for key in one.records[0]["events"] if key[1] == "value"), default=0)


def _show(job: Job, name: str, failure: dict[str, Any]) -> str:
    line = f"\n  at {failure['line']}" if failure["line"] else ""
    text = failure["text"]
    if failure["how"] in ("died", "exited"):
        text += f"; its last line: {log_tail(job, name, failure['rank'])}"
    return f"rank {failure.get('rank', 0)}: {text}{line}"


def _unstable(one: Difference) -> str:
    what = f"{one.kind} {one.name!r} on rank {one.rank} at step {one.step}"
    return (
        f"Cannot be compared: the {what} differs between two runs of the same program"
        f"{f' ({one.line})' if one.line else ''}. Seed all random numbers that the program draws "
        "(torch.manual_seed, random.seed, numpy.random.seed, DataLoader(generator=...)), and do "
        "not let data depend on time, on files of an earlier run, or on the order of threads."
    )


def _described(one: Difference) -> str:
    place = f", where the program is at {one.line}" if one.line else ""
    size = f"{one.size:.1e} of its largest element, " if one.size == one.size else ""
    return (
        f"step {one.step}, {one.kind} {one.name!r}, rank {one.rank}: {size}"
        f"{one.units:.3g} times the rounding noise (limit: {MULTIPLE:.0f}){place}"
    )


def _table(reference: Run, sharded: Run, differences: list[Difference], last: int) -> str:
    rows = [
        "  step    loss, DDP   loss, flatshard   largest difference (in units of rounding noise)"
    ]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        losses = []
        for one in (reference, sharded):
            facts = one.records[0]["events"].get((step, "loss", "loss"))
            losses.append("-" if facts is None else f"{float(facts[6][0]):.6f}")
        here = max(
            (one for one in differences if one.step == step),
            key=lambda one: one.units,
            default=None,
        )
        text = "0" if here is None else f"{here.units:.2g}  {here.kind} {here.name}"
        rows.append(f"  {step:>4} {losses[0]:>12} {losses[1]:>17}   {text}")
    return "\n".join(rows)


def _costs(one: Run, job: Job) -> dict[str, Any]:
    times = [record["times"][_WARM_UP - 1 :] for record in one.records.values()]
    is_timed = all(len(each) >= _TIMED for each in times)
    return {
        "memory": max(record["peak"] - record["baseline"] for record in one.records.values()),
        "seconds": statistics.median(times[0]) if is_timed else None,
        "sent": max(record["sent"] for record in one.records.values()),
    }


def _cost_table(figures: dict[str, Any]) -> str:
    rows = [f"\n  {'':<36} {'DDP':>12} {'flatshard':>12}"]
    for name, text in (
        ("memory", "peak memory per rank, above imports"),
        ("seconds", "time per step (median)"),
        ("sent", "bytes written in the last step"),
    ):
        one, other = figures["ddp"][name], figures["flatshard"][name]
        if one is None or other is None:
            rows.append(f"  {text:<36} (needs {_WARM_UP + _TIMED} steps)")
            continue
        shown = [f"{v * 1000:.1f} ms" if name == "seconds" else show_bytes(v) for v in (one, other)]
        ratio = f"{other / one:.2f}" if one else ""
        rows.append(f"  {text:<36} {shown[0]:>12} {shown[1]:>12}   {ratio}")
    return "\n".join(rows)


def _findings(one: Run) -> list[dict[str, str]]:
    found = {}
    for record in one.records.values():
        for line, what, remedy in record["findings"]:
            found.setdefault((line, what), {"line": line, "what": what, "remedy": remedy})
    return list(found.values())


def _lines_to_change(one: Run, job: Job) -> str:
    """Return a text with the lines that a program keeps flatshard with."""
    wrapped = {tuple(each): None for record in one.records.values() for each in record["wrapped"]}
    rows = []
    for line, name in wrapped:
        if name != "ShardedWrapper":
            rows.append(
                f'  {line}\n      write ShardedWrapper(..., auto_wrap_policy="auto") for {name}; from flatshard import ShardedWrapper'
            )
    for each in _findings(one):
        rows.append(
            f"  {each['line']}\n      {each['what']}"
            + (f"\n      {each['remedy']}" if each["remedy"] else "")
        )
    return "\nTo keep it, change:\n" + "\n".join(rows) if rows else ""
