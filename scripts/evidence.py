"""Runs a registry of the tests completely, and writes its table into a page.

    python scripts/evidence.py features --page docs/evidence.md
    python scripts/evidence.py features --only join no_sync

Without `--page`, prints the table. The registries are Python files in `tests/`, and the tests run a
part of each. A cell is *right* (the numbers of the reference), *raises* (an error on at least one
rank), *wrong* (other numbers, and no error), *crashes* (a process ends without a Python error) or
*hangs* (no end within `--timeout` seconds).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from tests.outcomes import Cell, try_ranks

GOOD = ("right", "raises")
VERSION = torch.__version__.partition("+")[0]

# ---------------------------------------------------------------- registries


def features(options: argparse.Namespace) -> str:
    """Features by strategies: rows of the features that some strategy lacks, and the others."""
    from tests.parity import test_features as registry

    names, notes = chosen(registry.FEATURES, options.only), Notes("features", longest=400)
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

    settings = chosen(registry.all_settings(), options.only)
    found = dict(registry.outcomes(settings, at_once=6, quick=False))
    lines = [row("", *registry.NEXT), "|---" * (len(registry.NEXT) + 1) + "|"]
    notes = Notes("programs", longest=600)
    for call in registry.CALLS:
        cells = []
        for then in registry.NEXT:
            some = [one for setting, one in found.items() if setting[:2] == (call, then)]
            counts = Counter(one.cell.verdict for one in some)
            bad = [notes.of(one.cell) for one in some if one.cell.verdict not in GOOD]
            slowest = max((one.seconds for one in some), default=0.0)
            seconds = {"right": "", "raises": f" ({slowest:.1f} s)"}
            good = [f"{counts[one]} {one}{seconds[one]}" for one in seconds if counts[one]]
            cells.append(", ".join(good + bad))
        lines.append(row(call, *cells))
    return "\n".join([*lines, "", *notes.lines()])


def peaks(options: argparse.Namespace) -> str:
    """Trainings on the CPU, with the error of the peak of tensors that a plan predicts."""
    from tests.extras.plan import test_predicted_peak as registry

    cases = chosen(registry.CASES, options.only)
    errors = registry.errors(cases)
    sizes = list(map(abs, errors))
    lines = [f"- {error:+.2%}: {case}" for case, error in zip(cases, errors, strict=True)]
    worst = f"median {statistics.median(sizes):.2%}, largest {max(sizes):.2%}"
    return "\n".join([f"{len(cases)} trainings, {worst}", "", *lines])


REGISTRIES = {
    "features": (features, "features"),
    "lone_calls": (lone_calls, ""),
    "peaks": (peaks, ""),
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


def chosen(names: Iterable[Any], only: Sequence[str]) -> list[Any]:
    """Those of the names that contain one of the words of `--only`."""
    return [name for name in names if not only or any(word in str(name) for word in only)]


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
    parser.add_argument("--only", nargs="+", default=(), metavar="WORD", help="names to run")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--page", type=Path, help="page to write the table into")
    options = parser.parse_args()
    table, mark = REGISTRIES[options.registry]
    write_table(options.page, mark, table(options))


if __name__ == "__main__":
    main()
