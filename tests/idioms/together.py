"""Several models that train one another; not in the table."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.idioms.side import ROWS, Side, idiom
from tests.models import Mlp


class Net(nn.Module):
    """Two layers and a scale that the root owns."""

    def __init__(self, inputs: int = 7, outputs: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 9), nn.Linear(9, outputs)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


@idiom("a critic that asks for no gradients while the generator learns", by_hand=True)
def frozen_critic(side: Side) -> Any:
    generator, critic = side.wrap(Net()), side.wrap(Net(7, 1))
    optimizers = side.sgd(generator), side.sgd(critic)
    for step in range(3):
        critic.requires_grad_(True)
        with torch.no_grad():
            fake = generator(side.draw(step, ROWS, 7))
        (critic(fake) - critic(side.draw(50 + step, ROWS, 7))).mean().backward()
        side.step(optimizers[1])
        critic.requires_grad_(False)
        (-critic(generator(side.draw(step, ROWS, 7)))).mean().backward()
        assert all(p.grad is None for p in critic.parameters())
        side.step(optimizers[0])
    return [generator, critic]


@idiom("CycleGAN: each model runs before and after the other in one graph")
def cycle(side: Side) -> Any:
    first, second = side.wrap(Net()), side.wrap(Net())
    optimizer = side.sgd(first, second)
    for step in range(3):
        a, b = side.draw(step, ROWS, 7), side.draw(50 + step, ROWS, 7)
        (F.mse_loss(second(first(a)), a) + F.mse_loss(first(second(b)), b)).backward()
        side.step(optimizer)
    return [first, second]


class Headed(nn.Module):
    """A model over an encoder that another model has, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


class ActorCritic(nn.ModuleList):
    """Two models that share an encoder. DistributedDataParallel has to call them through this."""

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self[which](x)


@idiom("actor and critic of a shared encoder, called by themselves", by_hand=True)
def shared_encoder(side: Side) -> Any:
    encoder = Net()
    both = side.wrap(ActorCritic([Headed(encoder), Headed(encoder)]), Net, Headed)
    optimizer = side.sgd(both)

    def loss(which: int, step: int) -> Tensor:
        if side.is_flatshard:
            return side.loss(both[which], step)
        return side.loss(lambda x: both(x, which), step)

    for step in range(2):
        for which in range(2):  # in turn
            loss(which, step).backward()
            side.step(optimizer)
        (loss(0, step) + loss(1, 10 + step)).backward()
        with torch.no_grad():
            loss(1, step)
        side.step(optimizer)
        with side.no_sync(both):
            loss(1, 20 + step).backward()
        loss(0, 30 + step).backward()
        side.step(optimizer)
    return both


@idiom("a frozen encoder in two wrappers, copied with both")
def frozen_encoder(side: Side) -> Any:
    encoder = Net().requires_grad_(False)
    encoder = side.wrap(encoder) if side.is_flatshard else encoder
    models = [side.wrap_whole(Headed(encoder)) for _ in range(2)]
    heads = [side.inner(model).head for model in models]
    optimizer = side.sgd(*heads)
    for step in range(2):
        for model in models:
            side.learn(model, optimizer, step)
    (side.loss(models[0], 5) + side.loss(models[1], 6)).backward()
    side.step(optimizer)
    twins = copy.deepcopy(models)
    first, second = (side.inner(twin) for twin in twins)
    assert first.encoder is second.encoder is not encoder
    optimizer = side.sgd(first.head, second.head)
    side.loss(twins[0], 7).backward()
    side.step(optimizer)
    return [*models, *twins]


@idiom("a frozen copy from the middle of training, in the loss of the original", by_hand=True)
def copies_as_targets(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(4):
        if step % 2 == 0:
            old = copy.deepcopy(model).requires_grad_(False)
        x = side.draw(step, ROWS, 7)
        (side.loss(model, step) + F.mse_loss(model(x), old(x + 1))).backward()
        side.step(optimizer)
    return [model, old]
