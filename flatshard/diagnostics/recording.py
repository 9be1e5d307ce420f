"""``recording``: a context that records the steps of a run, and writes them to files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flatshard.comm import event_log
from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import agreed, raise_everywhere
from flatshard.diagnostics.memory_timeline import matplotlib, plot_memory
from flatshard.diagnostics.recorder import StepRecorder
from flatshard.diagnostics.step_report import StepReport
from flatshard.engine.context import RunContext
from flatshard.engine.events import Kind

PathLike = str | os.PathLike[str] | None

_OWN = "{rank}"  # in a file name: every rank writes a file of its own
_PANELS = 8  # ranks in one plot; more would be too small to read

# From top to bottom; Chrome calls them threads.
_TRACKS = ("steps", "passes", *(kind.value for kind in Kind))
# Thread ids reserved per track: ranges that overlap get a lane each.
_LANES = 100


@contextlib.contextmanager
def recording(
    context: RunContext,
    world: Communicator,
    device: torch.device,
    *,
    trace: PathLike,
    memory: PathLike,
) -> Iterator[list[StepReport]]:
    """See ``ShardedWrapper.record_steps``."""
    paths = {"trace": trace, "memory": memory}
    files = {keyword: os.fspath(path) for keyword, path in paths.items() if path is not None}
    # Before the first step, so that no long run ends with an error.
    raise_everywhere(_problem(context, world, files), world)
    remedy = "Pass the same on every rank: the first one writes, or each where a name has '{rank}'."
    agreed(lambda: (True, files), [world], "record_steps", remedy)
    with event_log.record() as events:
        recorder = StepRecorder(context.units, events, rank=world.rank, device=device)
        context.observers.add(recorder)
        try:
            yield recorder.reports
        finally:
            context.observers.remove(recorder)
            recorder.end_step()
            context.last_report = [context.last_report, *recorder.reports][-1]
    for keyword, path in files.items():
        of_file = recorder.reports if keyword == "trace" else recorder.reports[-1:]
        _write(keyword, path, of_file, world)


def last_report(context: RunContext) -> StepReport:
    """See ``ShardedWrapper.step_report``."""
    recorder, report = context.observers.find(StepRecorder), context.last_report
    if recorder is not None:
        report = recorder.report() or [report, *recorder.reports][-1]
    if not isinstance(report, StepReport):
        raise RuntimeError(
            "step_report: no step was recorded. Run some inside "
            "`with model.record_steps():`, forward and backward, and ask again."
        )
    return report


def _written(path: str, world: Communicator) -> str | None:
    """The file that this rank writes; None: the first rank writes it for all."""
    if _OWN in path:
        return path.replace(_OWN, str(world.rank))
    return path if world.rank == 0 else None


def _problem(
    context: RunContext, world: Communicator, files: Mapping[str, str]
) -> Exception | None:
    """The reason why this rank cannot record, if there is one."""
    if context.observers.find(StepRecorder) is not None:
        return RuntimeError(
            "record_steps: the model's steps are being recorded already. Leave that context first."
        )
    for keyword, name in files.items():
        path = _written(name, world)
        if path is None:
            continue
        try:
            is_new = not Path(path).exists()
            Path(path).open("a").close()
            if is_new:  # a run that fails leaves no empty file
                Path(path).unlink()
            if keyword == "memory":
                matplotlib()
        except OSError as error:
            return ValueError(
                f"record_steps: {keyword}: cannot write {path!r}: {error.strerror}. Pass a file "
                "in a folder that is there and may be written to."
            )
        except ImportError as error:
            return error
    return None


def _write(keyword: str, name: str, reports: Sequence[StepReport], world: Communicator) -> None:
    """Write a file. Collective if it is about all ranks."""
    if _OWN not in name:
        everyone = world.gather_objects(reports, op_name="recorded steps")
        reports = [report for of_rank in everyone for report in of_rank]
    path = _written(name, world)
    if path is None:
        return
    if keyword == "trace":
        Path(path).write_text(json.dumps(chrome_trace(reports)))
    elif reports:
        panels = [(f"rank {one.rank}, step {one.number}", one.memory) for one in reports]
        plot_memory(panels[:_PANELS], path)


# ------------------------------------------------------------ the trace


def chrome_trace(reports: Sequence[StepReport]) -> dict[str, Any]:
    """Steps of any ranks in Chrome's trace format, as Perfetto reads it: a process per rank."""
    zero = min((report.began for report in reports), default=0.0)
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}
    for report in reports:
        since = report.began - zero
        for track, lane, name, begin, end in _in_lanes(report):
            tid = _LANES * _TRACKS.index(track) + lane
            names[report.rank, tid] = track if lane == 0 else f"{track} ({lane + 1})"
            times = {"ts": 1e6 * (since + begin), "dur": 1e6 * (end - begin)}
            place = {"ph": "X", "pid": report.rank, "tid": tid}
            events.append({**place, **times, "name": name, "cat": track})
        for seconds, gathered, gradients in report.memory.totals():
            held = {"unsharded": gathered, "gradients": gradients}
            place = {"ph": "C", "pid": report.rank, "ts": 1e6 * (since + seconds)}
            events.append({**place, "name": "memory in bytes", "args": held})
    return {"traceEvents": [*_metadata(names), *events], "displayTimeUnit": "ms"}


def _in_lanes(report: StepReport) -> Iterator[tuple[str, int, str, float, float]]:
    """Each range's track, the first lane of it where it overlaps none, name, begin and end."""
    yield "steps", 0, f"step {report.number}", 0.0, report.seconds
    lanes: dict[str, list[float]] = {}  # the end of each lane's last range
    for kind, unit, begin, end in sorted(report.ranges, key=lambda one: one.begin):
        is_pass = kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        track = "passes" if is_pass else kind.value
        of_unit = "all units" if unit is None else report.units[unit].name or "(root)"
        ends = lanes.setdefault(track, [])
        lane = next((lane for lane, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        yield track, lane, kind.value if is_pass else of_unit, begin, end


def _metadata(names: dict[tuple[int, int], str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for rank, _ in names}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for (rank, tid), name in names.items():
        thread = {"ph": "M", "pid": rank, "tid": tid}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": tid}}
