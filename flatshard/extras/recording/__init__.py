"""Extra: records the time, memory and communication of a model's steps.

``record`` lists the collectives that a rank starts. ``StepRecorder`` is a ``StepExtension``: the
engine calls its methods during a step. Without this folder, ``flatshard.collectives`` and
``ShardedWrapper.record_steps()`` raise ``MissingExtraError``.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from flatshard.comm.communicator import LISTENERS
from flatshard.engine.events import Kind, StepExtension
from flatshard.engine.handle import FlatParamHandle
from flatshard.engine.unit import Unit
from flatshard.extras import peak_resident_bytes
from flatshard.extras.recording.step_report import MemorySample, Range, StepReport, sum_up
from flatshard.module.wrappers import unit_of
from flatshard.units.module_proxy import ModuleProxy

__all__ = ["Event", "record", "record_steps"]


class Event(NamedTuple):
    """One collective that this rank has started.

    Attributes:
        kind: ``"gather"``, ``"reduce"`` (a reduce-scatter), ``"all_reduce"``, ``"all_to_all"``,
            ``"scalars"`` (a few numbers) or ``"broadcast"``.
        unit_fqn: name of the unit. For a collective without a unit, the purpose.
        nbytes: size in bytes of the result of an all-gather, or of each rank's input to a
            reduction. For an all-reduce that consists of a reduce-scatter and an all-gather, the
            mean of both sizes, because the dtypes may differ.
        ranks: the participating ranks, as ranks in the default group.
    """

    kind: str
    unit_fqn: str
    nbytes: int
    ranks: tuple[int, ...]


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Record the collectives that this rank starts inside the context, in order.

    The context yields a list of ``Event``s, which grows with each collective.

    Example:
        ```python
        from flatshard import collectives

        with collectives.record() as events:
            model(inputs)
        print(sum(event.nbytes for event in events if event.kind == "gather"))
        ```
    """
    events: list[Event] = []

    def listen(*facts: Any) -> None:
        events.append(Event(*facts))

    LISTENERS.append(listen)
    try:
        yield events
    finally:
        LISTENERS.remove(listen)


class _Doing(NamedTuple):
    """Work of the training thread for a unit, such as the unit's forward, that has not ended."""

    kind: Kind
    unit: int | None
    is_call: bool = False  # whether the work is a call of the unit's forward


_IN_FLIGHT = {Kind.GATHER_WAIT: Kind.GATHER, Kind.REDUCE_WAIT: Kind.REDUCE}


class StepRecorder(StepExtension):
    """Makes a report of each step, in the list ``reports``."""

    name = "recording"
    is_made_anew = watches = True

    def __init__(self, of: Unit, events: list[Event]) -> None:
        """Record the model that contains unit ``of``. ``record`` adds collectives to ``events``."""
        self.reports: list[StepReport] = []
        units = self._units = of.context.units
        self._events = events
        # If a wrapper directly wraps another wrapper, both units have the same name. In reversed
        # order, the inner unit, which has the parameters, comes last and wins.
        self._by_name = {unit.name: unit.index for unit in reversed(units)}
        self._rank, self._device = of.settings.ranks.world.rank, of.settings.device
        self._doing: list[_Doing] = []
        self._begin_step()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        self._began, self._since = time.perf_counter(), 0.0
        self._ranges: list[Range] = []
        self._samples = [MemorySample(0.0, 0, 0)]
        self._volume: Counter[tuple[int | None, str]] = Counter()
        # Start time of each forward pass, backward pass and collective that has not ended.
        self._in_flight: dict[tuple[Kind, int | None], float] = {}
        # Bytes of unsharded parameters and of gradients of each unit in the last sample.
        self._held: dict[Unit, tuple[int, int]] = {}
        self._events.clear()  # drop collectives that were started between two steps
        self._is_over = False  # whether the next forward begins a new step
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._look_at(self._units)

    def end_step(self) -> None:
        """End the current step and keep its report. Do nothing if no part of the step has run."""
        if not self._ranges:
            return
        cuda = self._device.type == "cuda"
        report = sum_up(
            [unit.name for unit in self._units],
            self._ranges,
            self._volume,
            self._samples,
            number=len(self.reports),
            rank=self._rank,
            seconds=self._clock(),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
            peak_resident_bytes=peak_resident_bytes(),
        )
        self.reports.append(report)

    def begin_forward(self, unit: Unit | None) -> None:
        self._doing.clear()  # a step that failed may have left entries
        if self._is_over or not self._ranges:
            self.end_step()
            self._begin_step()
        self._is_over = not torch.is_grad_enabled()
        self._in_flight[Kind.FORWARD_PASS, None] = self._clock()

    def after_forward(self) -> None:
        self._look_at(self._units)
        self._land(Kind.FORWARD_PASS, None)

    def begin_backward(self) -> None:
        self._is_over = True
        # A backward inside a forward (to compute forces, for example) is part of the forward pass.
        if (Kind.FORWARD_PASS, None) not in self._in_flight:
            self._in_flight[Kind.BACKWARD_PASS, None] = self._clock()

    def end_backward(self, has_gradients: bool) -> None:
        self._switch()
        self._doing = [one for one in self._doing if one.is_call]
        self._look_at(self._units)
        self._land(Kind.BACKWARD_PASS, None)

    # ------------------------------------------------------------ work of the thread

    def enter_forward(self, unit: Unit, recomputes: bool) -> None:
        kind = Kind.BACKWARD if recomputes else Kind.FORWARD
        self._begin(_Doing(kind, unit.index, is_call=True))

    def leave_forward(self, unit: Unit) -> None:
        self._look_at([unit])
        self._end(unit.index, is_call=True)

    def enter_backward(self, unit: Unit) -> None:
        self.leave_backward(unit)
        self._begin(_Doing(Kind.BACKWARD, unit.index))

    def leave_backward(self, unit: Unit) -> None:
        self._look_at([unit])
        self._end(unit.index)

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def _begin(self, doing: _Doing) -> None:
        self._switch()
        self._doing.append(doing)

    def _end(self, unit: int | None, *, is_call: bool = False) -> None:
        """End the innermost work for a unit, unless the recording began inside of this work."""
        for position in reversed(range(len(self._doing))):
            if self._doing[position][1:] == (unit, is_call):
                self._switch()
                del self._doing[position]
                return

    def _switch(self) -> None:
        """Count the time since the last switch for the innermost work of the thread."""
        now = self._clock()
        if self._doing:
            kind, unit, _ = self._doing[-1]
            self._ranges.append(Range(kind, unit, self._since, now))
        self._since = now

    # ------------------------------------------------------------ collectives

    @contextlib.contextmanager
    def span(self, kind: Kind, unit: Unit | None, purpose: str, ends: bool) -> Iterator[None]:
        index = None if unit is None else unit.index
        self._begin(_Doing(kind, index))
        num_before = len(self._events)
        try:
            yield
        finally:
            self._end(index)
            self._note(self._events[num_before:], purpose)
            del self._events[num_before:]
            if unit is not None and kind is not Kind.STARTING and ends:
                self._land(_IN_FLIGHT[kind], unit.index)
            # Another unit's gradient buffer may have been freed in this wait.
            self._look_at(self._units if purpose == "reduce" or unit is None else [unit])

    def _note(self, events: list[Event], purpose: str) -> None:
        kind = Kind.REDUCE if purpose == "reduce" else Kind.GATHER
        for event in events:
            # The collective may belong to another model, because one queue starts the second stages
            # of reductions (between nodes, for example) for all models. Then the unit is None.
            unit = None if purpose == "other" else self._by_name.get(event.unit_fqn)
            self._volume[unit, purpose] += event.nbytes
            if unit is not None:
                self._in_flight.setdefault((kind, unit), self._since)

    def _land(self, kind: Kind, unit: int | None) -> None:
        if (began := self._in_flight.pop((kind, unit), None)) is not None:
            self._ranges.append(Range(kind, unit, began, self._clock()))

    # ------------------------------------------------------------ memory

    def on_grad(self, unit: Unit) -> None:
        self._look_at([unit])

    def _look_at(self, units: Iterable[Unit]) -> None:
        """Record a sample of the memory if the memory of ``units`` has changed."""
        for unit in units:
            before = self._held.get(unit, (0, 0))
            gathered = sum(unsharded_bytes(handle) for handle in unit.handles)
            gradients = sum(handle.grads.nbytes for handle in unit.handles)
            if before != (gathered, gradients):
                self._held[unit] = gathered, gradients
                _, all_gathered, all_gradients = self._samples[-1]
                all_gathered += gathered - before[0]
                all_gradients += gradients - before[1]
                self._samples.append(MemorySample(self._clock(), all_gathered, all_gradients))


def unsharded_bytes(handle: FlatParamHandle) -> int:
    """Return the memory of the unsharded buffer and the secondary shard, in bytes."""
    secondary = handle.gather.secondary
    return handle.memory.held_bytes + (0 if secondary is None else secondary.nbytes)


# ------------------------------------------------------------ a recording


@contextlib.contextmanager
def record_steps(wrapper: ModuleProxy) -> Iterator[list[StepReport]]:
    """Record the steps that run inside the context; see ``ShardedWrapper.record_steps``."""
    unit = unit_of(wrapper)
    context = unit.context.check_between_steps("record_steps()")
    if context.extension(StepRecorder.name) is not None:
        raise RuntimeError(
            "record_steps: the model's steps are being recorded already. Leave the other "
            "`with model.record_steps():` block first."
        )
    with record() as events:
        recorder = StepRecorder(unit, events)
        context.extend(recorder)
        try:
            yield recorder.reports
        finally:
            context.drop(recorder)
            recorder.end_step()
