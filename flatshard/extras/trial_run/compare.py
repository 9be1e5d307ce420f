"""Compares the records of two runs, in units of the rounding noise that a third run shows.

[Note: units]
The unit of a tensor at a step is the largest of three numbers. First: the largest difference, up to
this step, between the tensor in the reference and in the third run, whose weights were changed by
one unit in the last place. Second: the median of these differences, relative to the tensors' sizes,
over all tensors of the same kind. Third: twice the precision of the dtype.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from flatshard.extras.trial_run.recorder import Facts, Key, Record

MULTIPLE = 100.0
"""A difference counts if it is more than this many units."""

CHAOS = 0.05
"""Steps are compared until noise changes half of the gradients by more than this fraction."""

Records = dict[int, Record]


class Difference(NamedTuple):
    """A tensor that differs from the reference."""

    step: int
    kind: str
    name: str
    rank: int
    units: float  # of noise
    size: float  # relative to the tensor's largest element
    line: str


class _Gap(NamedTuple):
    element: float  # largest difference of a recorded element
    spread: float  # the norm of the difference, estimated from recorded elements
    whole: float  # difference of the norms, or of the checksums
    largest: float  # largest absolute value in the reference
    norm: float  # of the reference
    eps: float
    root: float  # of the number of elements


def _gaps(reference: Records, other: Records) -> Iterator[tuple[Key, int, _Gap]]:
    """Yield the difference of each tensor, on each rank if ranks hold full tensors."""
    known = (*reference.values(), *other.values())
    keys = dict.fromkeys(key for record in known for key in record.events)
    for key in sorted(keys, key=lambda one: one[0]):
        ours = {rank: record.events.get(key, "missing") for rank, record in reference.items()}
        theirs = {rank: record.events.get(key, "missing") for rank, record in other.items()}
        parts = [one for one in theirs.values() if isinstance(one, Facts)]
        if any(one.numel < math.prod(one.shape) for one in parts):
            full = next((one for one in ours.values() if isinstance(one, Facts)), "missing")
            yield key, 0, _gap(full, _merged(parts))
        else:
            yield from ((key, rank, _gap(ours[rank], theirs[rank])) for rank in ours)


def _merged(parts: list[Facts]) -> Facts:
    """Join the ranges of all ranks. Ranks with the same range are replicas: take one."""
    distinct = {(one.offset, one.numel): one for one in parts if one.numel}
    ordered = sorted(distinct.values(), key=lambda one: one.offset)
    sums = torch.stack([one.sums for one in ordered]).sum(0)
    return parts[0]._replace(sums=sums, values=torch.cat([one.values for one in ordered]))


def _gap(one: Any, other: Any) -> _Gap:
    is_measured = isinstance(one, Facts) and isinstance(other, Facts)
    if not is_measured or one.shape != other.shape or one.values.shape != other.values.shape:
        gap = 0.0 if not is_measured and one == other else math.inf
        return _Gap(gap, gap, gap, 0.0, 0.0, 0.0, 1.0)
    a, b, root = one.values, other.values, math.sqrt(math.prod(one.shape))
    gaps = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b).abs()
    gaps = gaps.nan_to_num(math.inf) if gaps.numel() else torch.zeros(1)
    norm, whole = float(one.sums[0].sqrt()), float((one.sums - other.sums)[1].abs())
    whole = max(whole, abs(norm - float(other.sums[0].sqrt())))
    largest = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
    spread = float(gaps.square().mean().sqrt()) * root
    whole, norm = (value if math.isfinite(value) else 0.0 for value in (whole, norm))
    return _Gap(float(gaps.max()), spread, whole, largest, norm, one.eps, root)


class Noise:
    """How far rounding alone drives each tensor by each step."""

    def __init__(self, reference: Records, noise: Records) -> None:
        """Measure the differences between two runs of the reference."""
        self.last_step = max(key[0] for one in reference.values() for key in one.events)
        self.unstable: Difference | None = None  # the first difference that rounding cannot explain
        self._own: dict[tuple[Key, int], tuple[float, float]] = {}
        self._level: dict[tuple[int, str], float] = defaultdict(float)
        highest: dict[Any, Any] = defaultdict(lambda: (0.0, 0.0))
        relative: dict[tuple[int, str], list[float]] = defaultdict(list)
        for key, rank, gap in _gaps(reference, noise):
            before = highest[key[1:], rank]
            both = max(before[0], gap.element), max(before[1], gap.spread, gap.whole)
            self._own[key, rank] = highest[key[1:], rank] = both
            if gap.norm and gap.spread < math.inf:
                relative[key[:2]].append(gap.spread / gap.norm)
            size = gap.element / gap.largest if gap.largest else gap.element
            # In step 1, inputs depend on no weight, or only slightly (the output of a generator
            # model), so any larger difference of inputs has another cause than rounding.
            limit = CHAOS if key[0] > 1 else 1e-3
            is_other = key[1] == "input" and (size > limit or not gap.eps)
            if gap.element and (key[1] == "initial value" or is_other) and key[0] <= self.last_step:
                self.last_step, line = key[0] - 1, reference[rank].lines.get(key, "")
                self.unstable = Difference(*key, rank, math.inf, size, line)
        levels: dict[str, float] = defaultdict(float)
        for (step, kind), values in relative.items():
            level = self._level[step, kind] = levels[kind] = max(levels[kind], median(values))
            if kind == "gradient" and level > CHAOS:
                self.last_step = min(self.last_step, step - 1)

    def units(self, key: Key, rank: int, gap: _Gap, scale: float) -> float:
        """Return a difference in units. ``scale``: the largest element of tensors of this kind."""
        element, whole = self._own.get((key, rank), (0.0, 0.0))
        level, floor = max(self._level[key[:2]], 2 * gap.eps), 1e-3 * gap.eps * scale
        element = max(element, level * gap.largest, floor)
        whole = max(whole, level * gap.norm, floor * gap.root)
        return max(_ratio(gap.element, element), _ratio(gap.whole, whole))


def _ratio(gap: float, unit: float) -> float:
    return 0.0 if not gap or unit == math.inf else gap / unit if unit else math.inf


def compare(reference: Records, other: Records, noise: Noise | None) -> list[Difference]:
    """Return all differences in the order of the computation, also those within the noise.

    Without ``noise``, the size of a difference is not measured.
    """
    gaps = [one for one in _gaps(reference, other) if not noise or one[0][0] <= noise.last_step]
    scales: dict[tuple[int, str], float] = defaultdict(float)
    for key, _, gap in gaps:
        scales[key[:2]] = max(scales[key[:2]], gap.largest)
    found = []
    for key, rank, gap in gaps:
        units = noise.units(key, rank, gap, scales[key[:2]]) if noise else math.inf
        size = gap.element / gap.largest if gap.largest else math.inf
        if (gap.element or gap.whole) and units:
            found.append(Difference(*key, rank, units, size, other[rank].lines.get(key, "")))
    return found
