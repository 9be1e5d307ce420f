"""Finds the line of the user's program in a stack."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STDLIB = sysconfig.get_path("stdlib")


def line_in(frames: Iterable[tuple[str, int]]) -> str:
    """Return the first line of the user's program among ``frames``: file, number and source text.

    ``frames`` are paths and line numbers, innermost first. If no frame is the program's own, the
    line is the first one in an installed package other than torch.
    """
    path, number = min(frames, key=lambda one: _distance(one[0]), default=("", 0))
    if _distance(path) > 1:
        return ""
    shown = os.path.relpath(path)
    text = linecache.getline(path, number).strip()[:100]
    return f"{path if shown.startswith('..') else shown}:{number}: {text}"


@functools.cache
def _distance(path: str) -> int:
    """Return 0 for a file of the program, 1 for other packages, 2 for libraries below."""
    if not path or path.startswith((OURS, _TORCH, "<")):
        return 2
    if f"{os.sep}site-packages{os.sep}" in path:
        return 1
    return 2 if path.startswith(_STDLIB) else 0


def current_line() -> str:
    """Return the line of the user's program that this thread runs."""
    return line_in((f.f_code.co_filename, number) for f, number in traceback.walk_stack(None))
