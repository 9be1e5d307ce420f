"""Options of scripts. A bad option ends a script with one line and exit status 2."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from lib.output import output_file


def stop(message: str) -> NoReturn:
    """Ends this rank with exit status 2. One rank per machine prints `message`."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Argument parser that ends the script in one line on a bad option.

    `--help` prints the script's docstring.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        stop(message)

    def add_names(
        self, option: str, names: Iterable[str], what: str, default: Iterable[str] = ()
    ) -> None:
        """Adds an option for some of `names`, separated by commas. All names are the default."""
        known, usual = list(names), list(default) or list(names)

        def some(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                said = f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}"
                raise argparse.ArgumentTypeError(said)
            return text.split(",")

        text = f"{what}, separated by commas, of {','.join(known)} (default: {','.join(usual)})"
        self.add_argument(option, type=some, default=usual, help=text)

    def add_number(self, option: str, default: int, what: str, *, low: int = 1) -> None:
        """Adds an option for an integer that is at least `low`."""
        text = f"{what} (default: {default})"
        self.add_argument(option, type=at_least(low), default=default, help=text)

    def add_json(self, what: str = "all figures") -> None:
        """Adds the option `--json PATH`. `write_json` writes the file."""
        self.add_argument("--json", type=output_file, metavar="PATH", help=f"write {what} to PATH")


def at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    return integer
