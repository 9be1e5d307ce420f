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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as activations
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, collectives
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import every
from tests.harness import allow_warnings, naming, on_ranks
from tests.models import Case, Composed, vectors
from tests.oracle import STEPS, assert_same, local_loss, sgd, step_and_zero, train_rank_by_rank
from tests.ways import BASIC, WAYS, on_ranks_each_way

pytestmark = pytest.mark.uncoalesced

Checkpoint = Callable[..., Tensor]
Gathered = dict[str, list[str]]


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
        together: how many units one of the outer checkpoints contains.
        checkpoints: ``inner``, the checkpoint inside each unit; ``outer``, the checkpoint around
            units; ``whole``, the checkpoint around all four, which may contain the others.
    """

    def __init__(self, together: int = 1, **checkpoints: Checkpoint) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Layer(checkpoints.get("inner")) for _ in range(4)])
        self.head = nn.Linear(7, 3)
        self.together = together
        self.outer, self.whole = checkpoints.get("outer"), checkpoints.get("whole")

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
@on_ranks(2)
def test_same_numbers_and_no_extra_gather(rank: int, world_size: int, kind: str, way: str) -> None:
    for place, build in every(_nth(way), _places(kind).items(), start=list(BASIC).index(way)):
        case = Case(place, build, vectors, (Layer,), row_wise=False)
        with naming(place), _no_input_gradients():
            _check(way, case, _wrap(case, way), GATHERED)


class _Late(nn.Linear):
    """A unit whose backward reads the weight after it has computed all parameters' gradients."""

    def forward(self, x: Tensor) -> Tensor:
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        assert top[0].__module__ == checkpoint.__module__, "flatshard has added slower hooks"
        return F.linear(torch.sin(x), self.weight.detach(), self.bias) + self.weight.sum()


def _late_layers() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = KINDS["saved"](layer, x)
        return net.head(x)

    layers = nn.ModuleList(_Late(7, 7) for _ in range(4))
    return Composed(forward, layers=layers, head=nn.Linear(7, 3))


@pytest.mark.parametrize("way", ["full", "grad_op"])
@on_ranks(2)
def test_late_reads_of_a_recomputed_forward(rank: int, world_size: int, way: str) -> None:
    case = Case("late", _late_layers, vectors, (_Late,), row_wise=False)
    _check(way, case, _wrap(case, way), GATHERED)


def _wrap(case: Case, way: str) -> ShardedWrapper:
    return case.wrap(**WAYS[way].keywords)


LAYERS = [f"layers.{index}" for index in range(4)]
# The root is kept, as its backward follows at once.
GATHERED: Gathered = {"full": LAYERS, "grad_op": [], "no_shard": []}
"""By way, the units that a backward gathers."""


def _check(way: str, case: Case, model: Any, gathered: Gathered, run: Any = None) -> None:
    """``model``, called through ``run``, has the unwrapped model's numbers, and these gathers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = train_rank_by_rank(case, world_size)
    optimizer = sgd(model)
    for step in range(STEPS):
        with collectives.record() as forward:
            loss = local_loss(run or model, case, step, rank, world_size)
        with collectives.record() as backward:
            loss.backward()
        step_and_zero(optimizer)
        assert _gathers(forward) == Counter([] if way == "no_shard" else ["", *LAYERS])
        assert _gathers(backward) == Counter(gathered[way])
    assert_same(model, expected.state, 0.0, 1e-12)


def _gathers(events: list[collectives.Event]) -> Counter[str]:
    gathered = [event.unit_fqn for event in events if event.kind == "gather"]
    return Counter(name.removesuffix("._checkpoint_wrapped_module") for name in gathered)


def _no_input_gradients() -> contextlib.AbstractContextManager[None]:
    """Reentrant checkpoints say so in evaluation, and inside one another."""
    return allow_warnings(UserWarning, "None of the inputs have requires_grad=True")


# ---------------------------------------------------------------- around the wrapper itself


@pytest.mark.parametrize("kind", ["reentrant", "saved"])
@on_ranks_each_way(2)
def test_around_the_whole_wrapper(rank: int, world_size: int, kind: str, way: str) -> None:
    # A reentrant checkpoint does nothing where no input asks for a gradient.
    case = Case("whole", Layers, _vectors_with_grad, (Layer,), row_wise=False)
    model = _wrap(case, way)
    # The first forward of a reentrant checkpoint looks like an evaluation.
    everything = {"full": ["", *LAYERS], "grad_op": ["", *LAYERS], "no_shard": []}
    gathered = everything if kind == "reentrant" else GATHERED
    _check(way, case, model, gathered, functools.partial(KINDS[kind], model))


def _vectors_with_grad(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, target = vectors(rows, generator)
    return inputs.requires_grad_(), target


# ---------------------------------------------------------------- torch's wrapper modules


def _wrapped_before(way: str, case: Case) -> ShardedWrapper:
    """Checkpoints inside the units, the way torchtitan applies both."""
    return _shard(_checkpointed(case.model(), Layer), way, activations.CheckpointWrapper)


def _wrapped_before_class_inside(way: str, case: Case) -> ShardedWrapper:
    """The policy names the class that a checkpoint hides."""
    return _shard(_checkpointed(case.model(), Layer), way, Layer)


def _wrapped_after(way: str, case: Case) -> ShardedWrapper:
    """Checkpoints around the units."""
    return _checkpointed(_shard(case.model(), way, Layer), ShardedWrapper)


def _checkpointed(model: Any, kind: type[nn.Module]) -> Any:
    def is_chosen(module: nn.Module) -> bool:
        return isinstance(module, kind) and module is not model

    activations.apply_activation_checkpointing(model, activations.checkpoint_wrapper, is_chosen)
    return model


def _shard(model: nn.Module, way: str, unit: type[nn.Module]) -> ShardedWrapper:
    return ShardedWrapper(model, **WAYS[way].keywords, auto_wrap_policy=ModuleWrapPolicy({unit}))


@on_ranks_each_way(2)
def test_checkpoint_wrappers(rank: int, world_size: int, way: str) -> None:
    case = Case("wrapped", Layers, vectors, (Layer,), row_wise=False)
    for build in (_wrapped_before, _wrapped_before_class_inside, _wrapped_after):
        with naming(build.__name__):
            model = build(way, case)
            _check(way, case, model, GATHERED)
            model.load_state_dict(case.model().state_dict())
            assert_same(model, case.model(), 0.0, 0.0)
