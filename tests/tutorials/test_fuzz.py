"""The fuzzer runs, finds nothing in a few cases, and can tell wrong from right."""

import sys
from typing import Any

import fuzz
import pytest
from lib.rank_processes import Raised, Said

from tests.combinations import THOROUGH

CASE: dict[str, Any] = {
    "seed": 3,
    "world": 1,
    "tree": [{"kind": "linear", "of": 0, "unit": False}],
    "accumulate": 1,
    "optimizer": "sgd",
    "clip": False,
    "eval": False,
    "input_grad": False,
    "uneven": False,
}


@pytest.mark.distributed
@pytest.mark.slow
def test_some_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = "100" if THOROUGH else "8"
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--cases", cases, "--seed", "20"])
    failed = fuzz.main()
    assert not failed, capsys.readouterr().out


def test_verdicts() -> None:
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
