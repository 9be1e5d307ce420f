"""The files that `scripts/evidence.py` writes, and the page that counts their rows."""

import functools
import os
import time
from collections import Counter
from unittest import mock

import evidence
import torch

from tests import outcomes
from tests.idioms import IDIOMS
from tests.outcomes import Cell, try_ranks


def test_file_has_all_idioms() -> None:
    rows = evidence.read(evidence.FOLDER / "idioms.csv")
    found = Counter(one["idiom"] for one in rows)
    idioms = [name for name, one in IDIOMS.items() if one.section in evidence.SECTIONS]
    expected = dict.fromkeys(idioms, len(evidence.SIDES))
    assert found == expected, "python scripts/evidence.py idioms --write"


def test_page_counts_the_rows_of_the_files() -> None:
    page = evidence.PAGE.read_text()
    assert page == evidence.updated(page), "python scripts/evidence.py page"


def test_answers_are_those_of_the_files() -> None:
    """The figures that pages repeat in words: of idioms, programs, models and optimizers."""

    def right_of(name: str, **only: str) -> str:
        rows = evidence.read(evidence.FOLDER / f"{name}.csv")
        verdicts = [one["verdict"] for one in rows if only.items() <= one.items()]
        compared = [one for one in verdicts if one != "not compared"]
        right = sum(one.startswith(("right", "the same")) for one in compared)
        return f"{right} of {len(compared)}"

    page = evidence.PAGE.read_text()
    assert f"[{right_of('idioms', implementation='flatshard FULL_SHARD')} idioms]" in page
    assert f"[{right_of('public_programs')}]" in page
    assert f"[{right_of('zoo', implementation='flatshard')}]" in page
    assert f"[{right_of('optimizers', implementation='flatshard')}]" in page
    sides = ("flatshard FULL_SHARD", "ddp", "fsdp1", "fsdp2")
    counts = [right_of("idioms", implementation=one).partition(" ")[0] for one in sides]
    row = "| {} | {} | {} / {} |".format(*counts)
    assert row in (evidence.ROOT / "docs" / "comparison.md").read_text()


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
    judged = functools.partial(try_ranks, lambda found: Cell("right"), _do, 2, timeout=3)
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
