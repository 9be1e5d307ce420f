"""`Side` and `Run`: where a script runs that trains an unwrapped and a sharded model alike.

Such a script is written once. It runs on the unwrapped side with the rows of all ranks, and on the
sharded side with this rank's rows; models, tensors and numbers that it returns must agree.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming
from tests.models import CASES, Case, loss_of
from tests.oracle import OPTIMIZERS, ROWS, assert_same, local_loss, snapshot, trainable
from tests.ways import WAYS

TOLERANCE = 1e-12
"""Float64; the ranks' sums round in another order."""


class Side:
    """Where a script runs: plain with all rows, or sharded (``way``) with one rank's.

    Attributes:
        way: a key of `WAYS`; None on the plain side.
    """

    def __init__(self, rank: int, world_size: int, way: str | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.way = way

    def wrap(self, module: nn.Module, *units: type[nn.Module]) -> nn.Module:
        """The module in float64; sharded, with ``units`` (linear layers), on the sharded side."""
        module = module.double()
        if self.way is None:
            return module
        return ShardedWrapper(
            module,
            **WAYS[self.way].keywords,
            auto_wrap_policy=ModuleWrapPolicy(units or (nn.Linear,)),
        )

    def rows(self, tensor: Tensor) -> Tensor:
        """This side's rows of a batch."""
        return tensor if self.way is None else tensor.chunk(self.world_size)[self.rank]

    def draw(self, step: int, *shape: int) -> Tensor:
        """Random rows, the same ones on both sides."""
        generator = torch.Generator().manual_seed(step)
        rows = ROWS * self.world_size
        return self.rows(torch.randn(rows, *shape, generator=generator, dtype=torch.float64))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        return F.mse_loss(model(self.draw(step, 7)), self.draw(1000 + step, 3))

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.way is None else model.no_sync()

    def by_rank(self, values: list[float]) -> float:
        """Another number on each rank; their mean on the plain side."""
        return sum(values) / len(values) if self.way is None else values[self.rank]


class Run:
    """A model in training: the plain one, or one rank's part of the sharded one."""

    def __init__(self, model: nn.Module, case: Case, rank: int, world_size: int) -> None:
        self.model = model
        self.case = case
        self.rank = rank
        self.world_size = world_size
        self.is_sharded = isinstance(model, ShardedWrapper)
        self.optimizer = OPTIMIZERS["sgd"](trainable(model))

    def loss(self, step: int) -> Tensor:
        """The loss of a step's rows: this rank's, or all."""
        if self.is_sharded:
            return local_loss(self.model, self.case, step, self.rank, self.world_size)
        inputs, target = self.case.batch(step, self.world_size * ROWS)
        return loss_of(self.model(inputs), target)

    def inputs(self, step: int) -> Tensor:
        inputs, _ = self.case.batch(step, self.world_size * ROWS)
        return inputs.chunk(self.world_size)[self.rank] if self.is_sharded else inputs

    def evaluate(self) -> Tensor:
        """The model's output for rows that are the same on every rank."""
        return self.model(self.case.batch(100, 3)[0])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, first: int = 0, last: int = 2) -> None:
        for step in range(first, last):
            self.loss(step).backward()
            self.step()

    def no_sync(self, **keywords: Any) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync(**keywords) if self.is_sharded else contextlib.nullcontext()

    def submodule(self, name: str) -> nn.Module:
        """A module of the model itself, without the wrapper around it."""
        module = getattr(self.model, name)
        return module.module if isinstance(module, ShardedWrapper) else module

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]


Script = Callable[[Run], Any]


def pair(
    rank: int, world_size: int, way: str, case: Case | str = "mlp", **keywords: Any
) -> tuple[Run, Run]:
    """The same model sharded and unwrapped."""
    case = CASES[case] if isinstance(case, str) else case
    sharded = case.wrap(case.model(), **{**WAYS[way].keywords, **keywords})
    return Run(sharded, case, rank, world_size), Run(case.model(), case, rank, world_size)


def assert_same_model(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model, rtol=0.0, atol=TOLERANCE)


SideScript = Callable[[Side], list[Any]]
"""A training that runs on either side; returns the models and tensors that must agree."""


def run_both(rank: int, world_size: int, script: SideScript, ways: list[str]) -> None:
    """Run a script on the plain side and on the sharded side of each way, and compare."""
    expected = _run_one(script, Side(rank, world_size, None))
    for way in ways:
        with naming(way):
            actual = _run_one(script, Side(rank, world_size, way))
            for mine, theirs in zip(actual, expected, strict=True):
                assert_same(mine, theirs)


def _run_one(script: SideScript, side: Side) -> list[Any]:
    torch.manual_seed(3)
    return [snapshot(value) if isinstance(value, nn.Module) else value for value in script(side)]


def sgd(*models: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    params = [p for model in models for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def step_and_clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Net(nn.Module):
    """Two layers and a scale that the root owns."""

    def __init__(self, inputs: int = 7, outputs: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, 9)
        self.down = nn.Linear(9, outputs)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale
