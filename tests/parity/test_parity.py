"""Sharded training ends at the same parameters as training in one process."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flatshard import ShardingStrategy
from flatshard.wrap import size_based_auto_wrap_policy
from tests.combinations import diagonal, every
from tests.harness import naming, run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, Trained, assert_same, snapshot, train, train_steps, trainable

# Hybrid ones on one node are the same; test_strategies has nodes.
STRATEGIES = [strategy.name for strategy in ShardingStrategy if not strategy.placement.hybrid]

# Ranks add up in another order than one process does: some units in the last place, here of
# float64, per step.
TOLERANCE = {"sgd": 1e-12, "adadelta": 1e-12}
# Adam divides the gradient by its own size + 1e-8. A key's bias has a gradient of zero, in floating
# point 1e-18 or so: the step then has an error of lr * 1e-18 / 1e-8.
TOLERANCE["adamw"] = 1e-10


@dataclass(frozen=True)
class Config:
    """One way to shard and train a case."""

    case: str
    world_size: int = 2
    strategy: str = "FULL_SHARD"
    optimizer: str = "sgd"
    min_unit_numel: int | None = None
    dtype: torch.dtype = torch.float64


def _configs() -> Iterator[Config]:
    """Every value of each dimension, the most usual pairs, not the whole product.

    `test_random_models.py` crosses the settings at random, in a hundred cases with THOROUGH=1.
    """
    for case in CASES:
        yield Config(case)
    for case in every(2, CASES):
        yield Config(case, 3, "SHARD_GRAD_OP")
    for strategy, world_size in diagonal(4, STRATEGIES, [1, 2, 3, 4]):
        yield Config("mlp", world_size, strategy)
    for strategy in STRATEGIES:
        yield Config("tied-in-unit", 3, strategy)
    for optimizer, strategy in diagonal(2, ["adamw", "adadelta"], STRATEGIES):
        yield Config("tied-in-unit", 2, strategy, optimizer)
    for case in ("batch-norm", "frozen", "odd-shapes"):
        yield Config(case, 2, "NO_SHARD")
        yield Config(case, 4, "FULL_SHARD", optimizer="adamw")
    for numel in (1, 30, 100):
        yield Config("nested", 2, min_unit_numel=numel)
    for strategy in STRATEGIES:
        yield Config("mlp", 3, strategy, dtype=torch.float32)


def _train_each(rank: int, world_size: int, configs: list[Config]) -> list[Trained]:
    """Train each way; every other model has one unit a layer."""
    results = []
    for number, config in enumerate(configs):
        case = CASES[config.case]
        keywords: dict[str, Any] = {"coalesce_bytes": 0} if number % 2 else {}
        if config.min_unit_numel is not None:
            numel = {"min_num_params": config.min_unit_numel}
            keywords["auto_wrap_policy"] = functools.partial(size_based_auto_wrap_policy, **numel)
        with naming(config):
            keywords["sharding_strategy"] = config.strategy
            model = case.wrap(case.model(config.dtype), **keywords)
            optimizer = OPTIMIZERS[config.optimizer](trainable(model))
            losses = train_steps(model, optimizer, case, rank, world_size, dtype=config.dtype)
            results.append(Trained(snapshot(model), losses))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_as_one_process(world_size: int) -> None:
    configs = [one for one in dict.fromkeys(_configs()) if one.world_size == world_size]
    found = run_ranks(_train_each, world_size, configs, timeout=200)
    for config, *results in zip(configs, *found, strict=True):
        case = CASES[config.case]
        expected = train(case, world_size, config.optimizer, dtype=config.dtype)
        tolerance = TOLERANCE[config.optimizer] if config.dtype == torch.float64 else 1e-6
        with naming(config):
            assert_same(results[0].state, expected.state, rtol=0.0, atol=tolerance)
            losses = pytest.approx(expected.losses, rel=1e-6, abs=tolerance)
            assert _mean_losses(results) == losses
            # Buffers are each rank's own after a forward, as under DDP; parameters everybody's.
            names = [name for name, _ in case.model().named_parameters(remove_duplicate=False)]
            for result in results[1:]:
                for name in names:
                    assert torch.equal(result.state[name], results[0].state[name]), name


NAMES = ["mlp", "cnn", "cnn-channels-last", "tied-in-unit", "batch-norm", "dropout"]
BITWISE = diagonal(4, NAMES, [1, 2], STRATEGIES, [torch.float64, torch.float32])


@pytest.mark.parametrize("world_size", [1, 2])
def test_bitwise(world_size: int) -> None:
    """The average of two gradients is exact but for one rounding, whatever the order."""
    own = (one for one in BITWISE if one[1] == world_size)
    configs = [Config(*names, dtype=dtype) for *names, dtype in own]
    found = run_ranks(_train_each, world_size, configs, timeout=200)
    for config, *results in zip(configs, *found, strict=True):
        with naming(config):
            expected = train(CASES[config.case], world_size, dtype=config.dtype, by_rank=True)
            assert_same(results[0].state, expected.state, rtol=0.0, atol=0.0)
            assert _mean_losses(results) == expected.losses


def _mean_losses(results: list[Trained]) -> list[float]:
    """The ranks' batches have the same size, so the mean of means is the mean."""
    return [sum(losses) / len(losses) for losses in zip(*(r.losses for r in results), strict=True)]
