"""How scripts read their options: what is wrong with them is one line, and exit status 2."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn


def stop(message: str) -> NoReturn:
    """Ends this rank with exit status 2; one rank per machine says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Describes a script by its docstring, and ends in one line on a bad option."""

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        stop(message)
