"""The transformer's script: what it computes on the ranks of the harness, and what it refuses."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.harness import allow_warnings, run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_transformer.py"
SMALL = ["--width", "16", "--depth", "2", "--context", "16", "--batch-size", "12"]

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]
pytest.importorskip("tqdm", reason='needs pip install ".[examples]"')


def load_script() -> ModuleType:
    import train_transformer

    return train_transformer


def _run(rank: int, world_size: int, options: list[str]) -> None:
    script = load_script()
    args = script.parse_args([*SMALL, "--world-size", str(world_size), *options])
    with allow_warnings():
        (script.compare if args.compare else script.train)(args, torch.device("cpu"))


def losses(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line.get("loss", line.get("test_loss")) for line in lines[1:]]


def test_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    def options(steps: int, name: str, *more: str) -> list[str]:
        return ["--steps", str(steps), "--log-file", str(tmp_path / name), "--clip", "0.4", *more]

    checkpoint = str(tmp_path / "half.pt")
    run_ranks(_run, 1, options(4, "whole", "--ddp"))
    run_ranks(_run, 2, options(2, "first", "--save", checkpoint, "--accumulate", "2"))
    run_ranks(_run, 3, options(4, "second", "--resume", checkpoint, "--sample", "3"))
    whole = losses(tmp_path / "whole")
    assert len(whole) == 4 + 1
    # The last one is that of testing, on rows that three ranks cannot share out evenly.
    assert load_script().TEST_ROWS % 3
    found = [*losses(tmp_path / "first")[:-1], *losses(tmp_path / "second")]
    assert found == pytest.approx(whole, rel=1e-4)
    first = json.loads((tmp_path / "first").read_text().splitlines()[1])
    assert 0.4 < first["grad_norm"]
    # The strategy, and how it is spread, are no part of what is saved.
    state = torch.load(checkpoint)
    model = load_script().Transformer(**state["sizes"])
    model.load_state_dict(state["model"])


@pytest.mark.uncoalesced  # one unit for all blocks would be kept by any strategy
def test_compares_strategies(tmp_path: Path) -> None:
    sockets = ["--collectives", "sockets", "--json", str(tmp_path / "out.json")]
    run_ranks(_run, 2, ["--compare", "--steps", "2", *sockets])
    ways: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["ways"]
    replicated = ways["DDP"]
    assert set(ways) >= {"NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "FULL_SHARD"}
    for name, way in ways.items():
        assert way["loss"] == pytest.approx(
            replicated["loss"], rel=1e-2 if "bf16" in name else 1e-4
        )
    for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert ways["NO_SHARD"][kind] == pytest.approx(replicated[kind], rel=0.02)
        assert ways["FULL_SHARD"][kind] == pytest.approx(replicated[kind] / 2, rel=0.05)
    assert ways["FULL_SHARD"]["moved_bytes"] > ways["SHARD_GRAD_OP"]["moved_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps -1", "argument --steps: must be at least 0, got -1"),
        ("--lr 0", "argument --lr: must be a number above 0, got 0.0"),
        ("--batch-size 7 --world-size 2", "--batch-size 7 cannot be split over 2 ranks"),
        ("--heads 3", "--width 128 cannot be split into --heads 3"),
        ("--ddp --bf16", "--bf16 is for sharded parameters"),
        ("--plot x.png", "--plot needs --compare"),
        ("--compare --plot x.txt", "--plot: x.txt must end in .pdf, .png or .svg"),
        ("--text missing.txt", "--text: there is no file missing.txt"),
        ("--resume missing.pt", "--resume: there is no file missing.pt"),
        ("--save missing/x.pt", "not a file in an existing directory: missing/x.pt"),
        ("--colour", "unrecognized arguments: --colour"),
    ],
)
def test_refuses_options_in_one_line(
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    with pytest.raises(SystemExit) as stopped:
        load_script().parse_args(options.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_transformer.py: error: ")
    assert message in line


def test_refuses_files_in_one_line(tmp_path: Path) -> None:
    script = load_script()
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(script.training_job.Refused, match="9 bytes are too few for --context 128"):
        script.read_bytes(script.parse_args(["--text", str(short)]))
    with pytest.raises(script.training_job.Refused, match=r"short.txt cannot be read \(\w+\)$"):
        script.build_resumed(script.parse_args(["--resume", str(short)]))


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    script = load_script()
    without = lambda name: None if name == "matplotlib" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SystemExit):
        script.parse_args(["--compare", "--plot", "x.png"])
    assert 'matplotlib is not installed: pip install ".[examples]"' in capsys.readouterr().err
