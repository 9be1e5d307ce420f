"""``chrome_trace``: recorded steps in Chrome's trace format, for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatshard.diagnostics.step_report import StepReport
from flatshard.engine.events import Kind

_TRACKS = ("steps", "passes", *(kind.value for kind in Kind))
"""Tracks of a trace, from top to bottom; Chrome calls them threads."""

_LANES = 100
"""Thread ids reserved per track: ranges that overlap get a lane each."""


def chrome_trace(reports: Iterable[StepReport]) -> dict[str, Any]:
    """Steps of any ranks in Chrome's trace format, as Perfetto reads it: a process per rank."""
    reports = list(reports)
    zero = min((report.began for report in reports), default=0.0)
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}
    for report in reports:
        since = report.began - zero
        for kind, unit, begin, end, lane in _in_lanes(report):
            track = "passes" if kind in ("forward pass", "backward pass") else kind
            tid = _LANES * _TRACKS.index(track) + lane
            names[report.rank, tid] = track if lane == 0 else f"{track} ({lane + 1})"
            times = {"ts": 1e6 * (since + begin), "dur": 1e6 * (end - begin)}
            place = {"ph": "X", "pid": report.rank, "tid": tid}
            events.append({**place, **times, "name": unit, "cat": kind})
        for seconds, gathered, gradients in report.memory.totals():
            held = {"unsharded": gathered, "gradients": gradients}
            place = {"ph": "C", "pid": report.rank, "ts": 1e6 * (since + seconds)}
            events.append({**place, "name": "memory in bytes", "args": held})
    return {"traceEvents": [*_metadata(names), *events], "displayTimeUnit": "ms"}


def _in_lanes(report: StepReport) -> Iterator[tuple[str, str, float, float, int]]:
    """Each range's kind, name, begin, end, and the first lane where it overlaps no other one."""
    yield "steps", f"step {report.number}", 0.0, report.seconds, 0
    lanes: dict[Kind, list[float]] = {}
    for kind, unit, begin, end in sorted(report.ranges, key=lambda one: one.begin):
        ends = lanes.setdefault(kind, [])
        lane = next((lane for lane, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        is_pass = kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        of_unit = "all units" if unit is None else report.units[unit].name or "(root)"
        yield kind.value, kind.value if is_pass else of_unit, begin, end, lane


def _metadata(names: dict[tuple[int, int], str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for rank, _ in names}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for (rank, tid), name in names.items():
        thread = {"ph": "M", "pid": rank, "tid": tid}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": tid}}
