"""Defects that were found and fixed: each test tells what went wrong once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper
from flatshard.wrap import always_wrap_policy
from tests.harness import run_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, assert_same
from tests.side import Run, pair
from tests.ways import BASIC, WAYS

MLP = CASES["mlp"]

each_way = pytest.mark.parametrize("way", BASIC)


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


# ---------------------------------------------------------------- backward and gradients


@each_way
def test_gradient_penalty_with_a_backward_of_its_own(way: str) -> None:
    """The first backward freed parameters that the penalty's graph still had to read."""
    run_ranks(_penalty, 2, way)


def _penalty(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        for step in range(3):
            x = run.inputs(step)
            leaf = x.clone().requires_grad_()
            output = run.model(leaf).sum()
            (slope,) = torch.autograd.grad(output, leaf, create_graph=True)
            run.model(x).mean().backward()
            (slope.norm(dim=1) - 1).pow(2).mean().backward()
            run.step()
    assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
@each_way
def test_zero_grad_after_no_sync(way: str, set_to_none: bool) -> None:
    """Gradients not reduced yet survived zero_grad() and were added to the next step's."""
    run_ranks(_zeroed, 2, way, set_to_none)


def _zeroed(rank: int, world_size: int, way: str, set_to_none: bool) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        for first in (0, 10):
            with run.no_sync():
                run.loss(first).backward()
                run.loss(first + 1).backward()
            run.optimizer.zero_grad(set_to_none)
            with run.no_sync():
                run.loss(first + 2).backward()
            run.loss(first + 3).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none)
            run.loss(first + 4).backward()
            with run.no_sync():
                run.loss(first + 5).backward()
            run.optimizer.zero_grad(set_to_none)
            run.loss(first + 6).backward()
            run.step()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_step_under_no_sync_is_refused(way: str) -> None:
    """An optimizer stepped on no gradients at all, and said nothing."""
    run_ranks(_stepped_without_sync, 2, way)


def _stepped_without_sync(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    with sharded.no_sync():
        sharded.loss(0).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    for run in (sharded, plain):
        run.train()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_step_on_the_reduced_part_alone_is_refused(way: str) -> None:
    """What was reduced before no_sync was stepped on without what came under it."""
    run_ranks(_stepped_on_a_part, 2, way)


def _stepped_on_a_part(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.loss(0).backward()
        with run.no_sync():
            run.loss(1).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        sharded.optimizer.step()
    for run in (sharded, plain):
        run.loss(2).backward()
        run.step()
    assert_same(sharded.model, plain.model, 1e-12)
    sharded.loss(3).backward()
    with sharded.no_sync():
        sharded.loss(4).backward()
    sharded.optimizer.zero_grad(set_to_none=False)
    # fc1's gradient, dropped in place, is the same object, and nothing is missing in it now.
    sharded.model.fc3(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    sharded.optimizer.step()


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
    with pytest.warns(UserWarning, match="accumulated before it are lost"):
        sharded.loss(2)
    sharded.optimizer.zero_grad()
    for run in (sharded, plain):
        run.train()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_frozen_for_another_forward(way: str) -> None:
    """Parameters frozen during a later forward, and thawed in time, got no gradients."""
    run_ranks(_frozen_between, 2, way)


def _frozen_between(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        loss = run.loss(0)
        run.model.requires_grad_(False)
        run.loss(1)
        run.model.requires_grad_(True)
        loss.backward()
        run.step()
    assert_same(sharded.model, plain.model, 1e-12)


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


# ---------------------------------------------------------------- wrapping and optimizers


@each_way
def test_units_nested_by_hand(way: str) -> None:
    """An outer wrapper took the parameters of units below it a second time."""
    run_ranks(_nested_by_hand, 2, way)


def _nested_by_hand(rank: int, world_size: int, way: str) -> None:
    model = MLP.model()
    model.fc1 = ShardedWrapper(model.fc1, **WAYS[way].keywords)
    model.fc3 = ShardedWrapper(model.fc3, **WAYS[way].keywords)
    sharded = Run(ShardedWrapper(model, **WAYS[way].keywords), MLP, rank, world_size)
    plain = Run(MLP.model(), MLP, rank, world_size)
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)
    sharded.model.load_state_dict(plain.model.state_dict())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizer_stepped_before_wrapping(name: str) -> None:
    """Its state kept the whole shapes, and the first sharded step met it with shards."""
    run_ranks(_stepped_before, 2, name)


def _stepped_before(rank: int, world_size: int, name: str) -> None:
    runs = [Run(MLP.model(), MLP, rank, world_size) for _ in range(2)]
    for run in runs:
        run.optimizer = OPTIMIZERS[name](run.model.parameters())
        run.train(0, 2)
    begun, plain = runs
    sharded = Run(MLP.wrap(begun.model, **WAYS["full"].keywords), MLP, rank, world_size)
    sharded.optimizer = begun.optimizer
    for run in (sharded, plain):
        run.train(2, 5)
    assert_same(sharded.model, plain.model, 1e-12)


def test_clipping_in_a_step_hook() -> None:
    """In an optimizer's own pre-hook, clip_grad_norm_ saw the norm of this rank's part."""
    run_ranks(_clipped_in_hook, 2)


def _clipped_in_hook(rank: int, world_size: int) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    sharded, plain = pair(rank, world_size, "full")
    for run in (sharded, plain):
        run.optimizer.register_step_pre_hook(clip)
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


# ---------------------------------------------------------------- buffers and edits


def test_two_forwards_through_batch_norm() -> None:
    """The second forward sent rank 0's statistics in place, and backward refused to go on."""
    run_ranks(_batch_norm, 2)


def _batch_norm(rank: int, world_size: int) -> None:
    layers = [nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)]
    model = ShardedWrapper(nn.Sequential(*layers).double(), auto_wrap_policy=always_wrap_policy)
    plain = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    plain.load_state_dict(model.state_dict())
    x = MLP.batch(0, 8)[0].chunk(world_size)[rank]
    for each in (model, plain):
        (each(x).pow(2).sum() + each(2 * x).sum()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad / world_size)


def test_data_edited_between_two_forwards() -> None:
    """Without no_grad, the second forward used the weights that the first had gathered."""
    run_ranks(_edited_data, 2)


def _edited_data(rank: int, world_size: int) -> None:
    sharded, plain = pair(rank, world_size, "full")
    for run in (sharded, plain):
        run.evaluate()
        for param in run.model.parameters():
            param.data.mul_(0.5)
    torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=1e-12, atol=1e-12)
    assert_same(sharded.model, plain.model, 1e-12)


def test_nested_summons_keep_the_outer_edits() -> None:
    """The inner context gathered anew, over what had been edited in the outer one."""
    run_ranks(_nested_summons, 2)


def _nested_summons(rank: int, world_size: int) -> None:
    sharded, plain = pair(rank, world_size, "full")
    with ShardedWrapper.summon_full_params(sharded.model), torch.no_grad():
        sharded.submodule("fc1").weight.fill_(2)
        with ShardedWrapper.summon_full_params(sharded.model):
            assert torch.all(sharded.submodule("fc1").weight == 2)
            sharded.submodule("fc2").weight.fill_(3)
        assert type(sharded.submodule("fc2").weight) is nn.Parameter
        sharded.submodule("fc3").weight.fill_(4)
    with torch.no_grad():
        for value, name in enumerate(("fc1", "fc2", "fc3"), start=2):
            plain.submodule(name).weight.fill_(value)
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_moving_to_meta_is_refused(way: str) -> None:
    """to("meta") threw the weights away and left a model that crashed later."""
    run_ranks(_to_meta, 2, way)


def _to_meta(rank: int, world_size: int, way: str) -> None:
    run, _ = pair(rank, world_size, way)
    with pytest.raises(RuntimeError, match="meta"):
        run.model.to("meta")
