"""Extra: ``flatshard try`` runs an unchanged script under DDP and under flatshard, and compares.

``judge`` starts two runs of the script: one run under DistributedDataParallel, and one run with
``ShardedWrapper`` instead. If their numbers differ, a third run repeats the first run with weights
changed by one unit in the last place. In each process of a run, ``forked_ranks`` replaces the
wrappers, runs the script, and records the tensors of each step.

Without this folder, the command ``flatshard try`` does not exist.

[Note: units]
Differences are measured in units of rounding noise. The noise of a tensor is the difference between
the first and the third run. A tensor's unit at a step is the largest of these numbers:
- its largest noise up to this step, relative to its norm at the step of the noise;
- its largest noise up to this step, relative to its norm at this step, which may be tiny;
- the largest median so far: the median, at one step, of the nonzero relative noise of all tensors
  of the same kind (gradient, value, output, ...);
- a tenth of the largest relative noise so far of any tensor of the same kind; a tensor with noise
  of 5 % or more at a step is left out of that step. (Rounding may flip a number's sign before a
  ReLU or an absolute value. Then a few gradients change much more than the median.)
- twice the dtype's precision, or a larger multiple if the tensor's norm is below 1/2000 of the
  largest norm of its kind.
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from flatshard.extras import tabulate
from flatshard.options import ShardingStrategy

VERDICTS = SAME, DIFFERS, RAISES, NOT_COMPARED = "same", "differs", "raises", "not compared"
"""Verdicts. The index of a verdict is the exit code."""

_LIMIT = 100.0  # a difference counts if it is more than this many units
_CHAOS = 0.05  # steps are compared until noise changes half of the gradients by more than this
COSTS = "peak memory without imports, MiB", "time per step, ms", "written to sockets and files, KiB"
_WARM_UP, _TIMED = 2, 5  # number of steps not measured, and minimum number of steps measured
_TITLE = "{0.script}, {0.nproc_per_node} ranks, {0.steps} steps: under DDP, then under flatshard"
_OTHER = """Cannot be compared: {0.kind} {0.name!r} of rank {0.rank} at step {0.step} differs
between two runs with DDP, in which only the last digits of weights differ. Line: {0.line}.
Seed random numbers (torch, random, numpy, generator=... of a DataLoader). Let data not depend on
time, earlier runs or threads, and step sizes (of an adaptive solver) not on the last digit."""
_LONE = " But as it is, the script raises where not all ranks call the model (see below)."
_NOISY = " From step {} on, rounding alone changes too much to compare (--exact compares more)."
_DIFFERS = """Differs: step {0.step}, {0.kind} {0.name!r}, rank {0.rank}: {0.size:.1e} of its norm,
{0.units:.3g} times the rounding noise (limit: {1:.0f}), at {0.line}."""
_MISSING = "Differs: step {0.step}, {0.kind} {0.name!r}, rank {0.rank}: in one run only ({0.line})."
_CHANGES = "\n\nTo keep it, change these lines, then try again (more --steps find later lines):"


class Difference(NamedTuple):
    """The difference of a tensor from the reference, the run under DistributedDataParallel."""

    step: int
    kind: str
    name: str
    rank: int
    line: str  # the program's line
    norm: float  # norm of the tensor in the reference
    size: float  # norm of the difference, relative to ``norm`` if that is not 0
    eps: float  # precision of the dtype
    units: float  # the size, in units of noise ([Note: units])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flatshard try``."""
    # argparse would write many lines, and exit with 2, which here is the verdict "raises".
    parser.error = lambda problem: parser.exit(3, f"{parser.prog}: {problem}\n")  # type: ignore
    strategies = ShardingStrategy.__members__
    add: Any = parser.add_argument
    add("--nproc-per-node", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    add("--steps", type=int, default=10, metavar="K", help="steps of all optimizers (default: 10)")
    add("--exact", action="store_true", help="float64 and deterministic algorithms")
    add("--strategy", default="FULL_SHARD", choices=strategies, help="default: FULL_SHARD")
    add("--policy", default="auto", choices=("auto", "none"), help="auto_wrap_policy")
    add("--wrap", action="store_true", help="wrap the models that optimizers step")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="limit of one run")
    add("--json", metavar="FILE", help="write the verdict and all figures")
    add("--keep", metavar="DIR", help="keep the output of all ranks")
    add("-m", "--module", dest="is_module", action="store_true", help="SCRIPT is a module")
    add("script", help="a training script for DistributedDataParallel, FSDP or flatshard")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def start(given: dict[str, Any]) -> int:
    """Run the command. Returns the exit code: 0 same, 1 differs, 2 raises, 3 not compared."""
    options = argparse.Namespace(**given)
    options.nproc_per_node = int(os.environ.get("WORLD_SIZE", options.nproc_per_node))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the process of this host's first rank starts all ranks of this host
    options.num_here = int(os.environ.get("LOCAL_WORLD_SIZE", options.nproc_per_node))
    report: dict[str, Any] = {"verdict": NOT_COMPARED, "lines": [], "costs": {}}
    with tempfile.TemporaryDirectory(prefix="flatshard-try-") as folder:
        options.folder = Path(options.keep or folder).resolve()
        several_hosts = options.num_here < options.nproc_per_node
        options.records = options.folder if several_hosts else Path(folder)
        report["text"] = judge(options, report)
    if report["lines"]:
        report["text"] += "\n  ".join([_CHANGES, *report["lines"]])
    print(report["text"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return VERDICTS.index(report["verdict"])


def judge(options: argparse.Namespace, report: dict[str, Any]) -> str:
    """Run the script up to three times, and put the verdict and figures into ``report``.

    ``options.num_here``: number of ranks on this host. ``options.folder``: a folder for the
    output of all ranks. ``options.records``: an empty folder, which all hosts share. Returns the
    report's text, or what is wrong with the options.
    """
    # Import here: other commands should not wait for the import of torch's compiler and FSDP.
    from flatshard.extras.trial_run import forked_ranks

    if not (options.is_module or Path(options.script).is_file()):
        return f"SCRIPT: expected a file (or -m and a module), got {options.script!r}."
    if min(counts := (options.nproc_per_node, options.steps)) < 1:
        return f"--nproc-per-node, --steps: expected at least 1, got {counts[0]} and {counts[1]}."
    if options.num_here < options.nproc_per_node and not options.keep:
        return "--keep: expected a new folder that all hosts share."
    options.folder.mkdir(parents=True, exist_ok=True)
    reference, failure = forked_ranks.run(options, "ddp")
    if failure:
        return f"Cannot be compared: the script ends early without flatshard, too: {failure}"
    calls = {key: [one.notes[key] for one in reference] for one in reference for key in one.notes}
    lone = {key: counts for key, counts in calls.items() if len({*counts}) > 1}
    sharded, failure = forked_ranks.run(options, "sharded", lone)
    added = dict.fromkeys(key for one in sharded for key in one.notes if key not in calls)
    report["lines"] = [*added, *(f"{key} (calls by rank: {lone[key]})" for key in lone)]
    if failure.endswith(forked_ranks.FEWER_STEPS):
        return f"Cannot be compared: under flatshard, {failure}"
    if failure:
        report["verdict"] = RAISES
        return f"Raises under flatshard, not under DDP: {failure}"
    last, found = options.steps, [*differences(reference, sharded, lone)]
    if any(one.size for one in found):
        noise, failure = forked_ranks.run(options, "noise")
        if failure:
            return f"Cannot be compared: the second run with DDP failed: {failure}"
        units, other = units_of(differences(reference, noise, lone))
        last = max((step for step, *_ in units), default=0)
        if not last:
            return _OTHER.format(other) if other else "Cannot be compared." + _NOISY.format(1)
        found = [one._replace(units=one.size / units[one[:4]]) for one in found if one.step <= last]
    worst = next((one for one in found if one.units > _LIMIT), None)
    report["verdict"] = DIFFERS if worst else RAISES if lone else SAME
    report |= {"first": worst and worst._asdict(), "largest": max(one.units for one in found)}
    text = "The same numbers, within rounding." + _LONE * bool(lone)
    if worst:
        text = (_DIFFERS if worst.size < 1e100 else _MISSING).format(worst, _LIMIT)
    text += _NOISY.format(last + 1) * (last < options.steps)
    parts = [_TITLE.format(options), loss_table((reference[0], sharded[0]), found, last), text]
    if options.steps >= _WARM_UP + _TIMED:
        parts.append(cost_table((reference, sharded), report["costs"]))
    return "\n\n".join(parts)


def differences(reference: list[Any], other: list[Any], lone: Any) -> Iterator[Difference]:
    """Yield the difference of each tensor on each rank. Shards are first added up to full tensors.

    ``lone``: lines that ranks run different numbers of times. Tensors of these lines are left out.
    """
    keys = dict.fromkeys(key for one in (*reference, *other) for key in one.events)
    for key in sorted(keys, key=lambda one: one[0]):
        if any(line.partition("\n")[0] in key[2] for line in lone):
            continue
        ours, theirs = ([one.events.get(key) for one in side] for side in (reference, other))
        parts = [one for one in theirs if one]
        if any(one.share < 1 for one in parts):  # add shards, and average replicas
            sums = sum(one.sums for one in parts) / sum(one.share for one in parts)
            theirs = [parts[0]._replace(sums=sums)] * len(theirs)
        for rank, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            if any_one := one or two:
                norm, eps = float((any_one.sums**2).sum()) ** 0.5, any_one.eps
                # The gap of a missing tensor is finite, because infinity / infinity is NaN.
                gap = float(((one.sums - two.sums) ** 2).sum()) ** 0.5 if one and two else 1e200
                # Ignore smaller gaps: they are rounding errors of the sketches.
                size = gap * (gap > 1e-6 * eps * norm) / (norm or 1.0)
                yield Difference._make((*key, rank, any_one.line, norm, size, eps, 0.0))


def units_of(noise: Iterator[Difference]) -> tuple[dict[Any, float], Difference | None]:
    """Return the units of tensors, see [Note: units], in all steps that can be compared.

    ``noise``: the differences between two runs of the reference. Also returns the first of these
    differences that is too large for rounding (None: no difference is too large).

    The keys of units are the step, the kind of tensor, its name, and the rank.
    """
    # A tensor that only the run under flatshard has keeps this tiny unit: it always differs.
    units: dict[Any, float] = defaultdict(lambda: 1e-300)
    # Largest values up to this step. `sizes`: relative noise of each tensor. `gaps`: absolute noise
    # of each tensor. `typical`: relative noise of each kind ([Note: units]). `norms`: largest norm
    # of each kind.
    sizes, gaps, typical, norms = (defaultdict[Any, float](float) for _ in range(4))
    for step, group in groupby(noise, key=lambda one: one.step):
        here = [*group]
        # In step 1, no weight affects the inputs, or only slightly (inputs from a generator model).
        # So a larger difference of inputs has a cause other than rounding.
        limit = _CHAOS if step > 1 else 1e-3
        for one in here:
            sizes[one[1:4]] = max(sizes[one[1:4]], one.size)
            gaps[one[1:4]] = max(gaps[one[1:4]], one.size * one.norm)
            norms[one.kind] = max(norms[one.kind], one.norm)
            if one.kind in ("input", "initial value") and one.size > limit * (one.eps > 0):
                return units, one
        for kind in norms:
            changed = [one.size for one in here if one.kind == kind and one.size]
            largest = max((size for size in changed if size < _CHAOS), default=0.0)
            typical[kind] = max(typical[kind], median(changed or [0.0]), largest / 10)
        if typical["gradient"] > _CHAOS:
            break
        for one in here:
            floor = one.eps * max(2, 1e-3 * norms[one.kind] / (one.norm or 1.0))
            gap = gaps[one[1:4]] / (one.norm or 1.0)
            units[one[:4]] = max(sizes[one[1:4]], gap, typical[one.kind], floor, 1e-300)
    return units, None


def loss_table(runs: Any, found: list[Difference], last: int) -> str:
    """Return a table of losses and largest differences. ``runs``: records of rank 0."""
    rows = [["step", "loss, DDP", "loss, flatshard", "largest difference, in units of noise"]]
    for step in sorted({1, 2, 5, *range(10, last, 10), last} & {*range(1, last + 1)}):
        key = step, "loss", "loss"
        losses = [f"{one.events[key].sums[0]:.6f}" if key in one.events else "-" for one in runs]
        most = max((one for one in found if one.step == step), key=lambda one: one.units)
        text = f"{most.units:.2g}  {most.kind} {most.name}" if most.units else "0"
        rows.append([f"{step}", *losses, text])
    return tabulate(rows, numbers=(0, 1, 2))


def cost_table(runs: Any, figures: dict[str, Any]) -> str:
    """Return a table of costs (the largest of all ranks). Also puts the costs in ``figures``."""
    # dimensions: run, rank, step, figure
    costs = torch.tensor([[one.costs for one in run] for run in runs], dtype=torch.float64)
    figure = costs.diff(dim=2)[:, :, _WARM_UP:].quantile(0.5, dim=2)
    figure[:, :, 0] = costs[:, :, -1, 0] - costs[:, :, 0, 0]  # without the memory of imports
    rows = [["largest of all ranks", "DDP", "flatshard", ""]]
    for name, (one, other) in zip(COSTS, figure.amax(dim=1).T.tolist(), strict=True):
        figures[name] = one, other
        rows.append([name, f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}" if one else ""])
    return tabulate(rows, numbers=(1, 2, 3))
