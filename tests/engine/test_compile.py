"""``torch.compile``: the same numbers, and no compilation from step to step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import usual_and_every
from tests.harness import allow_warnings, naming, on_ranks
from tests.models import Case, vectors
from tests.oracle import assert_same, assert_same_state, snapshot
from tests.side import Run, pair
from tests.ways import WAYS

PRELOAD = ("tests.compiler",)

BACKEND = "aot_eager"
"""Traces forward and backward, with all guards, and generates no code."""

WARM_UP = 2
"""Steps in which compiling is allowed: the first one, and one with the recorded order."""


class Line(nn.Linear):
    """A layer with its own forward: torch 2.11 does not compile the forward of ``nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Line(7, 9)
        self.down = Line(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """Two units of one class between layers that the root owns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _blocks_before(case: Case, way: str) -> nn.Module:
    """Compiled blocks in one unit each."""
    model = case.model()
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return _wrap(model, way)


def _blocks_after(case: Case, way: str) -> nn.Module:
    """Units, compiled where they stand."""
    model = _wrap(case.model(), way)
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return model


def _parts_of_units(case: Case, way: str) -> nn.Module:
    """Modules inside the units."""
    model = case.model()
    for block in model.blocks:
        block.up.compile(backend=BACKEND)
        block.down.compile(backend=BACKEND)
    return _wrap(model, way)


def _whole(case: Case, way: str) -> nn.Module:
    """All of it, as trainers do: the wrapper inside a compiled module."""
    return torch.compile(_wrap(case.model(), way), backend=BACKEND)


def _whole_inside(case: Case, way: str) -> nn.Module:
    """The wrapper around a compiled module."""
    model = case.model()
    model.compile(backend=BACKEND)
    return _wrap(model, way)


def _wrap(model: nn.Module, way: str) -> ShardedWrapper:
    return ShardedWrapper(model, **WAYS[way].keywords, auto_wrap_policy=ModuleWrapPolicy({Block}))


Build = Callable[[Case, str], nn.Module]
BUILDS: list[Build] = [_blocks_before, _blocks_after, _parts_of_units, _whole, _whole_inside]


@pytest.mark.uncoalesced  # a compiled unit serves the next one of its class
@on_ranks(2, timeout=120.0, fresh=True, preload=PRELOAD)
def test_compiled(rank: int, world_size: int) -> None:
    """In one run: what the compiler is made of takes a rank seconds to import."""
    for build in BUILDS:
        with naming(build.__name__):
            _train_one(rank, world_size, build)


def _train_one(rank: int, world_size: int, build: Build) -> None:
    case = Case("network", Network, vectors)
    plain = Run(case.model(), case, rank, world_size)
    plain.train(0, 4)
    # To compile all of a model takes longest, and does no more with the units.
    more = ["grad_op", "no_shard"] if build in (_blocks_before, _blocks_after) else []
    for way in usual_and_every(2, ["full", *more], start=BUILDS.index(build)):
        with naming(way), allow_warnings():
            torch.compiler.reset()
            counters.clear()
            sharded = Run(build(case, way), case, rank, world_size)
            sharded.is_sharded = True
            sharded.train(0, WARM_UP)
            with torch.compiler.set_stance("fail_on_recompile"):
                sharded.train(WARM_UP, 4)
            assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
            state = {
                name.removeprefix("_orig_mod."): value
                for name, value in snapshot(sharded.model).items()
            }
            assert_same_state(state, snapshot(plain.model), 0.0, 1e-12)


class _Sliced(Network):
    """The slice is a new module, to which torch's global hooks see modules assigned."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        return x


@on_ranks(1)
def test_a_slice_in_a_compiled_model(rank: int, world_size: int) -> None:
    """Dynamo traced flatshard's hook: "already tracked for mutation" (Llama slices its layers)."""
    plain, rows = _Sliced(), torch.ones(2, 7)
    for make in (
        lambda model: ShardedWrapper(torch.compile(model, backend="eager")),
        lambda model: model.compile(backend="eager") or ShardedWrapper(model),
    ):
        model = _Sliced()
        model.load_state_dict(plain.state_dict())
        # Python 3.13.0: "Guards may run slower on Python 3.13.0".
        with torch.no_grad(), allow_warnings(RuntimeWarning):
            assert torch.equal(make(model)(rows), plain(rows))


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
@on_ranks(2)
def test_compiled_with_units_inside(rank: int, world_size: int, whole: bool) -> None:
    """Tracing ran into the gathering of parameters, and kept tensors that were freed later."""
    sharded, plain = pair(rank, world_size, "full")
    with allow_warnings():
        if whole:
            forward = torch.compile(sharded.model, backend="eager")
        else:
            sharded.submodule("fc2").compile(backend="eager")
            forward = sharded.model
        for step in range(3):
            outputs = [forward(sharded.inputs(step)), plain.model(sharded.inputs(step))]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
            outputs[0].pow(2).mean().backward()
            plain.model(plain.inputs(step)).pow(2).mean().backward()
            plain.step()
            sharded.step()
            assert_same(sharded.model, plain.model, 1e-12)
