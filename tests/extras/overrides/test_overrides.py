"""Modules and parameters in another dtype than their policy's, by name.

The oracle is that of the tests of the plain policy: a model that casts by hand.
"""

from typing import Any

import pytest
import torch
from torch import nn

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.extras.plan.shards import plan_flats
from flatshard.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness import assert_raises, naming, on_ranks, rank_0_warns
from tests.models import CASES, Mlp
from tests.precision import masters
from tests.precision.masters import BF16, FP32, NORMS, ROUTED, Layer, assert_bitwise, trained
from tests.ways import BASIC

FULL_PRECISION = ("norm", "router", "gain")
WIDE = {"layers.*.router": FP32, "*.gain": FP32}
NORM_CLASSES = (nn.BatchNorm1d, nn.LayerNorm)
POLICY = MixedPrecision(BF16, module_classes_to_ignore=NORM_CLASSES, overrides=WIDE)


@pytest.mark.parametrize(
    "value", [[("norm", BF16)], {"norm": torch.int8}, {1: BF16}, lambda param: BF16]
)
def test_bad_overrides(value: Any) -> None:
    with pytest.raises(TypeError, match=r"MixedPrecision: overrides must .*, got"):
        MixedPrecision(overrides=value)


@on_ranks(2)
def test_norms_and_routers_in_full_precision(rank: int, world_size: int) -> None:
    def dtype_of(name: str) -> torch.dtype:
        return FP32 if any(part in name for part in FULL_PRECISION) else BF16

    by_hand = masters.routed_by_hand((*NORMS, "router"))
    expected = masters.trained_by_hand(ROUTED, by_hand, dtype_of, dtype_of)
    for name, way in BASIC.items():
        model = ROUTED.wrap(ROUTED.model(FP32), **way.keywords, mixed_precision=POLICY)
        # One flat parameter for what is in bfloat16, one for all that is not.
        assert [h.buffer.dtype for h in model.layers[0]._sharded_unit.handles] == [FP32, BF16]
        with naming(name):
            assert_bitwise(trained(ROUTED, model, rank), expected)

    # A unit of its own that is to be ignored, and one with a policy of its own.
    units = CustomPolicy(
        lambda module: (
            {"mixed_precision": MixedPrecision(BF16)}
            if isinstance(module, nn.Linear) and module.in_features == 7
            else isinstance(module, nn.LayerNorm | Layer)
        )
    )
    model = ShardedWrapper(ROUTED.model(FP32), auto_wrap_policy=units, mixed_precision=POLICY)
    assert_bitwise(trained(ROUTED, model, rank), expected)

    # By the names of parameters; modules cast for themselves.
    wide = {name: FP32 for name, _ in by_hand.named_parameters() if dtype_of(name) is FP32}
    policy = MixedPrecision(BF16, module_classes_to_ignore=(), overrides=wide)
    by_hand.zero_grad()
    by_hand.load_state_dict(ROUTED.model(FP32).state_dict())
    model = ROUTED.wrap(by_hand.train(), mixed_precision=policy)
    assert_bitwise(trained(ROUTED, model, rank), expected)


@pytest.mark.uncoalesced  # the plan has an entry for each layer
def test_predicted_memory() -> None:
    """A module with an override is all-gathered in the dtype of its own."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(3)))
    policy = MixedPrecision(BF16, overrides={"1.*": FP32})
    blocks = ModuleWrapPolicy({nn.Linear})
    _, flats = plan_flats(model, world_size=4, auto_wrap_policy=blocks, mixed_precision=policy)
    assert [flat.gathered_bytes // 64**2 for flat in flats] == [2, 4, 2]


@on_ranks(2)
def test_what_is_said(rank: int, world_size: int) -> None:
    def wrap(model: nn.Module, overrides: Any) -> ShardedWrapper:
        return ShardedWrapper(model, mixed_precision=MixedPrecision(BF16, overrides=overrides))

    with rank_0_warns(rank, r"overrides names 'fc9\.\*', which matches no"):
        wrap(Mlp(), {"fc9.*": FP32})
    tied = CASES["tied-in-unit"].model(FP32)
    match = r"'embed.weight' and 'head.weight' are tied, but are to be unsharded in param_dtype and"
    assert_raises(ValueError, match, wrap, tied, {"head": FP32})
    with pytest.raises(ValueError, match="the ranks build different models"):
        wrap(Mlp(), {"*.weight": FP32} if rank else {})
