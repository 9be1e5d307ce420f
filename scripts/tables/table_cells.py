"""Cells, footnotes and pages of the scripts that write tables.

A cell is a verdict on a run of several ranks, in one of five words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# Import from the folder above.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.output import output_file
from lib.rank_processes import Said

VERDICTS = ("right", "raises", "wrong", "crashes", "hangs")
GOOD = {"right", "raises"}


class Cell(NamedTuple):
    """A verdict (of `VERDICTS`, unless a table has its own), and the reason if not "right"."""

    verdict: str
    why: str = ""


def failure(said: Sequence[Said]) -> Cell | None:
    """Cell for ranks of which some did not return; None if all ranks returned."""
    for rank, one in enumerate(said):
        if one.outcome == "died":
            return Cell("crashes", f"rank {rank} ends with exit code {one.what}")
    errors = [one.what for one in said if one.outcome == "raised"]
    text = f"{errors[0].kind}: {errors[0].message}" if errors else ""
    if any(one.outcome == "hangs" for one in said):
        return Cell("hangs", text and f"one rank raises {text}; others wait")
    return Cell("raises", text) if errors else None


class Notes:
    """Footnotes with the reasons of cells, each reason once, cut to ``longest`` characters.

    ``subject`` is the subject of the table, because a page has footnotes of several tables.
    """

    def __init__(self, subject: str, longest: int) -> None:
        self._title = f"Notes on {subject}"
        self._longest = longest
        self._numbers: dict[str, int] = {}

    def of(self, cell: Cell) -> str:
        """Text of a cell, with the number of its footnote, or with a difference in brackets."""
        if not cell.why:
            return cell.verdict
        if difference := re.search(r"\bdiffers by (\S+)$", cell.why):
            return f"{cell.verdict} ({difference[1]})"
        number = self._numbers.setdefault(self._shortened(cell.why), len(self._numbers) + 1)
        return f"{cell.verdict} [{number}](#{self._title.lower().replace(' ', '-')})"

    def _shortened(self, why: str) -> str:
        text = " ".join(why.replace("`", "'").split())
        text = re.sub(r"0x[0-9a-f]+|/\S*/|\[rank\d\]:? ?", "…", text)
        if len(text) <= self._longest:
            return text
        return text[: self._longest].rsplit(" ", 1)[0] + " …"

    def lines(self) -> list[str]:
        notes = [f"{number}. `{text}`" for text, number in self._numbers.items()]
        return folded(self._title, [f"#### {self._title}", "", *notes])


# ---------------------------------------------------------------- pages


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """A part of a page that is closed until the reader clicks on its title."""
    head = f'<details markdown="1"><summary>{title}</summary>'
    return [head, "", *lines, "", "</details>", ""]


def page_file(text: str) -> Path:
    """An existing page that this user can write."""
    path = output_file(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such page: {text}")
    return path


def split_page(page: Path, name: str) -> tuple[str, str, str]:
    """Split a page into the text before a table, the table and the text after it.

    Two comments with the table's name enclose the table.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, mark, after = page.read_text().partition(begin)
    table, end_mark, rest = after.partition(end)
    if not (mark and end_mark):
        raise SystemExit(f"{page}: expected the lines {begin.strip()} and {end}")
    return before + begin, table, end + rest


def write_table(page: Path | None, name: str, text: str) -> None:
    """Write a table into its place on a page; print the table if ``page`` is None."""
    if page is None:
        print(text)
        return
    before, _, rest = split_page(page, name)
    page.write_text(f"{before}\n{text.strip()}\n\n{rest}")
