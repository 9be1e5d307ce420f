"""Measures one thing on this machine, and prints a table.

    python scripts/measure.py NAME [--help] [--OPTION VALUE...] [--json PATH]

NAME is a file in `scripts/measure/` with the names and defaults of its `OPTIONS`, and `measure`,
which returns the table's title and rows. Needs Linux and `pip install ".[examples]"`.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from lib.command_line import Parser, at_least
from lib.output import show, write_json

sys.path.append(str(Path(__file__).with_name("measure")))
NAMES = ("checkpoints", "construction", "offload", "weights", "world_size")


def parse_args(module: ModuleType, arguments: list[str]) -> argparse.Namespace:
    """Read the options of a measure. Exits with status 2 if an option is wrong.

    A default that is a list has all values that may be chosen, separated by commas; a tuple has all
    values of which one may be chosen, the default first.
    """
    parser = Parser(module.__doc__)
    for name, default in module.OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        elif isinstance(default, list):
            parser.add_names(option, default, "some of them")
        elif isinstance(default, tuple):
            parser.add_argument(option, choices=default, default=default[0])
        else:
            kind = at_least(1) if isinstance(default, int) else type(default)
            parser.add_argument(option, type=kind, default=default, help=f"(default: {default})")
    parser.add_json("the rows")
    args = parser.parse_args(arguments)
    for name, default in module.OPTIONS.items():
        if isinstance(default, Path) and not getattr(args, name).is_dir():
            parser.error(f"--{name}: not a directory: {getattr(args, name)}")
    if not Path("/proc/self/clear_refs").exists():
        parser.error("this script needs Linux's /proc to measure RSS")
    return args


def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        print(f"usage: measure.py {{{','.join(NAMES)}}} ...\n\n{__doc__}")
        sys.exit(0 if name in ("-h", "--help") else 2)
    module = importlib.import_module(name)
    args = parse_args(module, arguments)
    title, rows = module.measure(args)
    show(title, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
