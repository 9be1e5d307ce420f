"""Checks on a GPU, which is simulated: right or a named error, although the host does not wait."""

import json
import re

import pytest

from tests import simulated_gpu
from tests.simulated_gpu.server import Ended, Gpu

missing = simulated_gpu.what_is_missing()
pytestmark = [pytest.mark.skipif(bool(missing), reason=missing), pytest.mark.timeout(200)]

STATE_DICTS = ("all_reduce", "all_reduce, held", "broadcast", "data", "nothing, held")
LATE = ("all_reduce, late", "all_reduce, late, held")
# For each kind of edit: the step from which the forward edits a parameter, and the step in which
# the error occurs.
EDITS = {"frozen": (3, 3), "written": (3, 3), "evaluation": (3, 5), "trainable": (3, 8)}
# For each thing that rank 0 does differently: the first rank whose output is NaN, and a part of the
# error. In "buffers", rank 0 keeps its own buffers, because rank 0 sends them.
APART = {
    "order": (0, r"ranks (all-gathered different units|began different collectives)"),
    "buffers": (1, r"of another model|ranks began different collectives"),
}
RIGHT = ("nothing, late, held", "no edit", "same", "inference", "alone")


@pytest.fixture(scope="module")
def ends(gpu: Gpu) -> dict[str, list[Ended]]:
    """Run all programs at the same time. For each program, return how each rank ended."""
    programs = {
        write: ("write_state_dict", "nccl", write) for write in (*STATE_DICTS, *LATE, RIGHT[0])
    }
    programs |= {way: ("edit_in_forward", "nccl", str(EDITS[way][0]), way) for way in EDITS}
    programs |= {what: ("evaluate_apart", "nccl", what) for what in (*APART, *RIGHT[2:])}
    programs["no edit"] = ("edit_in_forward", "nccl", "100", "written")
    return dict(zip(programs, gpu.run_programs(2, *programs.values()), strict=True))


@pytest.mark.parametrize("write", STATE_DICTS)
def test_writes_to_a_state_dict_reach_the_model(ends: dict[str, list[Ended]], write: str) -> None:
    for ended in ends[write]:
        assert ended.status == 0, ended
        expected = 1.0 if "nothing" in write else 2.0
        assert set(json.loads(ended.text)["factors"]) == {expected}


@pytest.mark.parametrize("write", LATE)
def test_writes_that_come_too_late_are_named(ends: dict[str, list[Ended]], write: str) -> None:
    for ended in ends[write]:
        error = json.loads(ended.text)["error"]
        assert "was written, but the parameter had changed" in error


@pytest.mark.parametrize("way", EDITS)
def test_edits_in_forward_are_named(ends: dict[str, list[Ended]], way: str) -> None:
    """Edits begin in the third forward: in the first two, the host waits for all values."""
    for ended in ends[way]:
        result = json.loads(ended.text)
        assert "its forward edited parameters in place" in result["error"]
        assert result["step"] == EDITS[way][1]


@pytest.mark.parametrize("what", APART)
def test_ranks_that_evaluate_differently_get_nan(ends: dict[str, list[Ended]], what: str) -> None:
    """Layers in another order, or the buffers of another model; the next backward raises.

    If the ranks are slow, the evaluation raises.
    """
    first, error = APART[what]
    for rank, ended in enumerate(ends[what]):
        assert ended.text, ended
        result = json.loads(ended.text)
        assert re.search(error, result["error"]), result
        assert rank < first or all(result["spoiled"].values()), result


@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(ends: dict[str, list[Ended]], name: str) -> None:
    """A state dict held in training; an encoder written between steps; replicas on rank 0 only."""
    for ended in ends[name]:
        assert ended.status == 0, ended
        assert not any(json.loads(ended.text).get("spoiled", {}).values())
