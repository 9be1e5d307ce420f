"""``recording``: a context that records the steps of a run, and writes them to files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from flatshard.comm import event_log
from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import raise_everywhere
from flatshard.diagnostics.chrome_trace import chrome_trace
from flatshard.diagnostics.memory_timeline import matplotlib, plot_memory
from flatshard.diagnostics.recorder import StepRecorder
from flatshard.diagnostics.step_report import StepReport
from flatshard.engine.context import RunContext

PathLike = str | os.PathLike[str] | None

_PANELS = 8
"""Ranks in one plot; more would be too small to read."""


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
    files = {"trace": _text(trace), "memory": _text(memory)}
    raise_everywhere(_problem(context, world, files), world)
    _check_same(files, world)
    with event_log.record() as events:
        recorder = StepRecorder(context.units, events, rank=world.rank, device=device)
        context.observers.add(recorder)
        try:
            yield recorder.reports
        finally:
            context.observers.remove(recorder)
            recorder.end_step()
            context.last_report = [context.last_report, *recorder.reports][-1]
    _write_trace(files["trace"], recorder.reports, world)
    _write_memory(files["memory"], recorder.reports[-1:], world)


def last_report(context: RunContext) -> StepReport:
    """See ``ShardedWrapper.step_report``."""
    recorder, report = context.observers.find(StepRecorder), context.last_report
    if recorder is not None:
        report = recorder.last_report() or report
    if not isinstance(report, StepReport):
        raise RuntimeError(
            "step_report: no step was recorded. Run some inside "
            "`with model.record_steps():`, forward and backward, and ask again."
        )
    return report


# ------------------------------------------------------------ checks before the first step


def _text(path: PathLike) -> str | None:
    return None if path is None else os.fspath(path)


def _problem(
    context: RunContext, world: Communicator, files: dict[str, str | None]
) -> Exception | None:
    """The reason why this rank cannot record, if there is one."""
    if context.observers.find(StepRecorder) is not None:
        return RuntimeError(
            "record_steps: the model's steps are being recorded already. Leave that context first."
        )
    try:
        for keyword, path in files.items():
            if path is not None and _writes(path, world):
                _check_writable(keyword, _of_rank(path, world))
                if keyword == "memory":
                    matplotlib()
    except (ValueError, ImportError) as error:
        return error
    return None


def _check_writable(keyword: str, path: str) -> None:
    try:
        is_new = not Path(path).exists()
        with Path(path).open("a"):
            pass
        if is_new:  # a run that fails leaves no empty file
            Path(path).unlink()
    except OSError as error:
        raise ValueError(
            f"record_steps: {keyword}: cannot write {path!r}: {error.strerror}. Pass a file in a "
            "folder that is there and may be written to."
        ) from error


def _check_same(files: dict[str, str | None], world: Communicator) -> None:
    everyone = world.gather_objects(files, op_name="comparing files of record_steps")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"record_steps: rank {world.ranks[0]} was given {everyone[0]}, rank "
                f"{world.ranks[rank]} {theirs}. Pass the same on every rank: rank "
                f"{world.ranks[0]} writes, or each its own file where a name has '{{rank}}'."
            )


# ------------------------------------------------------------ files

_OWN = "{rank}"
"""In a file name: every rank writes a file of its own."""


def _writes(path: str, world: Communicator) -> bool:
    return _OWN in path or world.rank == 0


def _of_rank(path: str, world: Communicator) -> str:
    return path.replace(_OWN, str(world.rank))


def _shared(path: str, reports: list[StepReport], world: Communicator) -> list[list[StepReport]]:
    """The reports of the ranks that this file covers. Collective if that is all ranks."""
    if _OWN in path:
        return [reports]
    return world.gather_objects(reports, op_name="recorded steps")


def _write_trace(path: str | None, reports: list[StepReport], world: Communicator) -> None:
    if path is not None:
        of_ranks = _shared(path, reports, world)
        if _writes(path, world):
            trace = chrome_trace(report for reports in of_ranks for report in reports)
            Path(_of_rank(path, world)).write_text(json.dumps(trace))


def _write_memory(path: str | None, last: list[StepReport], world: Communicator) -> None:
    if path is not None:
        panels = [
            (f"rank {report.rank}, step {report.number}", report.memory)
            for reports in _shared(path, last, world)
            for report in reports
        ]
        if panels and _writes(path, world):
            plot_memory(panels[:_PANELS], _of_rank(path, world))
