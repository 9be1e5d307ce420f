"""`try_ranks`: what comes of a call on several ranks, in one word; and what ranks that wait log."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.harness import RankError, allow_warnings, run_ranks

PATIENCE = 12.0
"""Seconds after an error in which the other ranks can find out that they wait for nobody."""

QUICK = {"FIRST_LOOK_SECONDS": 0.3, "LOOK_SECONDS": 0.1, "LONGEST_LOOK_SECONDS": 0.4}
"""Constants of `flatshard.extras.deadlock.detector`: ranks that wait are found sooner."""


def logged() -> list[str]:
    """The lines that flatshard logs from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flatshard").handlers = [handler]
    return lines


class Cell(NamedTuple):
    """A verdict ("right", "raises", "wrong", "crashes" or "hangs"), and its reason."""

    verdict: str
    why: str = ""


def try_ranks(
    judge: Callable[[list[Any]], Cell],
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    **options: Any,
) -> Cell:
    """The verdict of ``judge`` on what the ranks return; otherwise what ended them.

    The arguments after ``judge`` are those of `run_ranks`.
    """
    try:
        return judge(run_ranks(function, world_size, *args, patience=PATIENCE, **options))
    except RankError as error:
        return Cell(error.verdict, error.why)


def call(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """A rank's function that calls one without ``rank`` and ``world_size``."""
    with allow_warnings():
        return function(*args)
