"""Training loops: accumulation, several passes, evaluation between, uneven and failing steps."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.idioms.side import ORACLES, ROWS, Side, fail, failing, idiom, planned
from tests.models import Composed, Mlp


@idiom("accumulation under `no_sync`")
def accumulation(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(0, 6, 3):
        for part in range(2):
            with side.no_sync(model):
                side.loss(model, step + part).backward()
        side.learn(model, optimizer, step + 2)
    return [side.loss(model, 9), model]


@idiom("accumulation without `no_sync`")
def accumulation_with_sync(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(6):
        side.loss(model, step).backward()
        if step % 2:
            side.step(optimizer)
    return [side.loss(model, 9), model]


@idiom("two forwards, one backward")
def two_forwards(side: Side) -> Any:
    model = side.wrap(Mlp())
    return side.fit(model, loss_of=lambda m, step: side.loss(m, step) + side.loss(m, 20 + step))


@idiom("`retain_graph=True`, two backwards of one graph", by_hand=True)
def retain_graph(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(3):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward()
        side.step(optimizer)
    return [side.loss(model, 9), model]


@idiom("evaluation under `inference_mode`, then training")
def inference_mode(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step in range(3):
        model.eval()
        with torch.inference_mode():
            results.append(model(side.draw(30, 2, 7)).clone())
        model.train()
        results += side.fit(model, optimizer, steps=1, first=step)[:1]
    return results


@idiom("evaluation between forward and backward, and before the step")
def evaluation_between(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step in range(3):
        loss = side.loss(model, step)
        with torch.no_grad():
            results.append(model(side.draw(30, 2, 7)))
        loss.backward()
        with torch.no_grad():
            results.append(model(side.draw(31, 2, 7)))
        side.step(optimizer)
    return results


@idiom("a generator and a discriminator")
def adversarial(side: Side) -> Any:
    maker, judge = side.wrap(Mlp()), side.wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    of_maker, of_judge = side.sgd(maker), side.sgd(judge)
    results = []
    for step in range(3):
        made = maker(side.draw(step, ROWS, 7))
        loss = judge(made.detach()).square().mean() + (judge(side.draw(50, ROWS, 3)) - 1).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        judged = (judge(made) - 1).square().mean()
        judged.backward()
        of_maker.step()
        results += [loss.detach(), judged.detach()]
    return [*results, maker, judge]


@idiom("a frozen teacher in another wrapper")
def distillation(side: Side) -> Any:
    frozen = Mlp().requires_grad_(False)
    # DistributedDataParallel refuses a module that has nothing to train.
    teacher = frozen if side.implementation in ORACLES else side.wrap(frozen)
    model = side.wrap(Mlp())

    def loss_of(student: nn.Module, step: int) -> Tensor:
        x = side.draw(step, ROWS, 7)
        return F.mse_loss(student(x), teacher(x).detach())

    return side.fit(model, loss_of=loss_of)


@idiom("inputs of changing shapes")
def changing_shapes(side: Side) -> Any:
    return side.fit(
        side.wrap(Mlp()),
        loss_of=lambda m, s: m(side.draw(s, 1 + (s + side.rank) % 3, 7)).square().mean(),
    )


@idiom("an empty batch on one rank")
def empty_batch(side: Side) -> Any:
    return side.fit(
        side.wrap(Mlp()),
        loss_of=lambda m, s: m(side.draw(s, 0 if side.rank == s % 2 else ROWS, 7)).square().sum(),
    )


@idiom("`join` for uneven inputs")
def join(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    with model.join():
        losses = side.fit(model, optimizer, steps=3 + side.rank)[:-1]
    return [*losses, side.loss(model, 9)]


@idiom("evaluation loops of the same length on all ranks, `no_grad`")
def evaluation(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model)
    model.eval()
    with torch.no_grad():
        return [side.loss(model, step) for step in range(5)]


@idiom("evaluation on rank 0 alone")
def evaluation_on_one_rank(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    losses = side.fit(model, optimizer, steps=2)[:-1]
    if side.rank == 0:
        with torch.no_grad():
            losses.append(side.inner(model)(side.draw(30, 2, 7)))
    return losses + side.fit(model, optimizer, steps=2, first=2)


# ---------------------------------------------------------------- parameters without gradients


def _two_heads() -> nn.Module:
    def forward(net: Any, x: Tensor, which: int) -> Tensor:
        return net.heads[which](torch.tanh(net.trunk(x)))

    heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    return Composed(forward, trunk=nn.Linear(7, 5), heads=heads)


def _choosing(side: Side, net: nn.Module, choice: Callable[[int], int], **settings: Any) -> Any:
    """Train a model whose forward takes what this rank chooses in a step."""
    model = side.wrap(net, **settings)

    def loss_of(m: nn.Module, step: int) -> Tensor:
        return F.mse_loss(m(side.draw(step, ROWS, 7), choice(step)), side.draw(50 + step, ROWS, 3))

    return side.fit(model, loss_of=loss_of)


@idiom("unused parameters, the same on all ranks", unused=True)
def unused_alike(side: Side) -> Any:
    return _choosing(side, _two_heads(), lambda step: step % 2)


@idiom("unused parameters, others on each rank", unused=True)
def unused_by_rank(side: Side) -> Any:
    return _choosing(side, _two_heads(), lambda step: (step + side.rank) % 2)


@idiom("the same, which flatshard is told by `allow_divergence`", unused=True)
def unused_by_rank_declared(side: Side) -> Any:
    return _choosing(side, _two_heads(), lambda step: (step + side.rank) % 2, divergent=True)


@idiom("a parameter that is never used", unused=True)
def never_used(side: Side) -> Any:
    net = Mlp()
    net.extra = nn.Linear(3, 3)
    return side.fit(side.wrap(net))


def _stack() -> nn.Module:
    """Layers, of which some are skipped."""

    def forward(net: Any, x: Tensor, seed: int) -> Tensor:
        chance = random.Random(seed)
        for layer in net.layers:
            if chance.random() > 0.4:
                x = torch.tanh(layer(x))
        return net.head(x)

    layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
    return Composed(forward, layers=layers, head=nn.Linear(7, 3))


@idiom("layers dropped at random, alike on all ranks", unused=True)
def layer_drop(side: Side) -> Any:
    return _choosing(side, _stack(), lambda step: 10 * step)


@idiom("layers dropped at random by each rank", unused=True)
def layer_drop_by_rank(side: Side) -> Any:
    return _choosing(side, _stack(), lambda step: 10 * step + side.rank)


@idiom("the same, which flatshard is told by `allow_divergence`", unused=True)
def layer_drop_by_rank_declared(side: Side) -> Any:
    return _choosing(side, _stack(), lambda step: 10 * step + side.rank, divergent=True)


# ---------------------------------------------------------------- errors, and going on


def _going_on(side: Side, in_backward: bool) -> Any:
    model, optimizer = side.begin(Mlp())
    losses = side.fit(model, optimizer, steps=2)[:-1]
    with failing(side.inner(model).fc2, in_backward):
        side.loss(model, 7).backward()
    optimizer.zero_grad()
    return losses + side.fit(model, optimizer, steps=3, first=2)


@idiom("an exception in forward on all ranks, caught")
def exception_in_forward(side: Side) -> Any:
    return _going_on(side, in_backward=False)


@idiom("an exception in backward on all ranks, caught", by_hand=True)
def exception_in_backward(side: Side) -> Any:
    return _going_on(side, in_backward=True)


@idiom("an exception in a parameter's hook, caught", by_hand=True)
def exception_in_hook(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    hook = side.inner(model).fc2.weight.register_hook(fail)
    with planned():
        side.loss(model, 7).backward()
    hook.remove()
    optimizer.zero_grad()
    return side.fit(model, optimizer)


@idiom("an exception in evaluation, caught, between forward and backward")
def exception_in_evaluation(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    loss = side.loss(model, 0)
    with failing(side.inner(model).fc2), torch.no_grad():
        model(side.draw(30, 2, 7))
    loss.backward()
    optimizer.step()
    return side.fit(model, optimizer, first=1)


@idiom("a batch skipped after forward: the loss is dropped")
def dropped_loss(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(4):
        loss = side.loss(model, step)
        if step % 2 == 0:
            loss.backward()
            side.step(optimizer)
    return [side.loss(model, 9), model]
