"""Tied weights: stored once, in the lowest unit that contains every user, and tied for good."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.units.policies import Policy, always_wrap_policy
from tests.combinations import every
from tests.harness import allow_warnings, naming
from tests.models import Case, Transformer, tokens, vectors
from tests.oracle import assert_same, snapshot
from tests.side import Run
from tests.ways import BASIC, WAYS, on_ranks_each_way

pytestmark = pytest.mark.by_turns

# ---------------------------------------------------------------- models


class Leaf(nn.Linear):
    """A layer that becomes a unit."""


class Branch(nn.Module):
    """A unit with two units in it; ``tied`` names what they share."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.left = Leaf(7, 7)
        self.right = Leaf(7, 7)
        if tied:
            self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.right(torch.tanh(self.left(x))))


class Branches(nn.Module):
    """Two branches and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = Branch(tied)
        self.second = Branch(tied)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class ThreeUsers(Branches):
    """Three units in two branches use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first.right.weight = self.first.left.weight
        self.second.left.weight = self.first.left.weight


class UsedByRoot(Branches):
    """The root reads, under a name of its own, the weight of a unit two levels down."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = self.first.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.linear(x, self.projection))


class WithinUnit(nn.Module):
    """A unit that uses a weight twice, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(7, 5)
        self.weight = self.encode.weight
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.weight.t(), self.bias)


class Autoencoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = WithinUnit()
        self.second = WithinUnit()
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class SharedModule(Branches):
    """A module with two parents, both units."""

    def __init__(self) -> None:
        super().__init__()
        self.second.left = self.first.right


# ---------------------------------------------------------------- who owns what


@dataclass(frozen=True)
class Tie:
    """A model, its policy, and the unit in which each tied weight is to lie.

    Attributes:
        aliases: the names of each tied weight, by its first name.
        owners: the name of the unit that holds it, by its first name.
    """

    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    policy: Policy = field(repr=False)
    aliases: dict[str, list[str]] = field(repr=False)
    owners: dict[str, str] = field(repr=False)
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]] = field(
        repr=False, default=vectors
    )

    @property
    def case(self) -> Case:
        return Case(self.name, self.build, self.draw)


def _classes(*classes: type[nn.Module]) -> Policy:
    return functools.partial(_is_one_of, classes)


def _is_one_of(
    classes: tuple[type[nn.Module], ...], module: nn.Module, recurse: bool, nonwrapped_numel: int
) -> bool:
    return recurse or isinstance(module, classes)


_TIES = [
    Tie(
        "embedding and head",
        lambda: Transformer(tied=True),
        always_wrap_policy,
        {"embed.weight": ["head.weight"]},
        {"embed.weight": ""},
        tokens,
    ),
    Tie(
        "siblings",
        functools.partial(Branches, tied=True),
        _classes(Branch, Leaf),
        {
            "first.left.weight": ["first.right.weight"],
            "second.left.weight": ["second.right.weight"],
        },
        {"first.left.weight": "first", "second.left.weight": "second"},
    ),
    Tie(
        "three users",
        ThreeUsers,
        _classes(Branch, Leaf),
        {"first.left.weight": ["first.right.weight", "second.left.weight"]},
        {"first.left.weight": ""},
    ),
    Tie(
        "used by the root",
        UsedByRoot,
        _classes(Branch, Leaf),
        {"projection": ["first.left.weight"]},
        {"projection": ""},
    ),
    Tie(
        "within a unit",
        Autoencoders,
        _classes(WithinUnit),
        {"first.weight": ["first.encode.weight"], "second.weight": ["second.encode.weight"]},
        {"first.weight": "first", "second.weight": "second"},
    ),
    Tie(
        "shared module that is a unit",
        SharedModule,
        _classes(Branch, Leaf),
        {"first.right.weight": ["second.left.weight"], "first.right.bias": ["second.left.bias"]},
        {"first.right.weight": "first.right", "first.right.bias": "first.right"},
    ),
    Tie(
        "shared module that is no unit",
        SharedModule,
        _classes(Branch),
        {"first.right.weight": ["second.left.weight"], "first.right.bias": ["second.left.bias"]},
        {"first.right.weight": "", "first.right.bias": ""},
    ),
]

TIES = {tie.name: tie for tie in _TIES}


def _runs(rank: int, world_size: int, tie: Tie, way: str) -> tuple[Run, Run]:
    """The same model sharded and plain."""
    model = ShardedWrapper(tie.case.model(), **WAYS[way].keywords, auto_wrap_policy=tie.policy)
    return Run(model, tie.case, rank, world_size), Run(tie.case.model(), tie.case, rank, world_size)


def _assert_same(sharded: nn.Module, plain: nn.Module, tie: Tie) -> None:
    assert_same(sharded, plain, rtol=0.0)
    state = sharded.state_dict()
    for first, others in tie.aliases.items():
        for other in others:
            assert torch.equal(state[first], state[other]), f"{first} and {other} differ"


def _assert_tied(model: nn.Module, tie: Tie) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    for first, others in tie.aliases.items():
        assert all(found[first] is found[other] for other in others)


# ---------------------------------------------------------------- training and state dicts


@on_ranks_each_way(2)
def test_training_and_state_dicts(rank: int, world_size: int, way: str) -> None:
    for tie in every(1 if way == "full" else 6, TIES.values(), start=list(BASIC).index(way)):
        with naming(tie.name):
            _train_and_load(rank, world_size, tie, way)


def _train_and_load(rank: int, world_size: int, tie: Tie, way: str) -> None:
    sharded, plain = _runs(rank, world_size, tie, way)
    for run in (sharded, plain):
        run.train(0, 3)
    _assert_same(sharded.model, plain.model, tie)

    with naming("an unwrapped model loads the state dict"):
        reloaded = tie.case.model()
        reloaded.load_state_dict(sharded.model.state_dict())
        _assert_same(reloaded, plain.model, tie)

    with naming("the copy trains by itself"):
        copies = [
            Run(copy.deepcopy(run.model), tie.case, rank, world_size) for run in (sharded, plain)
        ]
        for one, twin in zip((sharded, plain), copies, strict=True):
            one.train(3, 5)
            twin.train(10, 13)
        _assert_same(sharded.model, plain.model, tie)
        _assert_same(copies[0].model, copies[1].model, tie)

    with naming("loading"):
        # Where aliases disagree, the last one in the model's order counts, as in a plain model.
        different = {
            name: value + index for index, (name, value) in enumerate(snapshot(plain.model).items())
        }
        for run in (sharded, plain):
            run.model.load_state_dict(different)
        _assert_same(sharded.model, plain.model, tie)

    with naming("loading one alias alone"):
        for first, others in tie.aliases.items():
            for alias in (first, *others):
                part = {alias: different[alias] + 1}
                answers = [r.model.load_state_dict(part, strict=False) for r in (sharded, plain)]
                assert answers[0] == answers[1]
                _assert_same(sharded.model, plain.model, tie)
                for run in (sharded, plain):
                    with pytest.raises(RuntimeError, match="Missing key"):
                        run.model.load_state_dict(part)


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


def test_views_of_one_tensor() -> None:
    """Each became a tensor of its own: what one of them learnt no longer reached the other."""
    for kind in ("one in the other", "the same", "overlapping", "crossing", "bytes"):
        with (
            allow_warnings(),
            pytest.raises(ValueError, match="'first' and 'second' are views of the same memo"),
        ):
            ShardedWrapper(_Views(kind))
        with allow_warnings():
            ShardedWrapper(_Views(kind, trained=False))
    for kind in ("rows apart", "columns apart", "empty"):
        with allow_warnings():
            ShardedWrapper(_Views(kind))
