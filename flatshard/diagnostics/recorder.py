"""``StepRecorder``: an observer that reports every step."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from flatshard.comm.communicator import Event
from flatshard.diagnostics.memory_timeline import MemorySample, MemoryTimeline
from flatshard.diagnostics.step_report import Range, StepRecord, StepReport, sum_up
from flatshard.engine.events import Kind, StepObserver
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit


class _Doing(NamedTuple):
    """What the thread is doing: begun and not ended."""

    kind: Kind
    unit: int | None
    is_call: bool = False  # a unit's forward


class _Span:
    """A context in which the thread does one thing for a unit."""

    def __init__(
        self,
        recorder: StepRecorder,
        kind: Kind,
        unit: Unit | None,
        purpose: str,
        ends: bool,
    ) -> None:
        self._recorder = recorder
        self.doing = _Doing(kind, None if unit is None else unit.index)
        self.unit, self.purpose, self.ends = unit, purpose, ends
        self.num_before = 0  # collectives that began before this

    def __enter__(self) -> None:
        self._recorder._begin_span(self)

    def __exit__(self, *error: object) -> None:
        self._recorder._end_span(self)


_UNDER_WAY = {Kind.GATHER_WAIT: Kind.GATHER, Kind.REDUCE_WAIT: Kind.REDUCE}


class StepRecorder(StepObserver):
    """Reports every step.

    Attributes:
        reports: the reports of the steps that are over.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        events: list[Event],
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        """Begin to record.

        Args:
            units: the model's units, the root last.
            events: the list of ``collectives.record``, from which this removes entries.
            rank: this rank's number among those that train the model.
            device: the device of computation.
        """
        self.reports: list[StepReport] = []
        self._units, self._events = units, events
        # A wrapper directly around another one has the same name and no parameters, and comes
        # later in `units`: reversed, the one with parameters wins.
        self._by_name = {unit.name: unit.index for unit in reversed(units)}
        self._rank, self._device = rank, device
        self._epoch = time.time() - time.perf_counter()
        self._number = 0
        self._doing: list[_Doing] = []
        self._reducing: dict[int, Unit] = {}
        self._begin_step()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        self._began, self._since = time.perf_counter(), 0.0
        self._ranges: list[Range] = []
        self._samples: list[MemorySample] = []
        self._volume: Counter[tuple[int | None, str]] = Counter()
        self._pass: tuple[Kind, float] | None = None
        self._under_way: dict[tuple[Kind, int | None], float] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._events.clear()  # collectives outside of the model's steps
        self._is_over = False  # True from backward on: the next forward begins a new step
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        for unit in self._units:
            self.look(unit)

    def end_step(self) -> None:
        """End the current step, if anything of it ran, and keep its report."""
        report = self.report()
        if report is None:
            return
        self._number += 1
        self.reports.append(report)

    def last_report(self) -> StepReport | None:
        """Report of the current step; of the last one if nothing of this one ran; else None."""
        return self.report() or (self.reports[-1] if self.reports else None)

    def report(self) -> StepReport | None:
        """Report of the current step so far; None if nothing of it ran."""
        if not self._ranges:
            return None
        now = self._clock()
        names = tuple(unit.name for unit in self._units)
        cuda = self._device.type == "cuda"
        return sum_up(
            StepRecord(self._number, self._epoch + self._began, self._ranges, self._volume),
            MemoryTimeline(names, now, tuple(self._samples)),
            rank=self._rank,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
            peak_resident_bytes=peak_resident_bytes(),
        )

    def begin_forward(self) -> None:
        """See ``StepObserver``."""
        self._doing.clear()  # a step that failed did not end these
        if self._is_over or not self._ranges:
            self.end_step()
            self._begin_step()
        self._is_over = not torch.is_grad_enabled()
        self._begin_pass(Kind.FORWARD_PASS)

    def end_forward(self) -> None:
        """See ``StepObserver``."""
        self._end_pass(Kind.FORWARD_PASS)

    def begin_backward(self) -> None:
        """See ``StepObserver``."""
        self._is_over = True
        self._begin_pass(Kind.BACKWARD_PASS)

    def end_backward(self) -> None:
        """See ``StepObserver``."""
        self._switch()
        self._doing = [one for one in self._doing if one.is_call]
        self._reducing.clear()
        self._end_pass(Kind.BACKWARD_PASS)

    def _begin_pass(self, kind: Kind) -> None:
        # A forward that runs a backward inside (for forces, say) is one pass.
        if self._pass is None or kind is Kind.FORWARD_PASS:
            self._pass = kind, self._clock()

    def _end_pass(self, kind: Kind) -> None:
        for unit in self._units:
            self.look(unit)
        if self._pass is not None and self._pass[0] is kind:
            self._ranges.append(Range(kind, None, self._pass[1], self._clock()))
            self._pass = None

    # ------------------------------------------------------------ work of the thread

    def enter_forward(self, unit: Unit, recomputes: bool) -> None:
        """See ``StepObserver``."""
        kind = Kind.BACKWARD if recomputes else Kind.FORWARD
        self._begin(_Doing(kind, unit.index, is_call=True))

    def leave_forward(self, unit: Unit) -> None:
        """See ``StepObserver``."""
        self.look(unit)
        calls = [one for one in self._doing if one.is_call and one.unit == unit.index]
        if calls:  # none if the recording began inside of it
            self._end(calls[-1])

    def enter_backward(self, unit: Unit) -> None:
        """See ``StepObserver``."""
        self.leave_backward(unit)
        self._begin(_Doing(Kind.BACKWARD, unit.index))

    def leave_backward(self, unit: Unit) -> None:
        """See ``StepObserver``."""
        self.look(unit)
        self._end(_Doing(Kind.BACKWARD, unit.index))

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def _begin(self, doing: _Doing) -> None:
        self._switch()
        self._doing.append(doing)

    def _end(self, doing: _Doing) -> None:
        """End the last equal entry; others may have begun since."""
        for position in reversed(range(len(self._doing))):
            if self._doing[position] == doing:
                self._switch()
                del self._doing[position]
                return

    def _switch(self) -> float:
        """Record what the thread did until now; returns the time."""
        now = self._clock()
        if self._doing:
            kind, unit, _ = self._doing[-1]
            self._ranges.append(Range(kind, unit, self._since, now))
        self._since = now
        return now

    # ------------------------------------------------------------ collectives

    def span(
        self, kind: Kind, unit: Unit | None, purpose: str, ends: bool
    ) -> AbstractContextManager[object]:
        """See ``StepObserver``."""
        return _Span(self, kind, unit, purpose, ends)

    def _begin_span(self, span: _Span) -> None:
        self._begin(span.doing)
        span.num_before = len(self._events)

    def _end_span(self, span: _Span) -> None:
        self._end(span.doing)
        events = self._events[span.num_before :]
        del self._events[span.num_before :]
        if events:
            self._note(events, span.purpose, self._since)
        unit = span.unit
        if span.doing.kind is Kind.STARTING:
            if unit is not None and span.purpose == "reduce":
                self._reducing[unit.index] = unit
        elif unit is not None and span.ends:
            self._end_under_way(_UNDER_WAY[span.doing.kind], unit)
        if unit is not None and span.doing.kind is not Kind.GATHER_WAIT:
            self.look(unit)
        if span.purpose == "reduce":
            # A gradient buffer that other ranks read is freed when all of them have read it, which
            # may be in any unit's wait: so look at all units whose buffers are still read.
            for one in list(self._reducing.values()):
                self.look(one)
                reduces = [handle.grad_reduce for handle in one.handles]
                if not any(reduce is not None and reduce.keeps_memory for reduce in reduces):
                    del self._reducing[one.index]

    def _note(self, events: list[Event], purpose: str, now: float) -> None:
        """Record collectives that have just begun."""
        way = Kind.REDUCE if purpose == "reduce" else Kind.GATHER
        for event in events:
            # None also for another model's: second stages of reductions share a queue.
            unit = None if purpose == "other" else self._by_name.get(event.unit_fqn)
            self._volume[unit, purpose] += event.nbytes
            if unit is not None:
                self._under_way.setdefault((way, unit), now)

    def _end_under_way(self, kind: Kind, unit: Unit) -> None:
        begin = self._under_way.pop((kind, unit.index), None)
        if begin is not None:
            self._ranges.append(Range(kind, unit.index, begin, self._clock()))

    def on_grad(self, unit: Unit, handle: FlatParamHandle, index: int, grad: Tensor) -> None:
        """See ``StepObserver``."""
        self.look(unit)

    def look(self, unit: Unit) -> None:
        """Record the memory of a unit, if it has changed."""
        held = (
            sum(handle.unsharded_bytes for handle in unit.handles),
            sum(handle.gradient_bytes for handle in unit.handles),
        )
        if self._held.get(unit.index, (0, 0)) != held:
            self._held[unit.index] = held
            self._samples.append(MemorySample(self._clock(), unit.index, *held))


def peak_resident_bytes() -> int | None:
    """Peak RSS of this process since its start; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
