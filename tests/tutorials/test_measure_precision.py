"""The figures of scripts/measure/precision.py, at toy size."""

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import run_ranks

pytest.importorskip("rich")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "precision.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("precision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures() -> None:
    run_ranks(_figures, 2)


def _figures(rank: int, world_size: int) -> None:
    script = _script()
    args = argparse.Namespace(width=16, depth=1, steps=2)
    largest = {(r["name"], r["policy"]): r["largest"] for r in script.measure_losses(args)}
    assert len(largest) == 7
    for (name, policy), apart in largest.items():
        assert apart < (1e-5 if policy == "fp32" else 1e-2), (name, policy)
        assert apart > 0 or name == "plain" or policy == "fp32", (name, policy)
    full, mixed, half = script.measure_bytes(args)
    assert full["gathered"] == 2 * mixed["gathered"] == 2 * half["gathered"] > 0
    assert full["reduced"] == mixed["reduced"] == 2 * half["reduced"] > 0
    del script.POLICIES["bf16, reduced in fp32"]
    for row in script.measure_determinism(args):
        runs = row["digests"].values()
        assert all(first == second for first, second in runs), row
        if row["reduce_mode"] == "fixed_order":
            assert len({digest for pair in runs for digest in pair}) == 1, row


@pytest.mark.parametrize(
    "arguments",
    [
        ["--world-sizes", "1"],
        ["--world-sizes", "x"],
        ["--width", "6"],
        ["--json", "/no/x"],
        ["--x"],
    ],
)
def test_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _script().parse_args(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
