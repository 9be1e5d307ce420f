"""The check of GPUs, scripts/gpu_check.py, as far as it goes on a CPU."""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gpu_checks import equality, overlap, simulated, streams
from gpu_checks.places import FAIL, Place

from flatshard.comm.work import AsyncWork
from tests.harness import run_ranks
from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"

pytestmark = [pytest.mark.tutorial, pytest.mark.timeout(120)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # it imports its neighbour
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_real_ranks_equal_the_plain_model(tmp_path: Path) -> None:
    place = ["--device", "cpu", "--backend", "gloo", "--ranks", "2"]
    worker = ["--worker", "gloo", "--quick", "--limit", "90", *place]
    status, out, err = run_script(SCRIPT, *worker, "--out", "outcome.json", cwd=tmp_path)
    assert status == 0, out + err
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["result"] == "pass", outcome["text"]
    assert outcome["text"].startswith("2 ranks, gloo on cpu: 12 cases")
    assert len(outcome["figures"]) == 12
    assert "FULL_SHARD fp32 plain: {'loss'" in out, "how far it got, for the log"


@pytest.mark.parametrize(
    ("part", "case"),
    [("streams", "FULL_SHARD, slow collectives"), ("single", "NO_SHARD, fixed_order")],
)
def test_other_collectives_change_nothing(tmp_path: Path, part: str, case: str) -> None:
    worker = ["--worker", part, "--limit", "90"]
    place = ["--device", "cpu", "--backend", "fake", "--ranks", "1"]
    status, out, err = run_script(SCRIPT, *worker, *place, "--out", "outcome.json", cwd=tmp_path)
    assert status == 0, out + err
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert (outcome["result"], outcome["figures"][case]) == ("skip", 0), outcome["text"]


class _Never:
    """In the place of the thread for slow collectives: they run when they are waited for."""

    def submit(self, late: Callable[..., None], work: Callable[[], object]) -> SimpleNamespace:
        return SimpleNamespace(result=functools.cache(work), done=lambda: True)


def test_slow_collectives_show_a_wait_that_lacks() -> None:
    run_ranks(_without_wait, 1, init_group=False)


def _without_wait(rank: int, world_size: int) -> None:
    device = streams.simulate_two_nodes(Place("cpu", "fake", 1))
    train = functools.partial(streams.train_simulated, device, "FULL_SHARD", None)
    slow = simulated.SimulatedCollectives(device, slow=True)
    reference = functools.partial(train, simulated.SimulatedCollectives(device))

    assert streams.distance(reference, functools.partial(train, slow)) == 0
    with mock.patch.object(slow, "thread", _Never()):

        def without_waits() -> list[torch.Tensor]:
            with mock.patch.object(AsyncWork, "_have"):
                return train(slow)

        apart = streams.distance(reference, without_waits)
        assert not isinstance(apart, str)
        assert not apart < 1e-3
    dist.destroy_process_group()


def test_a_part_that_breaks_is_named_and_others_go_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", "nccl,sync"])
    nowhere = script.Place("nowhere", "gloo", 1)
    monkeypatch.setattr(
        script, "place_of_part", lambda name, args: nowhere if name == "nccl" else None
    )
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 1
    out = capsys.readouterr().out
    assert "nccl      FAIL    ProcessRaisedException: RuntimeError: Expected one of cpu" in out
    assert "sync      skip    there is no GPU" in out


def test_a_case_that_breaks_is_named_and_others_go_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = script.parse_args([])
    args.limit = 90.0
    fine = {"loss": 0.0, "norm": 0.0, "distance": 0.0}
    found = [["one", "fp32", "ValueError: that"], ["two", "fp32", fine], ["three", "bf16", fine]]
    monkeypatch.setattr(equality, "in_ranks", lambda *_: [found])
    outcome = equality.part_ranks(Place("cpu", "gloo", 2), args)
    assert outcome.result == FAIL
    assert "1 cases or figures" in outcome.text
    assert outcome.text.endswith("one: ValueError: that")


def test_overlap_counts_time_that_both_share_once() -> None:
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "dur": 10},
            {"cat": "kernel", "name": "ncclDevKernel_ReduceScatter", "ts": 5, "dur": 10},
            {"cat": "kernel", "name": "gemm", "ts": 8, "dur": 4},
            {"cat": "kernel", "name": "gelu", "ts": 10, "dur": 2},
            {"cat": "kernel", "name": "adamw", "ts": 20, "dur": 5},
            {"cat": "gpu_user_annotation", "name": "nccl:all_gather", "ts": 0, "dur": 30},
        ]
    }
    collectives, others = overlap.kernels(trace)
    assert overlap.length(overlap.union(collectives)) == 15
    assert overlap.overlap(collectives, others) == 4


def test_a_deviation_of_any_kind_is_found() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    expected = equality.Trained([one[0]], [one[0]], {"weight": one})
    start = {"weight": torch.zeros(2)}
    same = equality.compare(expected, expected, start)
    assert same == equality.Limits(0, 0, 0)
    other = equality.compare(equality.Trained([two[0]], [two[0]], {"weight": two}), expected, start)
    assert other == equality.Limits(1, 1, 1)
