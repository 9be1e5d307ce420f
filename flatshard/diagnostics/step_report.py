"""``StepReport``: what a step of one rank consisted of, as data and as a table.

[Note: one thing at a time]
At every moment the training thread does one thing for one unit, or nothing of ours. The ranges that
say so never overlap, so they add up to no more than the step. What is under way beside it,
gathers and reductions, may overlap anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flatshard.diagnostics.memory_timeline import MemoryTimeline, plot_memory
from flatshard.diagnostics.unit_report import show_bytes, tabulate
from flatshard.engine.events import Kind


class Range(NamedTuple):
    """A stretch of time.

    Attributes:
        kind: what it was spent on.
        unit: the unit's number; None where it is for all of them.
        begin: seconds since the step began.
        end: likewise.
    """

    kind: Kind
    unit: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class UnitReport:
    """One unit's part of a step. Times of nested units are theirs alone.

    Bytes are of the whole: of what a gather gives, of what every rank puts into a reduction; as
    ``collectives.record`` lists them. A unit that its rank does not share moves none.

    Attributes:
        name: its name in the unwrapped model; empty for the root.
        forward_seconds: computing forward.
        backward_seconds: computing backward, with what is recomputed there.
        starting_seconds: preparing and starting collectives.
        gather_wait_seconds: blocked until its parameters were there.
        reduce_wait_seconds: blocked until its gradients were reduced.
        gathered_forward_bytes: gathered for forward.
        gathered_backward_bytes: gathered again for backward.
        reduced_bytes: reduce-scattered and all-reduced gradients.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    starting_seconds: float
    gather_wait_seconds: float
    reduce_wait_seconds: float
    gathered_forward_bytes: int
    gathered_backward_bytes: int
    reduced_bytes: int


@dataclass(frozen=True)
class StepReport:
    """One step of one rank; ``str()`` is a table.

    A step is a forward and its backward, with all that follows until the next one begins; under
    gradient accumulation, every micro-batch is one. Several forwards before one backward belong to
    one step, and an evaluation is a step of its own. Times are those of the host: where an
    accelerator computes, launching takes the host's time, and the first wait for a result has the
    rest.

    Attributes:
        number: steps recorded before it.
        rank: this rank's number among those that train the model.
        began: when, as Unix time.
        seconds: all of it.
        forward_seconds: in the outermost forward, waits included.
        backward_seconds: from the first gradient of an output to the end of backward, likewise.
        ranks_wait_seconds: blocked for no single unit: to learn which parameters other ranks used,
            for rank 0's buffers, and until others have taken what this rank gave.
        other_bytes: moved for no single unit.
        units: the units, the root last.
        peak_gathered_bytes: the most that gathered parameters took.
        peak_gradient_bytes: the most that gradients took until they were reduced.
        peak_held_bytes: the most that both took at one time.
        peak_allocated_bytes: ``torch.cuda.max_memory_allocated`` in the step; None on the CPU.
        peak_resident_bytes: the most that was ever resident of the process; None if not known.
        memory: bytes held over time, by unit.
        ranges: what the thread did and what was under way, by time of their ends.
    """

    number: int
    rank: int
    began: float
    seconds: float
    forward_seconds: float
    backward_seconds: float
    ranks_wait_seconds: float
    other_bytes: int
    units: tuple[UnitReport, ...]
    peak_gathered_bytes: int
    peak_gradient_bytes: int
    peak_held_bytes: int
    peak_allocated_bytes: int | None
    peak_resident_bytes: int | None
    memory: MemoryTimeline = dataclasses.field(repr=False)
    ranges: tuple[Range, ...] = dataclasses.field(repr=False)

    @property
    def other_seconds(self) -> float:
        """Neither in forward nor in backward: loss, optimizer, data."""
        return self.seconds - self.forward_seconds - self.backward_seconds

    @property
    def blocked_seconds(self) -> float:
        """In which the training thread waited for other ranks, or read from their memory."""
        waits = (unit.gather_wait_seconds + unit.reduce_wait_seconds for unit in self.units)
        return self.ranks_wait_seconds + sum(waits)

    @property
    def moved_bytes(self) -> int:
        """Of all collectives."""
        moved = (
            unit.gathered_forward_bytes + unit.gathered_backward_bytes + unit.reduced_bytes
            for unit in self.units
        )
        return self.other_bytes + sum(moved)

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; without the two timelines, ``memory`` and ``ranges``."""
        names = [field.name for field in dataclasses.fields(self)]
        figures = {
            name: getattr(self, name) for name in names if name not in ("units", "memory", "ranges")
        }
        for name in ("other_seconds", "blocked_seconds", "moved_bytes"):
            figures[name] = getattr(self, name)
        return {**figures, "units": [dataclasses.asdict(unit) for unit in self.units]}

    def plot_memory(self, path: str) -> None:
        """Draw bytes held over the step, stacked by unit: unsharded parameters and gradients.

        Args:
            path: where to write; its ending says the format.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: ``path`` cannot be written.
        """
        plot_memory([(f"rank {self.rank}, step {self.number}", self.memory)], path)

    def __str__(self) -> str:
        header = (
            *("unit", "forward", "backward", "starting", "gather wait", "reduce wait"),
            *("gathered fwd", "gathered bwd", "reduced"),
        )
        rows = [_cells(unit.name or "(root)", dataclasses.astuple(unit)[1:]) for unit in self.units]
        figures = [dataclasses.astuple(unit)[1:] for unit in self.units]
        totals = _cells("total", [sum(column) for column in zip(*figures, strict=True)])
        table = tabulate([header, *rows, totals], numbers=range(1, len(header)))
        return "\n".join([table, *self._summary()])

    def _summary(self) -> list[str]:
        share = 100 * self.blocked_seconds / self.seconds if self.seconds else 0.0
        lines = [
            f"rank {self.rank}, step {self.number}: {_ms(self.seconds)} ms (forward "
            f"{_ms(self.forward_seconds)}, backward {_ms(self.backward_seconds)}, other "
            f"{_ms(self.other_seconds)})",
            f"blocked: {_ms(self.blocked_seconds)} ms ({share:.1f} %), "
            f"{_ms(self.ranks_wait_seconds)} of it for no single unit",
            f"moved: {show_bytes(self.moved_bytes)}",
            f"held at most: {show_bytes(self.peak_held_bytes)} (gathered "
            f"{show_bytes(self.peak_gathered_bytes)}, gradients "
            f"{show_bytes(self.peak_gradient_bytes)})",
        ]
        if self.peak_allocated_bytes is not None:
            lines.append(f"allocated at most: {show_bytes(self.peak_allocated_bytes)}")
        if self.peak_resident_bytes is not None:
            lines.append(f"process resident at most: {show_bytes(self.peak_resident_bytes)}")
        return lines


_NUM_TIMES = 5
"""Of the figures of a ``UnitReport``: seconds come first, then bytes."""


def _cells(name: str, figures: Sequence[float]) -> tuple[str, ...]:
    times = (f"{_ms(seconds)} ms" for seconds in figures[:_NUM_TIMES])
    return name, *times, *(show_bytes(int(count)) for count in figures[_NUM_TIMES:])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


# ------------------------------------------------------------ the making


@dataclass
class StepRecord:
    """What was noted of a step, to be summed up.

    Attributes:
        number: steps recorded before it.
        began: when, as Unix time.
        ranges: as ``StepReport``.
        moved: bytes by unit and purpose: "forward" or "backward" of gathers, "reduce"; other
            purposes have no unit.
    """

    number: int
    began: float
    ranges: list[Range]
    moved: Mapping[tuple[int | None, str], int]


def sum_up(
    record: StepRecord,
    memory: MemoryTimeline,
    *,
    rank: int,
    peak_allocated_bytes: int | None,
    peak_resident_bytes: int | None,
) -> StepReport:
    """Make the report of a step; see its attributes."""
    seconds: dict[tuple[Kind, int | None], float] = {}
    for one in record.ranges:
        key = one.kind, one.unit
        seconds[key] = seconds.get(key, 0.0) + one.end - one.begin
    gathered, gradients, held = memory.peak_bytes()
    in_units = {unit for _, unit in seconds} | {unit for unit, _ in record.moved}
    assert in_units <= {None, *range(len(memory.units))}, "of units that there are"
    return StepReport(
        number=record.number,
        rank=rank,
        began=record.began,
        seconds=memory.seconds,
        forward_seconds=seconds.get((Kind.FORWARD_PASS, None), 0.0),
        backward_seconds=seconds.get((Kind.BACKWARD_PASS, None), 0.0),
        ranks_wait_seconds=seconds.get((Kind.RANKS_WAIT, None), 0.0),
        other_bytes=sum(count for (unit, _), count in record.moved.items() if unit is None),
        units=tuple(
            _unit_report(index, name, seconds, record.moved)
            for index, name in enumerate(memory.units)
        ),
        peak_gathered_bytes=gathered,
        peak_gradient_bytes=gradients,
        peak_held_bytes=held,
        peak_allocated_bytes=peak_allocated_bytes,
        peak_resident_bytes=peak_resident_bytes,
        memory=memory,
        ranges=tuple(record.ranges),
    )


def _unit_report(
    index: int,
    name: str,
    seconds: Mapping[tuple[Kind, int | None], float],
    moved: Mapping[tuple[int | None, str], int],
) -> UnitReport:
    return UnitReport(
        name=name,
        forward_seconds=seconds.get((Kind.FORWARD, index), 0.0),
        backward_seconds=seconds.get((Kind.BACKWARD, index), 0.0),
        starting_seconds=seconds.get((Kind.STARTING, index), 0.0),
        gather_wait_seconds=seconds.get((Kind.GATHER_WAIT, index), 0.0),
        reduce_wait_seconds=seconds.get((Kind.REDUCE_WAIT, index), 0.0),
        gathered_forward_bytes=moved.get((index, "forward"), 0),
        gathered_backward_bytes=moved.get((index, "backward"), 0),
        reduced_bytes=moved.get((index, "reduce"), 0),
    )
