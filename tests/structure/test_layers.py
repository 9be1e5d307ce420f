"""Packages import in one direction; the core needs torch alone; one package communicates."""

import ast
import functools
import sys
from collections.abc import Iterator, Set
from pathlib import Path

from structure import BESIDE, Source, read

from tests.harness import ROOT

ORDER = (
    *("options", "units", "memory", "precision", "comm", "tensor", "engine", "optimizer"),
    *("state", "module", "wrapper", "extras", "checkpoint", "integrations"),
)
"""A package imports those before it; the modules beside them are what users import."""

SHIMS = ("__main__", "collectives", "weights")
"""Modules at the top of the package that import what is beside the core."""


@functools.cache
def _sources() -> list[Source]:
    return read(ROOT)


@functools.cache
def _imported(source: Source) -> set[str]:
    """All modules and names that a module imports at runtime, with dots."""
    found: set[str] = set()
    for_types = [
        inside
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inside in ast.walk(node)
    ]
    for node in {*ast.walk(source.tree)} - {*for_types}:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _packages_used(source: Source) -> Set[str]:
    """The packages of flatshard that a module imports."""
    ours = (name for name in _imported(source) if name.startswith("flatshard."))
    return {name.split(".")[1] for name in ours}


def test_imports_point_down() -> None:
    against = {
        source.name: higher
        for source in _sources()
        if "/" in source.name
        if (higher := _packages_used(source) - {*ORDER[: ORDER.index(source.package) + 1]})
    }
    assert not against


def test_core_imports_nothing_beside_it() -> None:
    beside = {
        source.name: used
        for source in _sources()
        if source.package not in (*BESIDE, *SHIMS)
        if (used := _packages_used(source) & {*BESIDE})
    }
    assert not beside


def test_files_and_frameworks_do_not_read_the_engine() -> None:
    """What is beside the core uses what ``state`` and ``module`` say publicly of shards."""
    assert not {
        source.name
        for source in _sources()
        if source.package in ("checkpoint", "integrations")
        if _packages_used(source) & {"engine", "memory", "precision"}
    }


def test_only_torch() -> None:
    """All depends on torch and the standard library alone, an integration on its framework."""
    allowed = {"torch", "flatshard", *sys.stdlib_module_names}
    foreign = {}
    for source in _sources():
        its_own = {Path(source.name).stem} if source.package == "integrations" else set()
        used = {name.partition(".")[0] for name in _imported(source)}
        foreign[source.name] = used - allowed - its_own
    assert not {name: used for name, used in foreign.items() if used}


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


def test_one_package_communicates() -> None:
    """All communication passes ``comm``, so that it can be recorded and replaced."""
    found = {s.name: list(_communication(s.tree)) for s in _sources() if s.package != "comm"}
    assert not {name: calls for name, calls in found.items() if calls}
