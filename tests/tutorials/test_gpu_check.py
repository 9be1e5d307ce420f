"""The check of GPUs, scripts/gpu_check.py, as far as it goes on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from gpu_checks import equality

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


def test_real_ranks_equal_the_plain_model(tmp_path: Path) -> None:
    place = ["--device", "cpu", "--backend", "gloo", "--ranks", "2"]
    worker = ["--worker", "gloo", "--quick", "--limit", "90", *place]
    status, out, err = run_script(SCRIPT, *worker, "--out", "outcome.json", cwd=tmp_path)
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
