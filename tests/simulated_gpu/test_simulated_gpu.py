"""Training on a simulated GPU: its streams, events, memory and NCCL are real to torch."""

import json
import subprocess
import sys
import tempfile

import pytest
from gpu_checks.equality import LIMITS, Limits

from tests import simulated_gpu
from tests.harness import ROOT

WORLD_SIZE = 2
missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    built = simulated_gpu.build(tmp_path_factory.mktemp("gpu"))
    return {**built, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts")}


def run(environment: dict[str, str], *cases: str) -> list[Limits]:
    """How far training is from the unwrapped model's, case by case."""
    store = f"{tempfile.mkdtemp(dir=environment['SIMULATED_NCCL_FOLDER'])}/store"
    command = [sys.executable, "-m", "tests.simulated_gpu.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD_SIZE), store, *cases],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in said)
    found = [[Limits(**json.loads(line)) for line in out.splitlines()] for out, _ in said]
    assert all(len(one) == len(cases) for one in found)
    return found[0]


def check(found: Limits, case: str) -> None:
    limits = LIMITS[case.split(",")[1]]
    assert found.loss <= limits.loss, case
    assert found.norm <= limits.norm, case
    assert found.distance <= limits.distance, case


def test_streams_that_lag_behind_change_nothing(environment: dict[str, str]) -> None:
    cases = [
        "FULL_SHARD,fp32,checkpoint",
        "FULL_SHARD,bf16,unused",
        "FULL_SHARD,fp32,offload",
        "SHARD_GRAD_OP,fp32,no_sync",
    ]
    slow = {**environment, "SIMULATED_SIDE_DELAY": "2000"}
    for case, found in zip(cases, run(slow, *cases), strict=True):
        check(found, case)


def test_a_wait_that_lacks_is_seen(environment: dict[str, str]) -> None:
    slow = {**environment, "SIMULATED_SIDE_DELAY": "2000", "SIMULATED_WITHOUT_WAITS": "1"}
    (found,) = run(slow, "FULL_SHARD,fp32,offload")
    assert not found.distance <= LIMITS["fp32"].distance
