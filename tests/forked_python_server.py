"""Forks processes that run Python programs; torch is imported here, once. See `forked_python`.

python tests/forked_python_server.py LISTENER CLIENT
"""

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, files, _, _ = socket.recv_fds(client, 8, 250)
    text = b""
    while len(text) < int.from_bytes(header, "big"):
        part = client.recv(1 << 20)
        if not part:
            raise EOFError
        text += part
    return json.loads(text), files


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request. Only a forked process returns, with its request and files.

    The server itself stays in this function. Between the server and a program stays a keeper, the
    parent of the program.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        client, _ = listener.accept()
        if not os.fork():
            break
        client.close()
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files = receive(client)
    pid = os.fork()
    if pid:
        keep(pid, client, files)
    # `place` will close these files and may reuse their numbers: forget the numbers.
    for other in (client, listener):
        other.detach()
    return request, files


def keep(pid: int, client: socket.socket, files: list[int]) -> NoReturn:
    """Send a program the signals that its client got, and the client how the program ended.

    If the client was killed, the program is killed.
    """
    for number in files:
        os.close(number)
    end = os.pidfd_open(pid)
    while end not in select.select([client, end], [], [])[0]:
        numbers = b""
        with contextlib.suppress(OSError):  # the client was killed
            numbers = client.recv(100)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)  # nobody has waited for the process yet, so the id is valid
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # the client was killed
        client.send(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def place(files: list[int], numbers: list[int]) -> None:
    """Give the open files the numbers that they have in the client; close all others."""
    above = max([*numbers, 100]) + 1
    moved = [os.dup2(number, above + index) for index, number in enumerate(files)]
    os.closerange(0, above)
    os.closerange(above + len(moved), above + 10_000)
    for number, wanted in zip(moved, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def settle(request: dict[str, Any], path: list[str]) -> None:
    """Bring this forked process into the state of a newly started Python interpreter.

    The request has the client's directory, environment and options. ``path``: rest of ``sys.path``.
    """
    import multiprocessing.process
    import multiprocessing.spawn

    import torch

    os.sched_setscheduler(0, request["policy"], os.sched_param(0))
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    sys.executable = sys.argv[2]
    multiprocessing.spawn.set_executable(sys.executable)
    # The variables that Python has read before it runs a program.
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, given.split(os.pathsep)), *path]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.warnoptions[:] = filter(None, os.environ.get("PYTHONWARNINGS", "").split(","))
    warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open_stream(number, unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def open_stream(number: int, unbuffered: bool) -> io.TextIOWrapper | None:
    """Return a standard stream, or None if the client's stream is closed."""
    size = 0 if unbuffered and number else -1
    try:
        binary = open(number, "wb" if number else "rb", size, closefd=False)
    except OSError:
        return None
    return io.TextIOWrapper(
        binary,
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or os.isatty(number),
        write_through=unbuffered,
    )


def without_server(hook: Callable[..., None]) -> Callable[..., None]:
    """Return ``hook``, but without the lines of this file at the beginning of a traceback."""

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return show


def run(arguments: list[str]) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
    main.__file__ = os.path.abspath(kind)
    with open(kind, "rb") as file:
        code = compile(file.read(), kind, "exec")
    exec(code, vars(main))


def status_of(arguments: list[str]) -> int:
    """Run a program, and return its exit status. Raises only KeyboardInterrupt."""
    try:
        run(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(status: int) -> None:
    """End this process after its threads and exit handlers, as Python does, but free no objects.

    At its end, Python frees all objects one by one. In a forked process this would copy all memory
    that is shared until then, which takes longer than most of the programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # the other end, or the stream, is closed
            stream.flush()
    os._exit(status)


def keep_torchs_operators() -> None:
    """Let this process, and what it forks, end without removing torch's operators one by one.

    When a program ends, torch takes back each operator that its Python code has registered. In each
    forked process this would copy memory that is shared until then.
    """
    from torch.library import _del_library

    finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer, info in list(finalizers.items()):
        if info.func is _del_library:
            finalizer.atexit = False


def main() -> None:
    end_with_parent()
    path = sys.path[1:]  # without the folder of this file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends the server
    listener = socket.socket(fileno=int(sys.argv[1]))
    import torch
    import torch._dynamo  # torch imports it when it makes the first optimizer

    with contextlib.suppress(ImportError):
        import sklearn.datasets  # noqa: F401  # for the scripts that train on digits

    torch.set_num_threads(1)
    keep_torchs_operators()
    gc.collect()
    gc.freeze()  # keep memory shared with forked processes: a collection would write to it
    request, files = serve(listener)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    os.setsid()
    place(files, request["files"])
    settle(request, path)
    sys.excepthook = without_server(sys.excepthook)
    frees_objects = os.environ.get("FORKED_PYTHON_FREES_OBJECTS")
    status = status_of(request["arguments"])
    if frees_objects:
        sys.exit(status)
    end(status)


if __name__ == "__main__":
    main()
