"""Output files of scripts, and the colours of figures."""

import argparse
import json
import os
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    """A path that can be written. Checked now, so that hours of work do not end with an error."""
    path = Path(text)
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"not a file in an existing directory: {text}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path


def write_json(path: Path | None, figures: Any, indent: int | None = 2) -> None:
    """Writes `figures` as JSON to `path`, the value of an option; None: the option is not given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=indent, default=str) + "\n")


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table with a column for each key. All columns but the first are aligned right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_text, row.values()))
    # rich would send the table to a notebook's page, which the ranks of a notebook cannot reach.
    console = Console(force_jupyter=False)
    console.width = max(console.width, 16 * len(rows[0]))
    console.print(table)


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str("-" if value is None else value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


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
}
"""Colours in all figures, docs/step.svg included. A colour has the same meaning everywhere."""

PEAK = {"color": "#ececec", "hatch": "///", "edgecolor": "#8a8a8a", "linewidth": 0}
"""Style of memory that a step needs on top of persistent memory, if not divided further."""
