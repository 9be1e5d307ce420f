"""Importing this module makes a script end in one line on Ctrl-C, or if a package is missing."""

import ctypes
import importlib.util
import os
import signal
import sys
from typing import Any


def _say_interrupted() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one of torchrun's ranks per machine prints
        print("interrupted", file=sys.stderr, flush=True)


def _in_one_line(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):  # after this hook, Python ends the process by SIGINT
        _say_interrupted()
    else:
        sys.__excepthook__(kind, error, trace)


def _end_at_once(*_: object) -> None:
    _say_interrupted()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


sys.excepthook = _in_one_line

# On Ctrl-C, torchrun does not end ranks that it has just started. Let the kernel end this rank
# together with torchrun.
if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

for package in ("torch", "flatshard"):
    if importlib.util.find_spec(package) is None:
        print(f'error: {package} is not installed: pip install ".[examples]"', file=sys.stderr)
        sys.exit(2)

# While torch is being imported, its C++ code cannot handle KeyboardInterrupt. So on Ctrl-C during
# the import, end at once. There is nothing to clean up yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_at_once)
    import flatshard  # noqa: F401

    signal.signal(signal.SIGINT, signal.default_int_handler)
