"""The benchmark, scripts/benchmark.py, started as its reader would start it."""

import json
from pathlib import Path

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmark.py"
TINY = ["--preset", "tiny", "--world-size", "2", "--rounds", "1", "--steps", "1"]

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


def test_measures_implementations_beside_one_another(tmp_path: Path) -> None:
    names = ["flatshard", "fsdp1", "compute"]
    arguments = [*TINY, "--impl", ",".join(names), "--json", "out.json"]
    status, out, err = run_script(SCRIPT, *arguments, cwd=tmp_path)
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in names] == names
    assert "x fsdp1 (min-max)" in out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["baseline"] == "fsdp1"
    assert figures["settings"]["world_size"] == 2
    rows = figures["implementations"]
    assert list(rows) == names
    assert rows["fsdp1"]["ratio"] == 1
    for name, row in rows.items():
        ((first, second),) = row["rounds"]
        assert row["seconds"] == max(first["seconds"], second["seconds"]) > 0
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["fsdp1"]["seconds"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        if name == "compute":
            assert row["loss"] is None
            # Without the others' gradients the losses differ by more than is let pass below.
            alone = (first["loss"] + second["loss"]) / 2
            assert alone != pytest.approx(figures["plain_loss"], rel=1e-3)
        else:
            assert row["loss"] == pytest.approx(figures["plain_loss"], rel=1e-4)
