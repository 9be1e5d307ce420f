"""Jobs that are killed resume from their last checkpoint, with the losses of a whole run."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flatshard import checkpoint
from tests.forked_python import PYTHON
from tests.harness import ROOT

SMALL = "--width 16 --depth 2 --context 16 --batch-size 12 --checkpoint-every 1 --resume".split()
KILLS = int(os.environ.get("KILLS", "1"))
"""By hand: KILLS=50."""

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(60 + 20 * KILLS)]
if not sys.platform.startswith("linux"):
    pytest.skip("finds the ranks in /proc", allow_module_level=True)


def start(world_size: int, steps: int, folder: Path, max_restarts: int = 0) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    files = ["--checkpoint-dir", str(folder), "--json", str(folder / "results.json")]
    script = [str(ROOT / "scripts" / "train_transformer.py"), *SMALL, *files]
    command = [PYTHON, *torchrun, f"--max-restarts={max_restarts}", *script, f"--steps={steps}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **to)


def losses(world_size: int, steps: int, folder: Path) -> list[float]:
    job = start(world_size, steps, folder)
    out, _ = job.communicate(timeout=100)
    assert job.returncode == 0, out
    return json.loads((folder / "results.json").read_text())["losses"]


def last_step(folder: Path) -> int:
    path = checkpoint.latest(folder)
    return int(path.name.removeprefix("step-")) if path else 0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(folder: Path) -> list[int]:
    """Returns the process ids of the ranks that train in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            command = path.read_text()
            if str(folder) in command and "torch.distributed.run" not in command:
                found.append(int(path.parent.name))
    return found


def test_killed_and_preempted(tmp_path: Path) -> None:
    """Killed in a step, a save or a load, then stopped by SIGTERM; three ranks resume."""
    moments = random.Random(os.getpid())
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    job = start(2, 1_000_000, killed, max_restarts=KILLS)
    try:
        for _ in range(KILLS):
            before = last_step(killed)
            wait_until(lambda: len(ranks_of(killed)) == 2)
            time.sleep(moments.uniform(0, 3))
            os.kill(moments.choice(ranks_of(killed)), signal.SIGKILL)
            time.sleep(0.5)  # torchrun ends the other rank
            assert last_step(killed) >= before
        killed_after = last_step(killed)
        wait_until(lambda: last_step(killed) >= killed_after + 3)  # new ranks train
        job.terminate()
        out, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    step = last_step(killed)
    assert f"SIGTERM: saved step-{step:08d}" in out
    expected = losses(2, step + 2, whole)
    found = losses(3, step + 2, killed)
    assert found[:step] == expected[:step]
    assert found == pytest.approx(expected, rel=1e-4)
    left = sorted(path.name for path in killed.iterdir() if path.is_dir())  # no incomplete one
    assert left == [f"step-{number:08d}" for number in range(step, step + 3)]
