"""Code that the measuring scripts share: options, ranks that return figures, memory and tables."""

import importlib.util
import json
import logging
import signal
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
import torch.multiprocessing as mp
from benchmark import resident_bytes
from lib.command_line import Parser
from lib.output import write_json

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
    "spawn",
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


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
    """Runs `work(rank, *arguments)` in `world_size` processes.

    If a rank dies, ends the other ranks and this process, and prints the number of the rank.
    """
    # Hide torch's log of the ranks that it ends, because this function prints the reason.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Ctrl-C reaches all processes of the terminal. Let the ranks ignore it, because this process
    # ends the ranks.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = mp.spawn(work, arguments, nprocs=world_size, join=False)
    signal.signal(signal.SIGINT, handler)
    try:
        while not ranks.join():
            pass
    except mp.ProcessRaisedException as error:
        sys.exit(f"{error}\nerror: rank {error.error_index} failed, the job was stopped")
    except mp.ProcessExitedException as error:
        if error.exit_code == 2:  # the rank has printed the reason
            sys.exit(2)
        how = error.signal_name or f"exit status {error.exit_code}"
        sys.exit(f"error: rank {error.error_index} ended by {how}, the job was stopped")
    except KeyboardInterrupt:
        for process in ranks.processes:
            process.kill()
        raise
    finally:
        for file in ranks.error_files:  # ranks that failed after the first rank leave tracebacks
            Path(file).unlink(missing_ok=True)


def table(title: str, *columns: str) -> Table:
    """An empty table. The first column is text, and the other columns are numbers."""
    made = Table(title=title)
    for position, column in enumerate(columns):
        made.add_column(column, justify="right" if position else "left")
    return made


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"
