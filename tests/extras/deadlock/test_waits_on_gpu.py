"""Ranks that wait for one another on a GPU, which is simulated: all of them raise, soon."""

import json
from collections.abc import Iterator, Sequence

import pytest
from gpu_checks.divergence import CASES, SOON

from tests import simulated_gpu
from tests.simulated_gpu.server import Ended, Gpu

missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)

BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    simulated = Gpu(tmp_path_factory.mktemp("gpu"))
    yield simulated
    simulated.close()


def problems(gpu: Gpu, world_size: int, programs: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with the ends of the ranks, for each backend and case of ``programs``."""
    wrong = []
    run = gpu.run_programs(world_size, *(("diverge", *program) for program in programs))
    for (backend, case), ranks in zip(programs, run, strict=True):
        for rank, ended in enumerate(ranks):
            goes_on = case == "out of data" and rank == 0
            result = json.loads(ended.text) if ended.text else {"error": "", "seconds": 60}
            is_right = ended.status == (0 if goes_on else 1) and result["seconds"] < SOON
            if not is_right or bool(result["error"]) is goes_on:
                wrong.append(f"{case}, {backend}, rank {rank}: {ended}")
    return wrong


@pytest.mark.timeout(200)
def test_ranks_that_diverge_raise(gpu: Gpu) -> None:
    """With status 1, not by a signal; with gloo beside NCCL, and without."""
    on_nccl = [("nccl", case) for case in CASES if "clipping" in case or "norm" in case]
    assert not problems(gpu, 2, [(BOTH, case) for case in CASES] + on_nccl)


@pytest.mark.timeout(200)
def test_all_of_four_ranks_raise(gpu: Gpu) -> None:
    cases = [case for case in CASES if "clipping" in case or "unit" in case]
    assert not problems(gpu, 4, [(BOTH, case) for case in cases])


@pytest.fixture(scope="module")
def others(gpu: Gpu) -> dict[str, list[Ended]]:
    """The ends of programs that run at the same time, because they mostly wait."""
    programs = {
        "own, with gloo": ("wait_in_own", BOTH),
        "own": ("wait_in_own", "nccl"),
        "unseen": ("diverge_unseen", BOTH, "clipping on one rank"),
        "slow": ("are_slow", BOTH, "4", "0", "5"),
    }
    # Longer than any wait that ends, so that only waits for ever reach it.
    ends = gpu.run_programs(2, *programs.values(), SIMULATED_PATIENCE="15")
    return dict(zip(programs, ends, strict=True))


@pytest.mark.timeout(200)
def test_waits_of_the_program_are_named(others: dict[str, list[Ended]]) -> None:
    """Ranks that read values, one after a collective of its own, one after the model's forward."""
    for ended in others["own, with gloo"]:
        assert ended.status == 1, ended
        error = json.loads(ended.text)["error"]
        assert error.startswith("CollectiveError: collective "), error
        assert "rank 0 in [collective 1 of NCCL's process group 0 (default_pg), at " in error
        assert "; rank 1 in [collective " in error
        assert "[FS-DEADLOCK]" in error


@pytest.mark.timeout(200)
def test_a_collective_of_the_program_that_meets_one_of_the_model(
    others: dict[str, list[Ended]],
) -> None:
    """On NCCL alone the model all-gathers on the program's group, in one order with its own."""
    for ended in others["own"]:
        assert ended.status == 1, ended
        error = json.loads(ended.text)["error"]
        assert "So a collective of the program met a collective of the model." in error, error


@pytest.mark.timeout(200)
def test_without_a_look_at_the_gpu_a_rank_waits(others: dict[str, list[Ended]]) -> None:
    """Shows that the divergence makes a rank wait for the GPU, so that the tests above can fail."""
    assert not others["unseen"][0].text


@pytest.mark.timeout(200)
def test_slow_ranks_raise_no_alarm(others: dict[str, list[Ended]]) -> None:
    assert [ended.status for ended in others["slow"]] == [0, 0], others["slow"]
