"""How large the package and its step are; no number may grow beyond its budget.

Comments and docstrings are not counted. A change that lowers a number lowers its budget.
`scripts/measure/structure.py` and `plain_step.py` print the numbers by package and by file.
"""

import pytest
from plain_step import executed_in_a_step
from structure import measure_size

from tests.harness import ROOT, run_ranks

SIZE = {"code_lines": 18_224, "core_lines": 9_082, "modules": 119, "strict_zips_in_core": 21}

REPEATED_NAMES: set[str] = set()
"""Names that several files of the package have; no name may be added."""

STEP = {
    "native": {"files": 28, "functions": 190, "lines": 999},
    "sockets": {"files": 29, "functions": 204, "lines": 1063},
    "auto": {"files": 31, "functions": 206, "lines": 1093},
}
"""What one plain step executes with each transport; see `scripts/measure/plain_step.py`."""

TIMING = {"files": 2, "functions": 10, "lines": 35}
"""How much a step may execute more when a rank arrives late and others wait for it."""


def test_size() -> None:
    size = measure_size(ROOT)
    numbers = {name: getattr(size, name) for name in SIZE}
    print(numbers)
    assert not {name: number for name, number in numbers.items() if number > SIZE[name]}
    assert set(size.repeated_names) <= REPEATED_NAMES


def _executed(_rank: int, _world_size: int, transport: str) -> dict[str, tuple[int, int]]:
    return {name: tuple(numbers) for name, numbers in executed_in_a_step(transport).items()}


@pytest.mark.parametrize("transport", STEP)
def test_step(transport: str) -> None:
    executed, _ = run_ranks(_executed, 2, transport, fresh=True)
    functions, lines = map(sum, zip(*executed.values(), strict=True))
    numbers = {"files": len(executed), "functions": functions, "lines": lines}
    print(numbers)
    assert not {
        name: number
        for name, number in numbers.items()
        if number > STEP[transport][name] + TIMING[name]
    }
