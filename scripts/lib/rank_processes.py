"""`launch`: starts ranks on this machine, for notebooks."""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(function: Callable[..., Any], *args: Any, ranks: int = 2) -> dict[int, Any]:
    """Run ``function(*args)`` on ranks of this machine; returns each rank's result, by rank.

    torch's own launcher, which is also behind ``torchrun``, forks the ranks. So the function may be
    defined in a notebook, and may use whatever the notebook's earlier cells define. The notebook's
    process must not use CUDA, nor compute with torch on several threads: neither survives a fork.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="notebook",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    all_forked = multiprocessing.get_context("fork").Barrier(ranks)
    return elastic_launch(config, _once_all_are_forked)(all_forked, function, *args)


def _once_all_are_forked(
    all_forked: threading.Barrier, function: Callable[..., Any], *args: Any
) -> Any:
    # When a rank connects, a thread of the launcher calls getnameinfo(). A rank that is forked
    # meanwhile inherits the locked resolver of glibc, and would hang in getaddrinfo().
    all_forked.wait(60)
    return function(*args)
