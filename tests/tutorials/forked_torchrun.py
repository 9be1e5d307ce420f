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
    environment = options.pop("env")
    assert (name, options) == ("--nproc-per-node", {"capture_output": True, "text": True})
    done = scripts.torchrun(
        int(world_size), Path(script), *arguments, environment=environment, cwd=Path.cwd()
    )
    return subprocess.CompletedProcess(command, *done)


subprocess.run = run
