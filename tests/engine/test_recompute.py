"""Activation checkpointing, wherever it stands: the same numbers, and no gather too many.

A unit that computes again in backward was gathered for that, and backward goes on to use the same
parameters: recomputation and backward of a unit share one gather.
"""

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, collectives
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import allow_warnings, naming, on_ranks
from tests.models import Case, vectors
from tests.oracle import (
    assert_same,
    assert_same_state,
    local_loss,
    sgd,
    step_and_zero,
    train_rank_by_rank,
)
from tests.ways import BASIC, WAYS, on_ranks_each_way

Checkpoint = Callable[..., Tensor]


class Layer(nn.Module):
    """A unit that draws random numbers. With ``inner``, it computes its own middle again."""

    def __init__(self, inner: Checkpoint | None) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is None:
            return x + self._middle(x)
        return x + self.inner(self._middle, x)

    def _middle(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training))


class Layers(nn.Module):
    """Four units between two layers that the root owns.

    Args:
        inner: the checkpoint inside each unit.
        outer: the checkpoint around units.
        together: how many units one of the outer checkpoints contains.
        whole: the checkpoint around all four, which may contain the others.
    """

    def __init__(
        self,
        inner: Checkpoint | None = None,
        outer: Checkpoint | None = None,
        together: int = 1,
        whole: Checkpoint | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Layer(inner) for _ in range(4)])
        self.head = nn.Linear(7, 3)
        self.outer = outer
        self.together = together
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(self._all(x) if self.whole is None else self.whole(self._all, x))

    def _all(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.layers), self.together):
            some = functools.partial(self._some, first)
            x = some(x) if self.outer is None else self.outer(some, x)
        return x

    def _some(self, first: int, x: Tensor) -> Tensor:
        for layer in self.layers[first : first + self.together]:
            x = layer(x)
        return x


KINDS: dict[str, Checkpoint] = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "saved": functools.partial(checkpoint, use_reentrant=False),
    "saved-to-the-end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
}


def _places(kind: str) -> dict[str, Callable[[], nn.Module]]:
    run = KINDS[kind]
    return {
        "inside": lambda: Layers(inner=run),
        "around": lambda: Layers(outer=run),
        "around two": lambda: Layers(outer=run, together=2),
        "inside and around": lambda: Layers(inner=run, outer=run),
        "three deep": lambda: Layers(inner=run, outer=run, together=2, whole=run),
    }


def _nth(way: str) -> int:
    """Of what is crossed with the ways, the usual one meets all."""
    return 1 if way == "full" else 2


@pytest.mark.parametrize(
    ("kind", "way"),
    [*itertools.product(["reentrant", "saved"], BASIC), ("saved-to-the-end", "full")],
)
@pytest.mark.uncoalesced
@on_ranks(2)
def test_same_numbers_and_no_gather_too_many(
    rank: int, world_size: int, kind: str, way: str
) -> None:
    for place, build in every(_nth(way), _places(kind).items(), start=list(BASIC).index(way)):
        case = Case(place, build, vectors, (Layer,), row_wise=False)
        with naming(place), _no_input_gradients():
            expected = train_rank_by_rank(case, world_size, steps=3)
            model = _wrap(case, way)
            optimizer = sgd(model)
            for step in range(3):
                forward, backward = _gathers_of(local_loss, model, case, step, rank, world_size)
                step_and_zero(optimizer)
                _check_gathers(way, forward, backward)
            assert_same_state(model.state_dict(), expected.state, 0.0, 1e-12)


def _wrap(case: Case, way: str) -> ShardedWrapper:
    return case.wrap(case.model(), **WAYS[way].keywords)


def _gathers_of(loss_of: Callable[..., Tensor], *args: Any) -> tuple[Counter[str], Counter[str]]:
    """Per unit, how often the forward of a loss gathered it, and its backward."""
    with collectives.record() as forward:
        loss = loss_of(*args)
    with collectives.record() as backward:
        loss.backward()
    return _gathers(forward), _gathers(backward)


def _gathers(events: list[collectives.Event]) -> Counter[str]:
    return Counter(event.unit_fqn for event in events if event.kind == "gather")


def _no_input_gradients() -> contextlib.AbstractContextManager[None]:
    """Reentrant checkpoints say so in evaluation, and inside one another."""
    return allow_warnings(UserWarning, "None of the inputs have requires_grad=True")


LAYERS = [f"layers.{index}" for index in range(4)]


def _check_gathers(way: str, forward: Counter[str], backward: Counter[str]) -> None:
    if way == "no_shard":
        assert not forward + backward
        return
    assert forward == Counter(["", *LAYERS])
    # The root is kept, as its backward follows at once.
    assert backward == (Counter(LAYERS) if way.startswith("full") else Counter())


# ---------------------------------------------------------------- around the wrapper itself


@pytest.mark.parametrize("kind", ["reentrant", "saved"])
@pytest.mark.uncoalesced
@on_ranks_each_way(2)
def test_around_the_whole_wrapper(rank: int, world_size: int, kind: str, way: str) -> None:
    case = Case("whole", Layers, vectors, (Layer,), row_wise=False)
    expected = train_rank_by_rank(case, world_size, steps=4)
    model = _wrap(case, way)
    run_again = _Around(model, KINDS[kind])
    optimizer = sgd(model)
    # A reentrant checkpoint does nothing where no input asks for a gradient.
    inputs_matter = Case("whole", Layers, _vectors_with_grad, (Layer,), row_wise=False)
    for step in range(4):
        forward, backward = _gathers_of(
            local_loss, run_again, inputs_matter, step, rank, world_size
        )
        step_and_zero(optimizer)
        if way.startswith("full"):
            assert forward == Counter(["", *LAYERS])
            # The first forward of a reentrant checkpoint looks like an evaluation.
            root = [""] if kind == "reentrant" else []
            assert backward == Counter([*root, *LAYERS])
    assert_same_state(model.state_dict(), expected.state, 0.0, 1e-12)


class _Around(nn.Module):
    def __init__(self, model: nn.Module, run: Checkpoint) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.model, x)


def _vectors_with_grad(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, target = vectors(rows, generator)
    return inputs.requires_grad_(), target


# ---------------------------------------------------------------- torch's wrapper modules


def _wrapped_before(way: str, case: Case) -> ShardedWrapper:
    """Checkpoints inside the units, the way torchtitan applies both."""
    model = case.model()
    _checkpoint_modules(model, Layer)
    return _shard(model, way, CheckpointWrapper)


def _wrapped_before_class_inside(way: str, case: Case) -> ShardedWrapper:
    """The policy names the class that a checkpoint hides."""
    model = case.model()
    _checkpoint_modules(model, Layer)
    return _shard(model, way, Layer)


def _wrapped_after(way: str, case: Case) -> ShardedWrapper:
    """Checkpoints around the units."""
    model = _shard(case.model(), way, Layer)
    _checkpoint_modules(model, ShardedWrapper)
    return model


def _checkpoint_modules(model: nn.Module, kind: type[nn.Module]) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: isinstance(module, kind) and module is not model,
    )


def _shard(model: nn.Module, way: str, unit: type[nn.Module]) -> ShardedWrapper:
    return ShardedWrapper(model, **WAYS[way].keywords, auto_wrap_policy=ModuleWrapPolicy({unit}))


@pytest.mark.uncoalesced
@on_ranks_each_way(2)
def test_checkpoint_wrappers(rank: int, world_size: int, way: str) -> None:
    case = Case("wrapped", Layers, vectors, (Layer,), row_wise=False)
    expected = train_rank_by_rank(case, world_size, steps=3)
    for build in (_wrapped_before, _wrapped_before_class_inside, _wrapped_after):
        with naming(build.__name__):
            model = build(way, case)
            optimizer = sgd(model)
            for step in range(3):
                with collectives.record() as events:
                    local_loss(model, case, step, rank, world_size).backward()
                step_and_zero(optimizer)
                if way != "no_shard":
                    num_gathers = 9 if way.startswith("full") else 5
                    assert sum(_gathers(events).values()) == num_gathers
            assert_same(model, expected.state, 0.0, 1e-12)
            model.load_state_dict(case.model().state_dict())
            assert_same(model, case.model(), 0.0, 0.0)
