"""Runs idioms of DistributedDataParallel scripts with flatshard and torch's FSDP.

    python scripts/tables/conformance.py --page docs/evidence.md
    python scripts/tables/conformance.py --idiom tied --impl ddp "flatshard FULL_SHARD"
    python scripts/tables/conformance.py --list

Each idiom (`conformance_idioms/`) runs in separate processes on gloo ranks. Its results on each
rank (losses, gradients, the final state dict) must equal the results under DistributedDataParallel
on the same rank. If DistributedDataParallel raises or is known to be wrong, the results must equal
those of an unwrapped model whose gradients are averaged after each backward. A cell of the table is
*right*, *raises* (an error on some rank), *wrong* (other numbers, and no error), *crashes* (the
process ends without a Python error) or *hangs* (no end within the limit).
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
from conformance_idioms import IDIOMS, Idiom
from conformance_idioms.side import AUTO, IMPLEMENTATIONS, ORACLES, STRATEGIES, run_cell
from lib.command_line import Parser, at_least
from lib.rank_processes import Ranks, Said
from table_cells import GOOD, VERDICTS, Cell, Notes, failure, folded, page_file, write_table
from torch import Tensor

SECTIONS = {
    "loops": "Training loops",
    "optimizers": "Optimizers, gradients, averages of weights",
    "parameters": "Parameters",
    "models": "Modules, inputs and outputs",
    "layers": "Layers",
    "graphs": "Autograd",
    "states": "State, copies, conversions",
}
FLATSHARD = (*(f"flatshard {name}" for name in STRATEGIES), AUTO)
SLOW_FACTOR = 6
# Idioms of DistributedDataParallel that FSDP's documentation does not promise: it broadcasts no
# buffers, every forward and state dict is collective, and it has no join(). FSDP1 also has its own
# clipping and GradScaler, and prefixes in the names of parameters.
_FSDP = {
    *("batch_norm", "buffer_in_place", "buffer_reassigned", "buffer_replaced", "buffer_no_sync"),
    *("evaluation_on_one_rank", "state_on_rank_0", "join"),
}
RULED_OUT = {"fsdp1": _FSDP | {"clip_grad_norm", "grad_scaler", "walked"}, "fsdp2": _FSDP}
PRELOAD = ("conformance_idioms", "torch.distributed.fsdp", "torch.distributed.checkpoint")


# ---------------------------------------------------------------- verdicts


def judge(said: list[Said], expected: list[Said]) -> Cell:
    """Compare the outcomes of an idiom with the expected outcomes, rank by rank."""
    if failed := failure(said):
        return failed
    if any(one.outcome != "returned" for one in expected):
        return Cell("wrong", f"no error, but unwrapped: {expected[0].what}")
    for rank, (ours, oracle) in enumerate(zip(said, expected, strict=True)):
        if why := _difference(ours.what, oracle.what):
            return Cell("wrong", f"rank {rank}: {why}")
    return Cell("right")


def _difference(ours: Any, oracle: Any, where: str = "") -> str:
    """The first difference in words; an empty text if the results are equal."""
    if isinstance(oracle, dict):
        if list(ours) != list(oracle):
            return f"{where}names {list(ours)} instead of {list(oracle)}"
        return _first(_difference(ours[key], oracle[key], f"{key}: ") for key in oracle)
    if isinstance(oracle, list):
        if len(ours) != len(oracle):
            return f"{where}{len(ours)} results instead of {len(oracle)}"
        pairs = enumerate(zip(ours, oracle, strict=True))
        return _first(_difference(a, b, where or f"result {index}: ") for index, (a, b) in pairs)
    if isinstance(oracle, (Tensor, float)):
        ours, oracle = torch.as_tensor(ours), torch.as_tensor(oracle)
        if ours.shape != oracle.shape or ours.dtype != oracle.dtype:
            return f"{where}{ours.dtype} of {tuple(ours.shape)}, not of {tuple(oracle.shape)}"
        tolerance = 1e-9 if oracle.dtype in (torch.float64, torch.complex128) else 1e-5
        if not torch.allclose(ours, oracle, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{where}differs by {(ours - oracle).abs().max().item():.1g}"
        return ""
    return "" if ours == oracle else f"{where}{ours!r} instead of {oracle!r}"


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


# ---------------------------------------------------------------- running


def run_table(
    idioms: list[Idiom], implementations: list[str], world: int, seconds: float, jobs: int = 1
) -> dict[str, dict[str, Cell]]:
    """Run all cells, ``jobs`` at a time; returns them by idiom and implementation.

    DistributedDataParallel always runs, because the other results are compared with it.
    """
    table: dict[str, dict[str, Cell]] = {idiom.name: {} for idiom in idioms}
    expected: dict[str, list[Said]] = {}
    ranks_of_thread = threading.local()

    def run(idiom: Idiom, implementation: str) -> list[Said]:
        limit = seconds * (SLOW_FACTOR if idiom.slow else 1)
        ranks: Ranks = ranks_of_thread.ranks
        return ranks.run(run_cell, world, idiom.name, implementation, seconds=limit)

    def run_oracle(idiom: Idiom) -> Cell:
        theirs = run(idiom, "ddp")
        expected[idiom.name] = theirs
        if idiom.is_by_hand or any(one.outcome != "returned" for one in theirs):
            expected[idiom.name] = run(idiom, "by hand")
        return judge(theirs, expected[idiom.name])

    with contextlib.ExitStack() as stack:

        def start() -> None:
            ranks_of_thread.ranks = stack.enter_context(Ranks(world, preload=PRELOAD))

        # Run several cells at a time, because a cell mostly waits: for ranks that hang, and for
        # the end of other ranks.
        threads = stack.enter_context(ThreadPoolExecutor(jobs, initializer=start))
        try:
            for idiom, cell in zip(idioms, threads.map(run_oracle, idioms), strict=True):
                table[idiom.name]["ddp"] = cell
            # Run all idioms of one implementation before the next, so that its modules stay loaded.
            for implementation in (name for name in implementations if name not in ORACLES):
                found = threads.map(partial(run, implementation=implementation), idioms)
                pairs = zip(idioms, found, strict=True)
                for idiom, said in _progress(pairs, implementation, len(idioms)):
                    table[idiom.name][implementation] = judge(said, expected[idiom.name])
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return table


def _progress(items: Iterable[Any], title: str, total: int) -> Iterator[Any]:
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        items = tqdm(items, title, total, leave=False, disable=None)
    return iter(items)


# ---------------------------------------------------------------- Markdown


def _joined(cells: dict[str, Cell], notes: Notes) -> str:
    """Join the cells of all strategies; a single word if all strategies agree."""
    alike = collections.defaultdict(list)
    for implementation, cell in cells.items():
        alike[cell.verdict].append((implementation.removeprefix("flatshard "), cell))
    if len(alike) == 1:
        return notes.of(next(iter(cells.values())))
    usual = max(alike, key=lambda verdict: len(alike[verdict]))
    shown = notes.of(alike[usual][0][1])
    rest = collections.defaultdict(list)
    for name, cell in (pair for verdict in alike if verdict != usual for pair in alike[verdict]):
        rest[notes.of(cell)].append(name)
    return "; ".join([shown, *(f"{', '.join(names)}: {text}" for text, names in rest.items())])


def markdown(table: dict[str, dict[str, Cell]], world: int, command: str) -> str:
    """All tables in Markdown. The strategies of flatshard share a column.

    A row shows an idiom that is not right in all columns; below the rows is a list of the others.
    """
    present = next(iter(table.values()))
    ours = [name for name in FLATSHARD if name in present]
    others = [name for name in present if name not in ours]
    columns = [name for name in ("ddp",) if name in others] + (["flatshard"] if ours else [])
    columns += [name for name in others if name != "ddp"]
    notes = Notes("idioms", longest=90)
    lines = [*_explanation(world, command), *_summary(table, present), ""]
    for section, title in SECTIONS.items():
        names = [name for name in table if IDIOMS[name].section == section]
        if not names:
            continue
        heads = " | ".join(name.upper() if name != "flatshard" else name for name in columns)
        rows, right = [], []
        for name in names:
            cells = {key: cell for key, cell in table[name].items() if key in ours}
            texts = [
                _joined(cells, notes)
                if column == "flatshard"
                else _marked(notes.of(table[name][column]), name, column)
                for column in columns
            ]
            if set(texts) == {"right"}:
                right.append(f"`{name}` ({IDIOMS[name].title})")
            else:
                rows.append(f"| `{name}` | {IDIOMS[name].title} | {' | '.join(texts)} |")
        head = [f"| idiom | what it does | {heads} |", "|---" * (len(columns) + 2) + "|"]
        part = [*head, *rows] if rows else []
        part += ["", f"Right in all columns: {'; '.join(right)}."] if right else []
        lines += folded(f"{title}: {len(names)} idioms", part)
    return "\n".join([*lines, *notes.lines()])


def _marked(text: str, name: str, implementation: str) -> str:
    """The cell's text, with a star if the implementation does not promise the idiom."""
    is_ruled_out = name in RULED_OUT.get(implementation, ()) and text != "right"
    return text.replace(" ", "\\* ", 1) if is_ruled_out else text


def _explanation(world: int, command: str) -> list[str]:
    return [
        f"{datetime.date.today().isoformat()}, torch {torch.__version__}, {world} ranks on gloo"
        f" and CPUs: `{command}`. The HYBRID strategies run as on two nodes; `auto` is"
        ' `auto_wrap_policy="auto"` and every other default.',
        "",
    ]


def _summary(table: dict[str, dict[str, Cell]], present: Iterable[str]) -> list[str]:
    heads = [f"{len(table)} idioms", *VERDICTS, "silent, crash or hang", "of these not promised"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for implementation in present:
        cells = {name: row[implementation] for name, row in table.items()}
        counts = collections.Counter(cell.verdict for cell in cells.values())
        bad = [name for name, cell in cells.items() if cell.verdict not in GOOD]
        starred = sum(name in RULED_OUT.get(implementation, ()) for name in bad)
        name = implementation.upper() if " " not in implementation else implementation
        numbers = [*(counts[verdict] for verdict in VERDICTS), len(bad), starred]
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return lines


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "--idiom",
        nargs="+",
        choices=IDIOMS,
        metavar="NAME",
        default=list(IDIOMS),
        help="idioms to run (default: all); --list prints their names",
    )
    parser.add_argument(
        "--impl",
        nargs="+",
        choices=IMPLEMENTATIONS,
        metavar="NAME",
        default=[name for name in IMPLEMENTATIONS if name not in ORACLES],
        help=f"implementations to run, of {', '.join(IMPLEMENTATIONS)} (default: all)",
    )
    parser.add_argument(
        "--world-size", type=at_least(1), default=2, help="number of ranks (default: 2)"
    )
    parser.add_timeout(20.0, "each program")
    parser.add_argument(
        "--jobs", type=at_least(1), default=3, help="programs to run at a time (default: 3)"
    )
    parser.add_argument(
        "--page", type=page_file, help="write the table into this page instead of printing it"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the idioms")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{idiom.name}: {idiom.title}" for idiom in IDIOMS.values()))
        return 0
    idioms = [IDIOMS[name] for name in options.idiom]
    table = run_table(idioms, options.impl, options.world_size, options.timeout, options.jobs)
    command = " ".join(["python scripts/tables/conformance.py", *sys.argv[1:]])
    write_table(options.page, "idioms", markdown(table, options.world_size, command))
    ours = (cells.get(name, Cell("right")) for cells in table.values() for name in FLATSHARD)
    return int(any(cell.verdict not in GOOD for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
