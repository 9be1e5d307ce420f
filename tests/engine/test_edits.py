"""Parameters and gradients edited between steps: the same as in a plain model, or a named error."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from flatshard import MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks
from tests.oracle import assert_same
from tests.side import Run, Script, pair
from tests.ways import on_ranks_each_way


def _weights(run: Run) -> list[Tensor]:
    """The original parameters as their modules show them."""
    places = product(("fc1", "fc2", "fc3"), ("weight", "bias"))
    return [getattr(run.submodule(name), attribute) for name, attribute in places]


def _numbers(like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


# ---------------------------------------------------------------- scripts


def assigned_to_data(run: Run) -> None:
    kept = torch.cat([_numbers(weight).reshape(-1) for weight in _weights(run)])
    vector_to_parameters(kept, _weights(run))
    kept.mul_(0.5)  # also changes the parameters, to whose `.data` views of it were assigned
    run.evaluate()
    for weight in _weights(run):
        weight.data.copy_(_numbers(weight, 1))
    run.evaluate()
    for weight in _weights(run):
        weight.data = weight.data * 0.5


def put_away_and_back(run: Run) -> Tensor:
    """The usual class for moving averages: what `.data` gave before holds the old values."""
    kept = [weight.data for weight in _weights(run)]
    for weight in _weights(run):
        weight.data = _numbers(weight)
    output = run.evaluate().detach()
    for weight, before in zip(_weights(run), kept, strict=True):
        weight.data = before
    return output


def exchanged(run: Run) -> None:
    twins = [weight.detach().clone().mul_(2) for weight in _weights(run)]
    for weight, twin in zip(_weights(run), twins, strict=True):
        weight.data, twin.data = twin.data, weight.data
    run.evaluate()
    for weight, twin in zip(_weights(run), twins, strict=True):
        weight.data, twin.data = twin.data, weight.data
    with torch.no_grad():
        for weight, twin in zip(_weights(run), twins, strict=True):
            weight.add_(twin)


def drawn_anew(run: Run) -> None:
    torch.manual_seed(1)
    for weight in _weights(run):
        nn.init.uniform_(weight)
        nn.init.normal_(weight, 0.1, 0.2)
        nn.init.trunc_normal_(weight, std=0.3)
        if weight.dim() == 1:
            nn.init.constant_(weight, 0.3)
            continue
        for kind in ("kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal"):
            getattr(nn.init, f"{kind}_")(weight)
        nn.init.orthogonal_(weight)


def in_inference_mode(run: Run) -> Tensor:
    run.loss(0)
    with torch.inference_mode():
        for weight in _weights(run):
            weight.mul_(0.5)
        return run.evaluate().clone()


SCRIPTS = (assigned_to_data, put_away_and_back, exchanged, drawn_anew, in_inference_mode)


@pytest.mark.parametrize(
    ("script", "world_size"), [*product(SCRIPTS, [2]), *product(every(2, SCRIPTS), [3])]
)
@on_ranks_each_way()
def test_script(rank: int, world_size: int, script: Script, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    results = []
    for run in (sharded, plain):
        run.train(20, 21)
        results.append(script(run))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert_same(sharded.model, plain.model, 1e-12)
    torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=1e-9, atol=1e-12)
    for run in (sharded, plain):
        run.train(5, 7)
    assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize("script", [assigned_to_data, put_away_and_back, exchanged])
@on_ranks(2)
def test_script_in_mixed_precision(rank: int, world_size: int, script: Script) -> None:
    """Where plain parameters do not compute themselves: the edits must reach what does."""
    precision = MixedPrecision(param_dtype=torch.float32)
    sharded, plain = pair(rank, world_size, "no_shard", mixed_precision=precision)
    for run in (sharded, plain):
        script(run)
        assert run.evaluate().abs().sum() > 0
    assert_same(sharded.model, plain.model, 1e-12)
    torch.testing.assert_close(sharded.evaluate().double(), plain.evaluate(), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- refused


@on_ranks(2)
def test_what_needs_the_whole_tensor(rank: int, world_size: int) -> None:
    """What reads is right, what writes is a named error and changes nothing on any rank."""
    kinds = RuntimeError, TypeError
    for way in ("full", "grad_op"):
        with naming(way):
            sharded, plain = pair(rank, world_size, way)
            weight = sharded.submodule("fc2").weight
            like = torch.zeros(weight.shape, dtype=weight.dtype)
            attempts: list[Callable[[], Any]] = [
                lambda w=weight: w.t().mul_(2),
                lambda w=weight: w.view(-1).mul_(2),
                lambda w=weight: w.copy_(torch.ones(3, 3)),
                lambda w=weight: w.add_(torch.ones(7)),
                lambda w=weight: setattr(w, "data", torch.ones(3, 3, dtype=w.dtype)),
                lambda w=weight, like=like: setattr(w, "data", like.float()),
                lambda w=weight, like=like: w.set_(like),
                lambda w=weight: nn.init.eye_(w),
            ]
            for read in (
                lambda w: w[0],
                lambda w: w.cumsum(0),
                lambda w: torch.stack([w, w]),
                lambda w: parameters_to_vector([w]),
                lambda w: w.div_(w.norm(dim=1, keepdim=True)).sum(),
                lambda w: torch.zeros(w.shape, dtype=w.dtype).copy_(w),
                lambda w: torch.zeros(w.shape, dtype=w.dtype).lerp_(w, 0.5),
                lambda w: w.__setitem__(0, 1.0),
                lambda w: w.__setitem__((slice(None), 1), 1.0),
                lambda w: w.index_fill_(0, torch.tensor([0]), 1.0).sum(),
            ):
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")  # once: that it is all-gathered for this
                    torch.testing.assert_close(read(weight), read(plain.submodule("fc2").weight))
            for number, attempt in enumerate(attempts):
                with naming(number), torch.no_grad(), pytest.raises(kinds, match=r"fc2\.weight"):
                    attempt()
            assert_same(sharded.model, plain.model, 1e-12)


@on_ranks(2)
def test_added_in_place_through_a_unit(rank: int, world_size: int) -> None:
    """As LoRA's merge does: Python assigns the result of `+=` to the attribute."""
    policy = ModuleWrapPolicy({nn.Linear})
    model = ShardedWrapper(nn.Sequential(nn.Linear(3, 3)), auto_wrap_policy=policy)
    before = model[0].weight.full_tensor()
    with torch.no_grad():
        model[0].weight += torch.ones(3, 1) @ torch.ones(1, 3)
    assert torch.equal(model[0].weight.full_tensor(), before + 1)


@on_ranks_each_way(2)
def test_moved_to_meta_or_replaced(rank: int, world_size: int, way: str) -> None:
    """Both raise; a replaced parameter would train on each rank by itself."""
    sharded, _ = pair(rank, world_size, way)
    assert_raises(RuntimeError, "meta", sharded.model.to, "meta")
    module = sharded.submodule("fc2")
    module.weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    for attempt in (sharded.model.float, lambda: sharded.loss(0).backward()):
        assert_raises(RuntimeError, r"'fc2\.weight'.*replaced or removed", attempt)
