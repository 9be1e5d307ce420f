"""What sharded training has to equal: the unwrapped model in one process.

Two forms. `train` on all ranks' rows at once is the definition. Where rows see each other (batch
norm) or random numbers (dropout), and where the comparison is bitwise, `train_rank_by_rank`
computes each rank's loss alone and adds up their gradients, as an average over ranks does.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import allow_warnings
from tests.models import Case, loss_of

ROWS = 4
"""Rows of a batch on each rank."""

STEPS = 4
"""Of a training: the first two record the order of units, which the others follow."""


@dataclass(frozen=True)
class Trained:
    """The end of a training run: the state dict, and the loss of every step."""

    state: dict[str, Tensor]
    losses: list[float]


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    # Momentum for the main oracle: unlike Adam it shows wrongly scaled gradients.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
}


def train(
    case: Case,
    world_size: int,
    optimizer: str = "sgd",
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
    *,
    by_rank: bool = False,
) -> Trained:
    """Train on the rows of all ranks, together or, where that differs, rank by rank."""
    model = case.model(dtype)
    optim = OPTIMIZERS[optimizer](trainable(model))
    losses = []
    for step in range(steps):
        if by_rank or not case.row_wise:
            losses.append(_backward_by_rank(model, case, step, world_size, dtype))
        else:
            inputs, target = case.batch(step, world_size * ROWS, dtype)
            loss = loss_of(model(inputs), target)
            loss.backward()
            losses.append(loss.item())
        step_and_zero(optim)
    return Trained(snapshot(model), losses)


train_rank_by_rank = functools.partial(train, by_rank=True)


def _backward_by_rank(
    model: nn.Module, case: Case, step: int, world_size: int, dtype: torch.dtype
) -> float:
    """Each rank's rows in turn, with that rank's random numbers and rank 0's buffers."""
    before = [buffer.clone() for buffer in model.buffers()]
    after = before
    total = 0.0
    for rank in range(world_size):
        set_buffers(model, before)
        loss = local_loss(model, case, step, rank, world_size, dtype)
        (loss / world_size).backward()
        total += loss.item() / world_size
        after = [buffer.clone() for buffer in model.buffers()] if rank == 0 else after
    set_buffers(model, after)
    return total


def local_loss(
    model: nn.Module,
    case: Case,
    step: int,
    rank: int,
    world_size: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The loss of one rank's rows of a step; draws this rank's random numbers."""
    inputs, target = (
        part.chunk(world_size)[rank] for part in case.batch(step, world_size * ROWS, dtype)
    )
    # Not torch.manual_seed, which formats a stack for each kind of device that is not in use.
    torch.default_generator.manual_seed(1000 * rank + step)
    return loss_of(model(inputs), target)


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Case,
    rank: int,
    world_size: int,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """Train a wrapped model, sharded or DDP's, on this rank's rows; the losses of these."""
    losses = []
    for step in range(steps):
        loss = local_loss(model, case, step, rank, world_size, dtype)
        loss.backward()
        step_and_zero(optimizer)
        losses.append(loss.item())
    return losses


def assert_trains_alike(
    case: Case, rank: int, world_size: int, model: nn.Module | None = None, **keywords: Any
) -> None:
    """Training ``model``, or a model wrapped with ``keywords``, equals training the plain model."""
    expected = train(case, world_size)
    model = model or case.wrap(**keywords)
    train_steps(model, sgd(model), case, rank, world_size)
    assert_same_state(model.state_dict(), expected.state, 0.0, 1e-12)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["sgd"](trainable(model))


def trained(
    case: Case, rank: int, world_size: int, **keywords: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps of the model, wrapped with these keywords."""
    model = case.wrap(**keywords)
    return train_steps(model, sgd(model), case, rank, world_size, steps=3), snapshot(model)


def step_with(optimizers: Sequence[torch.optim.Optimizer], loss_of: Callable[[], Tensor]) -> None:
    """One step of each optimizer, with gradients of this loss; L-BFGS computes it repeatedly."""

    def closure() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    if isinstance(optimizers[0], torch.optim.LBFGS):
        optimizers[0].step(closure)
        return
    closure()
    for optimizer in optimizers:
        optimizer.step()


def step_and_zero(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def change_all(model: nn.Module, change: Callable[[nn.Parameter], object]) -> None:
    for param in model.parameters():
        change(param)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict that later steps leave alone."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float
) -> None:
    """The same names in the same order, the same shapes and dtypes, and close values."""
    assert list(actual) == list(expected), f"{list(actual)} instead of {list(expected)}"
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def _state_of(value: Any) -> Any:
    return snapshot(value) if isinstance(value, nn.Module) else value


def assert_same(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Models and state dicts have the same entries, and all that is compared has close values."""
    actual, expected = map(_state_of, (actual, expected))
    if isinstance(expected, dict):
        assert_same_state(actual, expected, rtol, atol)
    else:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_identical(actual: Any, expected: Any) -> None:
    """The same structure, order of names, shapes, dtypes and bits; of modules, the state dicts."""
    actual, expected = map(_state_of, (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)


def assert_same_gradients(
    sharded: nn.Module, plain: nn.Module, rtol: float = 1e-12, atol: float = 1e-12
) -> None:
    """Whole gradients are close, and those that lack, lack on both sides."""
    for (name, mine), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            grad = getattr(mine.grad, "full_tensor", mine.grad.detach)()
            torch.testing.assert_close(grad, theirs.grad, rtol=rtol, atol=atol, msg=name)


def own_parts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()``, without the warning that it has only this rank's parts."""
    with allow_warnings():
        return optimizer.state_dict()
