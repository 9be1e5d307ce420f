"""`Run`: a model in training, sharded or unwrapped, so that tests write a training once.

The unwrapped model trains on the rows of all ranks, the sharded one on this rank's.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.models import CASES, Case, loss_of
from tests.oracle import OPTIMIZERS, ROWS, assert_same, local_loss, step_and_zero, trainable
from tests.ways import WAYS

TOLERANCE = 1e-12
"""Float64; the ranks' sums round in another order."""


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
        everyones = self.case.batch(step, self.world_size * ROWS)[0]
        return self.rows(step, self.rank) if self.is_sharded else everyones

    def rows(self, step: int, rank: int) -> Tensor:
        """Inputs of a rank."""
        return self.case.batch(step, self.world_size * ROWS)[0].chunk(self.world_size)[rank]

    def backward(self, loss_of: Callable[[int], Tensor]) -> None:
        """Backward of this rank's loss, or of the average of all ranks' losses."""
        ranks = [self.rank] if self.is_sharded else range(self.world_size)
        for rank in ranks:
            (loss_of(rank) / len(ranks)).backward()

    def evaluate(self) -> Tensor:
        """The model's output for rows that are the same on every rank."""
        return self.model(self.case.batch(100, 3)[0])

    def step(self) -> None:
        step_and_zero(self.optimizer)

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
    sharded = case.wrap(**{**WAYS[way].keywords, **keywords})
    return Run(sharded, case, rank, world_size), Run(case.model(), case, rank, world_size)


def assert_same_model(sharded: Run, plain: Run) -> None:
    assert_same(sharded.model, plain.model, rtol=0.0, atol=TOLERANCE)
