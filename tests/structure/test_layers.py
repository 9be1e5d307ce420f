"""Packages import in one direction; the core needs torch alone; one package communicates."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from measure.structure import ORDER

import flatshard

FOLDER = Path(flatshard.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


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
    if not inside:
        return
    allowed = ORDER[: ORDER.index(package) + 1]
    used = {name.split(".")[1] for name in _imported(path) if name.startswith("flatshard.")}
    assert used <= set(allowed), f"{_name(path)} imports {sorted(used - set(allowed))}"


BESIDE = ("extras", "checkpoint", "integrations")
"""What is beside the core; the modules that users import beside it are no part of the core."""

SHIMS = ("__main__.py", "memory_plan.py")


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_core_imports_nothing_beside_it(path: Path) -> None:
    first, *_ = path.relative_to(FOLDER).parts
    if first.removesuffix(".py") in BESIDE or first in SHIMS:
        return
    used = {name.split(".")[1] for name in _imported(path) if name.startswith("flatshard.")}
    assert not used & set(BESIDE)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_torch(path: Path) -> None:
    """All depends on torch and the standard library alone, an integration on its framework."""
    allowed = {"torch", "flatshard", *sys.stdlib_module_names}
    if path.parent.name == "integrations":
        allowed.add(path.stem)
    assert {name.split(".")[0] for name in _imported(path)} <= allowed


CALLS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "barrier", "send")
CALLS += ("recv", "isend", "irecv", "new_group", "allreduce", "allgather", "alltoall", "_allgather")
CALLS += ("_reduce_scatter", "_all_gather", "batch_isend_irecv", "gather", "scatter", "monitored")
GROUPS = {"dist", "distributed", "c10d", "group", "process_group", "pg", "backend"}


def _communication(tree: ast.AST) -> Iterator[str]:
    """What communicates: a group's methods, and what torch.distributed imports or is asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (a.name for a in node.names if a.name.startswith(CALLS))
        elif isinstance(node, ast.Attribute) and node.attr.startswith(CALLS):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name.lstrip("_") in GROUPS:
                yield f"{name}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_one_package_communicates(path: Path) -> None:
    """All communication passes ``comm``, so that it can be recorded and replaced."""
    if not path.is_relative_to(FOLDER / "comm"):
        assert not list(_communication(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "planted",
    [
        "dist.all_reduce(x)",
        "torch.distributed.broadcast(x, 0)",
        "self._group.send([x], 1, 0)",
        "group.recv([x], 1, 0)",
        "settings.process_group.allreduce([x])",
        "from torch.distributed import all_gather_object",
    ],
)
def test_communication_is_seen(planted: str) -> None:
    assert list(_communication(ast.parse(planted)))
