"""Ignored parameters stay each rank's own; the others train as with DistributedDataParallel."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatshard import ShardedWrapper, sharded_modules
from flatshard.collectives import record
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import assert_raises, naming, on_ranks, rank_0_warns
from tests.models import Composed, loss_of, vectors
from tests.oracle import ROWS, assert_same, assert_same_state, sgd, snapshot, step_and_zero
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns

LINEARS = ModuleWrapPolicy({nn.Linear})
TOLERANCE = 1e-11

CHOSEN = ("full", "full-3", "no_shard", "hybrid")
each_way = pytest.mark.parametrize("way", CHOSEN)


class Model(nn.Module):
    """``local`` is to be ignored, and parameters here and there whose siblings are not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.ones(5))
        self.shift = nn.Parameter(torch.zeros(5))
        self.local = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.fc2 = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fc3 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x)) * self.gain + self.shift
        x = torch.tanh(self.fc2(x + self.local(x)))
        return self.fc3(self.norm(x))


LOCAL = {name for name in Model().state_dict() if name.startswith("local.")}
SINGLE = {"gain", "fc2.bias"}


def _choose(model: Model, how: str) -> tuple[dict[str, Any], set[str]]:
    """Keywords, and the names of the parameters and buffers that they ignore."""
    if how == "modules":
        return {"ignored_modules": [model.local]}, LOCAL
    if how == "parameters":
        return {"ignored_states": (p for p in (model.gain, model.fc2.bias))}, SINGLE
    if how == "states":
        return {"ignored_states": [model.gain, model.local, model.fc2.bias]}, LOCAL | SINGLE
    assert how == "names"
    names = SINGLE | {"local.0.weight", "local.1.running_mean"}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return {}, names


def _build(rank: int, how: str) -> tuple[Model, dict[str, Any], set[str]]:
    """A model whose ignored parameters and buffers start otherwise on each rank."""
    torch.manual_seed(3)
    model = Model().double()
    keywords, ignored = _choose(model, how)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in ignored and value.is_floating_point():
                value.add_(0.1 * rank)
    return model, keywords, ignored


def _wrap(model: nn.Module, way: str, **keywords: Any) -> ShardedWrapper:
    WAYS[way].set_nodes()
    strategy = WAYS[way].strategy
    return ShardedWrapper(model, sharding_strategy=strategy, auto_wrap_policy=LINEARS, **keywords)


def _loss(model: nn.Module, rank: int, world_size: int, step: int) -> Tensor:
    rows = vectors(world_size * ROWS, torch.Generator().manual_seed(step))
    inputs, target = (part.double().chunk(world_size)[rank] for part in rows)
    return loss_of(model(inputs), target)


def _check_trains_like(
    plain: nn.Module, ignored: set[str], model: ShardedWrapper, rank: int, world_size: int
) -> None:
    """Train like DistributedDataParallel, which leaves the ignored tensors alone."""
    # It looks for a parameter of the root by both names, "gain" and ".gain".
    names = {*ignored, *(f".{name}" for name in ignored)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, names)
    models = model, DistributedDataParallel(plain)
    optimizers = [sgd(one) for one in models]
    for step in range(4):
        for one in models:
            _loss(one, rank, world_size, step).backward()
        step_and_zero(*optimizers)
    assert_same(model, plain, TOLERANCE, TOLERANCE)


# ---------------------------------------------------------------- training


@each_way
@on_ranks(ranks_of)
def test_training(rank: int, world_size: int, way: str) -> None:
    hows = ("modules", "parameters", "states", "names")
    for how in every(2, hows, start=list(CHOSEN).index(way)):
        with naming(how):
            model, keywords, ignored = _build(rank, how)
            wrapped = _wrap(model, way, **keywords)
            _check_trains_like(_build(rank, how)[0], ignored, wrapped, rank, world_size)


@each_way
@on_ranks(ranks_of)
def test_clipping(rank: int, world_size: int, way: str) -> None:
    """All ranks have the same rows, so that their ignored gradients are one model's."""
    for order in (2.0, float("inf")):
        plain = _build(0, "states")[0]
        model, keywords, _ = _build(0, "states")
        wrapped = _wrap(model, way, **keywords)
        optimizers = [sgd(one) for one in (plain, wrapped)]
        for step in range(2):
            for one in (plain, wrapped):
                _loss(one, 0, 1, step).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order)
            if step == 0:
                with record() as events:
                    actual = wrapped.clip_grad_norm_(0.1, order)
                assert len(events) <= 1, events
            else:
                actual = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1, order)
            assert expected > 0.1
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=0.0)
            step_and_zero(*optimizers)
        assert_same(wrapped, plain, TOLERANCE, TOLERANCE)


# ---------------------------------------------------------------- what they are


@on_ranks(2)
def test_they_stay_plain(rank: int, world_size: int) -> None:
    model, keywords, ignored = _build(rank, "states")
    params = {name: p for name, p in model.named_parameters() if name in ignored}
    names = [name for name, _ in model.named_parameters()]
    start = snapshot(model)
    wrapped = ShardedWrapper(model, auto_wrap_policy=LINEARS, **keywords)
    assert type(model.local[0]) is nn.Linear
    assert sharded_modules(model.fc2)
    assert [name for name, _ in wrapped.named_parameters()] == names
    found = dict(wrapped.named_parameters())
    for name, param in params.items():
        assert found[name] is param, name
        assert type(param) is nn.Parameter
    assert_same_state(wrapped.state_dict(), start, 0.0, 0.0)  # of this rank
    with ShardedWrapper.summon_full_params(wrapped):
        assert dict(wrapped.named_parameters())["gain"] is params["gain"]
    wrapped.float()
    assert all(p.dtype is torch.float32 for p in wrapped.parameters())
    wrapped.double()
    assert wrapped.get_parameter("gain") is params["gain"]
    wrapped.load_state_dict(start)
    assert_same_state(wrapped.state_dict(), start, 0.0, 0.0)


@on_ranks(3)
def test_other_shapes_on_each_rank(rank: int, world_size: int) -> None:
    """Only its name must agree; what a rank holds there is its own affair."""
    model = Model().double()
    pairs = [(nn.Linear(5, 9 + rank), nn.Linear(9 + rank, 5)) for _ in range(rank + 1)]
    model.local = nn.Sequential(*itertools.chain(*pairs)).double()
    model.elsewhere = nn.Linear(rank + 1, 2, device="meta")
    ignored = [model.local, model.elsewhere]
    wrapped = ShardedWrapper(model, ignored_modules=ignored, auto_wrap_policy=LINEARS)
    _loss(wrapped, rank, world_size, 0).backward()
    assert all(p.grad is not None for p in model.local.parameters())
    wrapped.clip_grad_norm_(0.1)
    state = wrapped.state_dict()
    assert state["local.0.weight"].shape == (9 + rank, 5)
    assert state["elsewhere.weight"].is_meta


# ---------------------------------------------------------------- tied weights


def _tied() -> Any:
    """``inner`` and ``local`` share a weight."""
    model = Composed(
        lambda net, x: net.head(torch.tanh(net.local(torch.tanh(net.inner(x))))),
        inner=nn.Linear(7, 7),
        local=nn.Linear(7, 7),
        head=nn.Linear(7, 3),
    )
    model.local.weight = model.inner.weight
    return model


def _list_for_ddp(model: Any, names: set[str]) -> dict[str, Any]:
    model._ddp_params_and_buffers_to_ignore = names
    return {}


@pytest.mark.parametrize("policy", [LINEARS, None], ids=["units", "one-unit"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_tied(rank: int, world_size: int, strategy: str, policy: ModuleWrapPolicy | None) -> None:
    """A tied parameter is ignored as a whole; by DDP's list only if all its names are there."""
    weights = {"inner.weight", "local.weight"}
    torch.manual_seed(3)
    plain = _tied().double()
    for how, choose, ignored in (
        ("module", lambda model: {"ignored_modules": [model.local]}, {"local.bias", *weights}),
        ("parameter", lambda model: {"ignored_states": [model.local.weight]}, weights),
        ("all names", lambda model: _list_for_ddp(model, weights), weights),
        ("one name", lambda model: _list_for_ddp(model, {"inner.weight"}), set()),
    ):
        with naming(how):
            model = copy.deepcopy(plain)
            settings = {"sharding_strategy": strategy, **choose(model)}
            wrapped = ShardedWrapper(model, auto_wrap_policy=policy, **settings)
            _check_trains_like(copy.deepcopy(plain), ignored, wrapped, rank, world_size)
            assert wrapped.local.weight is wrapped.inner.weight


@on_ranks(2)
def test_one_list_for_every_wrapper(rank: int, world_size: int) -> None:
    """What was in another part of the model was refused."""
    model, _, ignored = _build(rank, "states")
    everywhere = [model.local, model.gain, model.fc2.bias, Model().fc1]
    model.fc2 = ShardedWrapper(model.fc2, ignored_states=everywhere)
    with rank_0_warns(rank, "none of the given .* is in the wrapped Linear"):
        model.fc3 = ShardedWrapper(model.fc3, ignored_states=everywhere)
    wrapped = ShardedWrapper(model, ignored_states=everywhere)
    _check_trains_like(_build(rank, "states")[0], ignored, wrapped, rank, world_size)


# ---------------------------------------------------------------- what is refused


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    model = Model()
    for keywords, error, says in (
        ({"ignored_modules": [], "ignored_states": []}, ValueError, "ignored_modules or ignored_"),
        ({"ignored_modules": model.fc1}, TypeError, "expected an iterable of Module, got a Li"),
        ({"ignored_modules": [model.gain]}, TypeError, "got a Parameter at position 0"),
        ({"ignored_states": model.gain}, TypeError, "got a Tensor at position 0"),  # its elements
        ({"ignored_states": ["gain"]}, TypeError, "got a str at position 0"),
    ):
        assert_raises(error, says, ShardedWrapper, model, **keywords)
    model.local = ShardedWrapper(model.local)
    model.fc2 = ShardedWrapper(nn.Sequential(model.fc2))
    model.extra = nn.Linear(5, 5)
    model.extra.weight = model.local[0].weight
    for keywords, name in (
        ({"ignored_modules": [model.local]}, "local.0"),
        ({"ignored_modules": [model.local[1]]}, "local.1"),
        ({"ignored_modules": [model.fc2[0]]}, "fc2.0"),
        ({"ignored_states": [model.local[0].weight]}, "local.0"),
        ({"ignored_modules": [model.extra]}, "local.0"),
    ):
        with pytest.raises(ValueError, match=rf"parameter '{name}.weight'.*sharded it already"):
            ShardedWrapper(model, **keywords)
    del model.extra
    wrapped = ShardedWrapper(model.double(), ignored_states=[model.gain])
    _loss(wrapped, rank, world_size, 0).backward()


@on_ranks(3)
def test_ranks_that_ignore_different_things(rank: int, world_size: int) -> None:
    for odd in ("fc1", "fc2"):
        model = Model()
        ignored = [model.local] + ([model.get_submodule(odd)] if rank == 1 else [])
        expected = rf"different models.*ignored tensors is .* on rank 0, .*'{odd}'.* on rank 1"
        assert_raises(ValueError, expected, ShardedWrapper, model, ignored_modules=ignored)
    model = Model()
    expected = r"ignored tensors is \['shift'\] on rank 0, \['gain'\] on rank 1"
    with pytest.raises(ValueError, match=expected):
        ShardedWrapper(model, ignored_states=[model.gain if rank else model.shift])


@on_ranks(2)
def test_everything_ignored(rank: int, world_size: int) -> None:
    model = Model().double()
    plain = copy.deepcopy(model)
    with rank_0_warns(rank, "itself is ignored"):
        wrapped = ShardedWrapper(model, ignored_modules=[model])
    for one in (wrapped, plain):
        _loss(one, rank, world_size, 0).backward()
    for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
