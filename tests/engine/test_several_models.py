"""Several models that train one another; each script runs on both sides of `tests/side.py`."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.combinations import usual_and_every
from tests.harness import run_ranks
from tests.models import Mlp
from tests.side import Net, Side, SideScript, run_both, sgd, step_and_clear
from tests.ways import BASIC

pytestmark = pytest.mark.by_turns


def adversarial(side: Side) -> list[Any]:
    """The critic learns from detached samples, then passes gradients on to the generator."""
    generator, critic = side.wrap(Net()), side.wrap(Net(7, 1))
    optimizers = sgd(generator), sgd(critic)
    for step in range(3):
        fake = generator(side.draw(step, 7))
        (
            F.softplus(critic(fake.detach())) + F.softplus(-critic(side.draw(50 + step, 7)))
        ).mean().backward()
        step_and_clear(optimizers[1])
        F.softplus(-critic(fake)).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [generator, critic]


def adversarial_with_frozen_critic(side: Side) -> list[Any]:
    """As above; the critic asks for no gradients while the generator learns."""
    generator, critic = side.wrap(Net()), side.wrap(Net(7, 1))
    optimizers = sgd(generator), sgd(critic)
    for step in range(3):
        critic.requires_grad_(True)
        with torch.no_grad():
            fake = generator(side.draw(step, 7))
        (critic(fake) - critic(side.draw(50 + step, 7))).mean().backward()
        step_and_clear(optimizers[1])
        critic.requires_grad_(False)
        (-critic(generator(side.draw(step, 7)))).mean().backward()
        assert all(p.grad is None for p in critic.parameters())
        step_and_clear(optimizers[0])
    return [generator, critic]


def critic_with_gradient_penalty(side: Side) -> list[Any]:
    """WGAN-GP: samples of one wrapped model, a penalty on the slope of another."""
    generator, critic = side.wrap(Net()), side.wrap(Net(7, 1))
    optimizers = sgd(generator, lr=0.01), sgd(critic, lr=0.01)
    for step in range(3):
        real, fake = side.draw(50 + step, 7), generator(side.draw(step, 7)).detach()
        mixed = real.lerp(fake, 0.3).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).pow(2).mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        step_and_clear(optimizers[1])
        (-critic(generator(side.draw(step, 7))).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [generator, critic]


def chained(side: Side) -> list[Any]:
    """Two wrapped models, one optimizer, one loss."""
    first, second = side.wrap(Net()), side.wrap(Net(7, 3))
    optimizer = sgd(first, second)
    for step in range(3):
        output = second(first(side.draw(step, 7)))
        F.mse_loss(output, side.draw(50 + step, 3)).backward()
        step_and_clear(optimizer)
    return [first, second]


def chained_in_a_cycle(side: Side) -> list[Any]:
    """CycleGAN: each model runs before and after the other in one graph."""
    first, second = side.wrap(Net()), side.wrap(Net())
    optimizer = sgd(first, second)
    for step in range(3):
        a, b = side.draw(step, 7), side.draw(50 + step, 7)
        (F.mse_loss(second(first(a)), a) + F.mse_loss(first(second(b)), b)).backward()
        step_and_clear(optimizer)
    return [first, second]


class Roots(nn.Module):
    """An unwrapped model of wrapped parts, one of which runs twice."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.encoder = side.wrap(Net())
        self.heads = nn.ModuleList([side.wrap(Net(7, 3)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.encoder(x))
        return self.heads[0](x) + self.heads[1](x)


def parts_wrapped_one_by_one(side: Side) -> list[Any]:
    model = Roots(side)
    optimizer = sgd(model)
    for step in range(3):
        side.loss(model, step).backward()
        step_and_clear(optimizer)
    return [model]


def teacher(side: Side) -> list[Any]:
    """A frozen model gives the targets: without gradients, and with useless ones."""
    student, frozen = side.wrap(Mlp()), side.wrap(Mlp().requires_grad_(False))
    optimizer = sgd(student)
    for step in range(4):
        x = side.draw(step, 7)
        with torch.set_grad_enabled(step % 2 == 1):
            target = frozen(x)
        F.mse_loss(student(x), target).backward()
        step_and_clear(optimizer)
    return [student, frozen]


def perceptual_loss(side: Side) -> list[Any]:
    """Gradients pass through a frozen model to the one that learns."""
    model, frozen = side.wrap(Net()), side.wrap(Mlp().requires_grad_(False))
    optimizer = sgd(model)
    for step in range(3):
        F.mse_loss(frozen(model(side.draw(step, 7))), side.draw(50 + step, 3)).backward()
        step_and_clear(optimizer)
    return [model, frozen]


def momentum_encoder(side: Side) -> list[Any]:
    """Another wrapped model follows by hand, between the steps."""
    online, target = side.wrap(Net()), side.wrap(Net())
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    optimizer = sgd(online)
    for step in range(3):
        x = side.draw(step, 7)
        with torch.no_grad():
            wanted = target(x + 0.1)
        F.mse_loss(online(x), wanted).backward()
        step_and_clear(optimizer)
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
    return [online, target]


def averaged_model(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    averages = [
        AveragedModel(model),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    ]
    optimizer = sgd(model)
    outputs = []
    for step in range(3):
        side.loss(model, step).backward()
        step_and_clear(optimizer)
        for average in averages:
            average.update_parameters(model)
            with torch.no_grad():
                outputs.append(average(torch.ones(1, 7, dtype=torch.float64)))
    return [model, *[average.module for average in averages], *outputs]


def copies_as_targets(side: Side) -> list[Any]:
    """A copy taken in the middle of training, frozen, in the loss of the original."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(4):
        if step % 2 == 0:
            old = copy.deepcopy(model).requires_grad_(False)
        x = side.draw(step, 7)
        (side.loss(model, step) + F.mse_loss(model(x), old(x + 1))).backward()
        step_and_clear(optimizer)
    return [model, old]


SCRIPTS: list[SideScript] = [
    adversarial,
    adversarial_with_frozen_critic,
    critic_with_gradient_penalty,
    chained,
    chained_in_a_cycle,
    parts_wrapped_one_by_one,
    teacher,
    perceptual_loss,
    momentum_encoder,
    averaged_model,
    copies_as_targets,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: SideScript) -> None:
    run_ranks(run_both, 2, script, usual_and_every(4, BASIC, SCRIPTS.index(script)))
