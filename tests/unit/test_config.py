"""What users pass is read, or refused by name."""

from typing import Any

import pytest
import torch
from torch.distributed import fsdp

from flatshard import MixedPrecision, ShardingStrategy
from flatshard.config import as_strategy, resharding
from flatshard.precision import as_mixed_precision

BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", [fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy])
def test_torch_precision(kind: Any) -> None:
    assert as_mixed_precision(kind(param_dtype=BF16)) == MixedPrecision(BF16)
    assert as_mixed_precision(kind(cast_forward_inputs=False)) == MixedPrecision()


def test_inputs_are_always_cast() -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    with pytest.raises(NotImplementedError, match="cast_forward_inputs=False"):
        as_mixed_precision(policy)


def test_fields_without_support() -> None:
    for field in ({"buffer_dtype": BF16}, {"cast_root_forward_inputs": False}):
        with pytest.raises(NotImplementedError, match=next(iter(field))):
            as_mixed_precision(fsdp.MixedPrecision(param_dtype=BF16, **field))


@pytest.mark.parametrize("strategy", fsdp.ShardingStrategy)
def test_torch_strategies(strategy: fsdp.ShardingStrategy) -> None:
    assert as_strategy(strategy).name == strategy.name.removeprefix("_")


def test_reshard_after_forward() -> None:
    full, hybrid = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD
    assert resharding(full, False)[0] is ShardingStrategy.SHARD_GRAD_OP
    assert resharding(hybrid, False)[0] is ShardingStrategy.HYBRID_SHARD_ZERO2
    assert resharding(full, True) == (full, full.placement)
    strategy, placement = resharding(hybrid, 4)
    assert strategy is hybrid
    assert placement.regather_size == 4
    assert not resharding(ShardingStrategy.HYBRID_SHARD_OP, False)[1].reshard_after_forward
    with pytest.raises(ValueError, match="keeps a part"):
        resharding(ShardingStrategy.HYBRID_SHARD_OP, 2)
