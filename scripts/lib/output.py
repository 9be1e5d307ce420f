"""Output files of scripts, and the colours of figures.

A script checks an output path before its work, and writes the file completely or not at all.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    """A path that can be written. Checked now, so that hours of work do not end with an error."""
    path = Path(text)
    if os.path.islink(path):
        path = Path(os.path.realpath(text))  # replace the link's target, not the link
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"not a file in an existing directory: {text}")
    if os.path.exists(path) and not os.path.isfile(path):  # a device, a pipe
        raise argparse.ArgumentTypeError(f"not a regular file: {text}")
    try:
        for one in (part_of(path), path):
            with contextlib.suppress(FileNotFoundError):
                one.open("rb+").close()
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    return path


def part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to. At the end, the written file replaces the regular file `path`.

    If the block raises, `path` stays as it was. If the process is killed, no partly written file is
    left.
    """
    part = part_of(path)
    part.unlink(missing_ok=True)
    try:
        # The file has no name until it is complete, so the system removes it with the process.
        file = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):  # not every system or file system has O_TMPFILE
        file = None
    try:
        if file is None:
            yield part
        else:
            nameless = Path(f"/proc/self/fd/{file}")
            yield nameless
            # With `src_dir_fd`, Python links the file. Without it, Python would link the symbolic
            # link in /proc.
            os.link(nameless, part, src_dir_fd=file)
        os.replace(part, path)
    finally:
        if file is not None:
            os.close(file)
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Like `replacing`, but ends the script in one line if the path cannot be written."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:  # for example, the disk is full
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def write_json(path: Path | None, figures: Any, indent: int | None = 2) -> None:
    """Writes `figures` as JSON to `path`, the value of an option; None: the option is not given."""
    if path is not None:
        with writing(path) as part:
            part.write_text(json.dumps(figures, indent=indent, default=str) + "\n")


# ---------------------------------------------------------------- figures

COLOURS = {
    # Memory of a rank.
    "this rank's parameters": "#1f77b4",
    "optimizer state": "#ff7f0e",
    "gradients": "#2ca02c",
    "unsharded parameters": "#d62728",
    "activations": "#9467bd",
    # Work of a rank.
    "forward": "#7f7f7f",
    "backward": "#c7c7c7",
    "all-gather": "#e377c2",
    "reduce-scatter": "#17becf",
    # Implementations.
    "DDP": "#8c564b",
    "flatshard": "#111111",
    "flatshard, sockets": "#4d4d4d",
    "flatshard, native": "#8a8a8a",
    "FSDP1": "#bcbd22",
    "FSDP2": "#dbdb8d",
    "DeepSpeed ZeRO-3": "#9edae5",
    "no communication": "#c49c94",
}
"""Colours in all figures, docs/step.svg included. A colour has the same meaning everywhere."""

PEAK = {"color": "#ececec", "hatch": "///", "edgecolor": "#8a8a8a", "linewidth": 0}
"""Style of memory that a step needs on top of persistent memory, if not divided further."""
