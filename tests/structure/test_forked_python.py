"""`PYTHON` runs programs as Python does: what they print, how they end, and what they start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked_python import PYTHON

pytestmark = pytest.mark.skipif(PYTHON == sys.executable, reason="it is the real Python")

PROGRAMS = [
    ("print('a'); import sys; sys.exit(3)", 3, "a\n", ""),
    ("import sys; sys.exit('no')", 1, "", "no\n"),
    (
        "raise ValueError(1)",
        *(1, "", 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'),
    ),
    ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
    ("import sys; print('flatshard' in sys.modules, sys.argv[1:])", 0, "False ['b']\n", ""),
    ("import atexit; atexit.register(print, 'end')", 0, "end\n", ""),
    (
        "import sys, threading; threading.Timer(0.1, print, 'a').start(); sys.exit(-1)",
        *(255, "a\n", ""),
    ),
]


@pytest.mark.parametrize(("program", "status", "out", "err"), PROGRAMS)
def test_end_of_a_program(program: str, status: int, out: str, err: str) -> None:
    done = subprocess.run([PYTHON, "-c", program, "b"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr[: len(err)]) == (status, out, err)
    assert bool(done.stderr) == bool(err)


STARTS = """
import multiprocessing, os, sys

def say(kind):
    print(kind, sys.argv[1:], os.environ["HERE"], os.getcwd(), flush=True)

if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        process = multiprocessing.get_context(kind).Process(target=say, args=(kind,))
        process.start()
        process.join()
"""


def test_processes_that_a_program_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STARTS)
    command, environment = [PYTHON, "script.py", "b"], {**os.environ, "HERE": "yes"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"{kind} ['b'] yes {tmp_path}" for kind in ("spawn", "forkserver")
    ]
    assert not done.stderr


def test_an_inherited_file_has_its_number() -> None:
    reads, writes = os.pipe()
    program = f"import os; os.write({writes}, b'b')"
    subprocess.run([PYTHON, "-c", program], pass_fds=[writes], check=True)
    os.close(writes)
    assert os.read(reads, 9) == b"b"
    assert os.read(reads, 9) == b""  # nobody else has it open
    os.close(reads)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals(number: int) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([PYTHON, "-c", program], text=True, **pipes) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(20) == -number
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
