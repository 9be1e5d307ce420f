"""Compares the records of two runs, in units of the rounding noise of a third.

[Note: units]
The unit of a tensor at a step is the largest of: the difference between the reference and the run
whose weights were changed by one unit in the last place, up to this step; the median of these
differences over all tensors of its kind, relative to their size; and twice the dtype's precision.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from flatshard.extras.trial_run.recorder import Facts

MULTIPLE = 100.0
"""A difference counts if it is more than this many units."""

CHAOS = 0.05
"""Steps are compared until rounding noise changes half of the gradients by more than this part."""

_GLOBAL = ("initial value", "gradient", "value")
Key = tuple[int, str, str]
Records = dict[int, dict[str, Any]]


class Difference(NamedTuple):
    """A tensor that differs from the reference."""

    step: int
    kind: str
    name: str
    rank: int
    units: float  # in units of noise
    size: float  # relative to the largest element of the tensor, or to the norm
    line: str


class _Pair(NamedTuple):
    key: Key
    rank: int
    one: Any  # the reference's facts; None: no tensor; a number: the state of a generator
    other: Any


class _Distance(NamedTuple):
    element: float  # the largest difference of a recorded element
    whole: float  # of norm and checksum
    spread: float  # estimate of the norm of the difference
    largest: float  # element of the reference
    norm: float


MISSING = "missing"


def _pairs(reference: Records, other: Records) -> Iterator[_Pair]:
    keys: dict[Key, None] = {}
    for record in (*reference.values(), *other.values()):
        keys.update(dict.fromkeys(record["events"]))
    for key in sorted(keys, key=lambda one: one[0]):
        there = {rank: record["events"].get(key, MISSING) for rank, record in other.items()}
        known = {rank: record["events"].get(key, MISSING) for rank, record in reference.items()}
        parts = [Facts(*one) for one in there.values() if isinstance(one, tuple)]
        if key[1] in _GLOBAL and any(one.stop - one.offset < _numel(one) for one in parts):
            full = next((one for one in known.values() if isinstance(one, tuple)), MISSING)
            yield _Pair(key, 0, full, tuple(_merged(parts)))
        else:
            for rank, one in known.items():
                yield _Pair(key, rank, one, there.get(rank, MISSING))


def _numel(one: Facts) -> int:
    return torch.Size(one.shape).numel()


def _merged(parts: list[Facts]) -> Facts:
    """Join the ranges of all ranks. Ranks with the same range are replicas: take one."""
    distinct = list({(one.offset, one.stop): one for one in parts}.values())
    distinct.sort(key=lambda one: one.offset)
    first = distinct[0]
    return first._replace(
        offset=0,
        stop=sum(one.stop - one.offset for one in distinct),
        sums=torch.stack([one.sums for one in distinct]).sum(0),
        positions=torch.cat([one.positions for one in distinct]),
        values=torch.cat([one.values for one in distinct]),
    )


def _distance(pair: _Pair) -> _Distance | None:
    """Measure a difference. None: there is nothing that could be measured."""
    if not isinstance(pair.one, tuple) or not isinstance(pair.other, tuple):
        return None
    one, other = Facts(*pair.one), Facts(*pair.other)
    if one.shape != other.shape or one.values.shape != other.values.shape:
        return None
    both_nan = one.values.isnan() & other.values.isnan()
    gaps = torch.where(
        both_nan | (one.values == other.values), 0.0, (one.values - other.values).abs()
    )
    element = float(gaps.max().nan_to_num(math.inf)) if gaps.numel() else 0.0
    spread = float(gaps.square().mean().sqrt()) * math.sqrt(_numel(one)) if gaps.numel() else 0.0
    norms = one.sums[0].sqrt(), other.sums[0].sqrt()
    known = bool(one.sums.isfinite().all()) and bool(other.sums.isfinite().all())
    whole = max(float((norms[0] - norms[1]).abs()), float((one.sums[1] - other.sums[1]).abs()))
    finite = one.values[one.values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return _Distance(
        element, whole if known else 0.0, spread, largest, float(norms[0].nan_to_num(0.0))
    )


class Noise:
    """How far rounding alone drives each tensor by each step."""

    def __init__(self, reference: Records, noise: Records) -> None:
        """Measure the differences between two runs of the reference."""
        self.last_step = max(
            (key[0] for one in reference.values() for key in one["events"]), default=0
        )
        self.unstable: Difference | None = None  # differs for another reason than rounding
        self._own: dict[tuple[Key, int], tuple[float, float]] = {}
        self._level: dict[tuple[int, str], float] = {}
        own: dict[Any, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        relative: dict[tuple[int, str], list[float]] = defaultdict(list)
        for pair in _pairs(reference, noise):
            step, kind, name = pair.key
            found = _distance(pair)
            if found is None or kind == "random generator":
                if _are_different(pair):
                    self._stop(pair, reference, math.inf)
                continue
            place = kind, name, pair.rank
            before = own[place]
            own[place] = max(before[0], found.element), max(before[1], found.whole, found.spread)
            self._own[pair.key, pair.rank] = own[place]
            if found.norm:
                relative[step, kind].append(min(1.0, found.spread / found.norm))
            size = found.element / found.largest if found.largest else 0.0
            is_whole = pair.one[1] == 0.0
            if (kind == "initial value" and found.element) or (
                kind == "input" and found.element and (is_whole or size > CHAOS)
            ):
                self._stop(pair, reference, size)
        highest: dict[str, float] = defaultdict(float)
        for (step, kind), levels in sorted(relative.items()):
            highest[kind] = self._level[step, kind] = max(highest[kind], statistics.median(levels))
            if kind == "gradient" and highest[kind] > CHAOS:
                self.last_step = min(self.last_step, step - 1)

    def _stop(self, pair: _Pair, reference: Records, size: float) -> None:
        step, kind, name = pair.key
        if step <= self.last_step:
            self.last_step = step - 1
            line = reference[pair.rank]["lines"].get(pair.key, "")
            self.unstable = Difference(step, kind, name, pair.rank, math.inf, size, line)

    def units(self, pair: _Pair, found: _Distance, floor: float) -> float:
        """Return a difference in units of noise."""
        element, whole = self._own.get((pair.key, pair.rank), (0.0, 0.0))
        eps = pair.one[1]
        level = max(self._level.get(pair.key[:2], 0.0), 2 * eps)
        element = max(element, level * found.largest, eps * floor)
        whole = max(whole, level * found.norm, eps * floor * math.sqrt(_numel(Facts(*pair.one))))
        ratios = (found.element, element), (found.whole, whole)
        return max(
            gap / unit if unit else math.inf * bool(gap) if gap else 0.0 for gap, unit in ratios
        )


def _are_different(pair: _Pair) -> bool:
    """Whether facts differ that have no size: of no tensor, or of another shape."""
    if isinstance(pair.one, tuple) and isinstance(pair.other, tuple):
        return pair.one[0] != pair.other[0]
    return pair.one != pair.other  # type: ignore[no-any-return]


def compare(reference: Records, other: Records, noise: Noise | None) -> list[Difference]:
    """Return all differences in the order of the computation, also those within the noise.

    Without ``noise``, every difference is infinitely many units large.
    """
    found = []
    scales: dict[tuple[int, str], float] = defaultdict(float)
    pairs = [
        pair for pair in _pairs(reference, other) if noise is None or pair.key[0] <= noise.last_step
    ]
    distances = [_distance(pair) for pair in pairs]
    for pair, one in zip(pairs, distances, strict=True):
        if one is not None:
            scales[pair.key[:2]] = max(scales[pair.key[:2]], one.largest)
    for pair, one in zip(pairs, distances, strict=True):
        if one is None:
            units, size = math.inf * 1 if _are_different(pair) else 0.0, math.nan
        elif noise is None:
            units = math.inf if max(one.element, one.whole) else 0.0
            size = 0.0
        else:
            units = noise.units(pair, one, 1e-3 * scales[pair.key[:2]])
            size = one.element / one.largest if one.largest else math.inf
        if units:
            line = other[pair.rank]["lines"].get(pair.key, "") if pair.rank in other else ""
            found.append(Difference(*pair.key, pair.rank, units, size, line))
    return found
