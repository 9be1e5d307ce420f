"""`run_script` and `torchrun`: a script in processes of `PYTHON`, which has imported torch."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

from tests.forked_python import PYTHON
from tests.harness import ROOT

HERE = {"PYTHONPATH": str(ROOT)}
"""Environment of a program that finds this repository's packages, wherever it is started."""


class Finished(NamedTuple):
    """Of several processes, the status is that of the first that failed."""

    status: int
    out: str
    err: str


def run_script(script: Path, *arguments: str, cwd: Path) -> Finished:
    """Run the script in the folder ``cwd``."""
    return _run([{}], [script, *arguments], cwd)


def run_code(code: str, *arguments: object) -> Finished:
    """Run Python code in the repository's folder, until its end as that of a real program."""
    return _run([{"FORKED_PYTHON_FREES_OBJECTS": "1"}], ["-c", code, *arguments], ROOT)


def torchrun(
    world_size: int, script: Path, *arguments: str, environment: Mapping[str, str] = HERE, cwd: Path
) -> Finished:
    """Run the script on so many ranks, which meet as torchrun's do: at the parent's store."""
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
    return _run(ranks, [script, *arguments], cwd)


def _run(
    environments: Sequence[Mapping[str, str]], arguments: Sequence[object], cwd: Path
) -> Finished:
    """A process for each environment. When one fails, or after 100 seconds, all are killed."""
    deadline = time.monotonic() + 100
    command = [PYTHON, *map(str, arguments)]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            for given in environments:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", **given}
                processes.append(
                    subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err)
                )
            codes: list[int | None] = [None]
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.02)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    assert None not in codes or any(codes), f"{command[:2]} still ran after 100 s: {texts}"
    return Finished(next(filter(None, codes), 0), *texts)
