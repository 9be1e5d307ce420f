"""The tables that `scripts/evidence.py` writes, and the names on their pages."""

import functools
import os
import re
import time
from pathlib import Path
from unittest import mock

import evidence
import torch

from tests import outcomes
from tests.idioms import IDIOMS
from tests.outcomes import Cell, try_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def test_page_has_all_idioms() -> None:
    # A row, or an entry in the list of the idioms that are right in all columns.
    pattern = r"^\| `(\w+)` \||(?<=: |; )`(\w+)` \("
    table = PAGE.read_text().partition("<!-- idioms -->")[2].partition("<!-- end of idioms")[0]
    found = re.finditer(pattern, table, re.MULTILINE)
    names = [row or entry for row, entry in map(re.Match.groups, found)]
    idioms = [name for name, one in IDIOMS.items() if one.section in evidence.SECTIONS]
    assert sorted(names) == sorted(idioms), (
        "python scripts/evidence.py idioms --page docs/evidence.md"
    )


def test_stars_are_of_idioms() -> None:
    """A star marks what the documentation of an implementation does not promise."""
    assert all(names <= set(IDIOMS) for names in evidence.RULED_OUT.values())
    cells = {"ddp": Cell("right"), "fsdp1": Cell("wrong", "why"), "fsdp2": Cell("right")}
    page = evidence.markdown({"clip_grad_norm": cells, "tied": cells}, 2, "command")
    assert "right | wrong\\* [1](#notes-on-idioms) | right |" in page
    assert "right | wrong [1](#notes-on-idioms) | right |" in page
    assert "| FSDP1 | 0 | 0 | 2 | 0 | 0 | 2 | 1 |" in page


def test_what_is_right_in_all_columns_is_a_list() -> None:
    right = {name: Cell("right") for name in ("ddp", "flatshard FULL_SHARD")}
    page = evidence.markdown({"lstm": right, "gru": right}, 2, "command")
    assert "\nRight in all columns: `lstm` (`LSTM`); `gru` (`GRU`).\n" in page
    raises = {f"flatshard {name}": Cell("raises", "why") for name in ("NO_SHARD", "SHARD_OP")}
    row = {**right, **raises, "flatshard auto": Cell("right")}
    page = evidence.markdown({"lstm": row}, 2, "command")
    assert "| right; NO_SHARD, SHARD_OP: raises [1](#notes-on-idioms) |" in page


def test_verdicts() -> None:
    value = [torch.ones(3, dtype=torch.float64), {"a": torch.zeros(2)}, 3]
    moved = [torch.ones(3, dtype=torch.float64) + 1e-6, *value[1:]]
    renamed = [value[0], {"b": torch.zeros(2)}, 3]
    assert evidence.judge([value, value], [value, value]) == Cell("right")
    for other in (moved, renamed, value[:2], [value[0].float(), *value[1:]], [*value[:2], 4]):
        assert evidence.judge([value, value], [value, other]).verdict == "wrong"
    assert evidence.judge(Cell("raises", "no"), [value, value]).verdict == "wrong"


def test_outcomes_of_ranks() -> None:
    """What each verdict needs; a rank that raises ends, as its program would."""
    judged = functools.partial(try_ranks, lambda found: Cell("right"), _do, 2, timeout=8)
    with mock.patch.object(outcomes, "PATIENCE", 0.5):
        assert judged(("return", "return")) == Cell("right")
        assert judged(("return", "raise")) == Cell("raises", "ValueError: no")
        assert judged(("die", "raise")) == Cell("crashes", "rank 0 ends with exit code 3")
        hangs = judged(("sleep", "raise"))
        assert hangs == Cell("hangs", "one rank raises ValueError: no; others wait")
        assert judged(("sleep", "sleep")).verdict == "hangs"


def _do(rank: int, world_size: int, actions: tuple[str, ...]) -> None:
    if actions[rank] == "raise":
        raise ValueError("no")
    if actions[rank] == "sleep":
        time.sleep(60)
    if actions[rank] == "die":
        os._exit(3)
