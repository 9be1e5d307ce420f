"""Runs the registries of the tests beside other libraries, and writes the tables of the pages.

    python scripts/evidence.py idioms --page docs/evidence.md
    python scripts/evidence.py idioms tied join --impl ddp "flatshard FULL_SHARD"
    python scripts/evidence.py idioms --list

`idioms` (`tests/idioms/`): idioms of DistributedDataParallel scripts. Each runs in separate
processes on gloo ranks. Its results on each rank (losses, gradients, the final state dict) must
equal the results under DistributedDataParallel on the same rank. If DistributedDataParallel raises
or is known to be wrong, the results must equal those of an unwrapped model whose gradients are
averaged after each backward.

A cell of a table is *right*, *raises* (an error on some rank), *wrong* (other numbers, and no
error), *crashes* (the process ends without a Python error) or *hangs* (no end within the limit).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "tables"))

import table_cells  # noqa: F401  (first, because this import may end the script)
import torch
from lib.command_line import Parser, at_least
from lib.rank_processes import Ranks, Said
from table_cells import GOOD, VERDICTS, Cell, Notes, failure, folded, page_file, write_table

from tests.idioms import IDIOMS
from tests.idioms.side import AUTO, ORACLES, STRATEGIES, difference, run

FLATSHARD = (*(f"flatshard {name}" for name in STRATEGIES), AUTO)
PRELOAD = ("tests.idioms", "torch.distributed.fsdp", "torch.distributed.checkpoint")

Table = dict[str, dict[str, Cell]]
"""Cells, keyed by entry and implementation."""


@dataclass(frozen=True)
class Registry:
    """What the tests prove of flatshard, and this script shows beside other libraries.

    Attributes:
        titles: what each entry does, keyed by name.
        implementations: those that run by default.
        more: other implementations.
        run: returns the cells of some entries and implementations.
        markdown: returns the table of a page, from the cells, the number of ranks and the command.
    """

    titles: dict[str, str]
    implementations: Sequence[str]
    more: Sequence[str]
    run: Callable[[list[str], list[str], argparse.Namespace], Table]
    markdown: Callable[[Table, int, str], str]


# ---------------------------------------------------------------- idioms

SECTIONS = {
    "loops": "Training loops",
    "optimizers": "Optimizers, gradients, averages of weights",
    "parameters": "Parameters",
    "models": "Modules, inputs and outputs",
    "layers": "Layers",
    "graphs": "Autograd",
    "states": "State, copies, conversions",
}
SLOW_FACTOR = 6
# Idioms of DistributedDataParallel that FSDP's documentation does not promise: it broadcasts no
# buffers, every forward and state dict is collective, and it has no join(). FSDP1 also has its own
# clipping and GradScaler, and prefixes in the names of parameters.
_FSDP = {
    *("batch_norm", "buffer_in_place", "buffer_reassigned", "buffer_replaced", "buffer_no_sync"),
    *("evaluation_on_one_rank", "state_on_rank_0", "join"),
}
RULED_OUT = {"fsdp1": _FSDP | {"clip_grad_norm", "grad_scaler", "walked"}, "fsdp2": _FSDP}


def run_idioms(names: list[str], implementations: list[str], options: argparse.Namespace) -> Table:
    """Run all cells, some at a time, because a cell mostly waits for other ranks to end."""
    local = threading.local()

    def cell(name: str, implementation: str) -> list[Said]:
        seconds = options.timeout * (SLOW_FACTOR if IDIOMS[name].slow else 1)
        world, coalesces = options.world_size, implementation == AUTO
        ranks: Ranks = local.ranks
        return ranks.run(run, world, name, implementation, coalesces, seconds=seconds)

    table: Table = {name: {} for name in names}
    said: dict[str, dict[str, list[Said]]] = {name: {} for name in names}
    with contextlib.ExitStack() as stack:

        def start() -> None:
            local.ranks = stack.enter_context(Ranks(options.world_size, preload=PRELOAD))

        threads = stack.enter_context(ThreadPoolExecutor(options.jobs, initializer=start))
        try:
            # Run all idioms of one implementation before the next, so that its modules stay loaded.
            # The oracles always run, because the other results are compared with theirs.
            others = [name for name in implementations if name not in ORACLES]
            for implementation in (*ORACLES, *others):
                some = [n for n in names if implementation != "by hand" or IDIOMS[n].by_hand]
                found = threads.map(partial(cell, implementation=implementation), some)
                for name, one in _progress(
                    zip(some, found, strict=True), implementation, len(some)
                ):
                    said[name][implementation] = one
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    for name in names:
        expected = said[name]["by hand" if IDIOMS[name].by_hand else "ddp"]
        for implementation in ("ddp", *others):
            table[name][implementation] = judge(said[name][implementation], expected)
    return table


def judge(said: list[Said], expected: list[Said]) -> Cell:
    """Compare the outcomes of an idiom with the expected outcomes, rank by rank."""
    if failed := failure(said):
        return failed
    if any(one.outcome != "returned" for one in expected):
        return Cell("wrong", f"no error, but unwrapped: {expected[0].what}")
    for rank, (ours, oracle) in enumerate(zip(said, expected, strict=True)):
        if why := difference(ours.what, oracle.what, tolerance=1e-9):
            return Cell("wrong", f"rank {rank}: {why}")
    return Cell("right")


def _progress(items: Iterable[Any], title: str, total: int) -> Iterator[Any]:
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        items = tqdm(items, title, total, leave=False, disable=None)
    return iter(items)


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


REGISTRIES = {
    "idioms": Registry(
        {name: idiom.title for name, idiom in IDIOMS.items() if idiom.section in SECTIONS},
        (*FLATSHARD, "fsdp1", "fsdp2"),
        ORACLES,
        run_idioms,
        markdown,
    )
}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("registry", choices=REGISTRIES, help="what to run")
    parser.add_argument("names", nargs="*", help="entries to run (default: all); see --list")
    parser.add_argument("--impl", nargs="+", metavar="NAME", help="implementations (default: all)")
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
    parser.add_argument("--list", action="store_true", help="print the names of the entries")
    options = parser.parse_args()
    registry = REGISTRIES[options.registry]
    names = options.names or list(registry.titles)
    implementations = options.impl or list(registry.implementations)
    for kind, some, known in (
        ("entry", names, registry.titles),
        ("--impl", implementations, (*registry.implementations, *registry.more)),
    ):
        if unknown := set(some) - set(known):
            parser.error(f"{kind} {min(unknown)!r}: expected some of {', '.join(known)}")
    if options.list:
        print("\n".join(f"{name}: {registry.titles[name]}" for name in names))
        return 0
    table = registry.run(names, implementations, options)
    command = " ".join(["python scripts/evidence.py", *sys.argv[1:]])
    write_table(
        options.page, options.registry, registry.markdown(table, options.world_size, command)
    )
    ours = (cells.get(name, Cell("right")) for cells in table.values() for name in FLATSHARD)
    return int(any(cell.verdict not in GOOD for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
