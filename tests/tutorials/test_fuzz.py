"""The fuzzer runs, finds nothing in a few cases, and can tell wrong from right."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASE: dict[str, Any] = {
    "seed": 3,
    "world": 1,
    "tree": [{"kind": "linear", "of": 0, "unit": False}],
    "accumulate": 1,
    "optimizer": "sgd",
    "clip": False,
    "eval": False,
    "input_grad": False,
}


@pytest.mark.slow
def test_a_hundred_cases() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "scripts/fuzz.py", "--cases", "100", "--seed", "20"]
    command += ["--without", "reassigned"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "right" in run.stdout


def test_verdicts() -> None:
    import fuzz
    from rank_processes import Raised, Said

    losses, state = fuzz.expected(CASE)
    assert fuzz.judge(CASE, [Said("returned", (losses, state))]) == ("right", "")
    verdict, why = fuzz.judge(CASE, [Said("returned", ([losses[0] + 1e-6, *losses[1:]], state))])
    assert verdict == "wrong"
    assert "loss 0" in why
    moved = {name: value + 1e-6 for name, value in state.items()}
    assert fuzz.judge(CASE, [Said("returned", (losses, moved))])[0] == "wrong"
    assert fuzz.judge(CASE, [Said("hangs", "")])[0] == "hangs"
    raised = Said("raised", Raised("ValueError", "no", ""))
    assert fuzz.judge(CASE, [raised])[0] == "raises"
    two = {**CASE, "world": 2}
    assert fuzz.judge(two, [raised, Said("returned", (losses, state))])[0] == "wrong"
