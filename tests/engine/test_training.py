"""Training idioms: a script run with a sharded and with a plain model comes to the same end.

A script is a function of a `Run`. It runs once with the plain model on the rows of all ranks, once
with the sharded one on this rank's rows, and what it returns must agree as well.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, ShardingStrategy
from tests.combinations import usual_and_every
from tests.harness import naming, run_ranks
from tests.models import CASES, Case, Mlp, loss_of, vectors
from tests.oracle import OPTIMIZERS, ROWS, assert_same_state, local_loss, snapshot, trainable

TOLERANCE = 1e-12
"""Float64; the ranks' sums round in another order."""


class Run:
    """A model in training: the plain one, or one rank's part of the sharded one."""

    def __init__(self, model: nn.Module, case: Case, rank: int, world_size: int) -> None:
        self.model = model
        self.case = case
        self.rank = rank
        self.world_size = world_size
        self.is_sharded = isinstance(model, ShardedWrapper)
        self.optimizer = OPTIMIZERS["sgd"](trainable(model))

    def loss(self, step: int) -> Tensor:
        """The loss of a step's rows: this rank's, or all."""
        if self.is_sharded:
            return local_loss(self.model, self.case, step, self.rank, self.world_size)
        inputs, target = self.case.batch(step, self.world_size * ROWS)
        return loss_of(self.model(inputs), target)

    def inputs(self, step: int) -> Tensor:
        inputs, _ = self.case.batch(step, self.world_size * ROWS)
        return inputs.chunk(self.world_size)[self.rank] if self.is_sharded else inputs

    def evaluate(self) -> Tensor:
        """The model's output for rows that are the same on every rank."""
        return self.model(self.case.batch(100, 3)[0])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, first: int = 0, last: int = 2) -> None:
        for step in range(first, last):
            self.loss(step).backward()
            self.step()

    def no_sync(self, **keywords: Any) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync(**keywords) if self.is_sharded else contextlib.nullcontext()

    def submodule(self, name: str) -> nn.Module:
        """A module of the model itself, without the wrapper around it."""
        module = getattr(self.model, name)
        return module.module if isinstance(module, ShardedWrapper) else module

    def parameter(self, name: str) -> nn.Parameter:
        return dict(self.model.named_parameters())[name]


Script = Callable[[Run], Any]


def _run_both(
    rank: int, world_size: int, script: Script, name: str, strategy: str, use_orig_params: bool
) -> None:
    case = CASES[name]
    plain = Run(case.model(), case, rank, world_size)
    expected = script(plain)
    model = case.wrap(
        case.model(),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    sharded = Run(model, case, rank, world_size)
    actual = script(sharded)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=TOLERANCE)
    _assert_same_model(sharded, plain)
    with naming("training on after the script"):
        sharded.train(10, 12)
        plain.train(10, 12)
        _assert_same_model(sharded, plain)


def _assert_same_model(sharded: Run, plain: Run) -> None:
    assert_same_state(sharded.model.state_dict(), snapshot(plain.model), 0.0, TOLERANCE)


# ---------------------------------------------------------------- scripts


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


WAYS = {
    "full": ("FULL_SHARD", True),
    "full-flat": ("FULL_SHARD", False),
    "grad_op": ("SHARD_GRAD_OP", True),
    "grad_op-flat": ("SHARD_GRAD_OP", False),
    "no_shard": ("NO_SHARD", True),
}
TRUE_SHAPE_WAYS = [way for way, (_, use_orig_params) in WAYS.items() if use_orig_params]

# Script, the case it trains (which must have an `fc1` or `fc2` where the script names them).
EVERYWHERE: list[tuple[Script, str]] = [
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
]
# These look at single parameters.
TRUE_SHAPES: list[tuple[Script, str]] = [
    (copied_from_full, "mlp"),
    (copied_from_full, "tied-in-unit"),
    (frozen_and_thawed, "mlp"),
    (unused, "unused"),
    (gradient_hooks, "mlp"),
]


def _combinations() -> Iterator[Any]:
    one_flat = [way for way in WAYS if way != "grad_op-flat"]
    for scripts, ways in ((EVERYWHERE, one_flat), (TRUE_SHAPES, TRUE_SHAPE_WAYS)):
        for number, (script, name) in enumerate(scripts):
            for way in usual_and_every(2, ways, start=number):
                yield pytest.param(script, name, way, id=f"{script.__name__}-{name}-{way}")


@pytest.mark.parametrize(("script", "name", "way"), list(_combinations()))
def test_script(script: Script, name: str, way: str) -> None:
    run_ranks(_run_both, 2, script, name, *WAYS[way])


# ---------------------------------------------------------------- what needs more than a script


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_optimizer_built_before_wrapping(strategy: ShardingStrategy) -> None:
    run_ranks(_optimizer_before_wrapping, 2, strategy)


def _optimizer_before_wrapping(rank: int, world_size: int, strategy: ShardingStrategy) -> None:
    case = CASES["mlp"]
    plain = Run(case.model(), case, rank, world_size)
    model = case.model()
    before = list(model.parameters())
    optimizers = [_grouped_by_ndim(plain.model), _grouped_by_ndim(model)]
    sharded = Run(case.wrap(model, sharding_strategy=strategy), case, rank, world_size)
    plain.optimizer, sharded.optimizer = optimizers
    assert all(a is b for a, b in zip(before, sharded.model.parameters(), strict=True))
    plain.train(0, 4)
    sharded.train(0, 4)
    _assert_same_model(sharded, plain)


def _grouped_by_ndim(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("keep_optimizer", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("convert", ["double", "to"])
@pytest.mark.parametrize("way", WAYS)
def test_converted_after_wrapping(way: str, convert: str, keep_optimizer: bool) -> None:
    run_ranks(_converted, 2, convert, keep_optimizer, *WAYS[way])


def _converted(
    rank: int,
    world_size: int,
    convert: str,
    keep_optimizer: bool,
    strategy: str,
    use_orig_params: bool,
) -> None:
    case = CASES["mlp"]
    plain = Run(case.model(torch.float32), case, rank, world_size)
    model = case.wrap(
        case.model(torch.float32),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
    )
    sharded = Run(model, case, rank, world_size)
    for run in (plain, sharded):
        converted = run.model.double() if convert == "double" else run.model.to(torch.float64)
        assert converted is run.model
        if not keep_optimizer:
            run.optimizer = OPTIMIZERS["sgd"](trainable(run.model))
        run.train(0, 3)
    _assert_same_model(sharded, plain)


class _Branches(nn.Module):
    """Uses one of three layers; ``spare`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])
        self.spare = nn.Linear(5, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](torch.tanh(self.fc(x)))


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["true-shape", "flat"])
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_ranks_use_different_parameters(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """`.grad` is the average where some ranks used a parameter, and None where none did."""
    run_ranks(_different_parameters, 2, strategy, use_orig_params)


def _different_parameters(
    rank: int, world_size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    torch.manual_seed(3)
    plain = _Branches().double()
    torch.manual_seed(3)
    model = ShardedWrapper(
        _Branches().double(), sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    plain_optimizer = OPTIMIZERS["sgd"](plain.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    case = Case("branches", _Branches, vectors)
    for step in range(4):
        for turn in range(world_size):
            inputs, target = case.batch(10 * step + turn, ROWS)
            (loss_of(plain(inputs, (step + turn) % 3), target) / world_size).backward()
        inputs, target = case.batch(10 * step + rank, ROWS)
        loss_of(model(inputs, (step + rank) % 3), target).backward()
        if use_orig_params:
            expected = {name: p.grad is None for name, p in plain.named_parameters()}
            assert {name: p.grad is None for name, p in model.named_parameters()} == expected
            plain_optimizer.step()
            optimizer.step()
        else:
            # A flat parameter has one momentum: what nobody used gets a gradient of zero, and
            # goes on as its momentum says. The plain model gets zeros to compare with.
            for parameter in plain.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            plain_optimizer.step()
            optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
    assert_same_state(model.state_dict(), snapshot(plain), 0.0, TOLERANCE)


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers(broadcast: bool) -> None:
    run_ranks(_buffers, 2, broadcast)


def _buffers(rank: int, world_size: int, broadcast: bool) -> None:
    case = CASES["batch-norm"]
    model = case.wrap(case.model(), broadcast_buffers=broadcast)
    mean, count = model.norm.running_mean, model.norm.num_batches_tracked
    mean.fill_(rank)
    count.fill_(10 * rank)
    model.eval()  # so that the forward itself leaves them alone
    model(case.batch(0, ROWS)[0])
    source = 0 if broadcast else rank
    assert torch.equal(mean, torch.full_like(mean, source))
    assert count.item() == 10 * source


def test_prefetched_gathers_see_the_optimizer_step() -> None:
    """Nothing that was gathered early may outlive a step; many units, in changing order."""
    run_ranks(_changing_order, 2)


def _changing_order(rank: int, world_size: int) -> None:
    plain_model, model = (_Reordered().double() for _ in range(2))
    model.load_state_dict(plain_model.state_dict())
    case = Case("reordered", _Reordered, vectors, (nn.Linear,))
    plain = Run(plain_model, case, rank, world_size)
    sharded = Run(case.wrap(model), case, rank, world_size)
    for step in range(6):
        for run in (plain, sharded):
            network = run.model.module if run.is_sharded else run.model
            network.order = [(step + i) % 3 for i in range(3)][: 2 + step % 2]
            run.train(step, step + 1)
    _assert_same_model(sharded, plain)


class _Reordered(Mlp):
    """Its middle layers run in the order of the list ``order``, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        for index in self.order:
            x = torch.tanh(self.middle[index](x))
        return self.fc3(torch.tanh(self.fc2(x)))


def test_subgroup() -> None:
    """A model trained by some of the ranks, while the others do nothing."""
    run_ranks(_subgroup, 3)


def _subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    case = CASES["mlp"]
    place = dist.get_group_rank(group, rank)
    plain = Run(case.model(), case, place, 2)
    sharded = Run(case.wrap(case.model(), process_group=group), case, place, 2)
    plain.train(0, 3)
    sharded.train(0, 3)
    _assert_same_model(sharded, plain)
