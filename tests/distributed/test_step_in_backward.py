"""Optimizers that step in backward: the numbers of ``backward()`` and ``step()``, to the bit."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, ShardingStrategy
from flatshard.step_in_backward import SteppedInBackward
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, run_ranks
from tests.models import CASES, Case, Mlp
from tests.oracle import ROWS, assert_same_state, local_loss, snapshot, train, trainable

STEPS = 4


def _sgd(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, **options)


def _adamw(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Two groups, each with parameters of all units, that lie between one another."""
    params = list(params)
    flat = any(param.dim() == 1 and param.numel() > 100 for param in params)
    decayed = params[::2] if flat else [param for param in params if param.dim() > 1]
    rest = [param for param in params if all(param is not one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "sgd-fused": lambda params: _sgd(params, fused=True),
    "adamw": _adamw,
    "adamw-foreach": lambda params: _adamw(params, foreach=True),
    "adamw-fused": lambda params: _adamw(params, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, rank: int, world_size: int
) -> Iterator[None]:
    """An ordinary loop with a scheduler; stops after each backward."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for step in range(STEPS):
        local_loss(model, case, step, rank, world_size, torch.float32).backward()
        yield
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def _configurations() -> Iterator[tuple[str, str, str, bool]]:
    strategies = [one.name for one in ShardingStrategy if not one.placement.hybrid]
    for number, case in enumerate(CASES):
        if case == "mixed-types":  # float64 alone
            continue
        optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
        yield case, optimizer, strategies[number % len(strategies)], number % 3 != 2
    for optimizer in OPTIMIZERS:
        yield "transformer", optimizer, "FULL_SHARD", True


def _all_alike(rank: int, world_size: int) -> int:
    early = 0
    for name, optimizer, strategy, use_orig_params in _configurations():
        case = CASES[name]
        ends = []
        with naming((name, optimizer, strategy, use_orig_params)):
            for in_backward in (False, True):
                model = case.wrap(
                    case.model(torch.float32),
                    sharding_strategy=strategy,
                    use_orig_params=use_orig_params,
                )
                optim = OPTIMIZERS[optimizer](trainable(model))
                if in_backward:
                    model.step_in_backward(optim)
                for _ in _train(model, optim, case, rank, world_size):
                    early += len(model._context.stepping._stepped)
                ends.append((snapshot(model), ShardedWrapper.optim_state_dict(model, optim)))
            assert_same_state(ends[1][0], ends[0][0], 0.0, 0.0)
            for key, state in ends[0][1]["state"].items():
                for entry, value in state.items():
                    assert torch.equal(ends[1][1]["state"][key][entry], value), (key, entry)
    return early


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bitwise(world_size: int) -> None:
    """What is stepped early, and when, may differ between ranks; the numbers may not."""
    assert min(run_ranks(_all_alike, world_size)) > 0
