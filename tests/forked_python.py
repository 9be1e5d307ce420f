"""`PYTHON`: runs programs as Python does, without waiting until torch is imported.

A process that imports torch, and then the ``torch._dynamo`` of its first optimizer, computes for
seven seconds before it begins. `PYTHON` is a small program with Python's command line. It asks a
server, which has imported torch once for all workers of pytest, to fork a process. The process gets
all that `PYTHON` got: arguments, environment, folder and open files. `PYTHON` passes signals on to
the process, and ends as the process ends. What the process starts by ``sys.executable`` (torchrun's
ranks, processes of ``multiprocessing``) is forked in turn.

Such a process has not imported flatshard. At its end it waits for its threads and runs its exit
handlers, but frees no objects, unless FORKED_PYTHON_FREES_OBJECTS=1 is in its environment. The
process differs from a fresh interpreter in three more ways: torch is imported already, the hashes
of strings are the same in all processes, and the process id is not the id of `PYTHON`. With
THOROUGH=1, and on other systems than Linux, `PYTHON` is the real Python, ``sys.executable``. A test
that needs a fresh interpreter starts ``sys.executable``.
"""

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER, REAL = "FORKED_PYTHON", "FORKED_PYTHON_REAL"
"""Environment variables for pytest's workers: the folder of `PYTHON`, and the real Python."""

CLIENT = """\
#!{real} -IS
import json, os, signal, socket, sys

arguments = sys.argv[1:]
while arguments and arguments[0] in ("-B", "-u"):
    del arguments[0]
# Anything but a file, a module or a text is for the real interpreter, and what needs no torch: the
# end of a forked process takes longer than such a program.
if (
    not arguments
    or arguments[0][0] == "-" and arguments[0] not in ("-c", "-m")
    or arguments[1:] and arguments[1].startswith("from multiprocessing.resource_tracker import")
    or "LD_PRELOAD" in os.environ
):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
files = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        files.append(number)
    except OSError:  # that of the list itself
        pass
request = {{
    "arguments": arguments,
    "unbuffered": "-u" in sys.argv[1:3],
    "cwd": os.getcwd(),
    "environment": {{os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}},
    "files": files,
    "policy": os.sched_getscheduler(0),
}}
text = json.dumps(request).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
socket.send_fds(server, [len(text).to_bytes(8, "big")], files)
server.sendall(text)


def pass_on(number, frame):
    server.send(bytes([number]))


for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, pass_on)
for number in files:  # a pipe that this process held open would have no end
    os.close(number)
status = int.from_bytes(server.recv(8), "big", signed=True)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def _start() -> str:
    """Start the server, unless a parent process has started it. Returns the path of `PYTHON`."""
    if os.environ.get("THOROUGH") or sys.platform != "linux":
        return sys.executable
    if FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="python-")
        path = f"{folder}/socket"
        # Programs connect to this socket, and wait until the server has imported torch.
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(100)
        client = Path(folder, "python")
        client.write_text(CLIENT.format(real=sys.executable, path=path))
        client.chmod(0o755)
        script = Path(__file__).with_name("forked_python_server.py")
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, script, str(number), client],
            env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
            pass_fds=[number],
        )
        listener.close()
        os.environ.update({FOLDER: folder, REAL: sys.executable})
        atexit.register(_end, server, folder, os.getpid())
    # In a worker, which `PYTHON` has started, `sys.executable` is `PYTHON`. Tests that need a fresh
    # interpreter start the real Python.
    sys.executable = os.environ[REAL]
    return f"{os.environ[FOLDER]}/python"


def _end(server: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() == owner:
        # All forked programs have set PR_SET_PDEATHSIG, so the kernel kills them with the server.
        server.kill()
        server.wait()
        shutil.rmtree(folder)


PYTHON = _start()
