"""How long the package and its core path are, in lines; neither may grow beyond its budget."""

from pathlib import Path

from measure.structure import CORE

import flatshard

FOLDER = Path(flatshard.__file__).parent
PACKAGE_LINES = 26_242
CORE_LINES = 4_500


def _count(paths: set[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_lines() -> None:
    core = {path for pattern in CORE for path in FOLDER.glob(pattern)}
    assert len(core) >= 15, "the list of the core path names files that are gone"
    package_lines, core_lines = _count(set(FOLDER.rglob("*.py"))), _count(core)
    print(
        f"package: {package_lines} lines of {PACKAGE_LINES}; core path: {core_lines}, {CORE_LINES}"
    )
    assert package_lines <= PACKAGE_LINES
    assert core_lines <= CORE_LINES
