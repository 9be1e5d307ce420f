"""Packages import in one direction; the core needs torch alone; one package communicates."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatshard

ORDER = (
    *("options", "plan", "memory", "precision", "comm", "tensor", "engine", "optimizer"),
    *("diagnostics", "state", "module", "compat"),
)
"""A package imports those before it; the modules beside them are what users import."""

FOLDER = Path(flatshard.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
NOT_YET = {
    *("engine/handle.py", "plan/param_info.py"),
}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path: Path) -> None:
    package, *inside = path.relative_to(FOLDER).parts
    if not inside or _name(path) in NOT_YET:
        return
    allowed = ORDER[: ORDER.index(package) + 1]
    used = {name.split(".")[1] for name in _imported(path) if name.startswith("flatshard.")}
    assert used <= set(allowed), f"{_name(path)} imports {sorted(used - set(allowed))}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_torch(path: Path) -> None:
    """The core depends on torch and the standard library alone."""
    allowed = {"torch", "flatshard", *sys.stdlib_module_names}
    assert {name.split(".")[0] for name in _imported(path)} <= allowed


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_one_package_communicates(path: Path) -> None:
    """All communication passes ``comm``, so that it can be recorded and replaced."""
    calls = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter")
    calls += ("barrier", "send", "recv", "isend", "irecv", "new_group")
    if path.is_relative_to(FOLDER / "comm"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_ours = node.value.id in ("dist", "distributed", "group", "_group")
            assert not (is_ours and node.attr.startswith(calls)), ast.dump(node)
