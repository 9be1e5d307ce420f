"""`norms`: those of the unwrapped model's tensors, in one collective."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatshard import CollectiveError, ShardedWrapper, collectives
from tests.combinations import every
from tests.harness import assert_raises, on_ranks
from tests.side import pair
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns

ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


def _norm(tensor: torch.Tensor, order: float) -> float:
    if tensor.numel() == 0:  # torch has no largest value of nothing
        return 0.0 if order >= 0 else math.inf
    return float(torch.linalg.vector_norm(tensor.abs().double(), order))


MODELS = ("nested", "tied-across-units", "odd-shapes", "mixed-types")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("mlp", way) for way in every(2, sorted(WAYS), start=1)),
        *((name, "full-3") for name in MODELS),
    ],
)
@on_ranks(ranks_of)
def test_equal_the_full_tensors_norms(rank: int, world_size: int, name: str, way: str) -> None:
    WAYS[way].set_nodes()
    run, _ = pair(rank, world_size, way, name)
    model = run.model
    run.train()
    run.loss(0).backward()
    after = _full(model)
    with ShardedWrapper.summon_full_params(model, with_grads=True, writeback=False):
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for order in ORDERS:
        for kind, tensors in (("param", after), ("grad", grads)):
            _assert_close(model.norms(kind, norm_type=order), tensors, order)


def _full(model: ShardedWrapper) -> dict[str, torch.Tensor]:
    with ShardedWrapper.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def _assert_close(found: dict[str, float], tensors: dict[str, Any], order: float) -> None:
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name] == pytest.approx(_norm(tensor, order), rel=1e-5), (name, order)


@on_ranks(2)
def test_one_collective_and_no_rounding_to_bfloat16(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = ShardedWrapper(
        nn.Sequential(*(nn.Linear(9, 9, dtype=torch.bfloat16) for _ in range(5))),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
        coalesce_bytes=0,
    )
    with collectives.record() as events:
        found = model.norms("param")
    assert [one.kind for one in events] == ["scalars"]
    for name, tensor in _full(model).items():
        assert found[name] == pytest.approx(_norm(tensor, 2), rel=1e-5)


@on_ranks(2)
def test_inf_and_nan(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with ShardedWrapper.summon_full_params(model), torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = math.nan
        model.get_parameter("1.bias")[3] = math.inf
    found = model.norms("param")
    assert math.isnan(found["0.weight"])
    assert found["1.bias"] == math.inf
    assert math.isfinite(found["0.bias"])


@on_ranks(2)
def test_refusals(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Linear(3, 3))
    assert_raises(ValueError, "'weights'", model.norms, "weights")
    assert model.norms() == {}
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    assert_raises(RuntimeError, "no_sync", model.norms)
    # Ranks must not add a parameter to a gradient of the same name.
    model = ShardedWrapper(nn.Linear(3, 3), process_group=dist.new_group())
    model(torch.ones(2, 3)).sum().backward()
    assert_raises(CollectiveError, "norm of order 2", model.norms, "grad" if rank else "param")
