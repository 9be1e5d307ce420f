"""Frozen parameters under activation checkpointing: no memory is read after it was freed.

A recomputed forward saves views of unsharded parameters where no hook of ours sees them. Frozen
weights are needed for the gradients of inputs, after the last gradient of a trained parameter; and
an input that is a leaf (``h.requires_grad_()``, a reentrant checkpoint) has no node in the graph.
"""

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, ShardingStrategy, collectives
from flatshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.combinations import diagonal, every
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.models import Case, Composed, vectors
from tests.oracle import assert_same, assert_trains_alike, local_loss
from tests.side import pair
from tests.ways import WAYS, on_ranks_each_way, ranks_of

Checkpoint = Callable[..., Tensor]

KINDS: dict[str, Checkpoint] = {
    "none": lambda function, x: function(x),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "saved": functools.partial(checkpoint, use_reentrant=False),
}


def frozen(module: nn.Module) -> Any:
    return module.requires_grad_(False)


class Lora(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(width, width))
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.frozen = frozen(nn.LayerNorm(width)), frozen(nn.Linear(width, width))
        self.first, self.second = Lora(width), Lora(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.frozen(self.first(self.norm(x)))))


class Adapted(nn.Module):
    """Frozen embeddings, whose output asks for gradients, then blocks with few trained weights."""

    def __init__(self, run: Checkpoint, width: int, where: str) -> None:
        super().__init__()
        self.embed, self.head = frozen(nn.Linear(7, width)), frozen(nn.Linear(width, 3))
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.run, self.where = run, where
        if where == "hook":  # ``enable_input_require_grads()``
            self.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x.requires_grad_() if self.where == "inside" else x
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def stack(run: Checkpoint, width: int, order: str) -> nn.Module:
    """Trained (t) and frozen (f) layers below an activation that asks for gradients."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(run(net.layers, net.first(x).requires_grad_()))

    first, last = frozen(nn.Linear(7, width)), nn.Linear(width, 3)
    layers = [nn.Linear(width, width).requires_grad_(kind == "t") for kind in order]
    return Composed(forward, first=first, layers=nn.Sequential(*layers), last=last)


def _models(width: int) -> dict[str, tuple[str, Callable[[], nn.Module]]]:
    """By name, the kind of checkpoint and the model."""
    found: dict[str, tuple[str, Callable[[], nn.Module]]] = {}
    for (kind, run), where in itertools.product(KINDS.items(), ("hook", "inside", "not")):
        if (kind, where) != ("reentrant", "not"):  # which computes no gradients
            found[f"{kind}, {where}"] = kind, functools.partial(Adapted, run, width, where)
    for (kind, run), order in itertools.product(KINDS.items(), ("tff", "fft", "ftf")):
        found[f"{kind}, {order}"] = kind, functools.partial(stack, run, width, order)
    return found


def _policy(name: str, width: int) -> Any:
    return {
        "block": ModuleWrapPolicy({Block, nn.Sequential}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=width * width),
        "each": ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
        "auto": "auto",
        "none": None,
    }[name]


@pytest.mark.parametrize(
    ("way", "collectives"),
    diagonal(2, ["full", "grad_op", "op", "hybrid-nodes-of-one"], ["auto", "sockets", "native"]),
)
def test_same_numbers(way: str, collectives: str) -> None:
    """Frozen and trained layers under each kind of checkpoint train as in the unwrapped model."""
    # Wide enough for mapped pages in every other way.
    number = ["auto", "sockets", "native"].index(collectives) + list(WAYS).index(way)
    run_ranks(_train, WAYS[way].world_size, way, collectives, number)


def _train(rank: int, world_size: int, way: str, collectives: str, number: int) -> None:
    WAYS[way].set_nodes()
    width = 128 if number % 2 else 12
    policies = ("block", "size", "each", "auto", "none")
    tried = itertools.product(_models(width).items(), policies)
    for (name, (_, build)), policy in every(13, tried, start=number):
        with naming(f"{name}, {policy}"), allow_warnings(UserWarning, "are unsharded together"):
            settings = {**WAYS[way].keywords, "collectives": collectives}
            settings["auto_wrap_policy"] = _policy(policy, width)
            assert_trains_alike(Case(name, build, vectors), rank, world_size, **settings)


# ---------------------------------------------------------------- when units are resharded


@pytest.mark.uncoalesced
@on_ranks(2)
def test_gathers_and_hooks(rank: int, world_size: int) -> None:
    for name, (_, build) in _models(12).items():
        if "hook" not in name:
            continue
        model = ShardedWrapper(build(), auto_wrap_policy=ModuleWrapPolicy({Block}))
        for _ in range(2):
            out = model(torch.ones(2, 7))
            with collectives.record() as events:
                out.sum().backward()
        # Each unit's two once: it is resharded when nothing needs it any more, and not before.
        gathers = Counter(event.unit_fqn for event in events if event.kind == "gather")
        assert gathers == Counter({f"blocks.{index}": 2 for index in range(3)}), name

    # An input that stays is a leaf that has no more hooks in the end than in the beginning.
    model = ShardedWrapper(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)))
    x = torch.ones(2, 7, requires_grad=True)
    for does_backward in (True, False, True, False):
        out = model(x)
        assert len(x._backward_hooks or ()) <= 1  # none without saved-tensor hooks
        if does_backward:
            out.sum().backward()
        del out
        gc.collect()
        assert not x._backward_hooks


# ---------------------------------------------------------------- views that code outside keeps


class _Product(torch.autograd.Function):
    """Keeps a view of a weight by itself, as extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight.t(), x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight.t(), grad.t() @ ctx.x


class _Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight)


@pytest.mark.parametrize("collectives", ["auto", "sockets"])
@on_ranks(2)
def test_a_function_that_keeps_a_view(rank: int, world_size: int, collectives: str) -> None:
    for run, width, strategy in itertools.product(
        KINDS.values(), (7, 128), ("FULL_SHARD", "SHARD_GRAD_OP")
    ):

        def build(run: Checkpoint = run, width: int = width) -> nn.Module:
            inner = nn.Sequential(_Layer(7, width), _Layer(width, width), _Layer(width, 3))
            frozen(inner[1])
            # Below an activation that asks for gradients.
            return Composed(lambda net, x: run(net.inner, x.clone().requires_grad_()), inner=inner)

        settings = {"sharding_strategy": strategy, "collectives": collectives}
        assert_trains_alike(Case("keeps", build, vectors, (_Layer,)), rank, world_size, **settings)


# ---------------------------------------------------------------- other units within checkpoints


class _Lookup(nn.Module):
    """An embedding between two layers."""

    def __init__(self, run: Checkpoint, mode: str) -> None:
        super().__init__()
        self.embed, self.first, self.last = nn.Embedding(3, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.embed.requires_grad_(mode != "frozen")
        self.run, self.mode = run, mode

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self._middle, self.first(x))

    def _middle(self, x: Tensor) -> Tensor:
        index = torch.arange(3).repeat(len(x), 1).sum(1) % 3
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode != "no_grad"):
            found = self.embed(index)
        return self.last(x + found + (self.embed(index) if self.mode == "twice" else 0))


class _Sharer(Composed):
    """Two checkpoints inside that share a weight, whose gradient comes after the first one's."""


def _sharing(run: Checkpoint, inner: Checkpoint, times: int) -> nn.Module:
    """A model that runs such a module once or twice within a checkpoint."""

    def share(net: Any, x: Tensor) -> Tensor:
        x = inner(lambda y: torch.tanh(net.shared(y)), x)
        return inner(lambda y: net.last(net.shared(y)), x)

    def repeat(net: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = net.inner(x)
        return x

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(run(functools.partial(repeat, net), net.first(x)))

    sharer = _Sharer(share, shared=nn.Linear(7, 7), last=nn.Linear(7, 7))
    return Composed(forward, first=nn.Linear(7, 7), inner=sharer, last=nn.Linear(7, 3))


@pytest.mark.parametrize("way", ["full", "grad_op", "op"])
@pytest.mark.uncoalesced
@on_ranks(ranks_of)
def test_units_within_checkpoints(rank: int, world_size: int, way: str) -> None:
    """Modules held sharded parameters: nothing else of an embedding is needed in backward."""
    run, saved = KINDS["reentrant"], KINDS["saved"]
    cases = [
        Case(mode, functools.partial(_Lookup, kind, mode), vectors, (nn.Embedding,))
        for kind in (run, saved)
        for mode in ("trained", "frozen", "no_grad", "twice")
    ]
    cases += [
        Case(f"{times} times", functools.partial(_sharing, *kinds, times), vectors, (_Sharer,))
        for kinds in ((run, run), (run, saved), (saved, run))
        for times in (1, 2)
    ]
    for case in cases:
        with naming(case.name), allow_warnings(UserWarning, "None of the inputs have"):
            model = case.wrap(**WAYS[way].keywords)
            with model.no_sync():  # dropped: it only has to run
                local_loss(model, case, 0, rank, world_size).backward()
            model.zero_grad()
            assert_trains_alike(case, rank, world_size, model)


@on_ranks_each_way(2)
def test_frozen_for_another_forward(rank: int, world_size: int, way: str) -> None:
    """Parameters that are frozen only in a later forward get the earlier one's gradients."""
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        loss = run.loss(0)
        run.model.requires_grad_(False)
        run.loss(1)
        run.model.requires_grad_(True)
        loss.backward()
        run.step()
    assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize(
    "options", [{"sharding_strategy": ShardingStrategy.NO_SHARD}, {"allow_divergence": True}]
)
@pytest.mark.uncoalesced
@on_ranks(2)
def test_frozen_while_a_rank_skips_it(rank: int, world_size: int, options: dict[str, Any]) -> None:
    def forward(net: Any, x: Tensor, skips: bool) -> Tensor:
        return net.last(x if skips else net.first(x))

    torch.manual_seed(0)
    module = Composed(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    model = ShardedWrapper(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    for step in range(4):
        if step:  # all ranks freeze and thaw, also rank 1, which skips the unit
            model.module.first.weight.requires_grad_(step > 1)
            model.module.first.bias.requires_grad_(step > 2)
        model(torch.ones(2, 4) * (rank + 1), step > 0 and rank == 1).sum().backward()
        has_grad = [p.grad is not None for p in model.module.first.parameters()]
        assert has_grad == [step != 1, step in (0, 3)]
        model.zero_grad()
