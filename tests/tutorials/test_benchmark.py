"""The benchmark, scripts/benchmark.py, started as its reader would start it."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmark.py"
TINY = ["--preset", "tiny", "--world-size", "2", "--rounds", "1", "--steps", "1"]

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_another_loss_is_an_error(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"seconds": 1.0, "forward": 0.3, "backward": 0.5, "optimizer": 0.2, "loss": 4.0}
    ranks = [{**figures, "peak_bytes": 2**20}, {**figures, "peak_bytes": None}]
    monkeypatch.setattr(script, "run", lambda args: {name: [ranks] for name in args.impl})
    monkeypatch.setattr(script, "plain_loss", lambda args: 4.01)
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--preset", "tiny", "--impl", "compute,ddp"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == "error: ddp's loss is 4.000000, the unwrapped model's 4.010000"
    assert "30/50/20" in capsys.readouterr().out
