"""No test file imports another one, and the shell scripts name files that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))
SHELL = sorted((TESTS.parent / "scripts").glob("*.sh"))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_test_file_is_imported() -> None:
    imported = {
        str(path.relative_to(TESTS)): name
        for path in FILES
        for name in _imported(path)
        if name.startswith("tests.") and ".test_" in name
    }
    assert not imported


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in FILES if path.name.startswith("test_")]
    assert len(names) == len(set(names))


def test_shell_scripts_name_files_that_exist() -> None:
    names = {name for path in SHELL for name in re.findall(r"\btests/[\w/.]*\w", path.read_text())}
    assert "tests/parity" in names
    assert not [name for name in names if not (TESTS.parent / name).exists()]
