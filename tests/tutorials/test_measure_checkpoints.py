"""The figures of scripts/measure/checkpoints.py, at toy size."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness import run_ranks

pytest.importorskip("rich")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure" / "checkpoints.py"
if not sys.platform.startswith("linux"):
    pytest.skip("needs /proc", allow_module_level=True)


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_checkpoints", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "1", "--width", "16", "--repeat", "1", "--folder", str(tmp_path)]
    args = _script().parse_args(options)
    ranks = run_ranks(_figures, 2, args)
    _script().show(ranks, args)
    assert "fsdp2" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def _figures(rank: int, world_size: int, args: object) -> object:
    script = _script()
    found = script.measure_rank(args)
    assert set(found["figures"]) == {"dd", *script.WAYS}
    assert found["calls"]["flatshard"]["of tensors (recorder)"] == 0
    assert found["bytes"] > 10_000
    return found


@pytest.mark.parametrize(
    "arguments", [["--world-size", "1"], ["--folder", "/no"], ["--impl", "x"], ["--x"]]
)
def test_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _script().parse_args(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
