"""A forward, backward or step that raises leaves a model that can train."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.combinations import usual_and_every
from tests.harness import run_ranks
from tests.models import Mlp
from tests.oracle import assert_same
from tests.side import Net, Side, SideScript, pair, run_both, sgd, step_and_clear
from tests.ways import BASIC, each_way

pytestmark = pytest.mark.by_turns


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("bad backward")


@contextlib.contextmanager
def _failing_backward(module: nn.Module) -> Iterator[None]:
    """Forwards in this context have a backward that fails at the module's output."""
    handle = module.register_forward_hook(lambda _, inputs, output: _Failing.apply(output))
    yield
    handle.remove()


@each_way
def test_second_backward_after_a_failed_one(way: str) -> None:
    """With no forward in between, the second one left every gradient None without a word."""
    run_ranks(_second_backward, 2, way)


def _second_backward(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    good = sharded.loss(0)
    with _failing_backward(sharded.model.fc2):
        bad = sharded.loss(1)
    with pytest.raises(ValueError, match="bad backward"):
        bad.backward()
    good.backward()
    sharded.step()
    plain.train(0, 1)
    assert_same(sharded.model, plain.model, 1e-12)


def test_failed_backward_tells_of_lost_gradients() -> None:
    """What no_sync had accumulated went with the failed backward, and nobody was told."""
    run_ranks(_lost, 2)


def _lost(rank: int, world_size: int) -> None:
    sharded, plain = pair(rank, world_size, "full")
    with sharded.no_sync():
        sharded.loss(0).backward()
    with _failing_backward(sharded.model.fc2):
        bad = sharded.loss(1)
    with pytest.raises(ValueError, match="bad backward"):
        bad.backward()
    with pytest.warns(UserWarning, match="accumulated before this backward are lost"):
        sharded.loss(2)
    sharded.optimizer.zero_grad()
    for run in (sharded, plain):
        run.train()
    assert_same(sharded.model, plain.model, 1e-12)


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


class _FailingSgd(torch.optim.SGD):
    error: BaseException | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.error is not None:
            raise self.error


def optimizer_shows_its_parameters_after_a_failed_step(side: Side) -> list[Any]:
    """The first step of a class fails, and a later step, and one that the user interrupts."""

    class FirstSeenHere(_FailingSgd):
        pass

    model = side.wrap(Mlp())
    params = list(model.parameters())
    # Torch hooks the step of each class at its first object. From here on, `super().step()` runs
    # the hooks inside of a step, too.
    torch.optim.SGD(params, lr=0.1)
    optimizer = FirstSeenHere(params, lr=0.1, momentum=0.9)
    for step, error in enumerate((_Planned(), _Planned(), KeyboardInterrupt())):
        side.loss(model, step).backward()
        optimizer.error = error
        with pytest.raises(type(error)):
            optimizer.step()
        optimizer.error = None
        assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, params)]
        assert {*map(id, optimizer.state)} == {*map(id, params)}
        optimizer.zero_grad()
        other = torch.optim.SGD([{"params": optimizer.param_groups[0]["params"]}], lr=0.2)
        side.loss(model, 10 + step).backward()
        step_and_clear(other)
    return [model]


def error_in_a_backward_inside_a_forward(side: Side) -> list[Any]:
    """The forward catches the error, and goes on."""

    class Forces(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            hidden.register_hook(fail)
            with contextlib.suppress(_Planned):
                self.down(hidden).sum().backward()
            return self.down(torch.tanh(self.up(x))) * self.scale

    def fail(_: Tensor) -> None:
        raise _Planned

    model = side.wrap(Forces())
    params = list(model.parameters())
    optimizer = sgd(model)
    for step in range(2):
        output = model(side.draw(step, 7))
        assert [*map(id, model.parameters())] == [*map(id, params)]
        optimizer.zero_grad()
        F.mse_loss(output, side.draw(50, 7)).backward()
        step_and_clear(optimizer)
    return [model]


def hook_removed_after_a_failed_backward(side: Side) -> list[Any]:
    """A hook that was removed, and gradients that were dropped, stay away."""
    model = side.wrap(Mlp())
    optimizer = sgd(model)
    calls: list[int] = []
    handle = model.fc1.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    side.loss(model, 0).backward()
    before = [param.grad for param in model.parameters()]
    with _failing(model.fc2, in_backward=True):
        side.loss(model, 1).backward()
    if side.way is not None:  # the unwrapped model has gradients of a part of the failed backward
        assert all(param.grad is one for param, one in zip(model.parameters(), before, strict=True))
    handle.remove()
    optimizer.zero_grad()
    side.loss(model, 2).backward()
    step_and_clear(optimizer)
    assert len(calls) == 1
    return [model]


SCRIPTS: list[SideScript] = [
    error_in_step,
    optimizer_shows_its_parameters_after_a_failed_step,
    error_in_a_backward_inside_a_forward,
    hook_removed_after_a_failed_backward,
    error_in_evaluation,
    error_between_two_models,
    error_in_a_hook_of_a_gradient,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: SideScript) -> None:
    run_ranks(run_both, 2, script, usual_and_every(4, BASIC, SCRIPTS.index(script)))
