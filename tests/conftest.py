"""Settings of all tests."""

from pathlib import Path

import pytest
import torch

DISTRIBUTED = Path(__file__).parent / "distributed"


def pytest_configure() -> None:
    # As in the ranks: a parallel kernel may add up in another order.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DISTRIBUTED in item.path.parents:
            item.add_marker(pytest.mark.distributed)
