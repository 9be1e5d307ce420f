"""The command ``flatshard try``: compares the records of runs, and reports the verdict.

[Note: units]
The unit of a tensor at a step is the largest of three numbers. First: the largest norm, up to this
step, of the tensor's difference between the reference and the third run, whose weights were changed
by one unit in the last place. Second: the largest median, up to this step, of these differences
relative to the tensors' norms, over all tensors of the same kind, times the tensor's norm. Third:
twice the precision of the dtype, times the tensor's norm.
"""

import argparse
import json
import math
import os
import tempfile
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from flatshard.extras import tabulate
from flatshard.extras.trial_run.recorder import Record

VERDICTS = SAME, DIFFERS, RAISES, NOT_COMPARED = "same", "differs", "raises", "not compared"
"""Verdicts. The index of a verdict is the exit code."""

_LIMIT = 100.0  # a difference counts if it is more than this many units
_CHAOS = 0.05  # steps are compared until noise changes half of the gradients by more than this
_COSTS = "peak memory without imports, MiB", "time per step, ms", "bytes sent and written, KiB"
_WARM_UP, _TIMED = 2, 5  # number of steps not measured, and minimum number of steps measured
_TITLE = "{}, {} ranks, {} steps each: DistributedDataParallel, then ShardedWrapper in its place"
_OTHER = (
    "Cannot be compared: {0.kind} {0.name!r} of rank {0.rank} at step {0.step} differs between two "
    "runs with DDP, whose weights differ in the last digit, at {0.line}.\nSeed random numbers "
    "(torch, random, numpy, generator=... of a DataLoader). Let data not depend on time, earlier "
    "runs or threads, and step sizes (of an adaptive solver) not on the last digit of weights."
)
_NOISY = " From step {} on, rounding alone changes too much to compare (--exact compares more)."
_DIFFERS = (
    "Differs: step {0.step}, {0.kind} {0.name!r}, rank {0.rank}: {0.size:.1e} of its norm, "
    "{0.units:.3g} times the rounding noise (limit: {1:.0f}), at {0.line}."
)
_CHANGES = "\n\nTo keep it, change (lines that run after the last step are not listed):\n  "


Place = tuple[int, str, str, int]  # step, kind of tensor, name, rank


class Difference(NamedTuple):
    """The difference of a tensor from the reference."""

    step: int
    kind: str
    name: str
    rank: int
    line: str  # the program's line
    gap: float  # norm of the difference
    norm: float  # norm of the tensor in the reference
    size: float  # the gap, relative to the norm of the reference
    eps: float  # precision of the dtype
    units: float = 0.0  # the gap, in units of noise

    def in_units(self, units: dict[Place, float]) -> "Difference":
        """Return the difference with its size in units of noise."""
        # Without the limit, an infinite gap would exceed an infinite unit.
        return self._replace(units=min(self.gap, 1e300) / units[self[:4]])


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
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the process of this host's first rank starts all ranks of this host
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as folder:
        options.folder = Path(options.keep or folder).resolve()
        report: dict[str, Any] = {"verdict": NOT_COMPARED, "text": "", "lines": []}
        report["text"] = judge(options, report)
    if report["lines"]:
        report["text"] += _CHANGES + "\n  ".join(report["lines"])
    if os.environ.get("RANK", "0") == "0":
        print(report["text"])
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return VERDICTS.index(report["verdict"])


def judge(options: argparse.Namespace, report: dict[str, Any]) -> str:
    """Run the script up to three times. Puts the verdict and figures into the report.

    ``options.folder``: an empty folder for the records of all ranks. Returns the report's text.
    """
    # Import here: other commands should not wait for the import of torch's compiler and FSDP.
    from flatshard.extras.trial_run import forked_ranks

    report |= {"verdict": NOT_COMPARED, "lines": [], "costs": {}}
    if not (options.is_module or Path(options.script).is_file()):
        return "SCRIPT is not a file."
    if min(options.nproc_per_node, options.steps) < 1:
        return "--nproc-per-node, --steps: at least 1."
    if "RANK" in os.environ and not options.keep:
        return "--keep: a new folder that all hosts share."
    options.folder.mkdir(parents=True, exist_ok=True)
    reference, failure = forked_ranks.run(options, "ddp")
    if failure:
        return f"Cannot be compared: the script ends early without flatshard, too: {failure}"
    calls = {key: [one.calls[key] for one in reference] for one in reference for key in one.calls}
    lone = {key: counts for key, counts in calls.items() if len({*counts}) > 1}
    sharded, failure = forked_ranks.run(options, "sharded", lone)
    lines = [f"{line}\n      {what}" for one in reference + sharded for line, what in one.remarks]
    lines += [f"{line}\n      {what} (calls by rank: {n})" for (line, what), n in lone.items()]
    report["lines"] = [*dict.fromkeys(lines)]
    if failure:
        report["verdict"] = RAISES
        return f"Raises under flatshard, not under DDP: {failure}"
    last = options.steps
    if found := [one for one in differences(reference, sharded, lone) if one.gap]:
        noise, failure = forked_ranks.run(options, "noise")
        if failure:
            return f"The second run with DDP failed: {failure}"
        units, other = units_of(differences(reference, noise, lone))
        last = min(last, max((step for step, *_ in units), default=0))
        if other and not last:
            return _OTHER.format(other)
        found = [one.in_units(units) for one in found if one.step <= last]
    worst = next((one for one in found if one.units > _LIMIT), None)
    report |= {"compared": last, "largest": max([0.0, *(one.units for one in found)])}
    report["first"] = worst and worst._asdict()
    report["verdict"], text = SAME, "The same numbers, within rounding."
    if worst:
        report["verdict"], text = DIFFERS, _DIFFERS.format(worst, _LIMIT)
    elif not last:
        report["verdict"], text = NOT_COMPARED, "Cannot be compared."
    elif lone:
        report["verdict"] = RAISES
        text += " But as it is, the script raises where not all ranks call the model (see below)."
    text += _NOISY.format(last + 1) * (last < options.steps)
    title = _TITLE.format(options.script, options.nproc_per_node, options.steps)
    parts = [title, _table(reference[0], sharded[0], found, last), text]
    if options.steps >= _WARM_UP + _TIMED:
        both = zip(_costs(reference), _costs(sharded), strict=True)
        report["costs"] = dict(zip(_COSTS, both, strict=True))
        parts.append(_cost_table(report["costs"]))
    return "\n\n".join(parts)


def differences(
    reference: list[Record], other: list[Record], lone_calls: dict[tuple[str, str], Any]
) -> list[Difference]:
    """Return the difference of each tensor, on each rank if ranks hold full tensors.

    ``lone_calls``: lines that ranks run different numbers of times. Tensors from these lines are
    left out.
    """
    found = []
    keys = dict.fromkeys(key for one in (*reference, *other) for key in one.events)
    for key in sorted(keys, key=lambda one: one[0]):
        if any(line in key[2] for line, _ in lone_calls):
            continue
        ours, theirs = ([one.events.get(key) for one in side] for side in (reference, other))
        parts = [one for one in theirs if one]
        if any(one.share < 1 for one in parts):  # replicas of a shard are averaged
            sums = torch.stack([one.sums for one in parts]).sum(0) / sum(one.share for one in parts)
            theirs = [parts[0]._replace(sums=sums)] * len(theirs)
        for rank, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            if any_one := one or two:
                norm, eps = float(any_one.sums.norm()), any_one.eps
                gap = float((one.sums - two.sums).norm()) if one and two else math.inf
                gap *= gap > 1e-6 * eps * norm  # adding up other ranges in float64 rounds, too
                size = gap / norm if norm else gap
                found.append(Difference(*key, rank, any_one.line, gap, norm, size, eps))
    return found


def units_of(noise: list[Difference]) -> tuple[dict[Place, float], Difference | None]:
    """Return the units of tensors, see [Note: units], in all steps that can be compared.

    ``noise``: the differences between two runs of the reference. Also returns the first of these
    differences that is too large for rounding (None: no difference is too large).
    """
    # Without noise, or if the noise run lacks a tensor, the unit is the smallest number.
    units: dict[Place, float] = defaultdict(lambda: math.ulp(0.0))
    own: dict[tuple[str, str, int], float] = defaultdict(float)  # largest gap of a tensor so far
    # For each kind of tensor, so far: the largest median of relative gaps, and the largest norm.
    level: dict[str, float] = defaultdict(float)
    scale: dict[str, float] = defaultdict(float)
    for step, group in groupby(noise, key=lambda one: one.step):
        here = [*group]
        # In step 1, no weight affects the inputs, or only slightly (inputs from a generator model).
        # So a larger difference of inputs has a cause other than rounding.
        limit = _CHAOS if step > 1 else 1e-3
        for one in here:
            own[one[1:4]] = max(own[one[1:4]], one.gap)
            scale[one.kind] = max(scale[one.kind], one.norm)
            is_other = one.kind == "input" and one.size > limit * (one.eps > 0)
            if one.gap and (is_other or one.kind == "initial value"):
                return units, one
        for kind in scale:
            sizes = [one.size for one in here if one.kind == kind and one.norm]
            level[kind] = max(level[kind], median(sizes or [0.0]))
        if level["gradient"] > _CHAOS:
            break
        for one in here:
            floor = one.eps * max(2 * one.norm, 1e-3 * scale[one.kind])
            units[one[:4]] = max(own[one[1:4]], level[one.kind] * one.norm, floor, math.ulp(0.0))
    return units, None


def _costs(records: list[Record]) -> list[float]:
    """Return the figures that _COSTS names, each of the rank where it is largest."""
    costs = torch.tensor([one.costs for one in records], dtype=torch.float64)  # rank, step, figure
    memory = (costs[:, -1, 1] - costs[:, 0, 1]).max().item()
    seconds, _, sent = costs.diff(dim=1)[:, _WARM_UP:].median(1).values.amax(0).tolist()
    return [memory / 2**20, 1e3 * seconds, sent / 2**10]


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


def _cost_table(costs: dict[str, tuple[float, float]]) -> str:
    rows = [["largest of all ranks", "DDP", "flatshard", ""]]
    for name, (one, other) in costs.items():
        rows.append([name, f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}" if one else ""])
    return tabulate(rows, numbers=(1, 2, 3))
