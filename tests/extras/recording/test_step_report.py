"""Reports of steps from made-up figures: the table, the data and the picture."""

import sys
from pathlib import Path

import pytest

from flatshard.engine.events import Kind
from flatshard.extras.recording.step_report import (
    MemorySample,
    MemoryTimeline,
    Range,
    StepReport,
    sum_up,
)

MIB = 2**20


def _report(rank: int = 0, began: float = 1000.0) -> StepReport:
    """Two units; ``block`` computes in two stretches, and two reductions overlap."""
    ranges = [
        Range(Kind.GATHER_WAIT, 0, 0.000, 0.004),
        Range(Kind.GATHER, 0, 0.000, 0.004),
        Range(Kind.FORWARD, 0, 0.004, 0.010),
        Range(Kind.FORWARD, 1, 0.010, 0.011),
        Range(Kind.FORWARD, 0, 0.011, 0.014),
        Range(Kind.FORWARD_PASS, None, 0.000, 0.014),
        Range(Kind.BACKWARD, 1, 0.014, 0.020),
        Range(Kind.REDUCE_WAIT, 0, 0.022, 0.025),
        Range(Kind.REDUCE, 0, 0.015, 0.025),
        Range(Kind.REDUCE, 1, 0.018, 0.026),
        Range(Kind.RANKS_WAIT, None, 0.026, 0.028),
        Range(Kind.BACKWARD_PASS, None, 0.014, 0.030),
    ]
    moved = {(0, "forward"): 3 * MIB, (0, "backward"): MIB, (1, "reduce"): 2048, (None, "other"): 7}
    samples = (
        MemorySample(0.001, 0, 3 * MIB, 0),
        MemorySample(0.015, 1, 0, 2 * MIB),
        MemorySample(0.020, 0, 0, MIB),
        MemorySample(0.025, 1, 0, 0),
    )
    return sum_up(
        ranges,
        moved,
        MemoryTimeline(("block", ""), 0.040, samples),
        number=4,
        rank=rank,
        began=began,
        peak_allocated_bytes=None,
        peak_resident_bytes=5 * MIB,
    )


def test_the_table() -> None:
    lines = str(_report()).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells[0] == [
        *("unit", "forward", "backward", "starting", "all-gather wait", "reduce wait"),
        *("all-gather fwd", "all-gather bwd", "reduced"),
    ]
    block = "block 9.00 ms 0.00 ms 0.00 ms 4.00 ms 3.00 ms 3.0 MiB 1.0 MiB 0 B"
    root = "(root) 1.00 ms 6.00 ms 0.00 ms 0.00 ms 0.00 ms 0 B 0 B 2.0 KiB"
    total = "total 10.00 ms 6.00 ms 0.00 ms 4.00 ms 3.00 ms 3.0 MiB 1.0 MiB 2.0 KiB"
    assert [" ".join(line) for line in cells[1:4]] == [block, root, total]
    assert lines[4:] == [
        "rank 0, step 4: 40.00 ms (forward 14.00, backward 16.00, other 10.00)",
        "blocked: 9.00 ms (22.5 %), 2.00 of it for no single unit",
        "communication volume: 4.0 MiB",
        "peak memory: 5.0 MiB (unsharded parameters 3.0 MiB, gradients 3.0 MiB)",
        "peak RSS: 5.0 MiB",
    ]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _report().plot_memory(str(tmp_path / "memory.svg"))
    assert (tmp_path / "memory.svg").stat().st_size > 1000


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        _report().plot_memory("memory.png")
