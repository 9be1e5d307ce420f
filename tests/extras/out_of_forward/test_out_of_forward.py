"""Parameters that are used outside of their unit's forward: right, as in an unwrapped model."""

import contextlib
import copy
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from flatshard import CollectiveError, ShardedWrapper
from flatshard.options.extras import default_extra
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import assert_same, assert_same_state, snapshot, step_and_zero
from tests.outcomes import QUICK
from tests.ways import BASIC, WAYS, on_ranks_each_way

D = 6
Use = Callable[["Parent", Tensor], Tensor]


class Child(nn.Linear):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(D, D)


class Chain(nn.Sequential):
    """A unit whose modules the parent calls one by one."""


class Parent(nn.Module):
    """Uses its children as ``use`` says."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use
        self.first = nn.Linear(D, D)
        self.child, self.other = Child(), Child()
        self.chain = Chain(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D), nn.Embedding(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.other(self.use(self, x).tanh())


def _calls_all(model: Parent, x: Tensor) -> Tensor:
    for layer in list(model.chain)[:3]:
        x = layer(x)
    return x + model.chain[3](torch.tensor([1, 2, 1])).sum(0)


def _again(model: Parent, x: Tensor) -> Tensor:
    """Before its own forward, after, and the parameter held from before."""
    bias = model.child.bias
    x = model.child(x * model.child.bias) * bias
    return model.child(x) @ model.child.weight


def _without_gradients(model: Parent, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, model.child.weight) * model.other.bias
    return model.child(x + y) * model.other.weight.detach().t()[0] + model.other.weight.data[1]


def _scaled(model: Parent, x: Tensor) -> Tensor:
    """Every rank has a mean of its own, so these are no parts of one tensor."""
    return x + (model.child.weight * x.mean()).sum() + (x.detach()[0] * model.child.bias).sum()


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as in guided-diffusion, or with ``saves`` the adjoint method of torchdiffeq."""

    @staticmethod
    def forward(ctx: Any, run: Any, saves: bool, unused: bool, x: Tensor, *params: Tensor) -> Any:
        ctx.run, ctx.kept = run, None if saves else (x, *params)
        ctx.allows_unused = unused
        ctx.save_for_backward(*((x, *params) if saves else ()))
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.kept or ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        # Without `allow_unused`, as a program has it that uses all parameters.
        asks = {"allow_unused": True} if ctx.allows_unused else {}
        grads = torch.autograd.grad(output, [x, *params], gradient, **asks)
        return None, None, None, *grads


def _own_checkpoint(m: Parent, x: Tensor, *, saves: bool, unused: bool) -> Tensor:
    params = [*m.child.parameters(), *m.chain[0].parameters()]
    params += m.chain[2].parameters() if unused else ()

    def run(y: Tensor) -> Tensor:
        return F.linear(m.child(y), m.child.weight) + m.chain[0](y) * m.child.weight.sum()

    result: Tensor = OwnCheckpoint.apply(run, saves, unused, x, *params)
    return result


class XDropout(torch.autograd.Function):
    """As older versions of DeBERTa have it: the gradient is a full tensor, of this rank's batch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        mask = torch.empty_like(weight).bernoulli_(0.3).to(torch.bool)
        ctx.save_for_backward(mask)
        return weight.masked_fill(mask, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(*ctx.saved_tensors, 0)


USES: dict[str, Use] = {
    "linear": lambda m, x: F.linear(x, m.child.weight, m.child.bias),
    "elementwise": lambda m, x: x * m.child.bias + m.child.bias.expand(len(x), -1),
    "views": lambda m, x: x @ m.child.weight.t()[:, :D] + m.child.weight[2] + m.child.weight.T[3],
    "joined": lambda m, x: F.linear(x, torch.cat([m.child.weight, m.other.weight]))[:, 2 : D + 2],
    "of two": lambda m, x: x @ (m.child.weight * m.child.bias),
    "computed": lambda m, x: F.linear(x, 0.5 * m.child.weight + (1 + m.child.weight).abs()),
    "reductions": lambda m, x: x * m.child.weight.abs().mean() + m.child.weight.sum(0),
    "embedding": lambda m, x: x + F.embedding(torch.tensor([1, 2]), m.child.weight).mean(0),
    "normalised": lambda m, x: F.linear(
        x, m.child.weight / m.child.weight.norm(dim=1, keepdim=True)
    ),
    "again": _again,
    "iterated": _calls_all,
    "scaled": _scaled,
    "without gradients": _without_gradients,
    "checkpointed": lambda m, x: checkpoint(
        lambda y: F.linear(y, m.child.weight) + m.chain[0](y), x, use_reentrant=False
    ),
    "reentrant": lambda m, x: checkpoint(
        lambda y: F.linear(y, m.child.weight) + m.chain[0](y), x, use_reentrant=True
    ),
    "frozen": lambda m, x: F.linear(x * m.child.bias, m.child.weight) + m.child(x),
    # The program's own checkpoints, whose backwards ask for gradients of sharded parameters.
    "kept": partial(_own_checkpoint, saves=False, unused=False),
    "saved": partial(_own_checkpoint, saves=True, unused=False),
    "unused": partial(_own_checkpoint, saves=True, unused=True),
    # Each rank draws for its batch, and for whole parameters. Every layer of DeBERTa reads, and
    # drops entries of, one embedding.
    "dropout": lambda m, x: F.linear(
        F.linear(x, F.dropout(m.child.weight, 0.3)).tanh(), F.dropout(m.child.weight, 0.3)
    ),
    "noise": lambda m, x: F.linear(x, m.child.weight + torch.randn_like(m.child.weight)),
    "mask": lambda m, x: F.linear(
        x, m.child.weight * torch.empty_like(m.child.weight).bernoulli_(0.7)
    ),
    "function": lambda m, x: F.linear(x, XDropout.apply(m.child.weight)),
    "computed draw": lambda m, x: F.linear(x, F.dropout(0.5 * m.child.weight, 0.3) / 2),
    "checkpointed draw": lambda m, x: checkpoint(
        lambda y: F.linear(y, F.dropout(m.child.weight, 0.3)), x, use_reentrant=False
    ),
    "own forward": lambda m, x: m.child(x) @ F.dropout(m.child.weight, 0.3),
    "norm": lambda m, x: F.linear(x, m.child.weight / m.child.weight.norm()),
}


def _wrap(model: nn.Module, way: str, *units: type[nn.Module], **others: Any) -> ShardedWrapper:
    policy = ModuleWrapPolicy(units or (Child, Chain))
    keywords = {**WAYS[way].keywords, **others}
    return ShardedWrapper(model.double(), auto_wrap_policy=policy, coalesce_bytes=0, **keywords)


def _quiet() -> contextlib.AbstractContextManager[None]:
    return allow_warnings(UserWarning, ".*outside of the unit's forward")


Step = Callable[[Any, Tensor], Tensor]


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def _train(model: Any, loss: Step, ranks: list[int], steps: int = 3) -> list[float]:
    """Train; with several ranks, on the average of their losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        total = sum(loss(model, _batch(step, rank)) for rank in ranks) / len(ranks)
        total.backward()
        step_and_zero(optimizer)
        losses.append(total.item())
    return losses


def _loss(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(int(x[0, 0].item() * 1e6))  # other numbers on each rank
    return model(x).pow(2).mean()


def _compare(rank: int, world: int, way: str, make: Callable[[], nn.Module], loss: Step) -> None:
    torch.manual_seed(0)
    sharded = _wrap(make(), way)
    torch.manual_seed(0)
    plain = make().double()
    with _quiet():
        _train(sharded, loss, [rank])
    _train(plain, loss, list(range(world)))
    assert_same(sharded, plain, 1e-12)


@pytest.mark.parametrize(
    ("way", "is_checkpointed"),
    [*((way, False) for way in BASIC), ("full", True), ("no_shard", True)],
)
@on_ranks(2)
def test_uses_of_a_child(rank: int, world: int, way: str, is_checkpointed: bool) -> None:
    """A module may compute with the parameters of its child in every way."""
    nth = 1 if way == "full" else 2  # the usual way meets all
    for name, use in every(nth, USES.items(), start=list(BASIC).index(way)):

        def make(name: str = name, use: Use = use) -> nn.Module:
            model = Parent(partial(checkpoint, use, use_reentrant=False))
            model.use = model.use if is_checkpointed else use
            model.child.requires_grad_(name != "frozen")
            return model

        with naming(name):
            _compare(rank, world, way, make, _loss)


@on_ranks(2)
def test_refused_gradients_of_parameters(rank: int, world: int) -> None:
    """Without `allow_unused=True`, an unused parameter raises, as in torch.

    `torch.autograd.grad` of sharded parameters raises outside of a backward, also under `no_grad`.
    """

    def use(m: Parent, x: Tensor) -> Tensor:
        params = (*m.child.parameters(), *m.chain[2].parameters())
        result: Tensor = OwnCheckpoint.apply(m.child, True, False, x, *params)
        return result

    for model in (Parent(use).double(), _wrap(Parent(use), "full")):
        with _quiet(), pytest.raises(RuntimeError, match="not have been used in the graph"):
            _loss(model, _batch(0, rank)).backward()
    with _quiet():
        loss = _loss(model, _batch(0, rank))
    with torch.no_grad(), pytest.raises(RuntimeError, match="do not support sharded parameters"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


class Encoder(nn.Module):
    """No unit: what it holds besides its children is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, D))
        self.scale = nn.Parameter(torch.ones(D))
        self.embed = nn.Embedding(5, D)
        self.child, self.norm = Child(), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start.expand(len(x), -1) + self.embed(torch.tensor([1, 2, 2, 3]))
        return self.norm(self.child(x)) * (1 + self.scale)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), Child(), nn.Linear(D, D)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        encoded = self.encoder(x) if encoded is None else encoded
        return self.head(self.decoder(encoded.tanh()))

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """As encoder-decoders do: the encoder once, then the model many times."""
        encoded = self.encoder(x)
        for _ in range(3):
            x = self(x, encoded=encoded)
        return self.head(x)


def _apart(model: Any, x: Tensor) -> Tensor:
    """Parts of the model are called, not the model; the first of them is a unit."""
    return model.head(model.decoder(model.encoder(model.decoder(x)))).pow(2).mean()


def _halves(model: Any, x: Tensor) -> Tensor:
    return model(x, encoded=model.encoder(x)).pow(2).mean() + model.encoder.norm(x).mean()


def _checkpointed(model: Any, x: Tensor) -> Tensor:
    parts, x = nn.Sequential(model.decoder, model.encoder, model.head), x.clone().requires_grad_()
    return sum(checkpoint(parts, x, use_reentrant=is_old).pow(2).mean() for is_old in (False, True))


@on_ranks_each_way(2)
def test_direct_calls_of_parts(rank: int, world: int, way: str) -> None:
    for loss in (_apart, _halves, _checkpointed):
        _compare(rank, world, way, Pair, loss)
    torch.manual_seed(0)
    plain = Pair().double()
    sharded = _wrap(copy.deepcopy(plain), way)
    x = _batch(0, rank)
    with _quiet():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for call in (
                    lambda model: model.generate(x),
                    lambda model: model.encoder(x),
                    lambda model: model.head(model.encoder.norm(x)),
                    lambda model: F.linear(x, 0.5 * model.head.weight) + model.head.weight[2:3],
                ):
                    torch.testing.assert_close(call(sharded), call(plain), rtol=0, atol=1e-12)
        # Accumulated, and reduced with what comes after.
        with sharded.no_sync():
            _halves(sharded, x).backward()
        _train(sharded, _apart, [rank], 2)
    (sum(_halves(plain, _batch(0, other)) for other in range(world)) / world).backward()
    _train(plain, _apart, list(range(world)), 2)
    assert_same(sharded, plain, 1e-12)


@on_ranks(2)
def test_writes_are_refused(rank: int, world: int) -> None:
    """What is read outside of forward is a copy: an edit of it would be lost."""

    def edit_in_forward(model: Parent, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.child.weight[0].mul_(2)
        return model.child(x)

    def edit_alias_in_forward(model: Parent, x: Tensor) -> Tensor:
        model.child.weight.data[0].zero_()
        return model.child(x)

    def replace_in_forward(model: Parent, x: Tensor) -> Tensor:
        x = model.child.weight[0] + x
        model.child.weight = nn.Parameter(torch.zeros(D, D).double())
        return x

    edits: list[Callable[[Tensor], object]] = [
        lambda weight: weight[0].zero_(),
        lambda weight: weight.t()[1:].add_(1),
        lambda weight: weight.view(-1).copy_(torch.zeros(D * D)),
        lambda weight: torch.add(torch.ones(D).double(), 1, out=weight.detach()[1]),
        lambda weight: F.relu(weight[1], inplace=True),
        lambda weight: weight.clone()[0].zero_(),
    ]
    sharded = _wrap(Parent(lambda m, x: m.child(x)), "full")
    before = snapshot(sharded)
    with _quiet():
        with torch.no_grad():
            for edit in edits:
                assert_raises(RuntimeError, "full_tensor|summon_full", edit, sharded.child.weight)
        assert_same_state(snapshot(sharded), before, 0.0, 0.0)
        statistics: list[Callable[[Any], object]] = [  # written without a new version
            lambda m: F.batch_norm(x, m.child.bias, m.other.bias, training=True),
            lambda m: F.batch_norm(x, m.child.weight.data[0], m.other.bias.data, training=True),
            lambda m: torch.ops.aten.rrelu_with_noise(x[0], m.child.bias, training=True),
        ]
        x = _batch(0, 0)
        for edit in statistics:
            inside = _wrap(Parent(lambda m, x, edit=edit: edit(m) and m.child(x)), "full")
            with torch.no_grad():
                assert_raises(RuntimeError, "summon_full_params", edit, sharded)
                assert_raises(RuntimeError, "summon_full_params", inside, x)
        assert_raises(ValueError, "read-only", sharded.child.weight.data[0].numpy().fill, 0)
        row = sharded.child.weight.data[0]
        sharded.child.weight.data.mul_(2)
        assert_raises(RuntimeError, "reads a view that was taken outside of forward", row.sum)
        for use in (edit_in_forward, edit_alias_in_forward, replace_in_forward):
            changed = _wrap(Parent(use), "full")
            assert_raises(RuntimeError, r"edit|replaced", changed, _batch(0, rank))


@on_ranks(2)
def test_views_that_require_gradients(rank: int, world: int) -> None:
    """Writes to them raise, so do reads after a step, and autograd treats them as plain views."""

    def hooked(weight: Tensor) -> object:
        row, seen = weight[0], list[Tensor]()
        row.register_hook(seen.append)
        (row**2).sum().backward()
        return seen

    def retained(weight: Tensor) -> object:
        row = weight[0]
        row.retain_grad()
        (row[1:3] ** 2).sum().backward()
        return row.grad

    def made_a_parameter(weight: Tensor) -> object:
        new = nn.Linear(D, 2, dtype=torch.float64)
        new.weight = nn.Parameter(weight[:2])
        new(torch.ones(D, dtype=torch.float64)).sum().backward()
        return new.weight.grad

    def differentiated(weight: Tensor) -> object:
        row = weight.t()[1:]
        return torch.autograd.grad((row**3).sum(), [row])

    plain = Parent(lambda m, x: m.child(x)).double()
    sharded = _wrap(copy.deepcopy(plain), "full")
    weight: Any = sharded.child.weight
    with _quiet():
        for use in (hooked, retained, made_a_parameter, differentiated):
            assert_close(use(weight), use(plain.child.weight), rtol=0, atol=0)
        before = snapshot(sharded)
        row, part, rows = weight[0], weight[0][1:3], weight.unbind()
        with torch.no_grad():
            for view in (row, part, rows[1], nn.Parameter(row)):
                assert_raises(RuntimeError, "full_tensor", view.zero_)
        assert_same_state(snapshot(sharded), before, 0.0, 0.0)
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
        for view in (row, part, rows[1]):
            assert_raises(RuntimeError, "reads a view that was taken outside of forward", view.sum)


@on_ranks(2)
def test_warns_once_for_each_unit(rank: int, world: int) -> None:
    sharded = _wrap(Parent(USES["joined"]), "full")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(2):
            sharded(_batch(step, rank)).sum().backward()
    found = [str(one.message) for one in caught]
    assert len(found) == (2 if rank == 0 else 0)
    assert all(__file__ == one.filename for one in caught)
    for message, name in zip(found, ("child", "other"), strict=False):
        assert f"unit '{name}'" in message
        assert f"'{name}.weight'" in message


def _lerp(mean: nn.Module, model: nn.Module) -> None:
    for old, new in zip(mean.parameters(), model.parameters(), strict=True):
        old.data.lerp_(new.data, 0.5)
        old.data.copy_(0.1 * new.data + 0.9 * old.data)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_an_average_that_was_copied_before_wrapping(rank: int, world: int) -> None:
    """One warning, and no stale values."""
    torch.manual_seed(0)
    plain = Parent(USES["linear"]).double()
    average = get_ema_multi_avg_fn(0.5)
    by_torch = [AveragedModel(plain, multi_avg_fn=average) for _ in range(2)]
    by_hand = [copy.deepcopy(plain) for _ in range(2)]
    sharded = _wrap(copy.deepcopy(plain), "full")
    loss: Step = lambda m, x: m(x).pow(2).mean()  # noqa: E731
    for _ in range(2):
        _train(plain, loss, list(range(world)), 1)
        with _quiet():
            _train(sharded, loss, [rank], 1)
        for number, model in enumerate((plain, sharded)):
            with warnings.catch_warnings(record=True, action="always") as caught:
                by_torch[number].update_parameters(model)
                by_torch[number].update_parameters(model)
                _lerp(by_hand[number], model)
        assert len(caught) <= 1
        for of_plain, of_sharded in (by_torch, by_hand):
            assert_same(of_sharded, of_plain, 1e-12, 0.0)
    chain, weights = sharded.chain, []
    with torch.no_grad(), allow_warnings(UserWarning):
        for number in (0, 2):
            for name in ("weight", "bias"):
                view = chain[number]._parameters[name].data.view(-1)
                weights.append(view.clone())
                assert_raises(RuntimeError, "the edit would be lost", view.zero_)
            chain[2].weight.mul_(3)
        weights.append(chain[3].weight.data.view(-1))
    full = snapshot(sharded)
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight")
    for name, weight in zip(names, weights, strict=True):
        factor = 3.0 if name == "2.weight" else 1.0
        expected = full[f"chain.{name}"].view(-1)
        torch.testing.assert_close(factor * weight, expected, check_stride=False)


@on_ranks(2)
def test_an_average_that_differs_between_ranks(rank: int, world: int) -> None:
    model = ShardedWrapper(nn.Linear(4, 4))
    mean = torch.full((4, 4), float(rank))
    with pytest.raises(CollectiveError, match="different collectives"):
        mean.copy_(0.1 * model.weight.data + 0.9 * mean)


@on_ranks(2)
def test_a_shard_is_written_on_one_rank_between_reads(rank: int, world: int) -> None:
    """Later reads of the same unit begin the same collectives on all ranks."""
    model = ShardedWrapper(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    params, found = [*model.parameters()], []
    with torch.no_grad(), allow_warnings(UserWarning):
        for number, param in enumerate(params):
            found.append(param.data.view(-1).clone())
            if number == 1 and rank == 0:
                params[-1].local.add_(1)
        changed = params[-1].full_tensor()
    assert_same(found[-1], changed.view(-1), 0.0, 0.0)


@pytest.mark.skipif(default_extra("deadlock") is None, reason="ranks would wait")
@on_ranks(2, group_timeout=120)
def test_in_forward_on_one_rank_alone(rank: int, world: int) -> None:
    """All ranks raise soon, also where collectives match by their order."""

    def use(model: Parent, x: Tensor) -> Tensor:
        x = model.child(x)
        return x @ model.child.weight if rank == 0 and is_on else x

    for collectives in ("native", "sockets"):
        is_on = False
        keywords = {"process_group": dist.new_group(), "collectives": collectives}
        sharded = _wrap(Parent(use), "full", **keywords)
        _train(sharded, lambda m, x: m(x).pow(2).mean(), [rank], 1)
        is_on = True
        start = time.monotonic()
        with (
            _quiet(),
            mock.patch.multiple("flatshard.extras.deadlock.detector", **QUICK),
            pytest.raises(CollectiveError, match=r"different collectives|rank . ended"),
        ):
            _train(sharded, lambda m, x: m(x).pow(2).mean(), [rank], 2)
        assert time.monotonic() - start < 20


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda p: p.detach().clone().requires_grad_(),
    "data": lambda p: p.data.mul(2).requires_grad_(),
    "parameter": lambda p: nn.Parameter(p.detach().clone()),
}

USES_OF_LEAVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda x, leaf: F.linear(x, leaf).pow(2).sum(),
    "computed with": lambda x, leaf: F.linear(x, 2 * leaf * leaf.abs()).sum(),
    "summed": lambda x, leaf: x.sum() * leaf.pow(2).sum(),
    "gathered": lambda x, leaf: (x @ leaf.full_tensor()).sum(),
}


@on_ranks(2)
def test_gradients_of_copies_of_parameters(rank: int, world: int) -> None:
    """A sharded copy refuses a backward; a full copy has this rank's gradient, as under DDP.

    Trial steps on copies of weights, as in first-order MAML, inside and outside of forward.
    """
    model = _wrap(Parent(_again), "full")
    x = _batch(0, rank)
    for (name, make), (use, loss) in itertools.product(LEAVES.items(), USES_OF_LEAVES.items()):
        leaf = make(model.child.weight)
        refused = pytest.raises(
            NotImplementedError, match=r"'child.weight'.*full_tensor\(\)\.detach"
        )
        with naming(f"{name}, {use}"), _quiet(), refused:
            loss(x, leaf).backward()
    with _quiet():
        values = model.child.weight.full_tensor().detach()
        with torch.no_grad():
            assert not model.child.weight.full_tensor().requires_grad
        leaf = values.clone().requires_grad_()
        F.linear(x, leaf).pow(2).sum().backward()
    expected = values.clone().requires_grad_()
    F.linear(x, expected).pow(2).sum().backward()
    assert torch.equal(leaf.grad, expected.grad)  # this rank's gradient, as under DDP


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda p: p + 0.1 * torch.randn_like(p),
    "a product": lambda p: p * torch.empty_like(p).uniform_(),
    "a mask": lambda p: torch.where(torch.rand_like(p) > 0.5, p, 0 * p),
    "a copy": lambda p: p.sub(torch.zeros_like(p).copy_(torch.rand_like(p))),
}


@pytest.mark.parametrize("way", ["full", "grad_op"])  # under NO_SHARD each rank draws all of it
@on_ranks(2)
def test_noise_outside_of_forward_in_a_loss(rank: int, world: int, way: str) -> None:
    """Noise for a sharded parameter in a loss raises: each element would have one rank's noise."""
    model = _wrap(Parent(_again), way)
    weight = model.child.weight
    for name, draw in NOISE.items():
        with naming(name), pytest.raises(RuntimeError, match=r"'child.weight'.*random numbers"):
            draw(weight)
    before = weight.full_tensor()
    weight.data.add_(torch.randn_like(weight))  # not in a loss: noise for the parameter itself
    with torch.no_grad():
        weight.add_(0.1 * torch.randn_like(weight))
    assert not torch.equal(weight.full_tensor(), before)
    with _quiet():
        (model(_batch(0, rank)).mean() + weight.pow(2).sum()).backward()
    # The same generator on all ranks: the ranges are parts of one tensor, which has a norm.
    torch.manual_seed(5)
    noise = torch.randn_like(weight)
    torch.manual_seed(5)
    expected = torch.randn(D, D, dtype=weight.dtype).norm()
    torch.testing.assert_close(noise.norm(), expected)
    # Otherwise each rank would add up its own numbers for its own range.
    torch.manual_seed(rank)
    apart = weight.data - torch.full((D, D), 1.0 + rank).double()
    for value in (torch.rand_like(weight), F.dropout(weight.detach()), apart):
        assert_raises(CollectiveError, r"different collectives", (2 * value).norm)


def _full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    # What differs between ranks.
    "mul": lambda m, x: (x.mean(0) * m.child.weight).sum(),
    "number": lambda m, x: (m.child.weight * x.mean()).pow(2).sum(),
    "where": lambda m, x: torch.where(x[0] > 0, m.child.bias, 0.0).sum(),
    "foreach": lambda m, x: sum(
        t.sum() for t in torch._foreach_mul([m.child.bias, m.other.bias], [x[0], x[1]])
    ),
    "normal": lambda m, x: (torch.normal(m.child.weight.detach(), 1.0) * m.child.weight).sum(),
    "gumbel": lambda m, x: F.gumbel_softmax(m.child.weight).pow(2).sum(),
    "alpha dropout": lambda m, x: F.alpha_dropout(m.child.weight, 0.5, True).pow(2).sum(),
    "dropout": lambda m, x: (
        F.dropout(m.child.weight, 0.3) ** 3 + nn.Dropout()(m.other.weight)
    ).sum(),
    # What is the same.
    "same": lambda m, x: (
        ((m.child.weight @ m.child.weight.t() - torch.eye(D)).pow(2).sum() * x.mean())
        + (m.child.weight[0].abs().sum() * x.mean() + m.other.weight.pow(2).sum())
    ),
    # As a fused loss does it.
    "full tensor": lambda m, x: (
        (x @ _full(m.child.weight).t()).square().mean() + _full(m.child.weight).abs().sum()
    ),
}


@on_ranks(2)
def test_parameters_in_a_loss(rank: int, world: int) -> None:
    """A loss may combine parameters with values that differ between ranks, or are the same.

    A head of which only the loss reads the weight is trained by it.
    """
    for name, penalty in LOSSES.items():

        def loss(model: Any, x: Tensor, penalty: Step = penalty) -> Tensor:
            return _loss(model, x) + penalty(model, x)

        use: Use = _again if name != "full tensor" else lambda model, x: x
        for way in BASIC if name in ("same", "full tensor") else ["full"]:
            with naming((way, name)):
                _compare(rank, world, way, partial(Parent, use), loss)


@on_ranks(2)
def test_transforms_in_forward(rank: int, world: int) -> None:
    """They raise, and the note says what to write instead, which an idiom does."""

    def use(model: Parent, x: Tensor) -> Tensor:
        return model.child(x + torch.func.grad(lambda x: x.square().sum())(x))

    with pytest.raises(RuntimeError, match="saved tensor hooks") as raised:
        _wrap(Parent(use), "full")(_batch(0, rank))
    assert ["torch.autograd.grad()" in note for note in raised.value.__notes__] == [True]


@on_ranks(2)
def test_written_values_that_require_a_gradient(rank: int, world_size: int) -> None:
    """As loralib merges its adapters in ``eval()``."""
    model = ShardedWrapper(nn.ModuleList([Child(), Child()]))
    weight, other = model[0].weight, model[1].weight
    with allow_warnings():
        expected = weight.full_tensor().detach() + (other @ other).detach()
        with pytest.raises(RuntimeError, match=r"Write value.detach\(\)"):
            weight.data += other @ other
        weight.data += (other @ other).detach()
        assert_close(weight.full_tensor().detach(), expected)
        with torch.no_grad():
            weight.data -= other @ other
        assert_close(weight.full_tensor().detach(), expected - (other @ other).detach())
