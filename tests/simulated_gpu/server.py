"""A process with a simulated GPU, which forks ranks that train on it."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_checks.equality import Limits

from tests import simulated_gpu
from tests.harness import ROOT


class Ended(NamedTuple):
    """The end of a rank: exit status, JSON that the rank's program returned or "", and stderr."""

    status: int
    text: str
    errors: str


class Gpu:
    """Trains on ranks that a process forks which has a simulated GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **simulated_gpu.build(folder),
            "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": "2",
            "PYTHONPATH": str(ROOT / "scripts"),
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated_gpu.rank"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, world_size: int, *cases: str, **environment: str) -> list[Limits]:
        """How far training is from the unwrapped model's, case by case."""
        (ranks,) = self.run_programs(world_size, ("train", "nccl", *cases), **environment)
        assert not any(rank.status for rank in ranks), ranks
        found = json.loads(ranks[0].text)["off"]
        assert len(found) == len(cases)
        return [Limits(**one) for one in found]

    def run_programs(
        self, world_size: int, *programs: Sequence[str], seconds: float = 280, **environment: str
    ) -> list[list[Ended]]:
        """How each rank of each program ended. The programs run at the same time.

        A program is the name of a function of `programs.py`, a backend, and arguments. All ranks
        must end within ``seconds``.
        """
        folder = tempfile.mkdtemp(dir=self._folder)
        request = {"world_size": world_size, "programs": programs, "folder": folder}
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({**request, "environment": environment}) + "\n")
        server.stdin.flush()
        answers, _, _ = select.select([server.stdout], [], [], seconds)
        text = {f"{p.parent.name}/{p.name}": p.read_text() for p in Path(folder).glob("*/*-*")}
        assert answers, text
        return [
            [
                Ended(status, text[f"{number}/out-{rank}"], text[f"{number}/err-{rank}"])
                for rank, status in enumerate(of_program)
            ]
            for number, of_program in enumerate(json.loads(server.stdout.readline()))
        ]

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)  # its ranks, too
        self._server.communicate()
