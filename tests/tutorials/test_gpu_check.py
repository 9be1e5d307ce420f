"""The check of GPUs, scripts/gpu_check.py, as far as it goes on a CPU."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gpu_checks import equality, overlap

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # it imports its neighbour
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


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


def test_a_part_that_breaks_is_named_and_others_go_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", "nccl,sync"])
    nowhere = script.Place("nowhere", "gloo", 1)
    monkeypatch.setattr(
        script, "place_of_part", lambda name, args: nowhere if name == "nccl" else None
    )
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 1
    out = capsys.readouterr().out
    assert "nccl      FAIL    ProcessRaisedException: RuntimeError: Expected one of cpu" in out
    assert "sync      skip    there is no GPU" in out


def test_overlap_counts_time_that_both_share_once() -> None:
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "dur": 10},
            {"cat": "kernel", "name": "ncclDevKernel_ReduceScatter", "ts": 5, "dur": 10},
            {"cat": "kernel", "name": "gemm", "ts": 8, "dur": 4},
            {"cat": "kernel", "name": "gelu", "ts": 10, "dur": 2},
            {"cat": "kernel", "name": "adamw", "ts": 20, "dur": 5},
            {"cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 30},
        ]
    }
    collectives, others = overlap.kernels(trace)
    assert overlap.length(overlap.union(collectives)) == 15
    assert overlap.overlap(collectives, others) == 4


def test_a_deviation_of_any_kind_is_found() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    expected = equality.Trained([one[0]], [one[0]], {"weight": one})
    start = {"weight": torch.zeros(2)}
    same = equality.compare(expected, expected, start)
    assert same == equality.Limits(0, 0, 0)
    other = equality.compare(equality.Trained([two[0]], [two[0]], {"weight": two}), expected, start)
    assert other == equality.Limits(1, 1, 1)
