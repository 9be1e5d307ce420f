"""`norms`: those of the unwrapped model's tensors, in one collective."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatshard import CollectiveError, ShardedWrapper, collectives
from tests.combinations import every
from tests.harness import on_ranks
from tests.models import CASES
from tests.oracle import local_loss, train_steps
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns

ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


@on_ranks(4)
def test_tensor_parallel(rank: int, world_size: int) -> None:
    """The norms of the full tensors, which ranks split by tensor parallelism, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    unsplit = copy.deepcopy(plain)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(plain, mesh["tensor"], plan)
    model = ShardedWrapper(plain, process_group=mesh["data"].get_group())
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for module in (unsplit, model):
        module(batch).square().sum().backward()
    parameters = {name: p.detach() for name, p in unsplit.named_parameters()}
    gradients = {name: p.grad for name, p in unsplit.named_parameters()}
    for order in (2.0, math.inf):
        _assert_close(model.norms("param", norm_type=order), parameters, order)
        _assert_close(model.norms("grad", norm_type=order), gradients, order)


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
    case = CASES[name]
    WAYS[way].set_nodes()
    model = case.wrap(case.model(), **WAYS[way].keywords)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    assert model.norms("update") == {}
    before = {name: p.detach().clone() for name, p in _full(model).items()}
    train_steps(model, optimizer, case, rank, world_size)
    local_loss(model, case, 0, rank, world_size).backward()
    after = _full(model)
    with ShardedWrapper.summon_full_params(model, with_grads=True, writeback=False):
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    changes = {name: after[name] - before[name] for name in after}
    for order in ORDERS:
        for kind, tensors in (("param", after), ("grad", grads)):
            _assert_close(model.norms(kind, norm_type=order), tensors, order)
    _assert_close(model.norms("update"), changes, 2.0)
    assert model.norms("param").non_finite == {}
    units = model.norms("param", "unit")
    total = math.sqrt(sum(value**2 for value in units.values()))
    assert total == pytest.approx(math.sqrt(sum(_norm(p, 2) ** 2 for p in after.values())))


def _full(model: ShardedWrapper) -> dict[str, torch.Tensor]:
    with ShardedWrapper.summon_full_params(model, writeback=False):
        every = [(name, p.detach().clone()) for name, p in model.named_parameters()]
    return {n: p for n, p in every if p.is_floating_point() or p.is_complex()}


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
def test_inf_and_nan_are_named_with_their_ranks(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with ShardedWrapper.summon_full_params(model), torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = math.nan
        model.get_parameter("1.bias")[3] = math.inf
    found = model.norms("param")
    assert math.isnan(found["0.weight"])
    assert found["1.bias"] == math.inf
    assert math.isfinite(found["0.bias"])
    assert found.non_finite == {"0.weight": [0], "1.bias": [1]}
    assert model.norms("param", "unit").non_finite == {"": [0, 1]}


@pytest.mark.parametrize("kinds", [("param", "grad"), ("update", "grad"), ("param", "update")])
@on_ranks(2)
def test_ranks_ask_for_different_kinds(rank: int, world_size: int, kinds: tuple[str, str]) -> None:
    """They must not add a parameter to a gradient of the same name."""
    model = ShardedWrapper(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    model.norms("update")
    with pytest.raises(CollectiveError, match="norms of order 2"):
        model.norms(kinds[rank])


@on_ranks(2)
def test_refusals(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="'weights'"):
        model.norms("weights")
    with pytest.raises(ValueError, match="'layer'"):
        model.norms("grad", "layer")
    assert model.norms() == {}
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        model.norms()
