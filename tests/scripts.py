"""`run_script`: run a script without waiting for torch to be imported by each of its processes.

It runs in a process forked from the harness's server, and what it spawns is forked in turn: its
arguments are not pickled, and its file is not imported again. `torchrun` starts so many of them as
ranks. Each script has besides a test that starts it as its reader would.
"""

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from tests.harness import PRELOAD, forked

# The harness's server has not started yet when this is imported, while tests are collected.
PRELOAD += ["rich.table", "sklearn.datasets"]


class Finished(NamedTuple):
    """Of several processes, the status is that of the first that failed."""

    status: int
    out: str
    err: str


def run_script(script: Path, *arguments: str, cwd: Path, timeout: float = 100) -> Finished:
    """Run the script in the folder ``cwd``.

    Raises:
        TimeoutError: it was still running after ``timeout`` seconds.
    """
    return _run([dict(os.environ)], script, arguments, cwd, timeout)


def torchrun(
    world_size: int, script: Path, *arguments: str, environment: Mapping[str, str], cwd: Path
) -> Finished:
    """Run the script on so many ranks, which meet as torchrun's do: at a store of their parent's.

    Raises:
        TimeoutError: one was still running after a hundred seconds.
    """
    limit = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    common = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(world_size),
        "WORLD_SIZE": str(world_size),
    }
    ranks = [{**common, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world_size)]
    return _run(ranks, script, arguments, cwd, timeout=100)


def _run(
    environments: list[dict[str, str]],
    script: Path,
    arguments: Sequence[str],
    cwd: Path,
    timeout: float,
) -> Finished:
    """A process for each environment, none of which, nor of what they start, is left behind."""
    deadline = time.monotonic() + timeout
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        files = [Path(folder) / "out", Path(folder) / "err"]
        for path in files:
            path.touch()
        try:
            for environment in environments:
                processes.append(fork_script(environment, script, arguments, cwd, files))
            status = _status(processes, deadline)
        finally:
            for process in processes:
                process.kill()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
                process.close()
        out, err = (path.read_text() for path in files)
    if status is None:
        raise TimeoutError(f"{script.name} was still running after {timeout} s:\n{out}{err}")
    return Finished(status, out, err)


def fork_script(
    environment: Mapping[str, str],
    script: Path,
    arguments: Sequence[str],
    cwd: Path,
    files: Sequence[Path],
) -> Any:
    """The started process of one script, in a session of its own; it writes into two ``files``."""
    return forked(_main, script, arguments, cwd, dict(environment), files)


def _status(processes: list[Any], deadline: float) -> int | None:
    """That of the first to fail, else 0; None when time is up."""
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return None
        for sentinel in ended:
            if status := running.pop(sentinel).exitcode:  # type: ignore[call-overload]
                return status
    return 0


def _main(
    script: Path,
    arguments: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    files: Sequence[Path],
) -> None:
    os.setsid()
    gc.freeze()  # what the server has loaded is no garbage, and stays shared with it
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update({**environment, "OMP_NUM_THREADS": "1"})
    os.chdir(cwd)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *map(str, arguments)]
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["fork"]
    runpy.run_path(str(script), run_name="__main__")
