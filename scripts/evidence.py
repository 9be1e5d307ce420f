"""Runs a registry of the tests completely, and writes its table into a page.

    python scripts/evidence.py features --page docs/evidence.md
    python scripts/evidence.py idioms tied --impl ddp "flatshard FULL_SHARD"

Without `--page`, prints the table. The registries are Python files in `tests/`, and the tests run a
part of each. A cell is *right* (the numbers of the reference), *raises* (an error on at least one
rank), *wrong* (other numbers, and no error), *crashes* (a process ends without a Python error) or
*hangs* (no end within `--timeout` seconds).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from tests.idioms import IDIOMS
from tests.idioms.side import AUTO, STRATEGIES, difference, run
from tests.outcomes import Cell, call, try_ranks

GOOD = ("right", "raises")
VERDICTS = (*GOOD, "wrong", "crashes", "hangs")
VERSION = torch.__version__.partition("+")[0]

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


def idioms(options: argparse.Namespace) -> str:
    """Idioms of DistributedDataParallel scripts.

    The results on each rank (losses, gradients, the final state dict) must equal the results under
    DistributedDataParallel on the same rank. If DistributedDataParallel raises or is known to be
    wrong, they must equal those of an unwrapped model whose gradients are averaged after each
    backward.
    """
    table: dict[str, dict[str, Cell]] = {}
    preload = "tests.idioms", "torch.distributed.fsdp", "torch.distributed.checkpoint"
    for name in chosen((one for one in IDIOMS if IDIOMS[one].section in SECTIONS), options.names):
        seconds = options.timeout * (SLOW_FACTOR if IDIOMS[name].slow else 1)

        def cell(judge: Any, side: str, name: str = name, seconds: float = seconds) -> Cell:
            arguments = judge, call, options.ranks, run, name, side, side == AUTO
            return try_ranks(*arguments, timeout=seconds, preload=preload)

        expected: list[Any] = []
        oracle = "by hand" if IDIOMS[name].by_hand else "ddp"
        failed = cell(lambda found, keep=expected: keep.extend(found) or Cell("right"), oracle)
        table[name] = {
            side: say(f"{name}, {side}", cell(partial(judge, expected or failed), side))
            for side in options.impl
        }
    return markdown(table, options.ranks, f"python {' '.join(sys.argv)}")


def judge(expected: list[Any] | Cell, found: list[Any]) -> Cell:
    """Compare the results of an idiom with the expected results, rank by rank."""
    if isinstance(expected, Cell):
        return Cell("wrong", f"no error, but unwrapped: {expected.why}")
    for rank, (ours, oracle) in enumerate(zip(found, expected, strict=True)):
        if why := difference(ours, oracle, tolerance=1e-9):
            return Cell("wrong", f"rank {rank}: {why}")
    return Cell("right")


def _joined(cells: dict[str, Cell], notes: Notes) -> str:
    """Join the cells of all strategies; a single word if all strategies agree."""
    alike = defaultdict(list)
    for implementation, cell in cells.items():
        alike[cell.verdict].append((implementation.removeprefix("flatshard "), cell))
    if len(alike) == 1:
        return notes.of(next(iter(cells.values())))
    usual = max(alike, key=lambda verdict: len(alike[verdict]))
    shown = notes.of(alike[usual][0][1])
    rest = defaultdict(list)
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
        f"{date.today().isoformat()}, torch {torch.__version__}, {world} ranks on gloo"
        f" and CPUs: `{command}`. The HYBRID strategies run as on two nodes; `auto` is"
        ' `auto_wrap_policy="auto"` and every other default.',
        "",
    ]


def _summary(table: dict[str, dict[str, Cell]], present: Iterable[str]) -> list[str]:
    heads = [f"{len(table)} idioms", *VERDICTS, "silent, crash or hang", "of these not promised"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for implementation in present:
        cells = {name: row[implementation] for name, row in table.items()}
        counts = Counter(cell.verdict for cell in cells.values())
        bad = [name for name, cell in cells.items() if cell.verdict not in GOOD]
        starred = sum(name in RULED_OUT.get(implementation, ()) for name in bad)
        name = implementation.upper() if " " not in implementation else implementation
        numbers = [*(counts[verdict] for verdict in VERDICTS), len(bad), starred]
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return lines


# ---------------------------------------------------------------- other registries


def features(options: argparse.Namespace) -> str:
    """Features by strategies: rows of the features that some strategy lacks, and the others."""
    from tests.parity import test_features as registry

    names, notes = chosen(registry.FEATURES, options.names), Notes("features", longest=400)
    lines, everywhere = [row("feature", "right", "otherwise"), "|---" * 3 + "|"], []
    for name in names:
        others: dict[str, list[str]] = {}
        for strategy in registry.STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (registry.trial, registry.WORLD, name, strategy, folder)
                cell = say(
                    f"{name}, {strategy}",
                    try_ranks(registry.judge, *arguments, timeout=options.timeout),
                )
            if cell.verdict != "right":
                # The same but for the strategy and for numbers of ranks.
                why = re.sub(r"over \d replicas", "over replicas", cell.why)
                why = why.replace(f"{strategy} never", "the strategy never")
                others.setdefault(notes.of(Cell(cell.verdict, why)), []).append(strategy)
        if others:
            some = "; ".join(f"{', '.join(some)}: {note}" for note, some in others.items())
            is_none = sum(map(len, others.values())) == len(registry.STRATEGIES)
            lines.append(row(name, "none" if is_none else "the other strategies", some))
        else:
            everywhere.append(name)
    lines += ["", f"*Right* with all strategies: {'; '.join(everywhere)}."]
    about = (
        f"`python scripts/evidence.py features`, 4 gloo ranks as 2 nodes of 2, torch {VERSION}. "
        f"The strategies are {', '.join(registry.STRATEGIES)}."
    )
    title = f"{len(names)} features by {len(registry.STRATEGIES)} strategies"
    return "\n".join([about, "", *folded(title, lines), *notes.lines()])


def lone_calls(options: argparse.Namespace) -> str:
    """Calls by next calls: the number of cells of each verdict, and the slowest error's seconds."""
    from tests.comm import test_lone_calls as registry

    settings = chosen(registry.all_settings(), options.names)
    found = dict(registry.outcomes(settings, at_once=6, quick=False))
    lines = [row("", *registry.NEXT), "|---" * (len(registry.NEXT) + 1) + "|"]
    notes = Notes("programs", longest=600)
    for name in registry.CALLS:
        cells = []
        for then in registry.NEXT:
            some = [one for setting, one in found.items() if setting[:2] == (name, then)]
            counts = Counter(one.cell.verdict for one in some)
            bad = [notes.of(one.cell) for one in some if one.cell.verdict not in GOOD]
            slowest = max((one.seconds for one in some), default=0.0)
            seconds = {"right": "", "raises": f" ({slowest:.1f} s)"}
            good = [f"{counts[one]} {one}{seconds[one]}" for one in seconds if counts[one]]
            cells.append(", ".join(good + bad))
        lines.append(row(name, *cells))
    return "\n".join([*lines, "", *notes.lines()])


def zoo(options: argparse.Namespace) -> str:
    """Architectures of other libraries, beside DistributedDataParallel and FSDP1."""
    from tests.zoo import families, trial

    sides, notes = ("flatshard", "fsdp1"), Notes("architectures", longest=90)
    models = [name for family in families.FAMILIES for name in families.models_of(family)]
    counts = {side: Counter[str]() for side in sides}
    sizes, lines = [], []
    for family in families.FAMILIES:
        table: list[str] = []
        right: dict[str, list[str]] = {policy: [] for policy in trial.POLICIES}
        for number, name in enumerate(models):
            if not name.startswith(f"{family}/") or name not in chosen(models, options.names):
                continue
            policy = trial.POLICIES[number % len(trial.POLICIES)]
            with tempfile.NamedTemporaryFile(suffix=".pt") as oracle:
                arguments = policy, oracle.name
                limits: Any = {"timeout": options.timeout, "preload": (family,)}
                run = partial(try_ranks, trial.judge, trial.train, 2, name, **limits)
                results: list[Any] = []
                keep = partial(lambda results, found: results.extend(found) or Cell(""), results)
                failed = try_ranks(keep, trial.train, 2, name, "ddp", *arguments, **limits)
                if not results:
                    say(f"{name} under DistributedDataParallel", failed)
                    continue
                cells = {one: say(f"{name}, {one}", run(one, *arguments)) for one in sides}
            for side, cell in cells.items():
                counts[side][cell.verdict] += 1
            sizes.append(results[0].numel)
            dtype = "" if results[0].dtype == "float64" else f", {results[0].dtype}"
            last, size = name.partition("/")[2], f"{results[0].numel:,}{dtype}"
            if {cell.verdict for cell in cells.values()} == {"right"}:
                right[policy].append(f"`{last}` ({size})")
            else:
                table.append(row(f"`{last}`", size, policy, *map(notes.of, cells.values())))
        total = len(table) + sum(map(len, right.values()))
        head = [row("architecture", "parameters", "policy", *sides), "|---" * 5 + "|"]
        part = [*head, *table, ""] if table else []
        part += [f"- Right, policy {one}: {', '.join(right[one])}" for one in right if right[one]]
        lines += ["", *folded(f"{family}: {total} architectures", part)] if total else []
    heads = [
        f"{date.today()}, torch {torch.__version__}: `python scripts/evidence.py zoo`. The median "
        f"model has {statistics.median_high(sizes):,} parameters.",
        "",
        row(f"{len(sizes)} architectures", *VERDICTS),
        "|---" * (len(VERDICTS) + 1) + "|",
        *(row(side, *(counts[side][verdict] for verdict in VERDICTS)) for side in sides),
    ]
    return "\n".join([*heads, *lines, *notes.lines()])


def optimizers(options: argparse.Namespace) -> str:
    """Optimizers by wrappers, and how flatshard steps each."""
    from tests.optimizers import test_steps as registry

    sides = {"flatshard": "flatshard FULL_SHARD", "FSDP1": "fsdp1", "FSDP2": "fsdp2", "DDP": "ddp"}
    notes, exact, names = Notes("optimizers", longest=90), dict[str, list[str]](), 0
    lines = [row("optimizer", "package", "flatshard steps it on", *sides), "|---" * 7 + "|"]
    for package, name in registry.OPTIMIZERS:
        if not chosen([name], options.names):
            continue
        names += 1
        mode, texts = "", []
        for title, side in sides.items():
            arguments = registry.judge, registry.train, options.ranks, package, name, side
            cell = say(f"{package} {name}, {title}", try_ranks(*arguments, timeout=options.timeout))
            is_right = cell.verdict.startswith("right")
            mode = cell.why if is_right and title == "flatshard" else mode
            is_exact = cell.verdict == "right, to the bit"
            text = cell.verdict if is_right else notes.of(cell)
            texts.append("exact" if is_exact else text)
        if mode and set(texts) == {"exact"}:
            exact.setdefault(mode, []).append(f"`{name}` ({package})")
        else:
            lines.append(row(f"`{name}`", package, mode, *texts))
    lines.append("")
    for mode, some in exact.items():
        lines.append(f"Exact in all columns, stepped on {mode}: {', '.join(some)}.")
    about = (
        f"Five steps of a small model on {options.ranks} gloo ranks with equal rows, torch "
        f"{VERSION}; *right*: no value differs from the unwrapped model's by more than "
        f"{registry.RIGHT:g}; *exact*: none differs."
    )
    return "\n".join([about, "", *folded(f"{names} optimizers", lines), *notes.lines()])


def optimizers_by_strategy(options: argparse.Namespace) -> str:
    """How many optimizers are right, by strategy and number of ranks."""
    from tests.optimizers import test_steps as registry

    names = [key for key in registry.OPTIMIZERS if chosen([key[1]], options.names)]
    lines, others = [row("strategy", "1 rank", *(f"{n} ranks" for n in (2, 3, 4)))], {}
    lines.append("|---" * 5 + "|")
    for strategy in STRATEGIES:
        cells = []
        for world in (1, 2, 3, 4):
            verdicts = []
            for package, name in names:
                arguments = package, name, f"flatshard {strategy}", world == 3
                run = partial(try_ranks, registry.judge, registry.train, world, *arguments)
                cell = say(f"{name}, {world} ranks, {strategy}", run(timeout=options.timeout))
                verdicts.append(cell.verdict)
                if not cell.verdict.startswith("right"):
                    what = f"`{name}` ({package}) on {world} ranks: {cell.why}"
                    others.setdefault(what, []).append(strategy)
            right = sum(verdict.startswith("right") for verdict in verdicts)
            cells.append(f"{right} ({verdicts.count('right, to the bit')})")
        lines.append(row(strategy, *cells))
    about = (
        f"How many of {len(names)} optimizers are right, and in brackets how many of them to the "
        "bit, as in the table above; on 3 ranks in float64, as a mean of three is rounded."
    )
    rest = [f"- {what}, with {', '.join(some)}" for what, some in others.items()]
    return "\n".join([about, "", *lines, "", *(["The others:", "", *rest] if rest else [])])


def resumed_optimizers(options: argparse.Namespace) -> str:
    """Numbers of cells by package, and the optimizers that are not right everywhere."""
    from tests.optimizers import test_resumed as registry

    rows = []
    for package in filter(importlib.util.find_spec, registry.PACKAGES):
        for name in chosen(registry._all_of(package), options.names):
            with tempfile.TemporaryDirectory() as folder:
                some = list(registry.rows_of(package, name, folder, timeout=options.timeout))
            say(f"{package} {name}", Cell(str(Counter(one.verdict for one in some))))
            rows += some
    verdicts = ("right", "refused", "fails unwrapped", "wrong", "raises", "crashes", "hangs")
    lines = [row("package", "optimizers", "cells", *verdicts), "|---" * 10 + "|"]
    for package in dict.fromkeys(one.package for one in rows):
        own = [one for one in rows if one.package == package]
        counts = Counter(one.verdict for one in own)
        numbers = len({one.optimizer for one in own}), len(own), *(counts[v] for v in verdicts)
        lines.append(row(package, *numbers))
    notes, cells = Notes("resumed optimizers", longest=240), dict[tuple[str, ...], list[str]]()
    for one in rows:
        if one.verdict != "right":
            key = f"`{one.optimizer}`", one.package, notes.of(Cell(one.verdict, one.reason))
            cells.setdefault(key, []).append(f"{one.way} {one.ranks}")
    every = len(registry.WAYS) * len(registry.WORLDS)
    head = row("optimizer", "package", "verdict", "way, and number of ranks that resume")
    listed = [
        row(*key, "all" if len(some) == every else ", ".join(some)) for key, some in cells.items()
    ]
    title = "Optimizers that are not right everywhere"
    return "\n".join(
        [*lines, "", *folded(title, [head, "|---" * 4 + "|", *listed]), *notes.lines()]
    )


def peaks(options: argparse.Namespace) -> str:
    """Trainings on the CPU, with the error of the peak of tensors that a plan predicts."""
    from tests.extras.plan import test_predicted_peak as registry

    cases = chosen(registry.CASES, options.names)
    errors = registry.errors(cases)
    sizes = list(map(abs, errors))
    lines = [f"- {error:+.2%}: {case}" for case, error in zip(cases, errors, strict=True)]
    worst = f"median {statistics.median(sizes):.2%}, largest {max(sizes):.2%}"
    return "\n".join([f"{len(cases)} trainings, {worst}", "", *lines])


REGISTRIES = {
    "idioms": (idioms, "idioms"),
    "features": (features, "features"),
    "lone_calls": (lone_calls, ""),
    "optimizers": (optimizers, "optimizers"),
    "optimizers_by_strategy": (optimizers_by_strategy, "optimizers by strategy"),
    "peaks": (peaks, ""),
    "resumed_optimizers": (resumed_optimizers, "resumed optimizers"),
    "zoo": (zoo, "architectures"),
}
"""By name: the function that makes the table, and the mark of its place on the page."""

# ---------------------------------------------------------------- tables


class Notes:
    """Footnotes with the reasons of cells, each reason once, cut to ``longest`` characters.

    ``subject`` is the subject of the table, because a page has footnotes of several tables.
    """

    def __init__(self, subject: str, longest: int) -> None:
        self._title, self._longest = f"Notes on {subject}", longest
        self._numbers: dict[str, int] = {}

    def of(self, cell: Cell) -> str:
        """Text of a cell, with the number of its footnote, or with a difference in brackets."""
        if not cell.why:
            return cell.verdict
        if difference := re.search(r"\bdiffers by (\S+)$", cell.why):
            return f"{cell.verdict} ({difference[1]})"
        text = " ".join(cell.why.replace("`", "'").split())
        text = re.sub(r"0x[0-9a-f]+|/\S*/|\[rank\d\]:? ?", "…", text)
        if len(text) > self._longest:
            text = text[: self._longest].rsplit(" ", 1)[0] + " …"
        number = self._numbers.setdefault(text, len(self._numbers) + 1)
        return f"{cell.verdict} [{number}](#{self._title.lower().replace(' ', '-')})"

    def lines(self) -> list[str]:
        notes = [f"{number}. `{text}`" for text, number in self._numbers.items()]
        return folded(self._title, [f"#### {self._title}", "", *notes]) if notes else []


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """A part of a page that is closed until the reader clicks on its title."""
    head = f'<details markdown="1"><summary>{title}</summary>'
    return [head, "", *lines, "", "</details>", ""]


def say(name: str, cell: Cell) -> Cell:
    print(f"{name}: {' '.join(map(str, cell))}"[:300], file=sys.stderr, flush=True)
    return cell


def chosen(names: Iterable[Any], words: Sequence[str]) -> list[Any]:
    """The names that are, or else that contain, one of the words; all names without words."""
    known = list(names)
    exact = [name for name in known if name in words]
    return exact or [one for one in known if not words or any(w in str(one) for w in words)]


def write_table(page: Path | None, mark: str, text: str) -> None:
    """Write a table into its place on a page, between two comments with the mark; or print it."""
    if page is None:
        print(text)
        return
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, is_there, after = page.read_text().partition(begin)
    _, end_is_there, rest = after.partition(end)
    if not (is_there and end_is_there):
        sys.exit(f"{page}: expected the lines {begin.strip()} and {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{rest}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("registry", choices=REGISTRIES)
    parser.add_argument("names", nargs="*", help="entries to run, or parts of their names")
    parser.add_argument("--impl", nargs="+", choices=SIDES, default=SIDES, help="of idioms")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds (default: 60)")
    parser.add_argument(
        "--ranks", type=int, default=2, help="of idioms and optimizers (default: 2)"
    )
    parser.add_argument("--page", type=Path, help="page to write the table into")
    options = parser.parse_args()
    table, mark = REGISTRIES[options.registry]
    write_table(options.page, mark, table(options))


if __name__ == "__main__":
    main()
