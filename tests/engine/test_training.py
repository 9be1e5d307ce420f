"""Training idioms: a script run with a sharded and with a plain model comes to the same end.

A script is a function of a `Run`. It runs once with the plain model on the rows of all ranks, once
with the sharded one on this rank's rows, and what it returns must agree as well.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, ShardingStrategy
from tests.combinations import usual_and_every
from tests.harness import naming, run_ranks
from tests.models import CASES, Case, Mlp, loss_of, vectors
from tests.oracle import OPTIMIZERS, ROWS, assert_same, assert_same_state, snapshot, trainable
from tests.side import TOLERANCE, Run, Script, assert_same_model
from tests.training_scripts import SCRIPTS
from tests.ways import BASIC, WAYS, each_way

MLP = CASES["mlp"]


pytestmark = pytest.mark.by_turns


def _run_both(rank: int, world_size: int, script: Script, name: str, way: str) -> None:
    case = CASES[name]
    plain = Run(case.model(), case, rank, world_size)
    expected = script(plain)
    model = case.wrap(case.model(), **WAYS[way].keywords)
    sharded = Run(model, case, rank, world_size)
    actual = script(sharded)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=TOLERANCE)
    assert_same_model(sharded, plain)
    with naming("training on after the script"):
        sharded.train(10, 12)
        plain.train(10, 12)
        assert_same_model(sharded, plain)


def _combinations() -> Iterator[Any]:
    for number, (script, name) in enumerate(SCRIPTS):
        for way in usual_and_every(4, BASIC, start=number):
            yield pytest.param(script, name, way, id=f"{script.__name__}-{name}-{way}")


@pytest.mark.parametrize(("script", "name", "way"), list(_combinations()))
def test_script(script: Script, name: str, way: str) -> None:
    run_ranks(_run_both, 2, script, name, way)


# ---------------------------------------------------------------- what needs more than a script


@each_way
def test_gradients_detached_in_place(way: str) -> None:
    """As in guided-diffusion and fairseq. Under NO_SHARD, torch refused to detach a view."""
    run_ranks(_run_both, 2, _detached_and_zeroed, "mlp", way)


def _detached_and_zeroed(run: Run) -> None:
    for step in range(3):
        run.loss(step).backward()
        run.optimizer.step()
        for param in run.model.parameters():
            if param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()


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
    assert_same_model(sharded, plain)


def _grouped_by_ndim(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("keep_optimizer", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("convert", ["double", "to"])
@pytest.mark.parametrize("way", BASIC)
def test_converted_after_wrapping(way: str, convert: str, keep_optimizer: bool) -> None:
    run_ranks(_converted, 2, convert, keep_optimizer, way)


def _converted(
    rank: int,
    world_size: int,
    convert: str,
    keep_optimizer: bool,
    way: str,
) -> None:
    case = CASES["mlp"]
    plain = Run(case.model(torch.float32), case, rank, world_size)
    model = case.wrap(
        case.model(torch.float32),
        **WAYS[way].keywords,
    )
    sharded = Run(model, case, rank, world_size)
    for run in (plain, sharded):
        converted = run.model.double() if convert == "double" else run.model.to(torch.float64)
        assert converted is run.model
        if not keep_optimizer:
            run.optimizer = OPTIMIZERS["sgd"](trainable(run.model))
        run.train(0, 3)
    assert_same_model(sharded, plain)


class _Branches(nn.Module):
    """Uses one of three layers; ``spare`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])
        self.spare = nn.Linear(5, 3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](torch.tanh(self.fc(x)))


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_ranks_use_different_parameters(strategy: ShardingStrategy) -> None:
    """`.grad` is the average where some ranks used a parameter, and None where none did."""
    run_ranks(_different_parameters, 2, strategy)


def _different_parameters(rank: int, world_size: int, strategy: ShardingStrategy) -> None:
    torch.manual_seed(3)
    plain = _Branches().double()
    torch.manual_seed(3)
    model = ShardedWrapper(_Branches().double(), sharding_strategy=strategy)
    plain_optimizer = OPTIMIZERS["sgd"](plain.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    case = Case("branches", _Branches, vectors)
    for step in range(4):
        for turn in range(world_size):
            inputs, target = case.batch(10 * step + turn, ROWS)
            (loss_of(plain(inputs, (step + turn) % 3), target) / world_size).backward()
        inputs, target = case.batch(10 * step + rank, ROWS)
        loss_of(model(inputs, (step + rank) % 3), target).backward()
        expected = {name: p.grad is None for name, p in plain.named_parameters()}
        assert {name: p.grad is None for name, p in model.named_parameters()} == expected
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


@pytest.mark.parametrize("sync", [None, True])
def test_first_buffers_without_broadcast(sync: bool | None) -> None:
    """Ranks keep the buffers with which they start, unless ``sync_module_states=True``.

    DistributedDataParallel with ``broadcast_buffers=False`` does the same: torch's DDP passes that
    option to ``_sync_module_states``.
    """
    run_ranks(_first_buffers, 2, sync)


def _first_buffers(rank: int, world_size: int, sync: bool | None) -> None:
    case = CASES["batch-norm"]
    plain = case.model()
    plain.norm.running_mean.fill_(rank)
    expected = torch.full_like(plain.norm.running_mean, 0 if sync else rank)
    model = case.wrap(plain, broadcast_buffers=False, sync_module_states=sync)
    assert torch.equal(model.norm.running_mean, expected)


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
    assert_same_model(sharded, plain)


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
    assert_same_model(sharded, plain)


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


def test_gradients_that_the_program_keeps() -> None:
    """The objects of gradients are used again, but not those that the program still holds."""
    run_ranks(_kept_gradients, 2)


def _kept_gradients(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    model = ShardedWrapper(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    params: list[Any] = list(model.parameters())

    def step() -> None:
        model(torch.randn(4, 6)).square().sum().backward()

    step()
    kept = [param.grad for param in params]
    values = [grad.full_tensor().clone() for grad in kept]
    model.zero_grad()
    step()
    assert all(torch.equal(grad.full_tensor(), one) for grad, one in zip(kept, values, strict=True))
    parts = [param.grad.detach() for param in params]
    values = [part.full_tensor().clone() for part in parts]
    known = [weakref.ref(param.grad) for param in params]
    model.zero_grad()
    assert [one() for one in known] == [None] * len(params)
    step()
    assert all(
        torch.equal(part.full_tensor(), one) for part, one in zip(parts, values, strict=True)
    )
    params[1].grad = torch.zeros(params[1].shape)
    assert not params[1].spec.original.kept_grad.__dict__, "memory is freed"
    params[0].grad.tag = 1
    before = {id(param.grad) for param in params}
    model.zero_grad()
    assert not any(param.spec.original.kept_grad.__dict__ for param in params), "memory is freed"
    step()
    assert id(params[0].grad) in before, "used again"
    assert not hasattr(params[0].grad, "tag")
