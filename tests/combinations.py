"""Which combinations of settings a run of the tests takes.

Where settings are crossed with one another, each value of each of them meets some values of the
others, and by default not all; where ways to wrap are crossed with something, the usual one meets
all of it. THOROUGH=1 in the environment takes all.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

THOROUGH = bool(os.environ.get("THOROUGH"))


def every(nth: int, items: Iterable[T], start: int = 0) -> list[T]:
    """Each `nth` of the items, from another one on for each `start`."""
    return list(items) if THOROUGH else list(items)[start % nth :: nth]


def usual_and_every(nth: int, items: Iterable[T], start: int = 0) -> list[T]:
    """The first item, which is the usual one, and each `nth` of the rest."""
    usual, *rest = items
    return [usual, *every(nth, rest, start)]


def diagonal(nth: int, *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One in `nth` combinations of what lies on the axes, evenly."""
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        tuple(axis[index] for axis, index in zip(axes, place, strict=True))
        for place in places
        if THOROUGH or sum(place) % nth == 0
    ]
