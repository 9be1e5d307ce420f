"""Training on a simulated GPU: its streams, events, memory and NCCL are real to torch."""

import json
import subprocess
import sys
import tempfile

import pytest
from gpu_checks.equality import LIMITS, OFFLOAD, VARIANTS, Limits

from tests import simulated_gpu
from tests.combinations import THOROUGH, diagonal
from tests.harness import ROOT

missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    built = simulated_gpu.build(tmp_path_factory.mktemp("gpu"))
    return {**built, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts")}


def run(environment: dict[str, str], world_size: int, *cases: str) -> list[Limits]:
    """How far training is from the unwrapped model's, case by case."""
    store = f"{tempfile.mkdtemp(dir=environment['SIMULATED_NCCL_FOLDER'])}/store"
    command = [sys.executable, "-m", "tests.simulated_gpu.rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), store, *cases],
            cwd=ROOT,
            env={**environment, "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=280) for rank in ranks]
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


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
CASES = [
    f"{strategy},{'bf16' if number % 3 == 2 else 'fp32'},{variant}"
    for number, (strategy, variant) in enumerate(diagonal(4, STRATEGIES, VARIANTS + OFFLOAD))
]


@pytest.mark.parametrize("lagging", ["SIDE", "MAIN"])
def test_streams_that_lag_behind_change_nothing(environment: dict[str, str], lagging: str) -> None:
    """Those beside the one that computes, with all cases; and that one."""
    slow = {**environment, f"SIMULATED_{lagging}_DELAY": "2000" if lagging == "SIDE" else "300"}
    cases = CASES if lagging == "SIDE" else ["FULL_SHARD,fp32,offload"]
    for case, found in zip(cases, run(slow, 4 if lagging == "SIDE" else 2, *cases), strict=True):
        check(found, case)


@pytest.mark.parametrize("site", ["every", *(["join", "_beside", "work"] if THOROUGH else [])])
def test_a_wait_that_lacks_is_seen(environment: dict[str, str], site: str) -> None:
    """Of any stream; of the one that computes, of the one that copies, and for a collective."""
    lagging = "MAIN" if site == "_beside" else "SIDE"
    slow = {**environment, f"SIMULATED_{lagging}_DELAY": "2000", "SIMULATED_WITHOUT_WAIT": site}
    (found,) = run(slow, 2, "FULL_SHARD,fp32,offload")
    assert not found.distance <= LIMITS["fp32"].distance
