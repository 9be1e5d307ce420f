"""``StepReport``: the time and memory of a rank in a step, as data and as a table."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

from flatshard.engine.events import Kind
from flatshard.extras import show_bytes, tabulate


class MemorySample(NamedTuple):
    """Memory of all units, without their shards, from ``seconds`` until the next sample."""

    seconds: float  # since the step began
    gathered_bytes: int  # unsharded parameters and secondary shards
    gradient_bytes: int  # gradients that accumulate or are being reduced


class Range(NamedTuple):
    """A range of time in a step.

    Attributes:
        kind: the work that took the time.
        unit: the unit's index; None if the work is for all units.
        begin: seconds since the step began.
        end: seconds since the step began.
    """

    kind: Kind
    unit: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class UnitReport:
    """Time and communication of one unit in a step, without the units nested in it.

    As in ``collectives.record``, bytes are the bytes of full tensors: the output of an all-gather,
    or the input of a reduce-scatter. A unit that is not sharded has no all-gathers.

    Attributes:
        name: the unit's name in the unwrapped model; empty for the root.
        forward_seconds: time computing forward.
        backward_seconds: time computing backward, with the recomputation of checkpoints.
        starting_seconds: time preparing and starting collectives.
        gather_wait_seconds: time of the thread in waits for parameters (the part of the all-gathers
            without overlap with computation).
        reduce_wait_seconds: time of the thread in waits for reduced gradients.
        gathered_forward_bytes: bytes all-gathered for forward.
        gathered_backward_bytes: bytes all-gathered again for backward.
        reduced_bytes: bytes of reduce-scattered or all-reduced gradients.
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
    """Report of one step on one rank. ``str(report)`` is a table.

    A step here is an iteration: a forward, its backward, and the time until the next forward
    begins. Under gradient accumulation, every micro-batch is a step. Several forwards before a
    backward belong to the same step, and a forward in evaluation is a step.

    Times are measured on the host. With an accelerator, the host only launches kernels and waits
    for kernels, so these are the times of launches and waits.

    Attributes:
        number: number of steps recorded before this step.
        rank: this rank's number among the ranks of the model.
        seconds: duration of the step.
        forward_seconds: time in the outermost forward, with waits.
        backward_seconds: time from the first gradient of an output to the end of backward, with
            waits.
        ranks_wait_seconds: time of waits that belong to no single unit: for the other ranks' lists
            of used parameters, for rank 0's buffers, or until the other ranks have finished reading
            this rank's memory.
        other_bytes: communication volume that belongs to no single unit.
        units: reports of the units, the root last.
        peak_gathered_bytes: peak memory of unsharded parameters.
        peak_gradient_bytes: peak memory of gradients before their reduction.
        peak_held_bytes: peak memory of unsharded parameters and gradients together.
        peak_allocated_bytes: ``torch.cuda.max_memory_allocated`` in the step; None on the CPU.
        peak_resident_bytes: peak RSS of the process since the start.
        memory: samples of the memory of all units over time. The first sample is always zero bytes.
        ranges: ranges of time, in the order of their ends. A range is work of the training thread,
            or a collective from its start to its end.
    """

    number: int
    rank: int
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
    peak_resident_bytes: int
    memory: tuple[MemorySample, ...] = field(repr=False)
    ranges: tuple[Range, ...] = field(repr=False)

    @property
    def other_seconds(self) -> float:
        """Time of the step outside of forward and backward: loss, optimizer, data."""
        return self.seconds - self.forward_seconds - self.backward_seconds

    @property
    def blocked_seconds(self) -> float:
        """Time in which the training thread waits for other ranks, or reads other ranks' memory."""
        waits = (unit.gather_wait_seconds + unit.reduce_wait_seconds for unit in self.units)
        return self.ranks_wait_seconds + sum(waits)

    @property
    def moved_bytes(self) -> int:
        """Communication volume of all collectives."""
        of_units = (
            unit.gathered_forward_bytes + unit.gathered_backward_bytes + unit.reduced_bytes
            for unit in self.units
        )
        return self.other_bytes + sum(of_units)

    def __str__(self) -> str:
        header = (
            *("unit", "forward", "backward", "starting", "all-gather wait", "reduce wait"),
            *("all-gather fwd", "all-gather bwd", "reduced"),
        )
        figures = [astuple(unit)[1:] for unit in self.units]
        names = [unit.name or "(root)" for unit in self.units]
        sums = [sum(column) for column in zip(*figures, strict=True)]
        rows = [
            (name, *(f"{_ms(one)} ms" for one in found[:5]), *map(show_bytes, found[5:]))
            for name, found in zip([*names, "total"], [*figures, sums], strict=True)
        ]
        return "\n".join([tabulate([header, *rows], numbers=range(1, 9)), *self._summary()])

    def _summary(self) -> list[str]:
        share = 100 * self.blocked_seconds / self.seconds if self.seconds else 0.0
        lines = [
            f"rank {self.rank}, step {self.number}: {_ms(self.seconds)} ms (forward "
            f"{_ms(self.forward_seconds)}, backward {_ms(self.backward_seconds)}, other "
            f"{_ms(self.other_seconds)})",
            f"blocked: {_ms(self.blocked_seconds)} ms ({share:.1f} %), "
            f"{_ms(self.ranks_wait_seconds)} of it for no single unit",
            f"communication volume: {show_bytes(self.moved_bytes)}",
            f"peak memory: {show_bytes(self.peak_held_bytes)} (unsharded parameters "
            f"{show_bytes(self.peak_gathered_bytes)}, gradients "
            f"{show_bytes(self.peak_gradient_bytes)})",
        ]
        if self.peak_allocated_bytes is not None:
            lines.append(f"peak allocated: {show_bytes(self.peak_allocated_bytes)}")
        return [*lines, f"peak RSS: {show_bytes(self.peak_resident_bytes)}"]


# The kinds of time and the purposes of bytes in a `UnitReport`, in the order of fields.
_TIMES = (Kind.FORWARD, Kind.BACKWARD, Kind.STARTING, Kind.GATHER_WAIT, Kind.REDUCE_WAIT)
_PURPOSES = ("forward", "backward", "reduce")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def sum_up(
    names: Sequence[str],
    ranges: Sequence[Range],
    volume: Mapping[tuple[int | None, str], int],
    memory: Sequence[MemorySample],
    **figures: Any,
) -> StepReport:
    # The training thread's ranges never overlap, so their sum is at most the step's time.
    # All-gathers and reductions are not work of the thread, and may overlap.
    seconds: defaultdict[tuple[Kind, int | None], float] = defaultdict(float)
    for kind, unit, begin, end in ranges:
        seconds[kind, unit] += end - begin
    units = []
    for index, name in enumerate(names):
        times: list[Any] = [seconds[kind, index] for kind in _TIMES]
        sizes = [volume.get((index, purpose), 0) for purpose in _PURPOSES]
        units.append(UnitReport(name, *times, *sizes))
    return StepReport(
        forward_seconds=seconds[Kind.FORWARD_PASS, None],
        backward_seconds=seconds[Kind.BACKWARD_PASS, None],
        ranks_wait_seconds=seconds[Kind.RANKS_WAIT, None],
        other_bytes=sum(count for (unit, _), count in volume.items() if unit is None),
        units=tuple(units),
        peak_gathered_bytes=max(one.gathered_bytes for one in memory),
        peak_gradient_bytes=max(one.gradient_bytes for one in memory),
        peak_held_bytes=max(one.gathered_bytes + one.gradient_bytes for one in memory),
        memory=tuple(memory),
        ranges=tuple(ranges),
        **figures,
    )
