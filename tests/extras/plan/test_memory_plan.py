"""What a plan of memory says, against the arithmetic by hand."""

import functools

import pytest
import torch
from torch import nn

from flatshard import MixedPrecision
from flatshard.memory_plan import predict
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

WIDTH = 256
BLOCK = WIDTH * WIDTH
PSI = 5 * BLOCK


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


def test_stages_of_zero() -> None:
    """bf16 parameters and gradients, K = 12: fp32 master weights and AdamW's two tensors."""
    plain = model().bfloat16()

    def held(strategy: str, **keywords: object) -> float:
        plan = predict(
            plain,
            world_size=8,
            auto_wrap_policy=BLOCKS,
            sharding_strategy=strategy,
            optimizer_bytes=12,
            **keywords,
        )
        return plan.persistent_bytes / PSI

    assert held("NO_SHARD") == 2 + 2 + 12
    assert held("SHARD_OP") == 2 + (2 + 2 + 12) / 8
    assert held("SHARD_GRAD_OP") == held("FULL_SHARD") == (2 + 2 + 12) / 8
    assert held("HYBRID_SHARD", ranks_per_node=2) == (2 + 2 + 12) / 2
    assert held("HYBRID_SHARD_OP", ranks_per_node=2) == (2 + 2 + 12) / 8 + 2 / 2


@pytest.mark.uncoalesced  # the plan has an entry for each layer
def test_peaks_follow_the_order_of_units() -> None:
    fp32 = 4
    plan = predict(model(), world_size=4, auto_wrap_policy=BLOCKS)
    assert [unit.name for unit in plan.units] == ["0", "1", "2", "3", ""]
    # At the peak, three units are unsharded: the unit whose backward ends, the unit whose backward
    # runs, and the next unit. The root is sharded again, because backward computes the root's only
    # gradient first.
    assert plan.peak_gathered_bytes == fp32 * 3 * BLOCK
    # Three reductions under way, each with a gradient and the result, and two earlier results.
    assert plan.peak_gradient_bytes == fp32 * (3 * 1.25 + 2 * 0.25) * BLOCK
    kept = predict(
        model(), world_size=4, auto_wrap_policy=BLOCKS, sharding_strategy="SHARD_GRAD_OP"
    )
    assert kept.peak_gathered_bytes == fp32 * PSI
    whole = predict(model(), world_size=4)
    assert whole.peak_gathered_bytes == fp32 * PSI
    replicated = predict(model(), world_size=4, sharding_strategy="NO_SHARD")
    assert replicated.peak_gathered_bytes == 0
    assert replicated.persistent_bytes == 16 * PSI
    # Small gradients are copied into the buffer of the reduction. During the copy, the gradients
    # need memory twice.
    assert replicated.peak_gradient_bytes == fp32 * 2 * PSI
    assert replicated.peak_bytes == (16 + fp32) * PSI


@pytest.mark.uncoalesced  # the plan has an entry for each layer
def test_precision_lowers_what_is_gathered_and_reduced() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan = predict(model(), world_size=4, auto_wrap_policy=BLOCKS, mixed_precision=precision)
    assert plan.persistent_bytes == 16 * PSI / 4
    assert plan.peak_gathered_bytes == 2 * 3 * BLOCK
    assert plan.units[0].whole_gradient_bytes == 4 * BLOCK


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
    assert plan.peak_gathered_bytes == 4 * (3 * 64 * 64 + 1024)
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
