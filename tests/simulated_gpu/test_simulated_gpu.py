"""Training on a simulated GPU: its streams, events, memory and NCCL are real to torch."""

import json
from collections import Counter

import pytest
from gpu_checks.equality import LIMITS, OFFLOAD, VARIANTS, Limits

from tests import simulated_gpu
from tests.combinations import diagonal, usual_and_every
from tests.simulated_gpu.server import Gpu

missing = simulated_gpu.what_is_missing()
pytestmark = pytest.mark.skipif(bool(missing), reason=missing)


def check(found: Limits, case: str) -> None:
    limits = LIMITS[case.split(",")[1]]
    assert found.loss <= limits.loss, case
    assert found.norm <= limits.norm, case
    assert found.distance <= limits.distance, case


OFFLOADED = "FULL_SHARD,fp32,offload"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "SHARD_OP")
CASES = [
    f"{strategy},{'bf16' if number % 3 == 2 else 'fp32'},{variant}"
    for number, (strategy, variant) in enumerate(diagonal(8, STRATEGIES, VARIANTS + OFFLOAD))
]
CASES += [
    "HYBRID_SHARD,fp32,fixed_order",  # whose reductions have the most stages
    # A rank's reduction begins at the end of its backward, which needs gathers before.
    "FULL_SHARD,fp32,unused",
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


SITES = [
    # The function that does not wait, what lags behind, and the case.
    ("every", "SIDE", OFFLOADED),
    ("AsyncWork.wait", "SIDE", OFFLOADED),  # of compute for a collective
    ("ParamGather.finish", "SIDE", "NO_SHARD,fp32,offload"),  # of compute for a copy
    ("Gradients._finish_copies", "SIDE", OFFLOADED),  # of the host for a copy
    ("on_side_stream", "MAIN", OFFLOADED),  # of a copy for what is computed
    ("on_side_stream", "MAIN", "NO_SHARD,fp32,plain"),  # of a reduction for the gradients
]


@pytest.mark.parametrize(("site", "lagging", "case"), usual_and_every(2, SITES))
def test_a_wait_that_lacks_is_seen(gpu: Gpu, site: str, lagging: str, case: str) -> None:
    late = {f"SIMULATED_{lagging}_DELAY": "6000", "SIMULATED_WITHOUT_WAIT": site}
    (found,) = gpu.run(2, case, **late)
    assert not found.distance <= LIMITS["fp32"].distance


CALLS = {"launches": 3, "collectives": 3, "events recorded": 10, "stream waits": 6}
"""Calls of the driver in forward and backward for each unit, above the unwrapped model's."""


def test_calls_of_the_driver(gpu: Gpu) -> None:
    """What a unit costs the host beside Python. Queries are left out, which depend on time."""
    kinds, numbers = ("plain", "flatshard"), (1, 2)
    programs = [("call_driver", "nccl", kind, str(number)) for kind in kinds for number in numbers]
    ended = gpu.run_programs(2, *programs)
    assert not any(rank.status for ranks in ended for rank in ranks), ended
    calls = [Counter(json.loads(ranks[0].text)["calls"]) for ranks in ended]
    expected = {**CALLS, "host waits": 0, "allocations": 0}
    for name, number in expected.items():
        one, two, ours_one, ours_two = (count[name] for count in calls)
        assert (ours_two - ours_one) - (two - one) == number, name


@pytest.mark.parametrize("lagging", ["MAIN", "SIDE"])
def test_counts_and_changed_weights(gpu: Gpu, lagging: str) -> None:
    """The host reads counts of tokens, and numbers of changed values, from the device."""
    late = {f"SIMULATED_{lagging}_DELAY": "300"}
    (ended,) = gpu.run_programs(2, ("count_tokens", "nccl"), **late)
    for rank in ended:
        assert rank.status == 0, rank
        found = json.loads(rank.text)
        assert found["wrong"] == 0
        assert found["off"] < 1e-6
