"""Ways to train, as scripts of a `Run`: accumulation, edits, penalties, hooks, closures.

`SCRIPTS` lists each with the name of the case that it trains.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.side import Run, Script


def accumulation(run: Run) -> None:
    for step in range(6):
        run.loss(step).backward()
        if step % 3 == 2:
            run.step()


def accumulation_without_sync(run: Run) -> None:
    for first in (0, 3):
        with run.no_sync():
            run.loss(first).backward()
            run.loss(first + 1).backward()
        run.loss(first + 2).backward()
        run.step()


def sync_before_no_sync(run: Run) -> None:
    """A reduced gradient and local ones add up."""
    run.loss(0).backward()
    with run.no_sync():
        run.loss(1).backward()
    run.loss(2).backward()
    run.step()


def gradients_kept_as_zeros(run: Run) -> None:
    for step in range(3):
        run.loss(step).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


def gradients_of_the_model_zeroed(run: Run) -> None:
    run.loss(0).backward()
    run.model.zero_grad()
    run.train()


def two_forwards_one_backward(run: Run) -> None:
    for step in range(3):
        (run.loss(step) + 2 * run.loss(50 + step)).backward()
        run.step()


def two_forwards_two_backwards(run: Run) -> None:
    first, second = run.loss(0), run.loss(1)
    second.backward()
    first.backward()
    run.step()


def forward_without_backward(run: Run) -> None:
    for step in range(3):
        run.loss(50 + step)
        run.loss(step).backward()
        run.step()


def backward_twice(run: Run) -> None:
    for step in range(3):
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        run.step()


def evaluation_first(run: Run) -> list[Tensor]:
    with torch.inference_mode():
        first = run.evaluate().clone()
    with torch.no_grad():
        second = run.evaluate()
    run.train()
    return [first, second]


def evaluation_between_steps(run: Run) -> list[Tensor]:
    outputs = []
    for step in range(3):
        run.train(step, step + 1)
        run.model.eval()
        with torch.no_grad():
            outputs.append(run.evaluate())
        with torch.inference_mode():
            outputs.append(run.evaluate().clone())
        run.model.train()
    return outputs


def evaluation_before_backward(run: Run) -> list[Tensor]:
    outputs = []
    for step in range(3):
        loss = run.loss(step)
        with torch.no_grad():
            outputs.append(run.evaluate())
        loss.backward()
        run.step()
    return outputs


def random_numbers(run: Run) -> Tensor:
    """Gathers and reductions draw none."""
    loss = run.loss(0)
    torch.manual_seed(1)
    loss.backward()
    run.step()
    run.model.eval()
    run.evaluate()
    return torch.rand(3)


def error_in_forward(run: Run) -> None:
    run.train()
    _fail(run, in_backward=False)
    run.train(2, 4)


def error_in_backward(run: Run) -> None:
    run.train()
    _fail(run, in_backward=True)
    run.optimizer.zero_grad()
    run.train(2, 4)


def error_at_first(run: Run) -> None:
    _fail(run, in_backward=False)
    _fail(run, in_backward=True)
    run.optimizer.zero_grad()
    run.train()


def evaluation_after_error(run: Run) -> Tensor:
    _fail(run, in_backward=True)
    run.optimizer.zero_grad()
    with torch.no_grad():
        return run.evaluate()


class _Planned(Exception):
    """An error that a script raises."""


def _fail(run: Run, in_backward: bool) -> None:
    def fail(*_: Any) -> None:
        raise _Planned

    def fail_later(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = run.submodule("fc2").register_forward_hook(fail_later if in_backward else fail)
    with pytest.raises(_Planned):
        run.loss(30).backward()
    handle.remove()


def clipping(run: Run) -> list[Tensor]:
    return _clipped(run, run.model.clip_grad_norm_ if run.is_sharded else None)


def clipping_with_torch(run: Run) -> list[Tensor]:
    return _clipped(run, None)


def _clipped(run: Run, clip: Callable[..., Tensor] | None) -> list[Tensor]:
    norms = []
    # torch knows no largest element of an empty tensor.
    types = (2.0, 1.0, 3.0) if run.case.name == "odd-shapes" else (2.0, 1.0, float("inf"))
    for step, norm_type in enumerate(types):
        run.loss(step).backward()
        if clip is not None:
            norms.append(clip(0.1, norm_type))
        else:
            norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, norm_type))
        run.step()
    return [torch.as_tensor(norm).detach() for norm in norms]


def scaled_in_place(run: Run) -> None:
    run.train()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)
    run.train(2, 4)


def scaled_between_forwards(run: Run) -> list[Tensor]:
    """The second forward must not see what was gathered for the first."""
    outputs = []
    for _ in range(2):
        with torch.no_grad():
            outputs.append(run.evaluate())
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
            outputs.append(run.evaluate())
        run.loss(0)
    return outputs


def copied_from_full(run: Run) -> None:
    run.train()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view(parameter.shape))
    run.train(2, 4)


def edited_through_data(run: Run) -> None:
    for step in range(3):
        run.train(step, step + 1)
        for parameter in run.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def frozen_and_thawed(run: Run) -> list[bool]:
    bias = run.parameter("fc1.bias")
    has_grad = []
    for step, trains in enumerate((True, False, False, True)):
        bias.requires_grad_(trains)
        run.loss(step).backward()
        has_grad.append(bias.grad is not None)
        run.step()
    return has_grad


def unused(run: Run) -> dict[str, bool]:
    run.loss(0).backward()
    has_grad = {name: p.grad is not None for name, p in run.model.named_parameters()}
    assert not all(has_grad.values())
    run.step()
    return has_grad


def gradient_hooks(run: Run) -> None:
    """They are called with the local gradient, as under DDP, and may change it."""
    for parameter in run.model.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
    run.train()


def weight_penalty(run: Run) -> None:
    for step in range(3):
        penalty = sum(p.pow(2).sum() for p in run.model.parameters())
        (run.loss(step) + 0.1 * penalty).backward()
        run.step()


def gradient_penalty(run: Run) -> None:
    """Backward through a backward; the mean over rows, so that the ranks' mean is the whole."""
    for step in range(3):
        inputs = run.inputs(step).requires_grad_()
        output = run.model(inputs).sum()
        (grad,) = torch.autograd.grad(output, inputs, create_graph=True)
        (output / len(inputs) + grad.pow(2).sum() / len(inputs)).backward()
        run.step()


def closure(run: Run) -> None:
    for step in range(3):

        def evaluate(step: int = step) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(step)
            loss.backward()
            return loss

        run.optimizer.step(evaluate)
    run.optimizer.zero_grad()


def learning_rate_schedule(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.2, total_steps=4)
    for step in range(3):
        run.train(step, step + 1)
        scheduler.step()


# Script, the case it trains (which must have an `fc1` or `fc2` where the script names them).
SCRIPTS: list[tuple[Script, str]] = [
    (accumulation, "mlp"),
    (accumulation, "tied-in-unit"),
    (accumulation_without_sync, "mlp"),
    (accumulation_without_sync, "tied-in-unit"),
    (accumulation_without_sync, "frozen"),
    (sync_before_no_sync, "mlp"),
    (gradients_kept_as_zeros, "mlp"),
    (gradients_of_the_model_zeroed, "mlp"),
    (two_forwards_one_backward, "mlp"),
    (two_forwards_one_backward, "twice"),
    (two_forwards_two_backwards, "mlp"),
    (forward_without_backward, "mlp"),
    (backward_twice, "mlp"),
    (evaluation_first, "mlp"),
    (evaluation_between_steps, "mlp"),
    (evaluation_between_steps, "lstm"),
    (evaluation_between_steps, "nested"),
    (evaluation_before_backward, "mlp"),
    (random_numbers, "mlp"),
    (error_in_forward, "mlp"),
    (error_in_forward, "mlp-one-unit"),
    (error_in_backward, "mlp"),
    (error_in_backward, "mlp-one-unit"),
    (error_at_first, "mlp"),
    (evaluation_after_error, "mlp"),
    (clipping, "mlp"),
    (clipping_with_torch, "mlp"),
    (clipping_with_torch, "odd-shapes"),
    (clipping_with_torch, "unused"),
    (scaled_in_place, "mlp"),
    (scaled_between_forwards, "mlp"),
    (edited_through_data, "mlp"),
    (gradient_penalty, "mlp"),
    (weight_penalty, "mlp"),
    (closure, "mlp"),
    (learning_rate_schedule, "mlp"),
    (copied_from_full, "mlp"),
    (copied_from_full, "tied-in-unit"),
    (frozen_and_thawed, "mlp"),
    (unused, "unused"),
    (gradient_hooks, "mlp"),
]
