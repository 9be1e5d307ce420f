"""A plan lists the tensors of the module, so that no later step has to look for them."""

import pytest
from torch import nn

from flatshard import ShardedWrapper
from flatshard.module.model_plan import ModelPlan
from tests.harness import allow_warnings
from tests.models import CASES, Case


def _wrapped(module: nn.Module) -> ShardedWrapper:
    with allow_warnings(UserWarning, "ShardedWrapper: no process group"):
        return ShardedWrapper(module)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_names_and_order_are_those_of_torch(case: Case) -> None:
    settings = _wrapped(nn.Linear(1, 1))._sharded_unit.settings
    model = case.build()
    plan = ModelPlan(model, settings)
    for found, expected in (
        (plan.params.items(), model.named_parameters()),
        (plan.buffers.items(), model.named_buffers()),
    ):
        assert [(name, id(tensor)) for name, tensor in found] == [
            (name, id(tensor)) for name, tensor in expected
        ]


def test_tensors_of_units_that_exist_already_are_left_out() -> None:
    inner = _wrapped(nn.BatchNorm1d(3))
    model = nn.Sequential(nn.Linear(2, 3), inner, nn.Linear(3, 2))
    plan = ModelPlan(model, inner._sharded_unit.settings)
    assert plan.wrappers == [inner]
    assert list(plan.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    # The inner unit's buffers are synchronised together with the rest, unless fewer ranks train it.
    assert list(plan.buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
