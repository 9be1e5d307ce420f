"""Ends the script that imports it, in one line, where what all of them need is not installed."""

import importlib.util
import sys

for package in ("torch", "flatshard"):
    if importlib.util.find_spec(package) is None:
        print(f'error: {package} is not installed: pip install ".[examples]"', file=sys.stderr)
        sys.exit(2)
