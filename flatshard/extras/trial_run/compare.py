"""Compares the records of two runs, in units of the rounding noise that a third run shows.

[Note: units]
The unit of a tensor at a step is the largest of three numbers. First: the norm of the difference,
up to this step, between the tensor in the reference and in the third run, whose weights were
changed by one unit in the last place. Second: the median of these differences, relative to the
tensors' norms, over all tensors of the same kind. Third: twice the precision of the dtype.
"""

import math
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch

from flatshard.extras.trial_run.recorder import Key, Record, Sketch

Place = tuple[int, str, str, int]  # step, kind of tensor, name, rank

MULTIPLE = 100.0
"""A difference counts if it is more than this many units."""

CHAOS = 0.05
"""Steps are compared until noise changes half of the gradients by more than this fraction."""


class Difference(NamedTuple):
    """The difference of a tensor from the reference."""

    step: int
    kind: str
    name: str
    rank: int
    gap: float  # norm of the difference
    norm: float = 0.0  # norm of the tensor in the reference
    size: float = math.inf  # the gap, relative to the norm of the reference
    eps: float = 0.0  # precision of the dtype
    units: float = 0.0  # the gap, in units of noise

    def in_units(self, units: dict[Place, float]) -> "Difference":
        """Return the difference with its size in units of noise."""
        # 0: noise does not change the tensor, or the noise run lacks it
        unit = units.get(self[:4], 0.0)
        gap = min(self.gap, 1e300)  # so that infinite noise explains an infinite gap
        return self._replace(units=gap / unit if unit else math.inf)


def differences(
    reference: list[Record], other: list[Record], lone_calls: dict[tuple[str, str], Any]
) -> list[Difference]:
    """Return the difference of each tensor, on each rank if ranks hold full tensors.

    ``lone_calls``: lines that ranks run different numbers of times. Tensors from these lines are
    left out.
    """
    found = []
    keys = dict.fromkeys(key for one in (*reference, *other) for key in one.events)
    for key in sorted(keys, key=lambda one: one[0]):
        if any(line in key[2] for line, _ in lone_calls):
            continue
        ours, theirs = ([one.events.get(key) for one in side] for side in (reference, other))
        parts = {one.range: one for one in theirs if one}  # ranks with equal ranges are replicas
        if any(one.range[1] < math.prod(one.shape) for one in parts.values()):
            sums = torch.stack([one.sums for one in parts.values()]).sum(0)
            theirs = [next(iter(parts.values()))._replace(sums=sums)] * len(theirs)
        ranks = range(len(theirs))
        found += [_difference(key, *pair) for pair in zip(ranks, ours, theirs, strict=True)]
    return found


def _difference(key: Key, rank: int, one: Sketch | None, other: Sketch | None) -> Difference:
    if not one or not other or one.shape != other.shape:
        return Difference(*key, rank, 0.0 if one is other else math.inf)
    gap, norm = float((one.sums - other.sums).norm()), float(one.sums.norm())
    # A smaller gap counts as 0: ranks add up different ranges of elements in float64, which rounds.
    gap *= gap > 1e-6 * one.eps * norm
    return Difference(*key, rank, gap, norm, gap / norm if norm else gap, one.eps)


def units_of(noise: list[Difference]) -> tuple[dict[Place, float], int, Difference | None]:
    """Return the unit of each tensor, see [Note: units].

    ``noise``: the differences between two runs of the reference. Also returns the last step that
    can be compared, and the first of these differences that is too large for rounding (None: no
    difference is too large).
    """
    units: dict[Place, float] = {}
    own: dict[tuple[str, str, int], float] = defaultdict(float)  # largest gap of a tensor so far
    # For each kind of tensor, so far: the largest median of relative gaps, and the largest norm.
    level: dict[str, float] = defaultdict(float)
    scale: dict[str, float] = defaultdict(float)
    last = 0
    for step in sorted({one.step for one in noise}):
        here = [one for one in noise if one.step == step]
        # In step 1, inputs depend on no weight, or only slightly (the output of a generator model),
        # so any larger difference of inputs has another cause than rounding.
        limit = CHAOS if step > 1 else 1e-3
        for one in here:
            own[one[1:4]] = max(own[one[1:4]], one.gap)
            scale[one.kind] = max(scale[one.kind], one.norm)
            is_other = one.kind == "input" and one.size > limit * (one.eps > 0)
            if one.gap and (is_other or one.kind == "initial value"):
                return units, last, one
        for kind in scale:
            sizes = [one.size for one in here if one.kind == kind and one.norm]
            level[kind] = max(level[kind], median(sizes or [0.0]))
        if level["gradient"] > CHAOS:
            break
        for one in here:
            least = max(
                level[one.kind] * one.norm, one.eps * max(2 * one.norm, 1e-3 * scale[one.kind])
            )
            units[one[:4]] = max(own[one[1:4]], least)
        last = step
    return units, last, None
