"""Finds the line of the user's program in a stack, and what flatshard says of the line."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch

OURS = f"{Path(__file__).parents[2]}{os.sep}"
_LIBRARIES = (
    OURS,
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    "<",
)


def line_in(frames: Iterable[tuple[str, int]]) -> str:
    """Return the first line of the user's program among ``frames``: file, number and source text.

    ``frames`` are paths and line numbers, innermost first. If no frame is the program's own, the
    line is the first one in an installed package other than torch.
    """
    known = [(path, number) for path, number in frames if not path.startswith(_LIBRARIES)]
    own = [one for one in known if f"{os.sep}site-packages{os.sep}" not in one[0]] or known
    if not own:
        return ""
    path, number = own[0]
    text = linecache.getline(path, number).strip()
    shown = os.path.relpath(path)
    return f"{path if shown.startswith('..') else shown}:{number}" + (
        f": {text[:100]}" * bool(text)
    )


def current_line() -> str:
    """Return the line of the user's program that this thread runs."""
    return line_in((f.f_code.co_filename, number) for f, number in traceback.walk_stack(None))


def line_of_error(trace: TracebackType | None) -> tuple[str, bool]:
    """Return the program's line in a traceback, and whether flatshard raised the error."""
    frames = [(f.f_code.co_filename, number) for f, number in traceback.walk_tb(trace)][::-1]
    return line_in(frames), bool(frames) and frames[0][0].startswith(OURS)
