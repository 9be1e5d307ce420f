"""Training on a simulated GPU: its streams, events, memory and NCCL are real to torch."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_checks.equality import LIMITS, OFFLOAD, VARIANTS, Limits

from tests import simulated_gpu
from tests.combinations import diagonal
from tests.harness import ROOT

missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)


class Gpu:
    """Trains on ranks that a process forks which has a simulated GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **simulated_gpu.build(folder),
            "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": "2",
            "PYTHONPATH": str(ROOT / "scripts"),
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated_gpu.rank"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, world_size: int, *cases: str, **environment: str) -> list[Limits]:
        """How far training is from the unwrapped model's, case by case."""
        folder = tempfile.mkdtemp(dir=self._folder)
        request = {"folder": folder, "world_size": world_size, "cases": cases}
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**request, "environment": environment}) + "\n")
        server.stdin.flush()
        answers, _, _ = select.select([server.stdout], [], [], 280)
        assert answers, self._errors(folder)
        statuses = json.loads(server.stdout.readline())
        assert statuses == [0] * world_size, self._errors(folder)
        found = Path(folder, "out-0").read_text().splitlines()
        assert len(found) == len(cases)
        return [Limits(**json.loads(line)) for line in found]

    @staticmethod
    def _errors(folder: str) -> str:
        return "\n".join(path.read_text() for path in sorted(Path(folder).glob("err-*")))

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)  # its ranks, too
        self._server.communicate()


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    simulated = Gpu(tmp_path_factory.mktemp("gpu"))
    yield simulated
    simulated.close()


def check(found: Limits, case: str) -> None:
    limits = LIMITS[case.split(",")[1]]
    assert found.loss <= limits.loss, case
    assert found.norm <= limits.norm, case
    assert found.distance <= limits.distance, case


OFFLOADED = "FULL_SHARD,fp32,offload"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
CASES = [
    f"{strategy},{'bf16' if number % 3 == 2 else 'fp32'},{variant}"
    for number, (strategy, variant) in enumerate(diagonal(8, STRATEGIES, VARIANTS + OFFLOAD))
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_side_streams_that_lag_behind_change_nothing(gpu: Gpu, world_size: int) -> None:
    """Those beside the one that computes; on two nodes what is for nodes."""
    cases = [case for case in CASES if case.startswith("HYBRID") == (world_size == 4)]
    found = gpu.run(world_size, *cases, SIMULATED_SIDE_DELAY="2000")
    for case, one in zip(cases, found, strict=True):
        check(one, case)


def test_a_main_stream_that_lags_behind_changes_nothing(gpu: Gpu) -> None:
    (found,) = gpu.run(2, OFFLOADED, SIMULATED_MAIN_DELAY="300")
    check(found, OFFLOADED)


SITES: dict[str, tuple[str, str]] = {
    # What lags behind, and the case.
    "every": ("SIDE", OFFLOADED),
    "AsyncWork._have": ("SIDE", OFFLOADED),  # of compute for a collective
    "ParamGather.finish": ("SIDE", "NO_SHARD,fp32,offload"),  # of compute for a copy
    "GradPublish._finish_copies": ("SIDE", OFFLOADED),  # of the host for a copy
    "beside": ("MAIN", OFFLOADED),  # of a copy for what is computed
    "_side_stream": ("MAIN", "NO_SHARD,fp32,plain"),  # of a reduction for the gradients
}


@pytest.mark.parametrize("site", SITES)
def test_a_wait_that_lacks_is_seen(gpu: Gpu, site: str) -> None:
    lagging, case = SITES[site]
    late = {f"SIMULATED_{lagging}_DELAY": "2000", "SIMULATED_WITHOUT_WAIT": site}
    (found,) = gpu.run(2, case, **late)
    assert not found.distance <= LIMITS["fp32"].distance
