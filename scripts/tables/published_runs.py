"""Predicts published training runs, and compares memory and speed with the published values.

    python scripts/tables/published_runs.py RUNS.csv --json OUT.json --plot OUT.png

RUNS.csv has a line for each run: model, GPUs, strategy, batch, length, activation checkpointing,
dtypes, peak memory, tokens per second. Only one number is fitted to the runs: the speed of
arithmetic of each kind of GPU, which is the median over the runs on this kind of GPU.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import table_cells  # noqa: F401  (import first: may end the script)
import torch
from lib.command_line import Parser, stop
from published.fsdp import Fsdp2Replay
from published.layers import Units, freed_at_last_use, repeated
from published.models import Block, Decoder, Embedding, Form, Head, step
from published.rows import COLUMNS, Run, read_row

from flatshard import MixedPrecision
from flatshard.extras.plan.fusion import compiled
from flatshard.extras.plan.planning import TracedModel
from flatshard.extras.plan.shards import plan_flats
from flatshard.extras.plan.trace import Alloc, CannotTraceError, Free, Mark, StepTrace
from flatshard.wrap import ModuleWrapPolicy

GIB = 2**30
CONTEXT_BYTES = 1 << 30  # approximate memory of the CUDA context and of NCCL


@cache
def traced(
    form: Form,
    batch: int,
    compiles: bool,
    stored: torch.dtype,
    reduce_dtype: torch.dtype,
    shallow_layers: int = 4,
) -> TracedModel:
    """Return the trace of a step.

    For a deep model, only four layers are traced, and ``repeated`` adds the other layers.
    """
    period = form.checkpoint_every
    shallow = replace(form, layers=min(form.layers, shallow_layers * period))
    found = TracedModel.of(
        partial(_build, shallow, stored),
        partial(step, form, batch),
        auto_wrap_policy=ModuleWrapPolicy(
            {Block, Embedding, Head} if form.root_is_split else {Block}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        coalesce_bytes=0,  # FSDP does not join small units
    )
    if form.layers > shallow.layers:
        before = _units(found)
        with torch.device("meta"):
            found.model = _build(form, stored)
        found.trace = repeated(found.trace, before, _units(found), form.layers // period, period)
    if compiles:
        found.trace = compiled(found.trace)
    return found


def _build(form: Form, stored: torch.dtype) -> Decoder:
    model = Decoder(form)
    for param in model.parameters():
        param.data = param.data.to(stored)
    return model


def _units(found: TracedModel) -> Units:
    plan, flats = plan_flats(found.model, world_size=1, **found.keywords)
    return Units([unit.name for unit in plan.units], [one.unit for one in flats])


@cache
def predict(run: Run) -> dict[str, Any]:
    found = traced(run.form, run.batch, run.is_compiled, run.stored, run.reduce_dtype)
    trace = freed_at_last_use(found.trace) if run.compiles_step else found.trace
    flats = found.flats(run.shards)
    if run.replicas > 1:
        for flat in flats:
            flat.replicas = run.replicas
    played = Fsdp2Replay(run, trace, flats, run.machine)
    outcome = played.run(steps=2)  # all later steps equal the second step
    once = outcome.seconds - played.step_seconds
    backwards = run.accumulate
    more = 0.0
    if run.pipeline_ranks > 1:
        # While the first microbatch passes the other ranks, this rank waits. Its microbatches stay
        # in memory. A stage's gradients add up without sharding until its last microbatch.
        idle = (run.pipeline_ranks - 1) / run.pipeline_stages
        backwards = run.microbatches + idle
        last = max(i for i, name in enumerate(found.trace.names) if name.startswith("blocks"))
        more = (run.microbatches - 1) * saved_bytes(found.trace, last)
        more += sum(one.whole_gradient_bytes for one in flats) / run.pipeline_stages
    return {
        "active_gib": (outcome.peak_bytes + more) / GIB,
        "reserved_gib": (outcome.reserved_bytes + more) / GIB,
        "peak": {key: value / GIB for key, value in outcome.peak.items()},
        "peak_at": outcome.peak_at,
        "seconds": backwards * once + played.step_seconds,
        "arithmetic_seconds": backwards * played.arithmetic_seconds,
        "exposed": outcome.exposed_seconds,
    }


def saved_bytes(trace: StepTrace, last: int) -> int:
    """Return the bytes that forward saves for backward, up to the end of unit ``last``."""
    forward: list[int] = []
    ends, in_backward, kept = 0, False, set()
    for event in trace.events:
        if isinstance(event, Mark):
            in_backward = in_backward or event.what == "backward"
            if event == Mark("leave", last) and not in_backward:
                ends = len(forward)
        elif isinstance(event, Alloc) and not in_backward:
            forward.append(event.block)
        elif isinstance(event, Free) and in_backward:
            kept.add(event.block)
    return sum(trace.sizes[block] for block in forward[:ends] if block in kept)


# ---------------------------------------------------------------- comparison


@dataclass
class Judged:
    """A row, the prediction for the row, and the errors of the prediction.

    ``why_not``: the reason why the row has no prediction.
    """

    row: dict[str, str]
    run: Run | None = None
    why_not: str = ""
    found: dict[str, Any] | None = None
    tokens_per_s: float = 0.0

    @property
    def published_gib(self) -> float:
        return float(self.row["peak_gib"] or 0)

    @property
    def published_tokens_per_s(self) -> float:
        return float(self.row["tokens_per_s_per_gpu"] or 0)

    @property
    def peak_gib(self) -> float:
        assert self.run is not None
        assert self.found is not None
        if not self.run.judges_reserved:
            return float(self.found["active_gib"])
        # Before torch's allocator runs out of memory, it returns free segments to the driver. So
        # the reserved memory never exceeds the GPU's memory.
        limit = (self.run.machine.device.memory_bytes - CONTEXT_BYTES) / GIB
        return max(min(self.found["reserved_gib"], limit), float(self.found["active_gib"]))

    @property
    def fits(self) -> bool:
        assert self.run is not None
        assert self.found is not None
        memory = self.run.machine.device.memory_bytes - CONTEXT_BYTES
        return bool(self.found["active_gib"] * GIB <= memory)

    @property
    def memory_error(self) -> float | None:
        if self.found is None or not self.published_gib:
            return None
        return self.peak_gib / self.published_gib - 1

    @property
    def speed_error(self) -> float | None:
        if self.found is None or not self.published_tokens_per_s:
            return None
        return self.tokens_per_s / self.published_tokens_per_s - 1


def judge(rows: Sequence[dict[str, str]]) -> tuple[list[Judged], dict[str, float]]:
    """Predict each row. Returns the rows, and the fitted speed of each kind of GPU."""
    found = []
    for row in rows:
        run = read_row(row)
        if isinstance(run, str):
            found.append(Judged(row, why_not=run))
            continue
        try:
            found.append(Judged(row, run, found=predict(run)))
        except CannotTraceError as error:
            found.append(Judged(row, why_not=f"{error}"))
    speeds = calibrate(found)
    for one in found:
        if one.run is not None and one.found is not None:
            arithmetic, seconds = one.found["arithmetic_seconds"], one.found["seconds"]
            seconds += arithmetic / speeds.get(one.run.kind, 1.0) - arithmetic
            one.tokens_per_s = one.run.tokens / seconds
    return found, speeds


def calibrate(found: Sequence[Judged]) -> dict[str, float]:
    """Return the speed of arithmetic of each kind of GPU, as a fraction of the speed in `DEVICES`.

    A limit on power makes matrix products and attention slower, but not memory and links. The speed
    of a row is the speed that makes the predicted time equal the published time. The speed of a
    kind of GPU is the median over its rows.
    """
    speeds: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.run is None or one.found is None or not one.published_tokens_per_s:
            continue
        arithmetic, seconds = one.found["arithmetic_seconds"], one.found["seconds"]
        measured = one.run.tokens / one.published_tokens_per_s
        rest = min(seconds - arithmetic, 0.9 * measured)
        speeds[one.run.kind].append(arithmetic / (measured - rest))
    return {kind: statistics.median(each) for kind, each in speeds.items()}


def summary(found: Sequence[Judged]) -> dict[str, Any]:
    """Return the number of rows, and the sizes of the errors. Errors are fractions."""

    def of(errors: list[float], within: float) -> dict[str, Any]:
        if not errors:
            return {"rows": 0}
        sizes = [abs(one) for one in errors]
        share = sum(size <= within for size in sizes) / len(sizes)
        return {"rows": len(sizes), "median": statistics.median(sizes), f"within {within}": share}

    memory = [e for one in found if (e := one.memory_error) is not None]
    speed = [e for one in found if (e := one.speed_error) is not None]
    series: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.memory_error is not None:
            series[one.row["source"]].append(one.memory_error)
    pairs = [abs(a - b) for each in series.values() for a, b in combinations(each, 2)]
    ran = [one for one in found if one.found is not None]
    return {
        "memory": of(memory, 0.10),
        "tokens_per_s": of(speed, 0.12),
        "pairs of a series": of(pairs, 0.05) | {"most": max(pairs, default=0.0)},
        "wrongly predicted not to fit": sum(not one.fits for one in ran),
        "not predicted": len(found) - len(ran),
    }


# ---------------------------------------------------------------- output


def show(found: Sequence[Judged], speeds: dict[str, float]) -> None:
    head = f"{'row':>4} {'source':34} {'model':14} {'GPUs':>5}  {'peak GiB':>15} {'':6}"
    print(f"{head} {'tokens/s/GPU':>15} {'':6} fits")
    for number, one in enumerate(found, 2):
        text = f"{number:4} {one.row['source'][:34]:34} {one.row['model'][:14]:14} "
        text += f"{one.row['gpus']:>5}  "
        if one.found is None:
            print(f"{text}not predicted: {one.why_not}")
            continue
        memory = _pair(one.published_gib, one.peak_gib, one.memory_error, ".1f")
        speed = _pair(one.published_tokens_per_s, one.tokens_per_s, one.speed_error, ".0f")
        print(f"{text}{memory} {speed} {'yes' if one.fits else 'NO'}")
    scales = ", ".join(f"{key} {value:.2f}" for key, value in speeds.items())
    print(f"\nspeed of arithmetic: {scales}")
    for name, value in summary(found).items():
        if isinstance(value, dict):
            value = ", ".join(
                f"{key} {part if isinstance(part, int) else format(part, '.1%')}"
                for key, part in value.items()
            )
        print(f"{name}: {value}")


def _pair(published: float, predicted: float, error: float | None, form: str) -> str:
    shown = format(published, form) if published else "-"
    relative = "" if error is None else f"{error:+.1%}"
    return f"{shown:>7} {format(predicted, form):>7} {relative:>6}"


def as_json(found: Sequence[Judged], speeds: dict[str, float]) -> dict[str, Any]:
    rows = []
    for number, one in enumerate(found, 2):
        entry: dict[str, Any] = {"line": number, "source": one.row["source"]}
        if one.found is None:
            entry["not_predicted"] = one.why_not
        else:
            entry |= {
                "published_gib": one.published_gib or None,
                "predicted_gib": one.peak_gib,
                "memory_error": one.memory_error,
                "published_tokens_per_s": one.published_tokens_per_s or None,
                "predicted_tokens_per_s": one.tokens_per_s,
                "speed_error": one.speed_error,
                "fits": one.fits,
                **one.found,
            }
        rows.append(entry)
    return {"speeds": speeds, "summary": summary(found), "rows": rows}


def plot(found: Sequence[Judged], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2))
    memory = [(o.published_gib, o.peak_gib, o) for o in found if o.memory_error is not None]
    speed = [
        (o.published_tokens_per_s, o.tokens_per_s, o) for o in found if o.speed_error is not None
    ]
    for panel, points, title, margin in (
        (panels[0], memory, "peak memory (GiB)", 0.10),
        (panels[1], speed, "tokens/s per GPU", 0.12),
    ):
        for device in sorted({one.run.device for *_, one in points if one.run}):
            mine = [(a, b) for a, b, one in points if one.run and one.run.device == device]
            panel.scatter(*zip(*mine, strict=True), s=18, label=device, alpha=0.8)
        ends = [f(a for a, *_ in points) for f in (min, max)] if points else [1.0, 2.0]
        panel.plot(ends, ends, color="gray", linewidth=0.8)
        for factor in (1 - margin, 1 + margin):
            panel.plot(ends, [factor * one for one in ends], color="gray", linewidth=0.5, ls=":")
        panel.set(xscale="log", yscale="log", title=title, xlabel="published", ylabel="predicted")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file. Raises ValueError if the file cannot be read or lacks a column."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"{path}: has no rows.")
    if missing := [name for name in COLUMNS if rows[0].get(name) is None]:
        raise ValueError(f"{path}: lacks the columns {', '.join(missing)}.")
    for number, row in enumerate(rows, 2):
        try:
            read_row(row)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, help="CSV file with a line for each run")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="plot predicted against published values")
    options = parser.parse_args()
    try:
        rows = read_rows(options.runs)
        found, speeds = judge(rows)
        if options.json:
            options.json.write_text(json.dumps(as_json(found, speeds), indent=1) + "\n")
    except (ValueError, OSError) as error:
        stop(str(error))
    show(found, speeds)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
