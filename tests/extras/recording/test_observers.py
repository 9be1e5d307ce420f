"""Watchers change nothing: with all of them attached, losses and weights are equal bit for bit."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from flatshard import collectives
from flatshard.engine.events import StepExtension
from flatshard.options.extras import EXTRAS
from tests.harness import on_ranks
from tests.models import CASES, loss_of
from tests.oracle import snapshot

EVENTS = {"begin_forward", "end_forward", "after_forward", "begin_backward", "end_backward"}
EVENTS |= {"enter_forward", "leave_forward", "enter_backward", "leave_backward", "on_grad", "span"}


class _Everything(StepExtension):
    """Counts each event."""

    name = list(EXTRAS)[-1]
    watches = True

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            self.heard[name] += 1
        return super().__getattribute__(name)


def _train(
    case: str, rank: int, strategy: str, watchers: list[StepExtension]
) -> tuple[list[float], dict[str, Tensor]]:
    model = CASES[case].wrap(CASES[case].model(), sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    with contextlib.ExitStack() as stack:
        if watchers:
            stack.enter_context(model.record_steps())
            stack.enter_context(collectives.record())
            stack.enter_context(torch.profiler.profile(acc_events=True))
            model.warn_non_finite()
            for one in watchers:
                model._sharded_unit.context.extend(one)
        for step in range(4):
            with model.no_sync() if step == 1 else contextlib.nullcontext():
                inputs, target = CASES[case].batch(2 * step + rank, 4)
                loss = loss_of(model(inputs), target)
                loss.backward()
            losses.append(loss.item())
            if step != 1:
                model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(model(inputs), target).item())
    return losses, snapshot(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("case", ["nested", "checkpointed"])
@on_ranks(2)
def test_nothing_changes(rank: int, world_size: int, case: str, strategy: str) -> None:
    everything = _Everything()
    losses, weights = _train(case, rank, strategy, [])
    watched_losses, watched_weights = _train(case, rank, strategy, [everything])
    assert set(everything.heard) == EVENTS
    assert watched_losses == losses
    assert watched_weights.keys() == weights.keys()
    assert all(torch.equal(watched_weights[name], value) for name, value in weights.items())
