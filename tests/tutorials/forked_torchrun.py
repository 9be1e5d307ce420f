"""Imported in a notebook's kernel: what its cells start with torchrun, `tests.scripts` starts.

Other commands are left alone.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import scripts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
_run = subprocess.run


def run(command: Any, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run`."""
    if list(command[: len(TORCHRUN)]) != TORCHRUN:
        return _run(command, **options)
    ranks, script, *arguments = map(str, command[len(TORCHRUN) :])
    name, _, world_size = ranks.partition("=")
    environment, check = options.pop("env"), options.pop("check", False)
    options.pop("text", None)  # what ended says it in text
    assert (name, options) == ("--nproc-per-node", {"capture_output": True})
    ended = scripts.torchrun(
        int(world_size), Path(script), *arguments, environment=environment, cwd=Path.cwd()
    )
    done = subprocess.CompletedProcess(command, *ended)
    if check:
        done.check_returncode()
    return done


subprocess.run = run
