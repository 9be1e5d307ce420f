"""The time of operators, optimizers and collectives in a plan."""

import pytest
import torch
from torch import nn

from flatshard.extras.plan import hardware
from flatshard.extras.plan.hardware import COLLECTIVE_SHARE, Device, Machine
from flatshard.extras.plan.planning import TracedModel
from flatshard.extras.plan.replay import Outcome, Replay
from flatshard.wrap import ModuleWrapPolicy

WIDTH, UNITS = 64, 4
FAST = 1e30


def build(num_frozen: int = 0) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
    for module in model[:num_frozen]:
        module.requires_grad_(False)
    return model


def predict(
    strategy: str,
    *,
    num_frozen: int = 0,
    optimizer_bytes: int = 8,
    memory_rate: float = FAST,
) -> Outcome:
    traced = TracedModel.of(
        lambda: build(num_frozen),
        lambda model: model(torch.ones(32, WIDTH)).sum(),
        on_gpu=False,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        coalesce_bytes=0,
    )
    flats = traced.flats(2, sharding_strategy=strategy, optimizer_bytes=optimizer_bytes)
    device = Device(FAST, FAST, memory_rate, 0.0, is_gpu=False)
    return Replay(traced.trace, flats, Machine(device, 2, FAST, FAST, 0.0, "sockets")).run()


def test_frozen_parameters_are_gathered_once() -> None:
    sent = [sum(predict("SHARD_OP", num_frozen=number).sent_bytes) for number in (0, 2)]
    assert sent[1] == sent[0] / 2


def test_a_step_is_longer_if_collectives_overlap_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = TracedModel.of(
        build,
        lambda model: model(torch.ones(32, WIDTH)).sum(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        coalesce_bytes=0,
    )
    # The matrix product of a unit takes 1 s. An all-gather takes 0.1 s.
    device, link = Device(2 * 32 * WIDTH**2, FAST, FAST, 0.0), 10 * 4 * WIDTH**2 / 2

    def seconds() -> float:
        return (
            Replay(traced.trace, traced.flats(2), Machine(device, 2, link, link, 0.0)).run().seconds
        )

    slowed = seconds()
    monkeypatch.setattr(hardware, "COLLECTIVE_SHARE", 0.0)
    # In forward, 3 of 4 all-gathers overlap. In backward, 3 all-gathers and 3 reductions overlap.
    assert slowed - seconds() == pytest.approx(9 * 0.1 * COLLECTIVE_SHARE, rel=0.01)
