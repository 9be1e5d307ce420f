"""Averages over ranks in another dtype on the wire."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import naming, run_ranks
from tests.models import CASES
from tests.oracle import assert_same_state, sgd, snapshot, train, train_steps

pytestmark = pytest.mark.by_turns


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OP", "HYBRID_SHARD_OP")
NARROW_WAYS: list[dict[str, Any]] = [
    *({"sharding_strategy": strategy} for strategy in STRATEGIES),
    {"reshard_after_forward": 2},
]


def _train_narrow_ways(
    rank: int, world_size: int, expected: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    case, ends = CASES["transformer"], []
    for keywords in NARROW_WAYS:
        with naming(keywords):
            model = case.wrap(case.model(torch.float32), wire_dtype=torch.bfloat16, **keywords)
            assert "sockets, bfloat16" in model.unit_report()
            train_steps(model, sgd(model), case, rank, world_size, dtype=torch.float32)
            ends.append(snapshot(model))
            # bfloat16 keeps 8 bits; what is sent is rounded in every step, sums are not.
            assert_same_state(ends[-1], expected, 0.0, 3e-2)
            assert any(not torch.equal(ends[-1][name], one) for name, one in expected.items())
    return ends


def test_strategies_with_a_wire_dtype() -> None:
    """Close to the unwrapped model, and the same on all ranks."""
    expected = train(CASES["transformer"], 4, dtype=torch.float32).state
    first, *others = run_ranks(_train_narrow_ways, 4, expected)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
