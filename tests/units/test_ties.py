"""Tied weights: stored once, in the lowest unit that contains every user, and tied for good."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.combinations import every
from tests.harness import allow_warnings, assert_raises, naming
from tests.models import Block, Case, Composed, Transformer, tokens, vectors
from tests.oracle import assert_same, snapshot
from tests.side import Run, pair
from tests.ways import BASIC, on_ranks_each_way

pytestmark = pytest.mark.by_turns

# ---------------------------------------------------------------- models


class Leaf(nn.Linear):
    """A layer that becomes a unit."""


class Branch(nn.Sequential):
    """A unit with two units in it."""

    def __init__(self) -> None:
        super().__init__(Leaf(7, 7), nn.Tanh(), Leaf(7, 7), nn.Tanh())


def _branches() -> Any:
    return nn.Sequential(Branch(), Branch(), nn.Linear(7, 3))


def _siblings() -> nn.Module:
    """In each branch, two units use one weight."""
    model = _branches()
    for branch in model[:2]:
        branch[2].weight = branch[0].weight
    return model


def _three_users() -> nn.Module:
    """Three units in two branches use one weight."""
    model = _branches()
    model[0][2].weight = model[1][0].weight = model[0][0].weight
    return model


def _used_by_root() -> nn.Module:
    """The root reads, under a name of its own, the weight of a unit three levels down."""
    branches = _branches()
    return Composed(
        lambda net, x: net.branches(F.linear(x, net.projection)),
        branches=branches,
        projection=branches[0][0].weight,
    )


def _shared_module() -> nn.Module:
    """A module with two parents, both units."""
    model = _branches()
    model[1][0] = model[0][2]
    return model


class WithinUnit(nn.Module):
    """A unit that uses a weight twice, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(7, 5)
        self.weight = self.encode.weight
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.weight.t(), self.bias)


def _twice_within_units() -> nn.Module:
    return nn.Sequential(WithinUnit(), WithinUnit(), nn.Linear(7, 3))


# ---------------------------------------------------------------- training and state dicts


PARTS = (nn.Embedding, nn.Linear, nn.LayerNorm, Block)
TIES = [
    Case("embedding and head", lambda: Transformer(tied=True), tokens, PARTS),
    Case("siblings", _siblings, vectors, (Branch, Leaf)),
    Case("three users", _three_users, vectors, (Branch, Leaf)),
    Case("used by the root", _used_by_root, vectors, (Branch, Leaf)),
    Case("within a unit", _twice_within_units, vectors, (WithinUnit,)),
    Case("shared module that is a unit", _shared_module, vectors, (Branch, Leaf)),
    Case("shared module that is no unit", _shared_module, vectors, (Branch,)),
]


def _aliases(model: nn.Module) -> list[list[str]]:
    """The names of each tied weight."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [some for some in names.values() if len(some) > 1]


@on_ranks_each_way(2)
def test_training_and_state_dicts(rank: int, world_size: int, way: str) -> None:
    for case in every(1 if way == "full" else 6, TIES, start=list(BASIC).index(way)):
        with naming(case.name):
            _train_and_load(*pair(rank, world_size, way, case))


def _train_and_load(sharded: Run, plain: Run) -> None:
    case, aliases = sharded.case, _aliases(plain.model)
    assert aliases
    with naming("one object, and one place in memory, for all names"):
        assert _aliases(sharded.model) == aliases
        with ShardedWrapper.summon_full_params(sharded.model):
            assert _aliases(sharded.model) == aliases
        held = sum(flat.flat_layout.numel for flat in sharded.model.flat_parameters())
        assert held in (0, sum(param.numel() for param in plain.model.parameters()))

    for run in (sharded, plain):
        run.train(0, 3)
    _assert_same(sharded.model, plain.model)

    with naming("an unwrapped model loads the state dict"):
        reloaded = case.model()
        reloaded.load_state_dict(sharded.model.state_dict())
        _assert_same(reloaded, plain.model)

    with naming("the copy trains by itself"):
        copies = []
        for run in (sharded, plain):
            copies.append(Run(copy.deepcopy(run.model), case, run.rank, run.world_size))
            run.train(3, 5)
            copies[-1].train(10, 13)
        _assert_same(sharded.model, plain.model)
        _assert_same(*(twin.model for twin in copies))

    with naming("loading"):
        # Where aliases disagree, the last one in the model's order counts, as in a plain model.
        state = enumerate(snapshot(plain.model).items())
        different = {name: value + index for index, (name, value) in state}
        for run in (sharded, plain):
            run.model.load_state_dict(different)
        _assert_same(sharded.model, plain.model)

    with naming("loading one alias alone"):
        for alias in itertools.chain.from_iterable(aliases):
            part = {alias: different[alias] + 1}
            answers = [r.model.load_state_dict(part, strict=False) for r in (sharded, plain)]
            assert answers[0] == answers[1]
            _assert_same(sharded.model, plain.model)
            for run in (sharded, plain):
                assert_raises(RuntimeError, "Missing key", run.model.load_state_dict, part)


def _assert_same(sharded: nn.Module, plain: nn.Module) -> None:
    assert_same(sharded, plain, rtol=0.0)
    state = sharded.state_dict()
    for first, *others in _aliases(plain):
        assert all(torch.equal(state[first], state[other]) for other in others), first


class _Views(nn.Module):
    """Two parameters over one tensor, which ``kind`` places."""

    def __init__(self, kind: str, *, trained: bool = True) -> None:
        super().__init__()
        table = torch.zeros(4, 6)
        places = {
            "one in the other": (table, table[1:2]),
            "the same": (table, table.view(6, 4)),
            "overlapping": (table[:3], table[2:]),
            "crossing": (table[:, :3], table[:, 2:]),
            "bytes": (table, table.view(torch.uint8)[3]),
            "rows apart": (table[:2], table[2:]),
            "columns apart": (table[:, :2], table[:, 2:]),
            "empty": (table, table[:0]),
        }
        first, second = places[kind]
        self.first = nn.Parameter(first, requires_grad=False)
        self.second = nn.Parameter(second, requires_grad=trained and second.is_floating_point())
        self.first.requires_grad_(trained and not self.second.requires_grad)


@allow_warnings()
def test_views_of_one_tensor() -> None:
    """Trained parameters that overlap in one tensor raise: they would be trained apart."""
    for kind in ("one in the other", "the same", "overlapping", "crossing", "bytes"):
        with pytest.raises(ValueError, match="'first' and 'second' are views of the same memo"):
            ShardedWrapper(_Views(kind))
        ShardedWrapper(_Views(kind, trained=False))
    for kind in ("rows apart", "columns apart", "empty"):
        ShardedWrapper(_Views(kind))


@allow_warnings()
def test_views_of_parameters_in_buffers_and_attributes() -> None:
    """A buffer or an attribute over a trained parameter raises: it would keep the old values."""
    for kind in ("buffer", "attribute"):
        for is_view in (True, False):
            model = nn.Sequential(nn.Linear(7, 5), nn.utils.spectral_norm(nn.Linear(5, 3)))
            value = model[0].weight.detach()[1:]
            value = value if is_view else value.clone()
            if kind == "buffer":
                model[1].register_buffer("cached", value)
            else:
                model[1].cached = value
            if is_view:
                with pytest.raises(ValueError, match=r"'1\.cached' is a view of .* '0\.weight'"):
                    ShardedWrapper(model)
            else:
                ShardedWrapper(model)
