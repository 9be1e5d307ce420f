"""``recording``: a context that records the steps of a run, and writes them to files."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from flatshard.collectives import record
from flatshard.comm.communicator import Communicator
from flatshard.comm.consistency import agreed, raise_everywhere
from flatshard.engine.context import RunContext
from flatshard.extras.recording.memory_timeline import matplotlib, plot_memory
from flatshard.extras.recording.recorder import StepRecorder
from flatshard.extras.recording.step_report import StepReport
from flatshard.module.sharding import Sharding

PathLike = str | os.PathLike[str] | None

_OWN = "{rank}"  # in a file name: every rank writes a file of its own
_PANELS = 8  # ranks in one plot; more would be too small to read
# Of each run whose recording is over, the report of the last step.
_last_reports: weakref.WeakKeyDictionary[RunContext, StepReport] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def record_steps(sharding: Sharding, memory: PathLike) -> Iterator[list[StepReport]]:
    """See ``ShardedWrapper.record_steps``."""
    context = sharding.check_between_steps("record_steps()")
    world, device = sharding.settings.ranks.world, sharding.settings.device
    file = None if memory is None else os.fspath(memory)
    # Before the first step, so that no long run ends with an error.
    raise_everywhere(_problem(context, world, file), world)
    remedy = "Pass the same on every rank: the first one writes, or each where a name has '{rank}'."
    agreed(lambda: (True, {"memory": str(file)}), [world], "record_steps", remedy)
    with record() as events:
        recorder = StepRecorder(context.units, events, rank=world.rank, device=device)
        context.observers.add(recorder)
        try:
            yield recorder.reports
        finally:
            context.observers.remove(recorder)
            recorder.end_step()
            if recorder.reports:
                _last_reports[context] = recorder.reports[-1]
    if file is not None:
        _write(file, recorder.reports[-1:], world)


def last_report(context: RunContext) -> StepReport:
    """See ``ShardedWrapper.step_report``."""
    recorder, report = context.observers.find(StepRecorder), _last_reports.get(context)
    if recorder is not None:
        report = recorder.report() or [report, *recorder.reports][-1]
    if report is None:
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


def _problem(context: RunContext, world: Communicator, file: str | None) -> Exception | None:
    """The reason why this rank cannot record, if there is one."""
    if context.observers.find(StepRecorder) is not None:
        return RuntimeError(
            "record_steps: the model's steps are being recorded already. Leave that context first."
        )
    path = None if file is None else _written(file, world)
    if path is None:
        return None
    try:
        is_new = not Path(path).exists()
        Path(path).open("a").close()
        if is_new:  # a run that fails leaves no empty file
            Path(path).unlink()
        matplotlib()
    except OSError as error:
        return ValueError(
            f"record_steps: memory: cannot write {path!r}: {error.strerror}. Pass a file in a "
            "folder that is there and may be written to."
        )
    except ImportError as error:
        return error
    return None


def _write(file: str, reports: Sequence[StepReport], world: Communicator) -> None:
    """Write a file. Collective if it is about all ranks."""
    if _OWN not in file:
        everyone = world.host.gather(reports, "recorded steps")
        reports = [report for of_rank in everyone for report in of_rank]
    path = _written(file, world)
    if path is not None and reports:
        panels = [(f"rank {one.rank}, step {one.number}", one.memory) for one in reports]
        plot_memory(panels[:_PANELS], path)
