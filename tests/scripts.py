"""`run_script`: run a script without waiting for torch to be imported by each of its processes.

It runs in a process forked from the harness's server, and what it spawns is forked in turn: its
arguments are not pickled, and its file is not imported again. Each script has besides a test that
starts it as its reader would.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness import PRELOAD, forked

# The harness's server has not started yet while tests are collected.
PRELOAD += ["rich.table", "sklearn.datasets", "tqdm"]


class Finished(NamedTuple):
    status: int
    out: str
    err: str


def run_script(
    script: Path, *arguments: str, cwd: Path, timeout: float = 100, first: Sequence[Path] = ()
) -> Finished:
    """Run the script in the folder ``cwd``, with ``first`` heading its path.

    None of its processes is left behind.

    Raises:
        TimeoutError: it was still running after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        files = [Path(folder) / "out", Path(folder) / "err"]
        process = forked(_main, script, arguments, cwd, first, dict(os.environ), files)
        try:
            process.join(timeout)
            status = process.exitcode
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        out, err = (path.read_text() if path.exists() else "" for path in files)
    if status is None:
        raise TimeoutError(f"{script.name} was still running after {timeout} s:\n{out}{err}")
    return Finished(status, out, err)


def _main(
    script: Path,
    arguments: Sequence[str],
    cwd: Path,
    first: Sequence[Path],
    environment: dict[str, str],
    files: Sequence[Path],
) -> None:
    os.setsid()
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update({**environment, "OMP_NUM_THREADS": "1"})
    os.chdir(cwd)
    sys.path[:0] = [*map(str, first), str(script.parent)]
    sys.argv = [str(script), *map(str, arguments)]
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["fork"]
    runpy.run_path(str(script), run_name="__main__")
