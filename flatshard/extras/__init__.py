"""Extras: each folder here adds one thing to the core, and can be deleted.

The core finds extras through the table ``EXTRAS`` in ``flatshard.options.extras``. The functions
below serve several extras: they format tables, and find the line that the user's program runs.
``mapped_files`` serves the extras that map memory, and ``partial_steps`` the extras that step some
parameters of an optimizer.
"""

import contextlib
import linecache
import os
import resource
import sysconfig
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    "<frozen",
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LINE_LENGTH = 80  # maximum number of characters of a source line that is quoted


def is_program(path: str) -> bool:
    """Whether a file is part of the user's program."""
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _PACKAGES)


def program_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program in the stack of ``frame``, or ""."""
    for one, number in traceback.walk_stack(frame) if frame else ():
        path = one.f_code.co_filename
        if is_program(path):
            line = linecache.getline(path, number).strip()
            with contextlib.suppress(ValueError):
                path = str(Path(path).relative_to(Path.cwd()))
            return f"{path}:{number}" + (f": {line[:_LINE_LENGTH]}" if line else "")
    return ""


def tabulate(table: Sequence[Sequence[str]], *, numbers: Collection[int]) -> str:
    """Align cells in columns, flush right in the columns whose indices are in ``numbers``."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        width = max(map(len, column))
        align = str.rjust if index in numbers else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def show_bytes(count: float, base: int = 1024) -> str:
    """Return a number of bytes as text in KiB, MiB or GiB; in kB, MB or GB if ``base`` is 1000."""
    unit, *larger = ("B", "KiB", "MiB", "GiB") if base == 1024 else ("B", "kB", "MB", "GB")
    while count >= base and larger:
        count, unit, *larger = count / base, *larger
    return f"{count:.{int(unit != 'B')}f} {unit}"


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process until now."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
