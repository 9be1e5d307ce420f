"""What users pass is read, or refused by name."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel.distributed import _MixedPrecision as DDPMixedPrecision

from flatshard import MixedPrecision, ShardingStrategy
from flatshard.options import as_strategy, resharding
from flatshard.options.precision import as_mixed_precision
from tests.harness import assert_raises

BF16, FP16 = torch.bfloat16, torch.float16


def test_torch_precision() -> None:
    """Each of torch's three dataclasses, and what its defaults mean."""
    assert as_mixed_precision(fsdp.MixedPrecision(BF16, FP16, BF16)) == MixedPrecision(
        BF16, FP16, BF16, cast_forward_inputs=False
    )
    ignoring = fsdp.MixedPrecision(_module_classes_to_ignore=[nn.LayerNorm])
    assert as_mixed_precision(ignoring).module_classes_to_ignore == (nn.LayerNorm,)
    policy = fsdp.MixedPrecisionPolicy(BF16, output_dtype=FP16)
    assert as_mixed_precision(policy) == MixedPrecision(BF16, output_dtype=FP16)
    uncast = as_mixed_precision(fsdp.MixedPrecisionPolicy(cast_forward_inputs=False))
    assert not uncast.cast_root_forward_inputs
    of_ddp = DDPMixedPrecision(BF16, buffer_dtype=FP16)
    assert as_mixed_precision(of_ddp) == MixedPrecision(BF16, buffer_dtype=FP16)


def test_bad_precision() -> None:
    for field, value in (
        ("param_dtype", torch.int8),
        ("buffer_dtype", "bf16"),
        ("gather_dtype", BF16),
        ("keep_low_precision_grads", 1),
        ("module_classes_to_ignore", nn.Linear(1, 1)),
    ):
        with pytest.raises(TypeError, match=f"MixedPrecision: {field} must .*, got"):
            MixedPrecision(**{field: value})
    assert_raises(TypeError, "expected a MixedPrecision", as_mixed_precision, BF16)
    with pytest.raises(NotImplementedError, match="param_type='low' is not supported"):
        as_mixed_precision(SimpleNamespace(param_dtype=BF16, param_type="low"))


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
    with pytest.raises(ValueError, match="always shards parameters over"):
        resharding(ShardingStrategy.HYBRID_SHARD_OP, 2)
