"""Hooks of users on tensors, gradients and optimizers run as on an unwrapped model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.combinations import usual_and_every
from tests.harness import run_ranks
from tests.models import CASES, Mlp
from tests.oracle import assert_same
from tests.side import Run, Side, SideScript, pair, run_both, sgd, step_and_clear
from tests.ways import BASIC, WAYS, each_way

pytestmark = pytest.mark.by_turns

MLP = CASES["mlp"]


@pytest.mark.parametrize("before_wrapping", [True, False])
def test_optimizer_in_backward_without_sharding(before_wrapping: bool) -> None:
    """Under NO_SHARD the hooks ran on each rank's own gradients, before their reduction."""
    run_ranks(_optimizer_in_backward, 2, before_wrapping)


def _optimizer_in_backward(rank: int, world_size: int, before_wrapping: bool) -> None:
    model = MLP.model()
    if before_wrapping:
        _step_in_backward(model)
    model = MLP.wrap(model, **WAYS["no_shard"].keywords)
    if not before_wrapping:
        _step_in_backward(model)
    sharded = Run(model, MLP, rank, world_size)
    plain = Run(MLP.model(), MLP, rank, world_size)
    plain.optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    for step in range(3):
        sharded.loss(step).backward()
    plain.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


def _step_in_backward(model: nn.Module) -> None:
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
        )


def test_leaf_input_gains_no_hooks() -> None:
    """Each step left a hook on an input that requires grad, for as long as the input lived."""
    run_ranks(_leaf_input, 2)


def _leaf_input(rank: int, world_size: int) -> None:
    run, _ = pair(rank, world_size, "full")
    x = run.inputs(0).requires_grad_()
    for _ in range(5):
        run.model(x).sum().backward()
        assert len(x._backward_hooks or ()) == 0


@each_way
def test_tensor_hooks_survive_a_conversion(way: str) -> None:
    """double() made new parameters, and left the hooks on the old ones."""
    run_ranks(_converted_hooks, 2, way)


def _converted_hooks(rank: int, world_size: int, way: str) -> None:
    runs = []
    models = MLP.model(torch.float32), MLP.model(torch.float32)
    for model in models:
        model.fc1.weight.register_hook(lambda grad: 3 * grad)
    for model in (MLP.wrap(models[0], **WAYS[way].keywords), models[1]):
        model.fc2.weight.register_hook(lambda grad: 2 * grad)
        runs.append(Run(model.double(), MLP, rank, world_size))
        runs[-1].train()
    assert_same(*(run.model for run in runs), 1e-12)


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


SCRIPTS: list[SideScript] = [
    optimizer_in_backward,
    scaler,
    gradient_hooks,
    post_accumulate_hooks,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: SideScript) -> None:
    run_ranks(run_both, 2, script, usual_and_every(4, BASIC, SCRIPTS.index(script)))
