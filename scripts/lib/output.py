"""What scripts write: files, tried before the work and whole after it, and colours of figures."""

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
    """A path that can be written, which is tried now rather than after hours of work."""
    path = Path(text)
    if os.path.islink(path):
        path = Path(os.path.realpath(text))  # what it leads to is replaced
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
    """Yields a path to write to, which takes the place of the regular file `path` at the end.

    It does so when all went well. Whenever the process is killed, nothing else is left.
    """
    part = part_of(path)
    part.unlink(missing_ok=True)
    try:
        # Without a name until all is written.
        file = os.open(path.parent, os.O_RDWR | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):  # not every system has that, nor every file system
        file = None
    try:
        if file is None:
            yield part
        else:
            nameless = Path(f"/proc/self/fd/{file}")
            yield nameless
            os.link(nameless, part, src_dir_fd=file)  # without the last, Python links the link
        os.replace(part, path)
    finally:
        if file is not None:
            os.close(file)
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """The same; where the path cannot be written, this ends the script in one line."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:  # the disk is full, say
        print(f"error: cannot write {path}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def write_json(path: Path | None, figures: Any, indent: int | None = 2) -> None:
    """Writes figures to the path of an option that may not be given."""
    if path is not None:
        with writing(path) as part:
            part.write_text(json.dumps(figures, indent=indent, default=str) + "\n")


# ---------------------------------------------------------------- figures

COLOURS = {
    # What a rank holds.
    "this rank's parameters": "#1f77b4",
    "optimizer state": "#ff7f0e",
    "gradients": "#2ca02c",
    "unsharded parameters": "#d62728",
    "activations": "#9467bd",
    # What a rank does.
    "forward": "#7f7f7f",
    "backward": "#c7c7c7",
    "all-gather": "#e377c2",
    "reduce-scatter": "#17becf",
    # What trains the model.
    "DDP": "#8c564b",
    "flatshard": "#111111",
    "flatshard, sockets": "#4d4d4d",
    "flatshard, native": "#8a8a8a",
    "FSDP1": "#bcbd22",
    "FSDP2": "#dbdb8d",
    "DeepSpeed ZeRO-3": "#9edae5",
    "no communication": "#c49c94",
}
"""Of all figures, docs/step.svg included: one colour means one thing everywhere."""

PEAK = {"color": "#ececec", "hatch": "///", "edgecolor": "#8a8a8a", "linewidth": 0}
"""What a step needs on top of persistent memory, where it is not told apart."""
