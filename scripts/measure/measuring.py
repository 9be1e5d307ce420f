"""Code that the measuring scripts share: options, ranks that return figures, memory and tables."""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Import from the folder above: its options, its code that starts ranks, and its models.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import lib.prerequisites  # noqa: F401  (first, because this import may end the script)
import torch
import torch.distributed as dist
from benchmark import resident_bytes
from lib.command_line import Parser
from lib.output import write_json
from lib.training_job import spawn

if importlib.util.find_spec("rich") is None:
    print('error: rich is not installed: pip install ".[examples]"', file=sys.stderr)
    sys.exit(2)

from rich.table import Table

__all__ = [
    "Parser",
    "choose",
    "figures_of_ranks",
    "join",
    "mib",
    "require_proc",
    "reset_peak",
    "resident_bytes",
    "table",
    "write_json",
]


def choose(parser: Parser, option: str, given: str, known: Iterable[str]) -> list[str]:
    """Split a list of names at commas. Exits with status 2 if a name is unknown."""
    names = given.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"{option}: {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return names


def require_proc(parser: Parser) -> None:
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this script needs Linux's /proc to measure RSS")


def reset_peak() -> None:
    """Reset the peak, so that ``resident_bytes("VmHWM")`` is the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def join(rank: int, world_size: int, folder: str) -> None:
    """Make this process a rank on gloo with one CPU thread."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def figures_of_ranks(
    measure: Callable[..., dict[str, Any]], world_size: int, *arguments: Any
) -> list[dict[str, Any]]:
    """Call ``measure(*arguments)`` on new ranks; returns each rank's figures."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (measure, world_size, folder, arguments), world_size)
        return [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(world_size)]


def _run_rank(
    rank: int,
    measure: Callable[..., dict[str, Any]],
    world_size: int,
    folder: str,
    arguments: tuple[Any, ...],
) -> None:
    join(rank, world_size, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(measure(*arguments)))
    # Wait for all ranks: the first rank that ends removes the store's file, which the other ranks
    # still need.
    dist.barrier()
    dist.destroy_process_group()


def table(title: str, *columns: str) -> Table:
    """An empty table. The first column is text, and the other columns are numbers."""
    made = Table(title=title)
    for position, column in enumerate(columns):
        made.add_column(column, justify="right" if position else "left")
    return made


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"
