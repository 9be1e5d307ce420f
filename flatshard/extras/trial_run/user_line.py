"""Finds the line of the user's program in a stack."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

OURS = f"{Path(__file__).parents[2]}{os.sep}"
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_LIBRARIES = (OURS, _STDLIB, f"{Path(torch.__file__).parent}{os.sep}", "<")


def line_in(frames: Iterable[tuple[str, int]]) -> str:
    """Return the first line of the user's program among ``frames``: file, number and source text.

    ``frames`` are paths and line numbers, innermost first. If no frame is the program's own, the
    line is the first one in an installed package other than torch.
    """
    ours = [
        (path, number)
        for path, number in frames
        if not path.startswith(_LIBRARIES) or (_PACKAGES in path and path.startswith(_STDLIB))
    ]
    known = [one for one in ours if not one[0].startswith(_LIBRARIES[2:])]
    path, number = next((one for one in known if _PACKAGES not in one[0]), (*known, ("", 0))[0])
    text = linecache.getline(path, number).strip()
    shown = os.path.relpath(path) if path else ""
    return f"{path if shown.startswith('..') else shown}:{number}: {text[:100]}" if path else ""


def current_line() -> str:
    """Return the line of the user's program that this thread runs."""
    return line_in((f.f_code.co_filename, number) for f, number in traceback.walk_stack(None))
