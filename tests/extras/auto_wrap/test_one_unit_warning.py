"""What is said about plans that waste time or memory."""

import pytest
import torch
from torch import nn

from flatshard.extras.auto_wrap import one_unit_warning
from flatshard.units.module_tree import ModuleTree
from tests.models import CASES


def test_a_large_layer_in_one_unit_may_be_wrapped_by_hand() -> None:
    with torch.device("meta"):
        assert one_unit_warning(ModuleTree(nn.Linear(10_000, 10_000))) == []
        layer = nn.TransformerEncoderLayer(2048, 8, batch_first=True)
        assert one_unit_warning(ModuleTree(layer)) == []


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_no_false_alarm_for_test_models(case: object) -> None:
    assert one_unit_warning(ModuleTree(case.build())) == []
