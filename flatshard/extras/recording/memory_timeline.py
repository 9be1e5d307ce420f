"""``MemoryTimeline``: memory of unsharded parameters and gradients over a step, and a plot."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

_MIB = 2**20


class MemorySample(NamedTuple):
    """Memory of a unit besides its shards, from ``seconds`` until the unit's next sample."""

    seconds: float  # time since the step began
    unit: int
    gathered_bytes: int  # unsharded parameters and secondary shards
    gradient_bytes: int  # gradients that accumulate or are being reduced


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of the units of one rank besides their shards, over the time of a step."""

    units: tuple[str, ...]  # names of the units; ``MemorySample.unit`` is an index of this tuple
    seconds: float  # duration of the step
    samples: tuple[MemorySample, ...]  # before its first sample, a unit's memory is zero

    def totals(self) -> list[tuple[float, int, int]]:
        """Return the memory of all units together, as it is after each sample.

        Each element has three values: the time of the sample, the bytes of unsharded parameters and
        secondary shards, and the bytes of gradients.
        """
        held: dict[int, tuple[int, int]] = {}
        gathered = gradients = 0
        found = []
        for seconds, unit, *after in self.samples:
            before = held.get(unit, (0, 0))
            held[unit] = after[0], after[1]
            gathered += after[0] - before[0]
            gradients += after[1] - before[1]
            found.append((seconds, gathered, gradients))
        return found


def _matplotlib(name: str) -> Any:
    # Import matplotlib only when a plot is made: matplotlib is optional, and slow to import.
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "plots of memory need matplotlib, which is not installed. Run: pip install matplotlib"
        ) from error


def plot_memory(timeline: MemoryTimeline, title: str, path: str) -> None:
    """Plot a timeline: unsharded parameters at the bottom, gradients (hatched) above."""
    figure = _matplotlib("figure").Figure(figsize=(10, 4), layout="constrained")
    axes, turbo = figure.subplots(), _matplotlib("cm").turbo
    names = [name or "(root)" for name in timeline.units]
    # Present memory in MiB: the unsharded parameters of each unit, then the gradients of each unit.
    held = [0.0] * (2 * len(names))
    columns = []
    for sample in timeline.samples:
        held[sample.unit] = sample.gathered_bytes / _MIB
        held[len(names) + sample.unit] = sample.gradient_bytes / _MIB
        columns.append(list(held))
    bands = axes.stackplot(
        [1000 * sample.seconds for sample in timeline.samples] + [1000 * timeline.seconds],
        list(zip(*columns, held, strict=True)),
        colors=2 * [turbo((i + 0.5) / len(names)) for i in range(len(names))],
        labels=[*names, *(f"{name}: gradients" for name in names)],
        step="post",
    )
    for band in bands[len(names) :]:
        band.set(hatch="////", alpha=0.5)
    axes.set(xlabel="ms since the step began", ylabel="MiB", xmargin=0)
    axes.set_title(title, loc="left", fontsize="medium")
    figure.legend(loc="outside right upper", fontsize=7, ncols=1 + len(names) // 20)
    figure.savefig(path, dpi=150)
