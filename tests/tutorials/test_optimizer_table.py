"""The table of optimizers: a sample of it is right, and its page has all of them."""

from pathlib import Path

import optimizers
import pytest
from optimizers import OPTIMIZERS, PACKAGES
from table_cells import split_page

from tests.combinations import THOROUGH

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"
SAMPLE = {
    ("torch", "Muon"): "owners",
    ("torch", "LBFGS"): "every rank",
    ("torch", "RAdam"): "shards",
    ("transformers", "Adafactor"): "owners",
    ("pytorch-optimizer", "SOAP"): "owners",
    ("pytorch-optimizer", "Lamb"): "sharded tensors",
    ("schedulefree", "AdamWScheduleFree"): "sharded tensors",
}


def test_a_sample() -> None:
    # transformers, which takes each rank seconds to import, has tests of its own with Adafactor.
    names = [n for n in SAMPLE if n in OPTIMIZERS and (THOROUGH or n[0] != "transformers")]
    cells = optimizers.table(names, ["flatshard"], 2, seconds=60)
    found = {name: row["flatshard"] for name, row in cells.items()}
    assert all(verdict.startswith("right") for verdict, _ in found.values()), found
    assert {name: how for name, (_, how) in found.items()} == {n: SAMPLE[n] for n in names}


def test_the_page_has_all() -> None:
    rows = {("torch", "Muon"), *((p, n) for p, (_, kinds) in PACKAGES.items() for n in kinds)}
    text = split_page(PAGE, "optimizers")[1]
    assert [
        f"`{name}`"
        for p, name in rows
        if f"| `{name}` | {p} |" not in text and f"`{name}` ({p})" not in text
    ] == []
    assert "| wrong" not in "".join(
        line.split("|")[4] for line in text.splitlines() if "| `" in line
    )
