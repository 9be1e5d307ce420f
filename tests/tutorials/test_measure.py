"""Measures of scripts/measure.py, at toy size."""

import argparse
from pathlib import Path
from typing import Any

import checkpoints
import measure
import pytest
import torch.distributed as dist
import world_size
from lib import output

from tests.harness import allow_warnings, run_ranks

pytest.importorskip("rich")
if not Path("/proc/self/clear_refs").exists():
    pytest.skip("needs /proc", allow_module_level=True)


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "1", "--width", "16", "--repeat", "1", "--folder", str(tmp_path)]
    args = measure.parse_args(checkpoints, options)
    output.show("title", run_ranks(_checkpoints, 2, args)[0])
    assert "fsdp2" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def _checkpoints(rank: int, _: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    with allow_warnings():
        return checkpoints.measure_rank(args)


def test_a_claimed_world() -> None:
    options = ["--layers", "2", "--width", "16", "--steps", "1"]
    args = measure.parse_args(world_size, options)
    rows = [run_ranks(_world, 1, way, args, init_group=False)[0] for way in world_size.WAYS]
    flatshard, fsdp2 = rows
    assert flatshard["torch, step s"] is not None
    assert fsdp2["torch, step s"] is None


def _world(rank: int, _: int, way: str, args: argparse.Namespace) -> dict[str, Any]:
    with allow_warnings():
        found = world_size.measure_rank(way, 8, args)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", measure.NAMES)
def test_every_measure_has_options(name: str) -> None:
    module = __import__(name)
    assert measure.parse_args(module, []) is not None
    assert callable(module.measure)
