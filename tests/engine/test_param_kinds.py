"""One unit with parameters of several kinds: dtypes, frozen ones, and any strides."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper, ShardingStrategy
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import on_ranks, run_ranks
from tests.models import Case, vectors
from tests.oracle import Trained, assert_same_state, change_all, sgd, snapshot, train, train_steps

pytestmark = pytest.mark.by_turns

Strides = dict[str, tuple[int, ...]]

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_WAY = list(itertools.product(STRATEGIES, [1, 2, 3]))

# Part of the model is in float32.
TOLERANCE = 1e-6


class Zoo(nn.Module):
    """Parameters of every kind in one module; notes their strides while it computes."""

    def __init__(self) -> None:
        super().__init__()
        double: Any = {"dtype": torch.float64}
        last, last_3d = torch.channels_last, torch.channels_last_3d
        self.scale = nn.Parameter(torch.tensor(1.5, **double))
        self.nothing = nn.Parameter(torch.empty(0, 7, **double))
        self.fc = nn.Linear(7, 12, **double)
        self.fc.bias.requires_grad_(False)
        self.single = nn.Linear(12, 12)
        self.conv = nn.Conv2d(3, 4, 2, **double).to(memory_format=last)
        self.point = nn.Conv2d(4, 4, 1, bias=False, **double).to(memory_format=last)
        self.volume = nn.Conv3d(4, 6, 1, **double).to(memory_format=last_3d)
        self.still = nn.Conv2d(3, 4, 2, bias=False, **double).to(memory_format=last)
        self.still.requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(4, 6, **double).t())
        self.permuted = nn.Parameter(torch.randn(2, 2, 6, **double).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(4, 8, **double)[:, ::2])
        self.repeated = nn.Parameter(torch.randn(1, 4, **double).expand(6, 4), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, 4, dtype=torch.complex128).t())
        self.swap = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.seen: Strides = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = strides_of_parameters(self)
        x = x.double()
        x = torch.tanh(self.fc(x) * self.scale) + F.linear(x, self.nothing).sum()
        x = self.single(x.float()).double().view(-1, 3, 2, 2)
        x = torch.tanh(self.conv(x) + F.conv2d(x, self.still.weight))
        x = torch.tanh(self.volume(self.point(x)[..., None])).flatten(1)
        x = torch.tanh(x @ self.transposed + x @ self.permuted.flatten(1) + x @ self.repeated)
        return ((x @ self.gaps).to(torch.complex128) @ self.phase).real[:, self.swap]


def strides_of_parameters(model: nn.Module) -> Strides:
    return {name: p.stride() for name, p in model.named_parameters()}


def kept_strides(model: nn.Module) -> Strides:
    """The strides that a wrapped model has: overlaps and gaps go."""
    return {name: torch.empty_like(p).stride() for name, p in model.named_parameters()}


ZOO = Case("zoo", Zoo, vectors)
# float32 batches: the model itself says what it computes in.
DTYPE = torch.float32


def _zoo() -> nn.Module:
    return ZOO.model(DTYPE)


def _wrap(model: nn.Module, strategy: str, **keywords: Any) -> Any:
    return ShardedWrapper(model, sharding_strategy=ShardingStrategy[strategy], **keywords)


def _train_zoo(rank: int, world_size: int, strategy: str) -> Trained:
    expected = kept_strides(_zoo())
    model = _wrap(_zoo(), strategy)
    losses = train_steps(model, sgd(model), ZOO, rank, world_size, dtype=DTYPE)
    assert model.module.seen == expected
    assert strides_of_parameters(model) == expected
    state = snapshot(model)
    assert {name: t.stride() for name, t in model.state_dict().items()} == expected

    # What was loaded is what is saved, from any strides.
    for saved in (state, {name: t.contiguous() for name, t in state.items()}):
        with ShardedWrapper.summon_full_params(model):
            change_all(model.module, Tensor.zero_)
        model.load_state_dict(saved)
        assert_same_state(snapshot(model), state, rtol=0.0, atol=0.0)
    return Trained(state, losses)


@pytest.mark.parametrize(("strategy", "world_size"), EVERY_WAY)
def test_same_numbers_and_strides(strategy: str, world_size: int) -> None:
    expected = train(ZOO, world_size, dtype=DTYPE)
    results = run_ranks(_train_zoo, world_size, strategy)
    for trained in results:
        assert_same_state(trained.state, expected.state, rtol=0.0, atol=TOLERANCE)
    losses = [sum(ranks) / world_size for ranks in zip(*(r.losses for r in results), strict=True)]
    assert losses == pytest.approx(expected.losses, rel=1e-6, abs=TOLERANCE)


# ---------------------------------------------------------------- everything that takes or gives


def _make_dense(model: nn.Module) -> None:
    """What overlaps cannot be written, and what has gaps draws random numbers in another order."""
    for param in model.parameters():
        param.data = torch.empty_like(param).copy_(param)


def _add_numbers(model: nn.Module) -> None:
    """Add to every element another number."""
    with torch.no_grad():
        for param in model.parameters():
            if param.dtype.is_floating_point:
                param.add_(torch.arange(param.numel()).to(param.dtype).view(param.shape) / 100)


def _assert_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = getattr(param, "full_tensor", param.detach)()
        assert torch.equal(whole, expected), name
        assert whole.stride() == param.stride(), name


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_operations_on_sharded_parameters(rank: int, world_size: int, strategy: str) -> None:
    plain, model = _zoo(), _wrap(_zoo(), strategy)
    _make_dense(plain)
    assert strides_of_parameters(model) == strides_of_parameters(plain)
    _assert_same_parameters(model, plain)

    def both(edit: Callable[[nn.Parameter], object]) -> None:
        for one in (plain, model):
            torch.manual_seed(7)
            with torch.no_grad():
                for param in one.parameters():
                    if param.is_floating_point():
                        edit(param)
        _assert_same_parameters(model, plain)

    def values(param: Tensor) -> Tensor:
        return torch.arange(param.numel(), dtype=param.dtype).reshape(param.shape)

    both(lambda p: p.normal_())
    both(lambda p: p.copy_(values(p)))
    both(lambda p: p.mul_(values(p) + 0.5))
    both(lambda p: p.add_(torch.arange(p.shape[-1] if p.dim() else 1).to(p.dtype).squeeze()))
    both(lambda p: p.copy_(torch.rand_like(p)))
    both(lambda p: p.copy_(p.detach().clone() * 2))
    both(lambda p: setattr(p, "data", values(p) / 100))
    inputs, _ = ZOO.batch(0, 4, DTYPE)
    torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-6, atol=TOLERANCE)
    # What was assigned is contiguous: copied where there are shards, as of a plain model elsewhere.
    is_sharded = hasattr(model.scale, "full_tensor")
    assert model.module.seen == (kept_strides(_zoo()) if is_sharded else kept_strides(plain))
    both(lambda p: setattr(p, "grad", values(p)))
    model.double()
    assert_same_state(snapshot(model), snapshot(plain.double()), rtol=0.0, atol=0.0)
    assert strides_of_parameters(model) == kept_strides(_zoo())


@pytest.mark.parametrize(("strategy", "world_size"), EVERY_WAY[1::2])
@on_ranks()
def test_summon_copy_convert(rank: int, world_size: int, strategy: str) -> None:
    plain, model = _zoo(), _wrap(_zoo(), strategy)
    expected = kept_strides(plain)
    with ShardedWrapper.summon_full_params(model):
        assert strides_of_parameters(model.module) == expected
        for param, original in zip(model.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, original)
        _add_numbers(model.module)
    _make_dense(plain)
    _add_numbers(plain)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert_same_state(snapshot(one), snapshot(plain), rtol=0.0, atol=0.0)
        inputs, _ = ZOO.batch(0, 4, DTYPE)
        output = one(inputs)
        assert one.module.seen == expected
        torch.testing.assert_close(output, plain(inputs), rtol=1e-6, atol=TOLERANCE)
        # A conversion of the dtype leaves the order alone.
        assert {name: t.stride() for name, t in one.float().state_dict().items()} == expected
        assert_same_state(snapshot(one), snapshot(copy.deepcopy(plain).float()), rtol=0.0, atol=0.0)


# ---------------------------------------------------------------- other formats


@on_ranks(2)
def test_ranks_that_differ_in_format(rank: int, world_size: int) -> None:
    model = nn.Conv2d(3, 4, 2)
    if rank == 1:
        model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"'weight'.*strides \(12, 4, 2, 1\).*\(12, 1, 6, 3\)"):
        ShardedWrapper(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_conversion_keeps_the_memory_format(rank: int, world_size: int, strategy: str) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 1))
    model = _wrap(module, strategy, auto_wrap_policy=ModuleWrapPolicy({nn.Conv2d}))
    before = snapshot(model)
    model.to(torch.float64, memory_format=torch.channels_last)
    assert model[0].weight.dtype == torch.float64
    assert model[0].weight.stride() == (12, 4, 2, 1)
    assert_same_state(snapshot(model.float()), before, rtol=0.0, atol=0.0)


@on_ranks(2)
def test_conversion_to_the_format_it_has(rank: int, world_size: int) -> None:
    """Weights with sizes of one, whose strides tell little, among them."""
    layers = [nn.Conv2d(3, 4, 2), nn.Conv2d(1, 4, 1), nn.Conv2d(1, 1, (2, 1)), nn.Conv2d(4, 1, 1)]
    model = nn.ModuleList(layers).to(memory_format=torch.channels_last)
    wrapped = ShardedWrapper(model).to(memory_format=torch.channels_last)
    weights = [param for param in wrapped.parameters() if param.dim() == 4]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in weights)


@pytest.mark.parametrize("collectives", ["auto", "sockets", "native"])
@on_ranks(2)
def test_lazy_conjugates(rank: int, world_size: int, collectives: str) -> None:
    """Views that are conjugated lazily keep their values where they are saved, sent and read."""
    for numel in (6, (1 << 17) + 2):  # the larger one's gradients stay where autograd made them
        plain, wrapped = _Complex(numel), _Complex(numel)
        sharded = ShardedWrapper(wrapped, auto_wrap_policy=None, collectives=collectives)
        batches = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(1))
        torch.stack([plain(x) for x in batches]).mean().backward()
        sharded(batches[rank]).backward()
        with ShardedWrapper.summon_full_params(sharded, with_grads=True):
            for param, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
                assert expected.grad is not None
                torch.testing.assert_close(param.grad, expected.grad.resolve_conj().resolve_neg())


class _Complex(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phase = nn.Parameter(torch.randn(numel, dtype=torch.complex64))
        self.turn = nn.Parameter(torch.randn(numel, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(numel))

    def forward(self, x: Tensor) -> Tensor:
        # The conjugate itself is saved, and one gradient is a conjugate, another a negative.
        product = x * (self.phase * self.phase.conj() * self.turn.conj()).imag
        alone = (x * self.turn.conj()).imag + torch.complex(x, self.real).conj().imag
        return (product + alone).mean()
