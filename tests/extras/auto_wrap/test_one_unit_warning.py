"""What is said about plans that waste time or memory."""

import pytest
import torch
from torch import nn

from flatshard.extras.auto_wrap import LARGE_MODEL_NUMEL, one_unit_warning
from flatshard.units.module_tree import ModuleTree
from tests.models import CASES


@pytest.mark.parametrize("depth", [2, 12])
def test_a_large_model_in_one_unit(depth: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(_large_block() for _ in range(depth)))
    (remark,) = one_unit_warning(ModuleTree(model))
    assert f"each of {depth} repeated blocks" in remark
    assert 'auto_wrap_policy="auto"' in remark


def _large_block() -> nn.Module:
    return nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Sequential(nn.Linear(2000, 2000)))


def test_a_small_model_in_one_unit_is_fine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(_large_block())
        assert sum(p.numel() for p in model.parameters()) < LARGE_MODEL_NUMEL
        assert one_unit_warning(ModuleTree(model)) == []


def test_a_large_layer_in_one_unit_may_be_wrapped_by_hand() -> None:
    with torch.device("meta"):
        assert one_unit_warning(ModuleTree(nn.Linear(10_000, 10_000))) == []
        layer = nn.TransformerEncoderLayer(2048, 8, batch_first=True)
        assert one_unit_warning(ModuleTree(layer)) == []


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_no_false_alarm_for_test_models(case: object) -> None:
    assert one_unit_warning(ModuleTree(case.build())) == []
