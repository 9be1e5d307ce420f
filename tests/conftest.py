"""Settings of all tests."""

import contextlib
import os
import warnings

import hypothesis
import pytest

with warnings.catch_warnings():
    # Where numpy is not installed, which the tests don't need, torch says so when imported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch

    from flatshard.options import collectives as collective_options


# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("flatshard", deadline=None)
hypothesis.settings.load_profile("flatshard")


def pytest_configure() -> None:
    # As in the ranks: a parallel kernel may add up in another order.
    torch.set_num_threads(1)
    collective_options.COALESCE_BYTES = 0
    if hasattr(os, "SCHED_BATCH"):
        # For all processes that tests start: a thread that wakes waits for the one that runs. Else
        # gloo's thread wakes before the lock is free that it needs, and polls for it: where ranks
        # are more than cores, collectives then take several times as long.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if "run_ranks" in vars(item.module):
            item.add_marker(pytest.mark.distributed)
