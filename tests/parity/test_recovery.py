"""A pass that failed, and what the program does next: the product, beside the unwrapped model.

The exception stays referenced, as in a notebook, so that no frame of the failed pass is freed.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from flatshard import ShardedWrapper, checkpoint
from flatshard.options.extras import default_extra
from flatshard.wrap import ModuleWrapPolicy
from tests.combinations import THOROUGH, diagonal
from tests.harness import naming, on_ranks
from tests.models import Composed
from tests.oracle import ROWS, step_and_zero
from tests.side import TOLERANCE
from tests.ways import BASIC, select

pytestmark = pytest.mark.skipif(
    not (default_extra("summon") and default_extra("conversion")), reason="deleted extras"
)

WAYS = {**BASIC, **select("keep", "hybrid-nodes-of-one")}


class _Planned(Exception):
    """An error that a program raises."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)
        self.then: Callable[[Tensor], object] = id  # called between the layers
        self.recomputes: bool | None = None  # by a checkpoint: whether it is reentrant

    def _inner(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        self.then(x)
        return self.down(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes is None:
            return self._inner(x)
        return recomputed(self._inner, x, use_reentrant=self.recomputes)


def _model() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.second(x + net.first(x)) * net.scale

    scale = nn.Parameter(torch.ones(7))
    return Composed(forward, first=_Block(), second=_Block(), scale=scale)


class _Sgd(torch.optim.SGD):
    """Raises ``fails`` after the update."""

    fails: BaseException | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.fails is not None:
            raise self.fails


class Program:
    """A training, and what it held before a pass failed."""

    def __init__(self, rank: int, way: str | None, folder: str) -> None:
        """The sharded model with this rank's rows; with all rows the unwrapped one, if no way."""
        self.rank, self.way, self.folder = rank, way, folder
        torch.manual_seed(0)
        self.model: Any = _model().double()
        if way is not None:
            policy = ModuleWrapPolicy({_Block})
            self.model = ShardedWrapper(self.model, **WAYS[way].keywords, auto_wrap_policy=policy)
        self.block: Any = getattr(self.model.second, "module", self.model.second)
        self.optimizer: Any = _Sgd(self.model.parameters(), lr=0.1, momentum=0.9)
        self.average = copy.deepcopy(self.model)
        self.train(1)
        self.params = list(self.model.parameters())
        self.backup = [0.5 * full for full in self.full()]

    def full(self) -> list[Tensor]:
        """The values that the program would print."""
        return [value.detach().clone() for value in self.model.state_dict().values()]

    def draw(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(2 * ROWS, 7, generator=generator, dtype=torch.float64)
        return rows if self.way is None else rows.chunk(2)[self.rank]

    def loss(self, step: int = 0) -> Tensor:
        return self.model(self.draw(step)).square().mean()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.loss(step).backward()
            step_and_zero(self.optimizer)

    def roll_back(self) -> None:
        with torch.no_grad():
            for param, old in zip(self.model.parameters(), self.backup, strict=True):
                param.copy_(old)


# ---------------------------------------------------------------- what fails


def _raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


def _in_forward(one: Program, error: BaseException) -> None:
    one.block.then = _raising(error)
    one.loss()


def _in_a_unit(one: Program, error: BaseException) -> None:
    one.block.then = _raising(error)
    one.model.second(one.draw(0))


def _in_backward(one: Program, error: BaseException) -> None:
    one.block.then = lambda x: x.register_hook(_raising(error))
    one.loss().backward()


def _after_another_backward(one: Program, error: BaseException) -> None:
    one.loss().backward()
    _in_backward(one, error)


def _in_a_hook(one: Program, error: BaseException) -> None:
    with one.model.first.up.bias.register_hook(_raising(error)):  # removes it in the end
        one.loss().backward()


def _in_a_post_hook(one: Program, error: BaseException) -> None:
    with one.model.second.up.bias.register_post_accumulate_grad_hook(_raising(error)):
        one.loss().backward()


def _in_recomputation(one: Program, error: BaseException) -> None:
    one.block.recomputes = True
    loss = one.loss()
    one.block.then = _raising(error)
    loss.backward()


def _in_step(one: Program, error: BaseException) -> None:
    one.loss().backward()
    one.optimizer.fails = error
    one.optimizer.step()


FAILURES: list[Callable[[Program, BaseException], None]] = [
    *(_in_backward, _in_forward, _in_step, _in_recomputation, _in_a_hook, _in_a_unit),
    *(_after_another_backward, _in_a_post_hook),
]


@contextlib.contextmanager
def _caught(one: Program, kind: type[BaseException]) -> Iterator[list[BaseException]]:
    kept: list[BaseException] = []
    try:
        yield kept
    except kind as error:
        kept.append(error)
    assert kept
    one.block.then, one.block.recomputes, one.optimizer.fails = id, None, None


# ---------------------------------------------------------------- what the program does next


def _lists(one: Program) -> None:
    names = [name for name, _ in one.model.named_parameters()]
    listed = [
        list(one.model.parameters()),
        [one.model.get_parameter(name) for name in names],
        [param for group in one.optimizer.param_groups for param in group["params"]],
        [one.model.scale, *one.model.first.parameters(), *one.block.parameters()],
    ]
    for found in listed:
        assert [*map(id, found)] == [*map(id, one.params)]
    assert {*map(id, one.optimizer.state)} == {*map(id, one.params)}


def _reads(one: Program) -> object:
    return torch.stack([param.detach().norm() for param in one.model.parameters()])


def _writes(one: Program) -> None:
    with torch.no_grad():
        one.block.up.weight.mul_(2)
    one.model.scale.data.add_(1)
    nn.init.constant_(one.model.first.down.bias, 0.3)


def _assigns(one: Program) -> None:
    for param, old in zip(one.model.parameters(), one.backup, strict=True):
        param.data = old.clone()


def _makes_an_optimizer(one: Program) -> None:
    groups = [{"params": group["params"]} for group in one.optimizer.param_groups]
    one.optimizer.zero_grad()
    one.optimizer = _Sgd(groups, lr=0.3)


def _freezes(one: Program) -> None:
    one.block.up.weight.requires_grad_(False)
    one.model.scale.requires_grad_(False)


def _converts(one: Program) -> None:
    one.optimizer.zero_grad()
    one.model.float().double()
    one.optimizer = _Sgd(one.model.parameters(), lr=0.1)


def _copies(one: Program) -> object:
    twin = copy.deepcopy(one.model)
    return [value.detach().clone() for value in twin.state_dict().values()]


def _loads(one: Program) -> None:
    names = one.model.state_dict().keys()
    one.model.load_state_dict(dict(zip(names, one.backup, strict=True)))
    part = one.block.state_dict()
    one.model.second.load_state_dict({name: 0.5 * value for name, value in part.items()})


def _saves(one: Program) -> object:
    before = one.full()
    if one.way is not None:
        checkpoint.save(one.folder, one.model)
        nn.init.zeros_(one.model.scale)
        checkpoint.load(one.folder, one.model)
    return before


def _averages(one: Program) -> object:
    pairs = zip(one.average.parameters(), one.model.parameters(), strict=True)
    with torch.no_grad():
        for mean, param in pairs:
            mean.lerp_(param, 0.25)
    return [value.detach().clone() for value in one.average.state_dict().values()]


def _summons(one: Program) -> object:
    if one.way is None:
        return [param.detach().clone() for param in one.params]
    with ShardedWrapper.summon_full_params(one.model):
        return [param.detach().clone() for param in one.model.parameters()]


def _drops_by_groups(one: Program) -> None:
    for group in one.optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
    one.optimizer.step()


def _evaluates(one: Program) -> object:
    with torch.no_grad():
        return one.model(torch.ones(2, 7, dtype=torch.float64))


ACTIONS: list[Callable[[Program], object]] = [
    *(_lists, _writes, _makes_an_optimizer, _reads, _freezes, _copies, _loads, _averages),
    *(_summons, _converts, _saves, _assigns, _drops_by_groups, _evaluates),
]


def _run(rank: int, way: str | None, folder: str, cell: Any) -> list[Any]:
    fail, kind, act = cell
    one = Program(rank, way, folder)
    with _caught(one, kind) as kept:  # noqa: F841
        fail(one, kind())
    one.roll_back()
    found = act(one)
    one.optimizer.zero_grad()
    one.train(2)
    return [found, one.full()]


KINDS: list[type[BaseException]] = [_Planned, KeyboardInterrupt]
CELLS = diagonal(9, FAILURES, KINDS, ACTIONS)


@pytest.mark.parametrize("way", WAYS if THOROUGH else BASIC)
@on_ranks(2, timeout=600.0)
def test_product(rank: int, world_size: int, way: str, tmp_path: Path) -> None:
    WAYS[way].set_nodes()
    for number, cell in enumerate(CELLS):
        with naming(str(cell)):
            expected = _run(rank, None, "", cell)
            found = _run(rank, way, f"{tmp_path}/{number}", cell)
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
