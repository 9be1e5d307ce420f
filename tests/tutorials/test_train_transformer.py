"""The transformer's scripts: what they compute on the ranks of the harness."""

import json
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness import allow_warnings, run_ranks

SMALL = ["--width", "16", "--depth", "2", "--context", "16", "--batch-size", "12"]

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


def _train(_rank: int, _world_size: int, options: list[str], compares: bool = False) -> None:
    import compare_strategies
    import train_transformer

    script = compare_strategies if compares else train_transformer
    with allow_warnings(), mock.patch.object(signal, "signal"):
        main = compare_strategies.compare if compares else train_transformer.train
        main(script.parse_args([*SMALL, *options]), torch.device("cpu"))


def test_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    import train_transformer

    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    files = ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "2", "--clip", "0.4"]
    run_ranks(_train, 1, ["--steps", "4", "--clip", "0.4", "--ddp", "--json", str(whole)])
    run_ranks(_train, 2, [*files, "--steps", "2", "--accumulate", "2"])
    run_ranks(_train, 3, [*files, "--steps", "4", "--resume", "--json", str(parts)])
    expected, found = (json.loads(path.read_text()) for path in (whole, parts))
    assert len(found["losses"]) == 4
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    # Three ranks cannot share the rows of the test evenly.
    assert train_transformer.TEST_ROWS % 3
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-4)


@pytest.mark.uncoalesced  # any strategy would keep one unit of all blocks
def test_compares_strategies(tmp_path: Path) -> None:
    sockets = ["--collectives", "sockets", "--json", str(tmp_path / "out.json")]
    run_ranks(_train, 2, ["--steps", "2", *sockets], True)
    ways: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())["ways"]
    replicated = ways["DDP"]
    assert set(ways) >= {"NO_SHARD", "SHARD_OP", "SHARD_GRAD_OP", "FULL_SHARD"}
    for name, way in ways.items():
        bound = 1e-2 if "bf16" in name else 1e-4
        assert way["loss"] == pytest.approx(replicated["loss"], rel=bound)
    for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert ways["NO_SHARD"][kind] == pytest.approx(replicated[kind], rel=0.02)
        assert ways["FULL_SHARD"][kind] == pytest.approx(replicated[kind] / 2, rel=0.05)
    assert ways["FULL_SHARD"]["moved_bytes"] > ways["SHARD_GRAD_OP"]["moved_bytes"]
