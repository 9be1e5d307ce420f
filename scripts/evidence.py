"""Runs a registry of the tests completely: every cell goes into a CSV file.

    python scripts/evidence.py features --write
    python scripts/evidence.py idioms tied --impl ddp "flatshard FULL_SHARD"
    python scripts/evidence.py page

Prints each cell, and how many there are of each verdict. With `--write`, the rows that ran replace
the rows of the same entries in `docs/evidence/NAME.csv`; each row has the date, commit and torch of
its own run. `page` counts the rows of all files again, into the tables of `docs/evidence.md`.
The registries are Python files in `tests/`, and the tests run a part of each. A cell is *right*
(the numbers of the reference), *raises* (an error on at least one rank), *wrong* (other numbers,
and no error), *crashes* (a process ends without a Python error) or *hangs* (no end within
`--timeout` seconds).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from lib.command_line import Parser

from tests.idioms import IDIOMS
from tests.idioms.side import AUTO, STRATEGIES, difference, run
from tests.outcomes import Cell, call, try_ranks

PAGE, FOLDER = ROOT / "docs" / "evidence.md", ROOT / "docs" / "evidence"
BAD = "wrong, crashes or hangs"
VERDICT_COLUMNS = {
    "right, to the bit": "right",
    "right": "right",
    "raises": "raises",
    **dict.fromkeys(("wrong", "crashes", "hangs"), BAD),
}
"""Columns of the page's tables, by verdict; another verdict is a column by itself."""
LONGEST_REASON = 160
Row = dict[str, str]

# ---------------------------------------------------------------- registries

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
FLATSHARD = (*(f"flatshard {name}" for name in STRATEGIES), AUTO)
SIDES = ("ddp", *FLATSHARD, "fsdp1", "fsdp2")
# Idioms of DistributedDataParallel that FSDP's documentation does not promise: it broadcasts no
# buffers, every forward and state dict is collective, and it has no join(). FSDP1 also has its own
# clipping and GradScaler, and prefixes in the names of parameters.
_FSDP = {
    *("batch_norm", "buffer_in_place", "buffer_reassigned", "buffer_replaced", "buffer_no_sync"),
    *("evaluation_on_one_rank", "state_on_rank_0", "join"),
}
RULED_OUT = {"fsdp1": _FSDP | {"clip_grad_norm", "grad_scaler", "walked"}, "fsdp2": _FSDP}


def idioms(options: argparse.Namespace) -> Iterator[Row]:
    """Idioms of DistributedDataParallel scripts.

    The results on each rank (losses, gradients, the final state dict) must equal the results under
    DistributedDataParallel on the same rank. If DistributedDataParallel raises or is known to be
    wrong, they must equal those of an unwrapped model whose gradients are averaged after each
    backward.
    """
    preload = "tests.idioms", "torch.distributed.fsdp", "torch.distributed.checkpoint"
    for name in chosen((one for one in IDIOMS if IDIOMS[one].section in SECTIONS), options.names):
        idiom = IDIOMS[name]
        seconds = options.timeout * (SLOW_FACTOR if idiom.slow else 1)

        def cell(judge: Any, side: str, name: str = name, seconds: float = seconds) -> Cell:
            arguments = judge, call, options.ranks, run, name, side, side == AUTO
            return try_ranks(*arguments, timeout=seconds, preload=preload)

        expected: list[Any] = []
        oracle = "by hand" if idiom.by_hand else "ddp"
        failed = cell(lambda found, keep=expected: keep.extend(found) or Cell("right"), oracle)
        for side in options.impl:
            keys = {"idiom": name, "implementation": side}
            found = cell(partial(judge, expected or failed), side)
            promised = "no" if name in RULED_OUT.get(side, ()) else "yes"
            about = {"part": SECTIONS[idiom.section], "what it does": idiom.title}
            yield row(keys, found, promised=promised, **about)


def judge(expected: list[Any] | Cell, found: list[Any]) -> Cell:
    """Compare the results of an idiom with the expected results, rank by rank."""
    if isinstance(expected, Cell):
        return Cell("wrong", f"no error, but unwrapped: {expected.why}")
    for rank, (ours, oracle) in enumerate(zip(found, expected, strict=True)):
        if why := difference(ours, oracle, tolerance=1e-9):
            return Cell("wrong", f"rank {rank}: {why}")
    return Cell("right")


def features(options: argparse.Namespace) -> Iterator[Row]:
    """Features by strategies, on two nodes of two ranks."""
    from tests.parity import test_features as registry

    for name in chosen(registry.FEATURES, options.names):
        for strategy in registry.STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                arguments = registry.trial, registry.WORLD, name, strategy, folder
                found = try_ranks(registry.judge, *arguments, timeout=options.timeout)
            yield row({"feature": name, "strategy": strategy}, found)


def lone_calls(options: argparse.Namespace) -> Iterator[Row]:
    """Calls that only one rank makes, by the next call of all ranks."""
    from tests.comm import test_lone_calls as registry

    settings = chosen(registry.all_settings(), options.names)
    for setting, one in registry.outcomes(settings, at_once=6, quick=False):
        keys = {"call": setting[0], "next": setting[1], "setting": ", ".join(map(str, setting[2:]))}
        yield row(keys, one.cell, seconds=f"{one.seconds:.1f}")


def zoo(options: argparse.Namespace) -> Iterator[Row]:
    """Architectures of other libraries, beside DistributedDataParallel and FSDP1."""
    from tests.zoo import families, trial

    models = [name for family in families.FAMILIES for name in families.models_of(family)]
    for name in chosen(models, options.names):
        policy = trial.POLICIES[models.index(name) % len(trial.POLICIES)]
        library, _, architecture = name.partition("/")
        limits: Any = {"timeout": options.timeout, "preload": (library,)}
        with tempfile.NamedTemporaryFile(suffix=".pt") as oracle:
            arguments = policy, oracle.name
            results: list[Any] = []
            keep = partial(lambda results, found: results.extend(found) or Cell(""), results)
            failed = try_ranks(keep, trial.train, 2, name, "ddp", *arguments, **limits)
            if not results:
                print(f"{name} under DistributedDataParallel: {failed}", file=sys.stderr)
                continue
            about = {"parameters": str(results[0].numel), "dtype": results[0].dtype}
            for side in ("flatshard", "fsdp1"):
                found = try_ranks(trial.judge, trial.train, 2, name, side, *arguments, **limits)
                keys = {"library": library, "architecture": architecture, "implementation": side}
                yield row(keys, found, **about, policy=policy)


def optimizers(options: argparse.Namespace) -> Iterator[Row]:
    """Optimizers by wrappers, and how flatshard steps each."""
    from tests.optimizers import test_steps as registry

    sides = "flatshard FULL_SHARD", "fsdp1", "fsdp2", "ddp"
    for package, name in registry.OPTIMIZERS:
        for side in sides if chosen([name], options.names) else ():
            arguments = registry.judge, registry.train, options.ranks, package, name, side
            found = try_ranks(*arguments, timeout=options.timeout)
            way = found.why if found.verdict.startswith("right") else ""
            keys = {"package": package, "optimizer": name, "implementation": side.split()[0]}
            yield row(keys, Cell(found.verdict) if way else found, **{"stepped on": way})


def optimizers_by_strategy(options: argparse.Namespace) -> Iterator[Row]:
    """How many optimizers are right, by strategy and number of ranks.

    On 3 ranks they train in float64, because a mean of three is rounded.
    """
    from tests.optimizers import test_steps as registry

    names = [key for key in registry.OPTIMIZERS if chosen([key[1]], options.names)]
    for strategy in STRATEGIES:
        for world in (1, 2, 3, 4):
            found = {}
            for package, name in names:
                arguments = package, name, f"flatshard {strategy}", world == 3
                run = partial(try_ranks, registry.judge, registry.train, world, *arguments)
                found[f"{name} ({package})"] = run(timeout=options.timeout)
            others = {k: one for k, one in found.items() if not one.verdict.startswith("right")}
            exact = sum(one.verdict == "right, to the bit" for one in found.values())
            about = {"optimizers": len(found), "right": len(found) - len(others), "exact": exact}
            why = "; ".join(f"{name}: {one.verdict}, {one.why}" for name, one in others.items())
            keys = {"strategy": strategy, "ranks": str(world)}
            yield row(keys, Cell("", why), **{k: str(v) for k, v in about.items()})


def resumed_optimizers(options: argparse.Namespace) -> Iterator[Row]:
    """Optimizers by forms of checkpoint and numbers of ranks that resume."""
    from tests.optimizers import test_resumed as registry

    for package in filter(importlib.util.find_spec, registry.PACKAGES):
        for name in chosen(registry._all_of(package), options.names):
            with tempfile.TemporaryDirectory() as folder:
                for one in registry.rows_of(package, name, folder, timeout=options.timeout):
                    keys = {"package": package, "optimizer": name, "way": one.way}
                    yield row({**keys, "ranks": str(one.ranks)}, Cell(one.verdict, one.reason))


def peaks(options: argparse.Namespace) -> Iterator[Row]:
    """Trainings on the CPU, with the error of the peak of tensors that a plan predicts."""
    from tests.extras.plan import test_predicted_peak as registry

    cases = chosen(registry.CASES, options.names)
    errors = registry.errors(cases)
    for case, error in zip(cases, errors, strict=True):
        yield row({"training": str(case)}, Cell(""), error=f"{error:+.2%}")
    sizes = list(map(abs, errors))
    print(f"median {statistics.median(sizes):.2%}, largest {max(sizes):.2%}", file=sys.stderr)


REGISTRIES = {
    one.__name__: one
    for one in (
        *(idioms, features, lone_calls, optimizers, optimizers_by_strategy, peaks),
        *(resumed_optimizers, zoo),
    )
}
COUNTED_BY = {
    "idioms": ("implementation", "number of runs, by wrapper"),
    "public_programs": ("wrapped by", "number of programs, by what wraps the model"),
    "zoo": ("implementation", "number of runs, by wrapper"),
    "optimizers": ("implementation", "number of runs, by wrapper"),
    "resumed_optimizers": ("package", "number of runs, by library of optimizers"),
}
"""Files whose verdicts the page counts: the column that makes the rows of its table, and the title
of these rows."""
READABLE = {one.lower(): one for one in ("DDP", "FSDP1", "FSDP2")}
READABLE |= {"--wrap": "`flatshard try --wrap`", "-": "(not compared)"}
"""How the page's tables show names of rows; other names stay as they are."""

# ---------------------------------------------------------------- tables


def row(keys: Row, cell: Cell, **about: str) -> Row:
    """A row of a CSV file; its first columns, ``keys``, say what was tried."""
    why = re.sub(r"0x[0-9a-f]+|/\S*/|\[rank\d\]:? ?", "…", " ".join(cell.why.split()))
    if len(why) > LONGEST_REASON:
        why = why[:LONGEST_REASON].rsplit(" ", 1)[0] + " …"
    print(", ".join(filter(None, [*keys.values(), cell.verdict, why])), file=sys.stderr, flush=True)
    return {**keys, "verdict": cell.verdict, "reason": why, **about}


def stamp() -> Row:
    """Columns that name a run."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    version = torch.__version__.partition("+")[0]
    return {"date": date.today().isoformat(), "commit": commit, "torch": version}


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, in the place of the rows of the file with the same keys."""

    def keys(one: Row) -> tuple[str, ...]:
        names = list(one)
        return tuple(one[name] for name in names[: names.index("verdict")])

    merged = {keys(one): one for one in read(path)} if path.exists() else {}
    merged |= {keys(one): one for one in rows}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(next(iter(merged.values()))), lineterminator="\n")
        table.writeheader()
        table.writerows(merged.values())


def counts(rows: Sequence[Row], column: str, about: str) -> list[str]:
    """A Markdown table: how often each verdict occurs, by the values of a column."""
    orders = [VERDICT_COLUMNS.get(one["verdict"], one["verdict"]) for one in rows]
    titles = [one for one in dict.fromkeys((*VERDICT_COLUMNS.values(), *orders)) if one in orders]
    found = Counter((one[column], verdict) for one, verdict in zip(rows, orders, strict=True))
    lines = [[about, *titles], ["---"] * (len(titles) + 1)]
    for name in dict.fromkeys(one[column] for one in rows):
        lines.append([READABLE.get(name, name), *(str(found[name, title]) for title in titles)])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def updated(page: str) -> str:
    """The page with the counts of all files, and the runs that they are of."""
    for name, (column, title) in COUNTED_BY.items():
        rows = read(FOLDER / f"{name}.csv")
        dates, commits, torches = (
            sorted({one[column] for one in rows}) for column in ("date", "commit", "torch")
        )
        of_commits = f"commit {commits[0]}" if len(commits) == 1 else f"{len(commits)} commits"
        when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
        runs = f"{when} ({of_commits}, torch {' and '.join(torches)})"
        about = f"Verdicts of [{len(rows):,} runs](evidence/{name}.csv) {runs}:"
        page = replaced(page, name, "\n".join([about, "", *counts(rows, column, title)]))
    return page


def replaced(page: str, mark: str, text: str) -> str:
    """The page with a text in its place, between two comments with the mark."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, is_there, after = page.partition(begin)
    _, end_is_there, rest = after.partition(end)
    if not (is_there and end_is_there):
        sys.exit(f"expected the lines {begin.strip()} and {end}")
    return f"{before}{begin}\n{text.strip()}\n\n{end}{rest}"


def chosen(names: Iterable[Any], words: Sequence[str]) -> list[Any]:
    """The names that are, or else that contain, one of the words; all names without words."""
    known = list(names)
    exact = [name for name in known if name in words]
    return exact or [one for one in known if not words or any(w in str(one) for w in words)]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("registry", choices=[*REGISTRIES, "page"])
    parser.add_argument("names", nargs="*", help="entries to run, or parts of their names")
    parser.add_argument("--impl", nargs="+", choices=SIDES, default=SIDES, help="of idioms")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_number("--ranks", 2, "of idioms and optimizers")
    parser.add_argument("--write", action="store_true", help="into docs/evidence/NAME.csv")
    options = parser.parse_args()
    if options.registry != "page":
        rows, of_run = list[Row](), stamp()
        try:
            rows.extend(REGISTRIES[options.registry](options))
        finally:  # an interrupted run keeps what it has
            if rows:
                first = next(iter(rows[0]))
                by, title = COUNTED_BY.get(options.registry, (first, first))
                print("\n".join(counts(rows, by, title)))
            if options.write:
                write(FOLDER / f"{options.registry}.csv", ({**one, **of_run} for one in rows))
        if not options.write:
            return
    PAGE.write_text(updated(PAGE.read_text()))


if __name__ == "__main__":
    main()
