"""Prints the size of the package, and the number of lines that one step executes.

    python scripts/measure/structure.py [--repo DIR] [--step native|sockets|auto] [--json PATH]

Sizes are lines of code, without comments, docstrings and blank lines. The core is the package
without extras, checkpoints and integrations. The script reads the source of any checkout and does
not import it. `--step` runs `plain_step.py` on two ranks.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.command_line import Parser
from lib.output import output_file, write_json

BESIDE = ("extras", "checkpoint", "integrations")
"""Packages that are not part of the core."""


@dataclass(frozen=True)
class Source:
    """A module: its path below the package's folder, its text and its syntax tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """First part of the path: a folder, or the name of a top-level module."""
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def part(self) -> str:
        """The package; for a module of an extra, the extra."""
        first, *rest = self.name.split("/")
        return "/".join((first, *rest[:-1][:1])) if first == "extras" else self.package


@dataclass
class Size:
    """Numbers of modules and of lines. Lines with comments count separately."""

    modules: int = 0
    code_lines: int = 0
    core_lines: int = 0
    comment_lines: int = 0
    lines_by_package: dict[str, int] = field(default_factory=dict)
    repeated_names: list[str] = field(default_factory=list)
    strict_zips_in_core: int = 0


def read(repo: Path) -> list[Source]:
    folder = repo / "flatshard"
    sources = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        sources.append(Source(path.relative_to(folder).as_posix(), text, ast.parse(text)))
    return sources


# ------------------------------------------------------------------------------------------- lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of docstrings, also of the strings below attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_and_comment_lines(source: Source) -> tuple[int, int]:
    """Lines with code, and lines with nothing but a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstring_lines(source.tree)
    return len(code), len(comments - code)


def measure_size(repo: Path) -> Size:
    found = Size()
    names: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for source in read(repo):
        code, comments = code_and_comment_lines(source)
        found.modules += 1
        found.code_lines += code
        found.comment_lines += comments
        lines[source.part] += code
        if source.package not in BESIDE:
            found.core_lines += code
            found.strict_zips_in_core += strict_zips(source.tree)
        names[Path(source.name).name] += 1
    del names["__init__.py"]
    found.lines_by_package = dict(lines.most_common())
    found.repeated_names = sorted(name for name, number in names.items() if number > 1)
    return found


def strict_zips(tree: ast.Module) -> int:
    """Calls of ``zip(..., strict=True)``: each passes lists whose entries belong together."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "zip"
        and any(ast.unparse(keyword) == "strict=True" for keyword in node.keywords)
        for node in ast.walk(tree)
    )


# --------------------------------------------------------------------------------- one plain step


def trace_step(repo: Path, transport: str) -> dict[str, tuple[int, int]]:
    """Numbers of functions and lines that one plain step executes, by file."""
    program = Path(__file__).with_name("plain_step.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(program), transport],
        env={**os.environ, "PYTHONPATH": str(repo.resolve()), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: tuple(executed) for name, executed in json.loads(done.stdout).items()}


# ------------------------------------------------------------------------------------- the figures


def show_size(size: Size) -> None:
    for name, lines in size.lines_by_package.items():
        print(f"{name:38}{lines:6}")
    print(f"{'package, lines of code':38}{size.code_lines:6} in {size.modules} modules")
    print(f"{'core, lines of code':38}{size.core_lines:6}")
    print(f"{'lines with only a comment':38}{size.comment_lines:6}")
    print(f"{'zip(..., strict=True) in the core':38}{size.strict_zips_in_core:6}")
    print(f"{'names of several files':38}{', '.join(size.repeated_names) or '-'}")


def show_step(transport: str, executed: dict[str, tuple[int, int]]) -> None:
    for name, (functions, lines) in executed.items():
        print(f"{name:44}{functions:4} functions {lines:5} lines")
    functions, lines = map(sum, zip(*executed.values(), strict=True))
    print(
        f"{transport}: one plain step executes {lines} lines in {functions} functions of "
        f"{len(executed)} files"
    )


def main() -> None:
    parser = Parser(__doc__)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument(
        "--repo", type=Path, default=here, help="checkout to read (default: this checkout)"
    )
    parser.add_argument(
        "--step",
        choices=("native", "sockets", "auto"),
        help="also count the lines that one step over this transport executes",
    )
    parser.add_argument("--json", type=output_file, metavar="PATH", help="write figures to PATH")
    args = parser.parse_args()
    if not (args.repo / "flatshard").is_dir():
        parser.error(f"--repo: there is no folder flatshard in {args.repo}")
    size = measure_size(args.repo)
    show_size(size)
    executed = trace_step(args.repo, args.step) if args.step else {}
    if args.step:
        show_step(args.step, executed)
    write_json(args.json, {**asdict(size), "step": executed})


if __name__ == "__main__":
    main()
