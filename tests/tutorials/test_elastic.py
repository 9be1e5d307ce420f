"""Jobs that are killed go on from their last checkpoint, as if they had not been."""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from flatshard import checkpoint
from tests.combinations import THOROUGH
from tests.scripts import Started

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SMALL = ["--width", "16", "--depth", "2", "--context", "16", "--batch-size", "12"]
KILLS = int(os.environ.get("KILLS", "1"))
"""By hand: KILLS=50."""

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(60 + 20 * KILLS)]
pytest.importorskip("tqdm", reason='needs pip install ".[examples]"')
if not sys.platform.startswith("linux"):
    pytest.skip("finds the ranks in /proc", allow_module_level=True)


def curve(path: Path) -> dict[int, float]:
    """The losses by step; what was trained twice was the same."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # cut off by a kill
            record = json.loads(line)
            if "step" in record:
                step = record["step"]
                assert found.setdefault(step, record["loss"]) == record["loss"], step
    return found


def started(folder: Path, world_size: int, steps: int) -> Started:
    files = ["--log-file", "log", "--checkpoint-dir", ".", "--checkpoint-every", "1", "--resume"]
    job = ["--world-size", str(world_size), "--steps", str(steps)]
    return Started(SCRIPTS / "train_transformer.py", *SMALL, *job, *files, cwd=folder)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """In a step, in a save, in a load; the curve is that of a job that nobody killed."""
    moments = random.Random(os.getpid())
    steps = 10 + 8 * KILLS
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert started(whole, 2, steps).finish(timeout=200).status == 0
    for _ in range(KILLS):
        before = checkpoint.latest(killed)
        job = started(killed, 2, steps)
        try:
            time.sleep(moments.uniform(0.3, 4))
            with contextlib.suppress(AssertionError, IndexError, OSError):  # it has ended
                os.kill(moments.choice(job.ranks()), signal.SIGKILL)
        finally:
            job.finish(timeout=60)
        after = checkpoint.latest(killed)
        assert before is None or (after is not None and after.name >= before.name)
    ended = started(killed, 2, steps).finish(timeout=200)
    assert ended.status == 0, ended.err
    assert curve(killed / "log") == curve(whole / "log")
    assert len(curve(killed / "log")) == steps
    # On another number of ranks it goes on as well; and what kills have left is gone.
    ended = started(killed, 3, steps + 2).finish(timeout=200)
    assert ended.status == 0, ended.err
    assert max(curve(killed / "log")) == steps + 2
    left = sorted(path.name for path in killed.iterdir() if path.is_dir())
    assert left == [f"step-{step:08d}" for step in range(steps, steps + 3)]


def test_a_restart_finds_no_addresses_of_ranks_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's store has them still."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    training_job = importlib.import_module("lib.training_job")
    limit = timedelta(seconds=30)
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    ones = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"], "1")
    zeros = dict.fromkeys(["RANK", "LOCAL_RANK"], "0")
    served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port)}
    for name, value in {**ones, **zeros, **served, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    num_keys = []
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        training_job.connect("env://")
        dist.destroy_process_group()
        num_keys.append(kept.num_keys())
    assert num_keys[1] > num_keys[0]  # the second start has its own


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(folder: Path, *options: str) -> subprocess.Popen:
    files = ["--log-file", "log", "--checkpoint-dir", ".", "--checkpoint-every", "3", "--resume"]
    script = [SCRIPTS / "train_mnist.py", "--data", "digits", *files]
    path = os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*TORCHRUN, "--max-restarts", "1", *script, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(path: Path, step: int) -> None:
    deadline = time.monotonic() + 100
    while max(curve(path), default=0) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not THOROUGH, reason="starts torchrun three times; THOROUGH=1 does")
def test_torchrun_restarts_and_preempts(tmp_path: Path) -> None:
    """A rank is killed, later the job is asked to end, and is then run to its end."""
    pytest.importorskip("sklearn", reason='needs pip install ".[examples]"')
    job = torchrun(tmp_path, "--max-steps", "1000", "--epochs", "100")
    try:
        until(tmp_path / "log", 4)
        os.kill(children(job.pid)[1], signal.SIGKILL)
        until(tmp_path / "log", 8)
        job.terminate()
        out, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert "Resumed after" in out
    assert "SIGTERM: saved step-" in out
    last = checkpoint.latest(tmp_path)
    assert last is not None
    step = int(last.name.removeprefix("step-"))
    assert step == max(curve(tmp_path / "log"))
    ended = torchrun(tmp_path, "--max-steps", str(step + 2))
    out, _ = ended.communicate(timeout=100)
    assert ended.returncode == 0, out
    assert max(curve(tmp_path / "log")) == step + 2
