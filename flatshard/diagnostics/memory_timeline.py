"""``MemoryTimeline``: bytes that units hold over a step, beside their shards, and its picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple


class MemorySample(NamedTuple):
    """What a unit holds from a moment on, until its next sample.

    Attributes:
        seconds: since the step began.
        unit: its number.
        gathered_bytes: of gathered parameters, and of parts kept to gather from.
        gradient_bytes: of gradients that are collected or reduced.
    """

    seconds: float
    unit: int
    gathered_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """A rank's step.

    Attributes:
        units: the units' names; numbers in samples count them.
        seconds: how long the step took.
        samples: in the order of time. What has no sample yet holds nothing.
    """

    units: tuple[str, ...]
    seconds: float
    samples: tuple[MemorySample, ...]

    def totals(self) -> list[tuple[float, int, int]]:
        """After each sample: its time, and all units' gathered and gradient bytes."""
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
        """The most that was gathered, that gradients took, and that both took at one time."""
        totals = self.totals()
        return (
            max((gathered for _, gathered, _ in totals), default=0),
            max((gradients for _, _, gradients in totals), default=0),
            max((gathered + gradients for _, gathered, gradients in totals), default=0),
        )

    def _of_units(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per unit, what it holds after each sample: gathered, gradients."""
        gathered: list[list[int | None]] = [[] for _ in self.units]
        gradients: list[list[int | None]] = [[] for _ in self.units]
        for sample in self.samples:
            for unit in range(len(self.units)):
                changes = unit == sample.unit
                gathered[unit].append(sample.gathered_bytes if changes else None)
                gradients[unit].append(sample.gradient_bytes if changes else None)
        return list(map(_carried, gathered)), list(map(_carried, gradients))


def _carried(values: list[int | None]) -> list[int]:
    """Each value, or the last one before it that was there."""
    kept = accumulate(values, lambda before, now: before if now is None else now, initial=0)
    return [value or 0 for value in kept][1:]


# ------------------------------------------------------------ the picture

_LABELLED_WIDTH, _LABELLED_HEIGHT = 0.02, 0.03
"""Parts of the picture below which a band has its name in the legend alone."""

_LOOKS: tuple[dict[str, Any], ...] = ({"alpha": 0.9}, {"alpha": 0.45, "hatch": "////"})
"""Of gathered parameters, and of gradients."""

_MIB = 2**20


def check_can_plot() -> None:
    """See that matplotlib is there.

    Raises:
        ImportError: it is not.
    """
    _matplotlib("figure")


def _matplotlib(name: str) -> Any:
    # Not among what flatshard needs, and slow to load.
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "pictures of memory need matplotlib, which is not installed. Run: "
            "pip install matplotlib"
        ) from error


def plot(timelines: Sequence[tuple[str, MemoryTimeline]], path: str) -> None:
    """Draw timelines of the same units, each under its title: bytes held, stacked by unit.

    Args:
        timelines: titles and timelines.
        path: where to write; its ending says the format.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    figure = _matplotlib("figure").Figure(
        figsize=(10, 1 + 3 * len(timelines)), layout="constrained"
    )
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        _draw(axes, timeline)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel("MiB held")
        axes.margins(x=0)
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("ms since the step began")
    _draw_legend(figure, timelines[0][1].units)
    figure.savefig(path, dpi=150)


def _colours(units: Sequence[str]) -> list[Any]:
    colours = _matplotlib("cm").turbo
    return [colours(0.08 + 0.84 * index / max(len(units) - 1, 1)) for index in range(len(units))]


def _draw(axes: Any, timeline: MemoryTimeline) -> None:
    """Gathered parameters at the bottom, gradients, hatched, on top of them."""
    times = [1000 * sample.seconds for sample in timeline.samples]
    times.append(1000 * timeline.seconds)
    low = [0.0] * len(times)
    size = (times[-1] - times[0], max(timeline.peak_bytes()[2], 1) / _MIB)
    layers = [
        (held, name, colour, looks)
        for bytes_, looks in zip(timeline._of_units(), _LOOKS, strict=True)
        for held, name, colour in zip(bytes_, timeline.units, _colours(timeline.units), strict=True)
        if any(held)
    ]
    for held, name, colour, looks in layers:
        high = [below + one / _MIB for below, one in zip(low, [*held, held[-1]], strict=True)]
        axes.fill_between(
            times, low, high, step="post", facecolor=colour, edgecolor="white", lw=0, **looks
        )
        _label(axes, name or "(root)", times, low, high, size)
        low = high


def _label(
    axes: Any,
    name: str,
    times: list[float],
    low: list[float],
    high: list[float],
    size: tuple[float, float],
) -> None:
    """Write a unit's name into the longest stretch of its band, where it fits."""
    start, end = _longest([above > below for above, below in zip(high, low, strict=True)], times)
    width, middle = times[end] - times[start], (times[start] + times[end]) / 2
    at = max(index for index in range(start, end) if times[index] <= middle)
    if width < _LABELLED_WIDTH * size[0] or high[at] - low[at] < _LABELLED_HEIGHT * size[1]:
        return
    axes.text(
        middle,
        (low[at] + high[at]) / 2,
        name,
        rotation=0 if width > 0.12 * size[0] else 90,
        ha="center",
        va="center",
        fontsize=7,
        clip_on=True,
        bbox={"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.8},
    )


def _longest(present: list[bool], times: list[float]) -> tuple[int, int]:
    """The longest stretch, ``[start, end]`` as indices of times, in which something is present."""
    best, start = (0, len(times) - 1), None
    longest = -1.0
    for index, is_there in enumerate([*present[:-1], False]):
        if is_there and start is None:
            start = index
        elif not is_there and start is not None:
            if times[index] - times[start] > longest:
                longest, best = times[index] - times[start], (start, index)
            start = None
    return best


def _draw_legend(figure: Any, units: Sequence[str]) -> None:
    patch = _matplotlib("patches").Patch
    entries = [
        patch(facecolor="0.6", label="gathered"),
        patch(facecolor="0.8", hatch="////", edgecolor="white", label="gradients"),
        *(
            patch(facecolor=colour, label=name or "(root)")
            for name, colour in zip(units, _colours(units), strict=True)
        ),
    ]
    columns = 1 + len(entries) // 30
    figure.legend(handles=entries, loc="outside right upper", fontsize=7, ncols=columns)
