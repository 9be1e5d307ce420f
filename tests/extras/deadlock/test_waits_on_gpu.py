"""Ranks that wait for one another on a GPU, which is simulated: all of them raise, soon."""

import json
from collections.abc import Iterator

import pytest
from gpu_checks.divergence import CASES, SOON

from tests import simulated_gpu
from tests.simulated_gpu.server import Gpu

missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)

BARRIER = CASES[-1]  # torch's NCCL barrier launches a kernel that nothing here computes
BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    simulated = Gpu(tmp_path_factory.mktemp("gpu"))
    yield simulated
    simulated.close()


def problems(gpu: Gpu, world_size: int, backend: str) -> list[str]:
    """What is wrong with the ends of the ranks, case by case."""
    cases = [case for case in CASES if case != BARRIER or backend == BOTH]
    wrong = []
    programs = [("diverge", backend, case) for case in cases]
    for case, ranks in zip(cases, gpu.run_programs(world_size, *programs), strict=True):
        for rank, ended in enumerate(ranks):
            goes_on = case == "out of data" and rank == 0
            result = json.loads(ended.text) if ended.text else {"error": "", "seconds": 60}
            is_right = ended.status == (0 if goes_on else 1) and result["seconds"] < SOON
            if not is_right or bool(result["error"]) is goes_on:
                wrong.append(f"{case}, rank {rank}: {ended}")
    return wrong


@pytest.mark.parametrize("backend", ["nccl", BOTH])
@pytest.mark.timeout(200)
def test_ranks_that_diverge_raise(gpu: Gpu, backend: str) -> None:
    """With status 1, not by a signal; with gloo beside NCCL, and without."""
    assert not problems(gpu, 2, backend)


@pytest.mark.timeout(200)
def test_all_of_four_ranks_raise(gpu: Gpu) -> None:
    assert not problems(gpu, 4, BOTH)


@pytest.mark.timeout(200)
def test_waits_of_the_program_are_named(gpu: Gpu) -> None:
    """Ranks that read values, one after a collective of its own, one after the model's forward."""
    (ranks,) = gpu.run_programs(2, ("wait_in_own", BOTH))
    assert [rank.status for rank in ranks] == [1, 1], ranks
    errors = [json.loads(rank.text)["error"] for rank in ranks]
    for error in errors:
        assert error.startswith("CollectiveError: collective "), error
        assert "rank 0 in [collective 1 of NCCL's process group 0 (default_pg), at " in error
        assert "; rank 1 in [collective " in error
        assert "[FS-DEADLOCK]" in error


@pytest.mark.timeout(200)
def test_a_collective_of_the_program_that_meets_one_of_the_model(gpu: Gpu) -> None:
    """On NCCL alone the model all-gathers on the program's group, in one order with its own."""
    (ranks,) = gpu.run_programs(2, ("wait_in_own", "nccl"))
    assert [rank.status for rank in ranks] == [1, 1], ranks
    for rank in ranks:
        error = json.loads(rank.text)["error"]
        assert "So a collective of the program met a collective of the model." in error, error


@pytest.mark.timeout(200)
def test_without_a_look_at_the_gpu_a_rank_waits(gpu: Gpu) -> None:
    """Shows that the divergence makes a rank wait for the GPU, so that the tests above can fail."""
    program = "diverge_unseen", BOTH, "clipping on one rank"
    (ranks,) = gpu.run_programs(2, program, SIMULATED_PATIENCE="12")
    assert not ranks[0].text


@pytest.mark.timeout(200)
def test_slow_ranks_raise_no_alarm(gpu: Gpu) -> None:
    programs = [("are_slow", backend, "5", "0", "4", "0", "6") for backend in ("nccl", BOTH)]
    ends = gpu.run_programs(2, *programs)
    assert [[rank.status for rank in ranks] for ranks in ends] == [[0, 0], [0, 0]], ends
