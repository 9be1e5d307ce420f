"""scripts/measure/many_ranks.py and scripts/measure/world_size.py, at toy size."""

import argparse
from pathlib import Path
from typing import Any

import many_ranks
import pytest

from tests.harness import allow_warnings, run_ranks

pytest.importorskip("rich")

ROWS = 6


def test_a_few_ranks_resume(tmp_path: Path) -> None:
    expected = many_ranks.expected_losses(ROWS)
    saved = many_ranks.SAVED
    for size, resumes in ((3, False), (2, True)):
        found = run_ranks(_losses, size, str(tmp_path / "checkpoint"), resumes)
        for losses in found:
            assert losses == pytest.approx(expected[saved * resumes :], rel=many_ranks.TOLERANCE)


def _losses(rank: int, world_size: int, folder: str, resumes: bool) -> list[float]:
    with allow_warnings():
        return many_ranks.run_rank("FULL_SHARD", folder, ROWS, resumes)["losses"]


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
