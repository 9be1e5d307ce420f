"""Ends the script that imports it in one line: where what it needs is missing, and on Ctrl-C."""

import importlib.util
import sys
from typing import Any


def _in_one_line(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):  # Python goes on to end by SIGINT
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _in_one_line

for package in ("torch", "flatshard"):
    if importlib.util.find_spec(package) is None:
        print(f'error: {package} is not installed: pip install ".[examples]"', file=sys.stderr)
        sys.exit(2)
