"""Prints the size of the package.

    python scripts/measure/structure.py

Sizes are lines of code, without comments, docstrings and blank lines. The core is the package
without extras, checkpoints and integrations. `plain_step.py` counts the lines that a step executes.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.command_line import Parser

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


@dataclass
class Size:
    """Numbers of modules and of lines."""

    modules: int = 0
    code_lines: int = 0
    core_lines: int = 0
    lines_by_package: Counter[str] = field(default_factory=Counter)
    repeated_names: list[str] = field(default_factory=list)
    strict_zips_in_core: int = 0


def read(repo: Path) -> list[Source]:
    folder = repo / "flatshard"
    sources = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        sources.append(Source(path.relative_to(folder).as_posix(), text, ast.parse(text)))
    return sources


def code_lines(source: Source) -> int:
    """Number of lines with code, without docstrings and the strings below attributes."""
    no_code = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    no_code += (tokenize.COMMENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def measure_size(repo: Path) -> Size:
    found, names = Size(), Counter[str]()
    for source in read(repo):
        lines = code_lines(source)
        found.modules += 1
        found.code_lines += lines
        # The modules of an extra count together.
        is_extra = source.package == "extras"
        part = source.name.rpartition("/")[0] if is_extra else source.package
        found.lines_by_package[part] += lines
        if source.package not in BESIDE:
            found.core_lines += lines
            found.strict_zips_in_core += strict_zips(source.tree)
        names[Path(source.name).name] += 1
    del names["__init__.py"]
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


def main() -> None:
    Parser(__doc__).parse_args()
    size = measure_size(Path(__file__).resolve().parents[2])
    for name, lines in size.lines_by_package.most_common():
        print(f"{name:38}{lines:6}")
    print(f"{'package, lines of code':38}{size.code_lines:6} in {size.modules} modules")
    print(f"{'core, lines of code':38}{size.core_lines:6}")
    print(f"{'zip(..., strict=True) in the core':38}{size.strict_zips_in_core:6}")
    print(f"{'names of several files':38}{', '.join(size.repeated_names) or '-'}")


if __name__ == "__main__":
    main()
