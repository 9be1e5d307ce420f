"""The tables that `scripts/evidence.py` writes, and the names on their pages."""

import re
from pathlib import Path

import evidence
import torch
from lib.rank_processes import Raised, Said
from table_cells import Cell, split_page

IDIOMS = evidence.REGISTRIES["idioms"].titles

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"


def test_page_has_all_idioms() -> None:
    # A row, or an entry in the list of the idioms that are right in all columns.
    pattern = r"^\| `(\w+)` \||(?<=: |; )`(\w+)` \("
    found = re.finditer(pattern, split_page(PAGE, "idioms")[1], re.MULTILINE)
    names = [row or entry for row, entry in map(re.Match.groups, found)]
    assert sorted(names) == sorted(IDIOMS), (
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
    expected = [Said("returned", value)] * 2

    def verdict(*said: Said) -> str:
        return evidence.judge(list(said), expected).verdict

    moved = [torch.ones(3, dtype=torch.float64) + 1e-6, *value[1:]]
    renamed = [value[0], {"b": torch.zeros(2)}, 3]
    error = Said("raised", Raised("ValueError", "no", ""))
    assert verdict(*expected) == "right"
    for other in (moved, renamed, value[:2], [value[0].float(), *value[1:]], [*value[:2], 4]):
        assert verdict(expected[0], Said("returned", other)) == "wrong"
    assert verdict(error, expected[0]) == "raises"
    assert verdict(error, Said("hangs", "")) == "hangs"
    assert verdict(expected[0], Said("hangs", "")) == "hangs"
    assert verdict(expected[0], Said("died", -11)) == "crashes"
