"""Settings of all tests."""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.forked_python import PYTHON

with warnings.catch_warnings():
    # Where numpy is not installed, which the tests don't need, torch says so when imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

    from flatshard import options


MUST_RUN = {
    *("test_peer_memory.py", "test_fallbacks.py", "test_systems.py"),
    *(() if torch.cuda.is_available() else ("test_simulated_gpu.py",)),
}
"""Test files that look whether their system has what they need, and skip where it lacks."""

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("flatshard", deadline=None)
hypothesis.settings.load_profile("flatshard")


def pytest_configure(config: pytest.Config) -> None:
    # The servers of ranks, and pytest-xdist's workers, need not import torch either.
    multiprocessing.set_executable(PYTHON)
    if workers := config.getoption("tx", None):
        config.option.tx = [one.replace("popen", f"popen//python={PYTHON}") for one in workers]
    # As in the ranks: a parallel kernel may add up in another order.
    torch.set_num_threads(1)
    # A shell lets what it starts in the background ignore Ctrl-C: scripts that tests start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(os, "SCHED_BATCH"):
        # For all processes that tests start: a thread that wakes waits for the one that runs. Else
        # gloo's thread wakes before the lock is free that it needs, and polls for it: where ranks
        # are more than cores, collectives then take several times as long.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(autouse=True)
def coalescing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the marks say of small units; `run_ranks` hands it on to the ranks."""
    node = request.node
    is_other_turn = node.get_closest_marker("by_turns") and zlib.crc32(node.name.encode()) % 2
    if node.get_closest_marker("uncoalesced") or is_other_turn:
        monkeypatch.setattr(options, "COALESCE_BYTES", 0)


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A simulated GPU; compiled, and its server of ranks started, for the first test with one."""
    from tests.simulated_gpu.server import Gpu

    simulated = Gpu(tmp_path_factory.mktemp("gpu"))
    yield simulated
    simulated.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What skips in a file of `MUST_RUN` fails on a Linux that tests all."""
    report = yield
    is_complete = os.environ.get("CI") or os.environ.get("MUST_RUN")
    if report.skipped and is_complete and sys.platform == "linux" and item.path.name in MUST_RUN:
        report.outcome = "failed"
        report.longrepr = f"skipped, which this file must not be here: {report.longrepr}"
    return report


SLOW = [
    *("test_waits_on_gpu.py", "test_try.py", "test_documents.py", "test_transformers.py"),
    *("test_watchdog.py", "test_idioms.py", "test_extras.py", "test_elastic.py"),
    *("test_compiled_units.py", "test_lone_calls.py", "test_order_of_collectives.py"),
    *("test_notebooks.py", "test_peer_memory.py", "test_rank_failure.py"),
]
"""Files that take longest. They begin first, so that no worker has one left at the end."""


TOGETHER = {
    "frameworks": ("tests/integrations/",),
    "compiler": ("tests/engine/test_compiled_units.py",),
    "simulated GPU": (
        "tests/extras/deadlock/test_waits_on_gpu.py",
        "tests/extras/device_checks/test_device_checks.py",
        "tests/simulated_gpu/test_simulated_gpu.py",
    ),
}
"""Beginnings of the names of files that one worker runs, by what they share."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all files for which a server of ranks imports, or compiles, the same."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.endswith("test_idioms.py"):  # workers share its sections, which begin the ids
                return nodeid.partition("-")[0]
            return next((one for one in TOGETHER if file.startswith(TOGETHER[one])), file)

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if "SAMPLE" in os.environ:  # in scripts/test_versions.sh: "1/4" takes items 1, 5, 9, ...
        first, step = map(int, os.environ["SAMPLE"].split("/"))
        is_kept = [
            number % step == first % step or item.get_closest_marker("versions") is not None
            for number, item in enumerate(items)
        ]
        left_out = [item for item, kept in zip(items, is_kept, strict=True) if not kept]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, kept in zip(items, is_kept, strict=True) if kept]

    def place(item: pytest.Function) -> int:
        name = item.path.name
        return SLOW.index(name) if name in SLOW else len(SLOW)

    items.sort(key=place)
    for item in items:
        if {"run_ranks", "on_ranks", "on_ranks_each_way"} & vars(item.module).keys():
            item.add_marker(pytest.mark.distributed)
