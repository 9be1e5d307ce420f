"""scripts/gpu_check.py, as far as it goes on a CPU, and scripts/benchmark.py."""

import json
from pathlib import Path

import pytest
import torch
from gpu_checks import equality

from tests.harness import ROOT
from tests.scripts import run_script

SCRIPTS = ROOT / "scripts"
TINY = ["--preset", "tiny", "--world-size", "2", "--rounds", "1", "--steps", "1"]

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


def test_real_ranks_equal_the_plain_model(tmp_path: Path) -> None:
    place = ["--device", "cpu", "--backend", "gloo", "--ranks", "2"]
    worker = ["--worker", "gloo", "--quick", "--limit", "90", "--out", "outcome.json", *place]
    status, out, err = run_script(SCRIPTS / "gpu_check.py", *worker, cwd=tmp_path)
    assert status == 0, out + err
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["result"] == "pass", outcome["text"]
    assert outcome["text"].startswith("2 ranks, gloo on cpu: 12 cases")
    assert len(outcome["figures"]) == 12
    assert "FULL_SHARD fp32 plain: {'loss'" in out, "how far it got, for the log"


def test_a_deviation_of_any_kind_is_found() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    expected = equality.Trained([one[0]], [one[0]], {"weight": one})
    start = {"weight": torch.zeros(2)}
    same = equality.compare(expected, expected, start)
    assert same == equality.Limits(0, 0, 0)
    other = equality.compare(equality.Trained([two[0]], [two[0]], {"weight": two}), expected, start)
    assert other == equality.Limits(1, 1, 1)


def test_measures_implementations_beside_one_another(tmp_path: Path) -> None:
    names = ["flatshard", "fsdp1", "compute"]
    arguments = [*TINY, "--impl", ",".join(names), "--json", "out.json"]
    status, out, err = run_script(SCRIPTS / "benchmark.py", *arguments, cwd=tmp_path)
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
