"""Several models that train one another; each script runs on both sides of `tests/side.py`."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatshard import ShardedWrapper
from tests.combinations import usual_and_every
from tests.harness import run_ranks
from tests.models import Mlp
from tests.side import Net, Side, SideScript, run_both, sgd, step_and_clear
from tests.ways import BASIC, WAYS

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


class Headed(nn.Module):
    """A model over an encoder that another model has, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def one_wrapper_around_models_that_share_an_encoder(side: Side) -> list[Any]:
    """Actor and critic, called by themselves: in turn, in one backward, one only, under no_sync."""
    encoder = Net()
    models = side.wrap(nn.ModuleList([Headed(encoder), Headed(encoder)]), Net, Headed)
    optimizer = sgd(models)
    for step in range(2):
        for model in models:
            side.loss(model, step).backward()
            step_and_clear(optimizer)
        (side.loss(models[0], step) + side.loss(models[1], 10 + step)).backward()
        with torch.no_grad():
            models[1](side.draw(step, 7))
        step_and_clear(optimizer)
        with side.no_sync(models):
            side.loss(models[1], 20 + step).backward()
        side.loss(models[0], 30 + step).backward()
        step_and_clear(optimizer)
    return [models]


def frozen_encoder_in_two_wrappers(side: Side) -> list[Any]:
    encoder = side.wrap(Net().requires_grad_(False))
    models = [_outer(side, encoder) for _ in range(2)]
    optimizer = sgd(*(model.head for model in models))
    for step in range(2):
        for model in models:
            side.loss(model, step).backward()
        step_and_clear(optimizer)
    (side.loss(models[0], 5) + side.loss(models[1], 6)).backward()
    step_and_clear(optimizer)
    twins = copy.deepcopy(models)
    assert twins[0].encoder is twins[1].encoder is not encoder
    optimizer = sgd(*(model.head for model in twins))
    side.loss(twins[0], 7).backward()
    step_and_clear(optimizer)
    return [*models, *twins]


def _outer(side: Side, encoder: nn.Module) -> nn.Module:
    model = Headed(encoder).double()
    return model if side.way is None else ShardedWrapper(model, **WAYS[side.way].keywords)


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
    one_wrapper_around_models_that_share_an_encoder,
    frozen_encoder_in_two_wrappers,
    teacher,
    perceptual_loss,
    momentum_encoder,
    averaged_model,
    copies_as_targets,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: SideScript) -> None:
    run_ranks(run_both, 2, script, usual_and_every(4, BASIC, SCRIPTS.index(script)))


@pytest.mark.parametrize("way", BASIC)
def test_a_trained_unit_in_two_outermost_wrappers(way: str) -> None:
    run_ranks(_shared, 2, way)


def _shared(rank: int, world_size: int, way: str) -> None:
    side = Side(rank, world_size, way)
    two = "is trained, and is also in another .* .around a Headed."
    remedy = "models = ShardedWrapper.nn.ModuleList"
    encoder = side.wrap(Net())
    encoder(side.draw(0, 7)).sum().backward()  # has been trained as a model of its own
    actor = _outer(side, encoder)
    with pytest.raises(ValueError, match=f"{two}.*{remedy}"):
        _outer(side, encoder)
    # The error about a policy must not recommend two wrappers.
    with pytest.raises(ValueError, match=f"{two}.*{remedy}"):
        ShardedWrapper(Headed(encoder).double(), auto_wrap_policy="auto")
    side.loss(actor, 0).backward()
    encoder.requires_grad_(False)
    critic, third = _outer(side, encoder), _outer(side, encoder)
    for model in (actor, critic, third):
        side.loss(model, 0).backward()
    encoder.requires_grad_(True)
    for model in (actor, critic, encoder):
        with pytest.raises(ValueError, match=f"Headed.*{remedy}"):
            model(side.draw(0, 7))
    # Without the other wrappers, the encoder belongs to the last one, whichever that is.
    freed = [weakref.ref(actor), weakref.ref(critic)]
    del actor, critic, model
    side.loss(third, 0).backward()
    assert [one() for one in freed] == [None, None]
    assert all(param.grad is not None for param in third.parameters())
    freed = [weakref.ref(third)]
    del third
    gc.collect()
    assert freed[0]() is None, "the encoder must not keep a model that was dropped"
    side.loss(_outer(side, encoder), 0).backward()


@pytest.mark.parametrize("way", BASIC)
def test_an_unwrapped_module_in_two_wrappers(way: str) -> None:
    run_ranks(_shares_a_module, 2, way)


def _shares_a_module(rank: int, world_size: int, way: str) -> None:
    side, encoder = Side(rank, world_size, way), Net()
    first = side.wrap(Headed(encoder), Net)
    expected = "parameter 'encoder.*' is already in another ShardedWrapper.*ModuleList"
    with pytest.raises(ValueError, match=expected):
        side.wrap(Headed(encoder))
    for again in (first, first.module):
        with pytest.raises(ValueError, match=r"ModuleList|already a ShardedWrapper"):
            side.wrap(again)
    side.loss(first, 0).backward()
