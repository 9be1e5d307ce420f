"""What a plan of memory says of units that are not usual."""

import functools

import pytest
import torch
from torch import nn

from flatshard.memory_plan import predict
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

WIDTH = 256
BLOCK = WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def model() -> nn.Sequential:
    with torch.device("meta"):
        blocks = [Block() for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH, bias=False))


BLOCKS = ModuleWrapPolicy({Block})


def test_frozen_tied_and_overridden_units() -> None:
    plain = model()
    plain[0].requires_grad_(False)
    plain[1].linear.weight = plain[2].linear.weight  # the root has it then, once
    policy = CustomPolicy(
        lambda module: isinstance(module, Block) and {"sharding_strategy": "NO_SHARD"}
    )
    plan = predict(plain, world_size=2, auto_wrap_policy=policy)
    by_name = {unit.name: unit for unit in plan.units}
    assert list(by_name) == ["0", "3", ""]
    assert plan.numel == 4 * BLOCK
    assert by_name[""].numel == 2 * BLOCK
    assert by_name["0"].gradient_bytes == by_name["0"].optimizer_bytes == 0
    assert by_name["3"].parameter_bytes == 4 * BLOCK
    assert by_name["3"].gathered_bytes == 0
    assert by_name[""].parameter_bytes == 4 * BLOCK


@pytest.mark.uncoalesced  # the plan has an entry for each layer
def test_units_around_units_stay_gathered() -> None:
    with torch.device("meta"):
        outer = nn.Sequential(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=64 * 64)
    nested = CustomPolicy(lambda module: isinstance(module, nn.Linear) or module is outer[0])
    outer[0].register_parameter("scale", nn.Parameter(torch.empty(1024, device="meta")))
    plan = predict(outer, world_size=2, auto_wrap_policy=nested)
    assert plan.peak_gathered_bytes == 4 * (2 * 64 * 64 + 1024)
    assert predict(outer, world_size=2, auto_wrap_policy=policy).numel == plan.numel


def test_table_and_refusals() -> None:
    text = str(predict(model(), world_size=2, auto_wrap_policy=BLOCKS))
    assert text.splitlines()[0].split() == [
        *("unit", "elements", "parameters", "gradients", "optimizer", "unsharded")
    ]
    assert "each rank: persistent memory 2.6 MB" in text
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        predict(model(), world_size=0)
    for size in (None, 3):
        with pytest.raises(ValueError, match=f"HYBRID_SHARD needs ranks_per_node.* got {size}"):
            predict(model(), world_size=4, sharding_strategy="HYBRID_SHARD", ranks_per_node=size)
    with pytest.raises(TypeError, match="auto_wrap_policy"):
        predict(model(), world_size=4, auto_wrap_policy=3)
