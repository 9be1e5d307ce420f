"""Ranks that wait for one another on a GPU, which is simulated: all of them raise, soon."""

import _thread
import json
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from gpu_checks.divergence import CASES

from flatshard.comm.work import CollectiveError, WaitCondition, named
from flatshard.extras.deadlock import detector, gpu as gpu_waits
from tests import simulated_gpu
from tests.simulated_gpu.divergences import BARRIERS, SIX, Setting, problems
from tests.simulated_gpu.server import Ended, Gpu

missing = simulated_gpu.what_is_missing()
pytestmark = [pytest.mark.skipif(bool(missing), reason=missing), pytest.mark.timeout(200)]

BOTH = "cpu:gloo,cuda:nccl"
Ends = dict[str, list[Ended]]


def wrong_in(gpu: Gpu, settings: Sequence[Setting]) -> list[str]:
    """What is wrong with the ends of the ranks of each setting, all with the same number of ranks.

    The ranks must raise in seconds, with the same text, and end with status 1, not by a signal.
    """
    run = gpu.run_programs(settings[0].world, *(setting.program() for setting in settings))
    pairs = zip(settings, run, strict=True)
    return [f"{one}: {text}" for one, ranks in pairs for text in problems(one, ranks)[0]]


ALONE, IN_BARRIER = BARRIERS


def test_ranks_that_diverge_raise(gpu: Gpu) -> None:
    """With gloo beside NCCL, and without; all in the model, or the last rank in a barrier."""
    own = [Setting(case, ALONE, 2, BOTH) for case in CASES if case not in SIX]
    both = [Setting(case, (ALONE, IN_BARRIER)[n % 2], 2, BOTH) for n, case in enumerate(SIX)]
    nccl = [Setting(SIX[n], (ALONE, IN_BARRIER)[n % 2], 2, "nccl") for n in (1, 2, 5)]
    assert not wrong_in(gpu, own + both + nccl)


def test_all_of_four_ranks_raise(gpu: Gpu) -> None:
    both = [Setting(SIX[0], IN_BARRIER, 4, BOTH), Setting(SIX[3], ALONE, 4, BOTH)]
    assert not wrong_in(gpu, [*both, Setting(SIX[3], ALONE, 4, "nccl")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def others(gpu: Gpu, folder: Path) -> Ends:
    """The ends of programs that run at the same time, because they mostly wait."""
    programs = {
        "own, with gloo": ("wait_in_own", BOTH),
        "own": ("wait_in_own", "nccl"),
        "functional": ("wait_in_own", BOTH, "functional"),
        "destroyed": ("wait_in_own", BOTH, "destroyed"),
        "unseen": ("diverge_unseen", BOTH, "clipping on one rank"),
        "timeout": ("diverge_unseen", "nccl", "clipping on one rank", "4"),
        "save": ("save_slowly", "nccl", str(folder / "saved"), "5"),
        "train": ("pause", BOTH, "2", "40", "5"),
        "evaluate": ("pause", BOTH, "3", "40", "5"),  # also before a reduction of the program
    }
    # Longer than any wait that ends, so that only waits for ever reach it.
    trace = {"TORCH_FR_DUMP_TEMP_FILE": str(folder / "trace_")}
    ends = gpu.run_programs(2, *programs.values(), SIMULATED_PATIENCE="15", **trace)
    return dict(zip(programs, ends, strict=True))


@pytest.mark.parametrize("name", ["own, with gloo", "functional", "destroyed"])
def test_waits_of_the_program_are_named(others: Ends, name: str) -> None:
    """Ranks that read values, one after a collective of its own, one after the model's forward."""
    for ended in others[name]:
        assert ended.status == 1, ended
        error = json.loads(ended.text)["error"]
        assert error.startswith("CollectiveError: collective "), error
        assert "rank 0 in [collective 1 of NCCL's process group 0 (default_pg), at " in error
        assert "; rank 1 in [collective " in error
        assert "[FS-DEADLOCK]" in error


def test_a_collective_of_the_program_meets_one_of_the_model(others: Ends, folder: Path) -> None:
    """On NCCL alone the model all-gathers on the program's group, in one order with its own.

    The error names the file of the flight recorder.
    """
    for rank, ended in enumerate(others["own"]):
        assert ended.status == 1, ended
        error = json.loads(ended.text)["error"]
        assert "So a collective of the program met a collective of the model." in error, error
        path = folder / f"trace_{rank}"
        assert f"flight recorder is in {path}." in error
        assert pickle.loads(path.read_bytes())["entries"]


def test_without_a_look_at_the_gpu_a_rank_waits(others: Ends) -> None:
    """Shows that the divergence makes a rank wait for the GPU, so that the tests above can fail.

    Only torch's own watchdog then finds it, at the timeout.
    """
    assert not others["unseen"][0].text
    for ended in others["timeout"]:
        assert "Watchdog caught collective operation timeout" in ended.errors


@pytest.mark.parametrize("name", ["save", "train", "evaluate"])
def test_slow_ranks_raise_no_alarm(others: Ends, name: str) -> None:
    assert [ended.status for ended in others[name]] == [0, 0], others[name]


def test_exchanges_on_the_host_are_no_collectives_of_nccl() -> None:
    """A group of gloo and NCCL: rank 1 is further, and has exchanged a value on the host."""
    reports = []
    for on_gpu, on_host in ((24, 12), (31, 13)):
        of_model = {"1": (on_gpu, []), "1 on cpu": (on_host, [])}
        begun = {"2": of_model, "1": {detector.ON_GPU: (on_gpu, [])}}
        need = WaitCondition("1", detector.ON_GPU, on_gpu, (2,))
        reports.append(detector._Report(1, 0.0, "", need, begun))
    assert detector._mixed(reports[0], {1: reports[1]}) is None


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_program_gets_a_single_error(order: str) -> None:
    """The main thread waits in C++ for a thread of autograd, whose collective fails.

    The watchdog sets its error before or after this error. If before, this error contains the text
    of the watchdog's: the watchdog then aborts the collective, and this error tells why.
    """
    raised, is_done = [], threading.Lock()
    main, since = threading.get_ident(), time.monotonic()

    def fail() -> None:
        try:
            with named("all-gather"):
                if order == "before":
                    gpu_waits._raise_in_thread(main, "ranks began different ones", since)
                raise RuntimeError("aborted")
        except CollectiveError as error:
            raised.append(str(error))
            if order == "after":
                gpu_waits._raise_in_thread(main, "a second error", since)
        finally:
            is_done.release()

    is_done.acquire()
    _thread.start_new_thread(fail, ())  # like a thread of C++, not a `threading.Thread`
    is_done.acquire()
    reason = {"before": ": ranks began different ones", "after": ". Another rank died"}[order]
    assert raised[0].startswith(f"all-gather failed{reason}")


def test_a_traced_thread_takes_errors_back() -> None:
    # On Python 3.11, a thread under a debugger or a coverage tool never returned from this.
    thread, before = threading.get_ident(), sys.gettrace()
    with gpu_waits._raising:
        gpu_waits._to_raise[thread] = "an error"
    sys.settrace(lambda *_: lambda *_: None)
    try:
        assert gpu_waits.take_back_error() == "an error"
        assert gpu_waits.take_back_error() is None
    finally:
        sys.settrace(before)
