"""Wider idioms: several models, several backwards, penalties, hooks, scalers, errors.

A script is written once, for a `Side`. It runs on the plain side, with the rows of all ranks, and
on the sharded one, with this rank's; models and tensors that it returns must agree.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshard import ShardedWrapper
from tests.combinations import usual_and_every
from tests.engine.several_models import (
    Net,
    adversarial,
    adversarial_with_frozen_critic,
    averaged_model,
    chained,
    chained_in_a_cycle,
    copies_as_targets,
    critic_with_gradient_penalty,
    momentum_encoder,
    parts_wrapped_one_by_one,
    perceptual_loss,
    sgd,
    step_and_clear,
    teacher,
)
from tests.harness import naming, run_ranks
from tests.models import Mlp
from tests.oracle import assert_same, snapshot
from tests.side import Side
from tests.ways import BASIC, WAYS

pytestmark = pytest.mark.by_turns

Script = Callable[[Side], list[Any]]


def _run_both(rank: int, world_size: int, script: Script, ways: list[str]) -> None:
    expected = _run_one(script, Side(rank, world_size, None))
    for way in ways:
        with naming(way):
            actual = _run_one(script, Side(rank, world_size, way))
            for mine, theirs in zip(actual, expected, strict=True):
                assert_same(mine, theirs)


def _run_one(script: Script, side: Side) -> list[Any]:
    torch.manual_seed(3)
    return [snapshot(value) if isinstance(value, nn.Module) else value for value in script(side)]


# ---------------------------------------------------------------- several passes


class TwoHeads(nn.Module):
    """Two outputs from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.trunk(x))
        return [head(x) for head in self.heads]


def backward_per_head(side: Side) -> list[Any]:
    """One forward, a backward for each output; the trunk's gradient comes twice."""
    model = side.wrap(TwoHeads())
    optimizer = sgd(model)
    for step in range(3):
        first, second = model(side.draw(step, 7))
        first.pow(2).mean().backward(retain_graph=True)
        second.pow(2).mean().backward()
        step_and_clear(optimizer)
    return [model]


def one_head_at_a_time(side: Side) -> list[Any]:
    """The other head's gradient stays None."""
    model = side.wrap(TwoHeads())
    optimizer = sgd(model)
    for step in range(4):
        model(side.draw(step, 7))[step % 2].pow(2).mean().backward()
        assert all(p.grad is None for p in model.heads[1 - step % 2].parameters())
        step_and_clear(optimizer)
    return [model]


def three_backwards_of_one_graph(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(2):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        step_and_clear(optimizer)
    return [model]


def retained_graph_with_a_forward_between(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(2):
        loss = side.loss(model, step)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model(side.draw(70, 7))
        other = side.loss(model, 50 + step)
        loss.backward()
        other.backward()
        step_and_clear(optimizer)
    return [model]


def inference_between_all(side: Side) -> list[Any]:
    """Evaluation before, between forward and backward, and between backward and step."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    outputs = []

    def evaluate() -> None:
        with torch.inference_mode():
            outputs.append(model(torch.ones(2, 7, dtype=torch.float64)).clone())

    for step in range(2):
        evaluate()
        loss = side.loss(model, step)
        evaluate()
        loss.backward()
        evaluate()
        step_and_clear(optimizer)
    return [model, *outputs]


class Energy(nn.Module):
    """Returns an energy and, from a backward inside its forward, the forces."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(7, 5)
        self.head = nn.Linear(5, 1)
        self.shift = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.head(torch.tanh(self.body(x + self.shift)))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy * self.shift.sum().exp(), -slope + self.shift


def forces(side: Side) -> list[Any]:
    """A force field learns from forces, and is evaluated without a graph."""
    model = side.wrap(Energy(), Net, nn.Linear)
    optimizer = sgd(model)
    outputs = []
    for step in range(3):
        model.train()
        energy, force = model(side.draw(step, 7))
        (
            F.mse_loss(energy, side.draw(50 + step, 1)) + F.mse_loss(force, side.draw(60 + step, 7))
        ).backward()
        step_and_clear(optimizer)
        model.eval()
        with torch.no_grad():
            outputs += model(torch.ones(2, 7, dtype=torch.float64))
    return [model, *[output.detach() for output in outputs]]


def adversarial_inputs(side: Side) -> list[Any]:
    """A gradient of the input, found by a backward that reaches no parameter, changes it."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step in range(3):
        x, target = side.draw(step, 7).requires_grad_(), side.draw(50 + step, 3)
        (slope,) = torch.autograd.grad(F.mse_loss(model(x), target), x)
        F.mse_loss(model(x.detach() + 0.1 * slope.sign()), target).backward()
        step_and_clear(optimizer)
    return [model]


# ---------------------------------------------------------------- penalties


def penalties(side: Side) -> list[Any]:
    """Of several kinds, in the same loss as the data."""
    return _penalised(
        side,
        [0.1, 0.1],
        lambda p: p.pow(2).sum(),
        lambda p: p.abs().sum(),
        lambda p: (p - 1).square().sum() / 2,
        lambda p: p.exp().sum(),
    )


def norm_penalties(side: Side) -> list[Any]:
    """Weighted differently by each rank.

    Of a flat parameter, a norm or mean would be that of the rank's part of the unit, and the
    rank's weight that of its part.
    """
    return _penalised(
        side,
        [0.1, 0.3],
        lambda p: p.pow(2).sum(),
        torch.norm,
        lambda p: p.norm(1),
        lambda p: torch.linalg.vector_norm(p, 3),
        lambda p: (p * p).mean(),
    )


def _penalised(side: Side, weights: list[float], *kinds: Callable[[Tensor], Tensor]) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model, lr=0.01)
    weight = side.by_rank(weights)
    for step, kind in enumerate(kinds):
        penalty = sum(kind(p) for p in model.parameters())
        (side.loss(model, step) + weight * penalty).backward()
        step_and_clear(optimizer)
    return [model]


def penalty_by_itself(side: Side) -> list[Any]:
    """In a backward of its own: before, after, and without the loss's."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)

    def penalty() -> Tensor:
        return 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    for step in range(3):
        if step != 1:
            penalty().backward()
        if step != 2:
            side.loss(model, step).backward()
        if step == 1:
            penalty().backward()
        step_and_clear(optimizer)
    return [model]


def penalty_with_accumulation(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for first in (0, 2):
        with side.no_sync(model):
            side.loss(model, first).backward()
        penalty = 0.1 * sum(p.abs().sum() for p in model.parameters())
        (side.loss(model, first + 1) + penalty).backward()
        step_and_clear(optimizer)
    return [model]


# ---------------------------------------------------------------- hooks


def gradient_hooks(side: Side) -> list[Any]:
    """From before and after wrapping, one removed, one that only looks."""
    plain = Mlp()
    plain.fc1.weight.register_hook(lambda grad: 2 * grad)
    gone = plain.fc2.weight.register_hook(lambda grad: 5 * grad)
    model = side.wrap(plain)
    seen: list[torch.Size] = []
    model.fc2.weight.register_hook(lambda grad: seen.append(grad.shape))
    late = model.fc3.weight.register_hook(lambda grad: 3 * grad)
    model.double()
    optimizer = sgd(model)
    for step in range(4):
        side.loss(model, step).backward()
        step_and_clear(optimizer)
        if step == 1:
            gone.remove()
            late.remove()
    assert seen == [torch.Size([4, 5])] * 4
    return [model]


def post_accumulate_hooks(side: Side) -> list[Any]:
    """They see the average, once for each backward that reduces, and may change it."""
    calls = []

    def halve(param: Tensor) -> None:
        calls.append(param.shape)
        param.grad.mul_(0.5)

    plain = Mlp()
    handles = [p.register_post_accumulate_grad_hook(halve) for p in plain.fc1.parameters()]
    model = side.wrap(plain)
    handles += [p.register_post_accumulate_grad_hook(halve) for p in model.fc2.parameters()]
    optimizer = sgd(model)
    for step in range(3):
        side.loss(model, step).backward()
        step_and_clear(optimizer)
        if step == 1:
            for handle in handles:
                handle.remove()
    assert len(calls) == 2 * len(handles)
    return [model]


def optimizer_in_backward(side: Side) -> list[Any]:
    model = side.wrap(Mlp())

    def stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        return lambda _: step_and_clear(optimizer)

    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        param.register_post_accumulate_grad_hook(stepping(optimizer))
    for step in range(3):
        side.loss(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
    return [model]


# ---------------------------------------------------------------- scalers


def scaler(side: Side) -> list[Any]:
    """Torch's own, on the whole length of it: growth, clipping, an overflow on one rank."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(6):
        # An overflow of one rank's rows is one of the whole batch.
        overflow = step == 2 and (side.way is None or side.rank == 1)
        loss = side.loss(model, step) * (float("inf") if overflow else 1.0)
        grad_scaler.scale(loss).backward()
        if step % 2 == 0:
            grad_scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert bool(norm.isfinite()) is (step != 2)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        optimizer.zero_grad()
        scales.append(torch.tensor(grad_scaler.get_scale()))
    assert scales[2] < scales[1] < scales[-1] * 2
    return [model, *scales]


# ---------------------------------------------------------------- errors


class _Planned(Exception):
    """An error that a script raises."""


@contextlib.contextmanager
def _failing(module: nn.Module, in_backward: bool) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise _Planned

    def fail_later(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = module.register_forward_hook(fail_later if in_backward else fail)
    with pytest.raises(_Planned):
        yield
    handle.remove()


def error_in_step(side: Side) -> list[Any]:
    """Raised before, within and after the update, by hooks and by a closure."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)

    def fail(*_: Any) -> None:
        raise _Planned

    def closure() -> Tensor:
        side.loss(model, 40).backward()
        raise _Planned

    for step, register in enumerate(
        (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    ):
        side.loss(model, step).backward()
        handle = register(fail)
        with pytest.raises(_Planned):
            optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        side.loss(model, 10 + step).backward()
        step_and_clear(optimizer)
    with pytest.raises(_Planned):
        optimizer.step(closure)
    optimizer.zero_grad()
    side.loss(model, 20).backward()
    step_and_clear(optimizer)
    return [model]


def error_in_evaluation(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    for step, mode in enumerate((torch.no_grad, torch.inference_mode)):
        loss = side.loss(model, step)
        with _failing(model.fc2, in_backward=False), mode():
            model(side.draw(70, 7))
        loss.backward()
        step_and_clear(optimizer)
    return [model]


def error_between_two_models(side: Side) -> list[Any]:
    """The second model's backward fails, and the first one's never starts; or the first's does."""
    first, second = side.wrap(Net()), side.wrap(Net(7, 3))
    optimizer = sgd(first, second)
    for step, model in enumerate((second, first, first, second)):
        with _failing(model.up, in_backward=step < 2):
            F.mse_loss(second(first(side.draw(step, 7))), side.draw(50, 3)).backward()
        optimizer.zero_grad()
        for good in (10 * step, 10 * step + 1):
            F.mse_loss(second(first(side.draw(good, 7))), side.draw(60, 3)).backward()
            step_and_clear(optimizer)
    return [first, second]


def error_in_a_hook_of_a_gradient(side: Side) -> list[Any]:
    model = side.wrap(Mlp())
    optimizer = sgd(model)

    def fail(_: Tensor) -> None:
        raise _Planned

    for step, register in enumerate(
        (model.fc2.weight.register_hook, model.fc2.weight.register_post_accumulate_grad_hook)
    ):
        handle = register(fail)
        with pytest.raises(_Planned):
            side.loss(model, 30).backward()
        handle.remove()
        optimizer.zero_grad()
        for good in (2 * step, 2 * step + 1):
            side.loss(model, good).backward()
            step_and_clear(optimizer)
    return [model]


# ---------------------------------------------------------------- the table

SCRIPTS: list[Script] = [
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
    backward_per_head,
    three_backwards_of_one_graph,
    retained_graph_with_a_forward_between,
    inference_between_all,
    forces,
    adversarial_inputs,
    penalties,
    penalty_by_itself,
    penalty_with_accumulation,
    optimizer_in_backward,
    scaler,
    error_in_step,
    error_in_evaluation,
    error_between_two_models,
    one_head_at_a_time,
    norm_penalties,
    gradient_hooks,
    post_accumulate_hooks,
    error_in_a_hook_of_a_gradient,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: Script) -> None:
    run_ranks(_run_both, 2, script, usual_and_every(2, BASIC, SCRIPTS.index(script)))


# ---------------------------------------------------------------- what wrapping leaves behind


class _Memory(bytearray):
    """Bytes that a tensor can lie in and a weak reference can watch."""


@pytest.mark.parametrize("way", BASIC)
def test_originals_are_given_back(way: str) -> None:
    """A graph over the flattening, and the list of originals, kept a whole model on each rank."""
    run_ranks(_originals, 2, way)


def _originals(rank: int, world_size: int, way: str) -> None:
    model = nn.Linear(7, 5)
    memory = _Memory(4 * model.weight.numel())
    watched = weakref.ref(memory)
    model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(5, 7).fill_(1)
    del memory
    wrapped = ShardedWrapper(model, **WAYS[way].keywords)
    assert watched() is None
    assert torch.equal(wrapped.state_dict()["weight"], torch.ones(5, 7))
