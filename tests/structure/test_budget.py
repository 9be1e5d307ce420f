"""How long the package and its core path are; neither may grow beyond its budget.

The package is counted in lines of code: comments and docstrings cost nothing.
"""

from measure.structure import measure

from tests.harness import ROOT

PACKAGE_CODE_LINES = 18_000
CORE_PATH_LINES = 4_500


def test_lines() -> None:
    figures = measure(ROOT)
    assert len(figures.core_files) >= 15, "the list of the core path names files that are gone"
    print(
        f"package: {figures.code_lines} lines of code, budget {PACKAGE_CODE_LINES}; "
        f"core path: {figures.core_lines} lines, budget {CORE_PATH_LINES}"
    )
    assert figures.code_lines <= PACKAGE_CODE_LINES
    assert figures.core_lines <= CORE_PATH_LINES
