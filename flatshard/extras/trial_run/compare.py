"""Compares the records of two runs, in units of the rounding noise that a third run shows.

[Note: units]
The unit of a tensor at a step is the largest of three numbers. First: the norm of the difference,
up to this step, between the tensor in the reference and in the third run, whose weights were
changed by one unit in the last place. Second: the median of these differences, relative to the
tensors' norms, over all tensors of the same kind. Third: twice the precision of the dtype.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch

from flatshard.extras.trial_run.recorder import Key, Record, Sketch

MULTIPLE = 100.0
"""A difference counts if it is more than this many units."""

CHAOS = 0.05
"""Steps are compared until noise changes half of the gradients by more than this fraction."""

Records = dict[int, Record]


class Difference(NamedTuple):
    """The difference of a tensor from the reference."""

    step: int
    kind: str
    name: str
    rank: int
    gap: float  # norm of the difference
    norm: float  # of the reference
    eps: float  # of the dtype
    units: float  # the gap, in units of noise

    @property
    def key(self) -> Key:
        """Key of the tensor in records."""
        return self[:3]

    @property
    def size(self) -> float:
        """The gap, relative to the reference."""
        return self.gap / self.norm if self.norm else self.gap


def _gaps(reference: Records, other: Records) -> Iterator[Difference]:
    """Yield the difference of each tensor, on each rank if ranks hold full tensors."""
    keys = dict.fromkeys(
        key for one in (*reference.values(), *other.values()) for key in one.events
    )
    for key in sorted(keys, key=lambda one: one[0]):
        ours = {rank: record.events.get(key) for rank, record in reference.items()}
        theirs = {rank: record.events.get(key) for rank, record in other.items()}
        parts = [one for one in theirs.values() if one]
        if any(one.numel < math.prod(one.shape) for one in parts):
            # Ranks with the same range are replicas: take one.
            distinct = {(one.offset, one.numel): one.sums for one in parts}
            whole = parts[0]._replace(sums=torch.stack([*distinct.values()]).sum(0))
            yield _gap(key, 0, next(filter(None, ours.values()), None), whole)
        else:
            yield from (_gap(key, rank, ours[rank], theirs[rank]) for rank in ours)


def _gap(key: Key, rank: int, one: Sketch | None, other: Sketch | None) -> Difference:
    if not one or not other or one.shape != other.shape:
        return Difference(*key, rank, 0.0 if one is other else math.inf, 0.0, 0.0, math.inf)
    gap, norm = float((one.sums - other.sums).norm()), float(one.sums.norm())
    gap *= gap > 1e-6 * one.eps * norm  # less is the rounding of float64 sums over other ranges
    return Difference(*key, rank, gap, norm, one.eps, math.inf)


class Noise:
    """How far rounding alone drives each tensor by each step."""

    def __init__(self, reference: Records, noise: Records) -> None:
        """Measure the differences between two runs of the reference."""
        self.last_step = max(key[0] for one in reference.values() for key in one.events)
        self.unstable: Difference | None = None  # the first difference that rounding cannot explain
        self._own: dict[tuple[Key, int], float] = {}
        self._level: dict[tuple[int, str], float] = defaultdict(float)
        highest: dict[tuple[str, str, int], float] = defaultdict(float)
        relative: dict[tuple[int, str], list[float]] = defaultdict(list)
        for one in _gaps(reference, noise):
            tensor = one.kind, one.name, one.rank
            highest[tensor] = max(highest[tensor], one.gap)
            self._own[one.key, one.rank] = highest[tensor]
            if one.norm:
                relative[one.key[:2]].append(one.size)
            # In step 1, inputs depend on no weight, or only slightly (the output of a generator
            # model), so any larger difference of inputs has another cause than rounding.
            limit = (CHAOS if one.step > 1 else 1e-3) if one.eps else 0.0
            is_other = one.kind == "initial value" or (one.kind == "input" and one.size > limit)
            if one.gap and is_other and one.step <= self.last_step:
                self.last_step, self.unstable = one.step - 1, one
        levels: dict[str, float] = defaultdict(float)
        for (step, kind), sizes in relative.items():
            levels[kind] = self._level[step, kind] = max(levels[kind], median(sizes))
            if kind == "gradient" and levels[kind] > CHAOS:
                self.last_step = min(self.last_step, step - 1)

    def units(self, one: Difference, scale: float) -> float:
        """Return a difference in units. ``scale``: the largest norm of tensors of this kind."""
        level = max(self._level[one.key[:2]], 2 * one.eps) * one.norm
        unit = max(self._own.get((one.key, one.rank), 0.0), level, 1e-3 * one.eps * scale)
        return 0.0 if unit == math.inf else one.gap / unit if unit else math.inf


def compare(reference: Records, other: Records, noise: Noise | None) -> list[Difference]:
    """Return all differences in the order of the computation, also those within the noise.

    Without ``noise``, the size of a difference is not measured.
    """
    found = [one for one in _gaps(reference, other) if not noise or one.step <= noise.last_step]
    scales: dict[tuple[int, str], float] = defaultdict(float)
    for one in found:
        scales[one.key[:2]] = max(scales[one.key[:2]], one.norm)
    found = [one for one in found if one.gap]
    if noise:
        found = [one._replace(units=noise.units(one, scales[one.key[:2]])) for one in found]
    return found
