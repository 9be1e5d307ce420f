"""scripts/measure/world_size.py, at toy size."""

import argparse
from typing import Any

import pytest

from tests.harness import allow_warnings, run_ranks

pytest.importorskip("rich")


def test_figures_of_a_claimed_world(capsys: pytest.CaptureFixture[str]) -> None:
    import world_size

    options = ["--layers", "2", "--width", "16", "--steps", "1", "--world-sizes", "8"]
    args = world_size.parse_args(options)
    rows = [run_ranks(_figures, 1, way, args, init_group=False)[0] for way in world_size.WAYS]
    world_size.show(rows)
    assert "fsdp2" in capsys.readouterr().out
    flatshard, fsdp2 = rows
    assert flatshard["torch_step"] is not None
    assert fsdp2["torch_step"] is None
    with pytest.raises(SystemExit) as ended:
        world_size.parse_args(["--world-sizes", "64,1"])
    assert ended.value.code == 2


def _figures(rank: int, _: int, way: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist
    import world_size

    with allow_warnings():
        found = world_size.measure_rank(way, 8, args)
    dist.destroy_process_group()
    return found
