"""Settings of all tests."""

import contextlib
import os
import signal
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

with warnings.catch_warnings():
    # Where numpy is not installed, which the tests don't need, torch says so when imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

    from flatshard.options import collectives as collective_options


MUST_RUN = {
    *("test_peer_memory.py", "test_page_pool.py", "test_fallbacks.py", "test_systems.py"),
    *(() if torch.cuda.is_available() else ("test_simulated_gpu.py",)),
}
"""Test files that look whether their system has what they need, and skip where it lacks."""

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("flatshard", deadline=None)
hypothesis.settings.load_profile("flatshard")


def pytest_configure() -> None:
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
        monkeypatch.setattr(collective_options, "COALESCE_BYTES", 0)


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
    "tutorials/test_fuzz.py",
    "simulated_gpu/test_simulated_gpu.py",
    "tutorials/test_documents.py",
    "tutorials/test_notebooks.py",
    "engine/test_compiled_units.py",
    "extras/tensor_parallel/test_tensor_parallel.py",
    "integrations/test_transformers.py",
    "integrations/test_lightning.py",
    "parity/test_strategies.py",
    "tutorials/test_train_mnist.py",
    "tutorials/test_optimizer_table.py",
    "state/test_state_dict.py",
    "engine/test_training.py",
    "tutorials/test_elastic.py",
    "extras/deadlock/test_watchdog.py",
    "tutorials/test_conformance.py",
    "comm/test_rank_failure.py",
    "engine/test_touch.py",
    "whole_tensors/test_whole_step.py",
    "engine/test_frozen.py",
    "engine/test_boundaries_in_training.py",
    "extras/shared_memory/test_peer_memory.py",
    "engine/test_checkpointing.py",
    "parity/test_parity.py",
    "plan/test_ties.py",
    "tutorials/test_model_zoo.py",
    "engine/test_edits.py",
    "plan/test_ignored.py",
    "state/test_optim_state.py",
    "optimizer/test_clipping.py",
    "tutorials/test_measure_strategies.py",
    "optimizer/test_step_in_backward.py",
    "precision/test_precision.py",
    "engine/test_compile.py",
]
"""Files that take longest. They begin first, so that no worker has one left at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests of integrations: its fork server alone imports the frameworks."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = "tests/integrations/"
            return folder if nodeid.startswith(folder) else super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    def place(item: pytest.Function) -> int:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return SLOW.index(name) if name in SLOW else len(SLOW)

    items.sort(key=place)
    for item in items:
        if "run_ranks" in vars(item.module):
            item.add_marker(pytest.mark.distributed)
