"""``MemoryTimeline``: unsharded parameters and gradients of units over a step, and its plot."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_MIB = 2**20


class MemorySample(NamedTuple):
    """What a unit holds beside its shards, from ``seconds`` until its next sample.

    Attributes:
        seconds: since the step began.
        unit: the unit's index.
        gathered_bytes: of unsharded parameters and secondary shards.
        gradient_bytes: of gradients that accumulate or are being reduced.
    """

    seconds: float
    unit: int
    gathered_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """What the units of one rank hold over a step, beside their shards.

    Attributes:
        units: the units' names; samples refer to them by index.
        seconds: duration of the step.
        samples: in the order of time. Before its first sample a unit holds nothing.
    """

    units: tuple[str, ...]
    seconds: float
    samples: tuple[MemorySample, ...]

    def totals(self) -> list[tuple[float, int, int]]:
        """Time of each sample, with the unsharded and gradient bytes of all units after it."""
        held: dict[int, MemorySample] = {}
        gathered = gradients = 0
        found = []
        for sample in self.samples:
            before = held.get(sample.unit)
            gathered += sample.gathered_bytes - (before.gathered_bytes if before else 0)
            gradients += sample.gradient_bytes - (before.gradient_bytes if before else 0)
            held[sample.unit] = sample
            found.append((sample.seconds, gathered, gradients))
        return found

    def peak_bytes(self) -> tuple[int, int, int]:
        """The peaks of unsharded parameters, of gradients, and of both together."""
        totals = self.totals()
        return (
            max((gathered for _, gathered, _ in totals), default=0),
            max((gradients for _, _, gradients in totals), default=0),
            max((gathered + gradients for _, gathered, gradients in totals), default=0),
        )

    def by_unit(self) -> list[list[int]]:
        """A row per unit of its unsharded bytes, then a row per unit of its gradient bytes.

        A row has a value for each sample, and one for the end of the step.
        """
        held = [[0] * (2 * len(self.units))]
        for sample in self.samples:
            row = list(held[-1])
            row[sample.unit] = sample.gathered_bytes
            row[len(self.units) + sample.unit] = sample.gradient_bytes
            held.append(row)
        return [list(column) for column in zip(*held[1:], held[-1], strict=True)]


# ------------------------------------------------------------ the plot


def matplotlib(name: str = "figure") -> Any:
    """Import a module of matplotlib late: it is optional, and slow to load.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "pictures of memory need matplotlib, which is not installed. Run: "
            "pip install matplotlib"
        ) from error


def plot_memory(timelines: Sequence[tuple[str, MemoryTimeline]], path: str) -> None:
    """Draw memory, stacked by unit: unsharded parameters, and gradients above them, hatched.

    Args:
        timelines: a title and a timeline per panel, all of the same units.
        path: file to write; its suffix determines the format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    size = (10, 1 + 3 * len(timelines))
    figure = matplotlib().Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        names = [name or "(root)" for name in timeline.units]
        colours = [matplotlib("cm").turbo((i + 0.5) / len(names)) for i in range(len(names))]
        times = [1000 * sample.seconds for sample in timeline.samples] + [1000 * timeline.seconds]
        rows = [[held / _MIB for held in row] for row in timeline.by_unit()]
        labels = [*names, *(f"{name}: gradients" for name in names)]
        bands = axes.stackplot(times, rows, colors=colours * 2, labels=labels, step="post")
        for band in bands[len(names) :]:
            band.set(hatch="////", alpha=0.5)
        axes.set(ylabel="MiB", xmargin=0)
        axes.set_title(title, loc="left", fontsize="medium")
    panels[-1].set_xlabel("ms since the step began")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 1 + len(labels) // 40
    figure.legend(handles, labels, loc="outside right upper", fontsize=7, ncols=columns)
    figure.savefig(path, dpi=150)
