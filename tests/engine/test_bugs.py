"""Defects that were found and fixed: each test tells what went wrong once."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.harness import allow_warnings, run_ranks
from tests.models import CASES, Case, vectors
from tests.oracle import OPTIMIZERS, assert_same
from tests.scripts import torchrun
from tests.side import Run, pair
from tests.ways import BASIC, TRUE_SHAPE, WAYS

MLP = CASES["mlp"]

each_way = pytest.mark.parametrize("way", BASIC)
each_strategy = pytest.mark.parametrize("way", TRUE_SHAPE)


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


@each_strategy
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


@each_strategy
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


@each_strategy
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


class _Growing(nn.Module):
    """Has a table that it makes longer when a batch needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("offset", torch.full((4,), 7.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.table.numel() < len(x):
            self.table = torch.arange(float(len(x)))
        return self.linear(x) + self.table[: len(x), None]


@pytest.mark.parametrize("longer", [0, 1])
def test_buffer_of_another_length_on_each_rank(longer: int) -> None:
    """Rank 0's buffers were sent into ones of other lengths, and the ranks crashed."""
    run_ranks(_growing, 2, longer)


def _growing(rank: int, world_size: int, longer: int) -> None:
    torch.manual_seed(0)
    plain = _Growing()
    model = ShardedWrapper(_Growing())
    model.load_state_dict(plain.state_dict())
    x = torch.randn(8 if rank == longer else 3, 7)
    for _ in range(3):
        output = model(x)
        torch.testing.assert_close(output, plain(x))
        output.sum().backward()
    assert torch.equal(model.offset, torch.full((4,), 7.0))
    assert torch.equal(model.table, torch.arange(float(len(x))))


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


@pytest.mark.parametrize("way", ["full", "full-flat"])
def test_data_edited_between_two_forwards(way: str) -> None:
    """Without no_grad, the second forward used the weights that the first had gathered."""
    run_ranks(_edited_data, 2, way)


def _edited_data(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.evaluate()
        for param in run.model.parameters():
            param.data.mul_(0.5)
    torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=1e-12, atol=1e-12)
    assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize("way", ["full-flat", "grad_op-flat"])
def test_data_assigned_to_flat_parameters(way: str) -> None:
    """The next gather read the old shard, and what was assigned to `.data` got lost."""
    run_ranks(_assigned_data, 2, way)


def _assigned_data(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.evaluate()
        for param in run.model.parameters():
            param.data = param.data * 0.5
    torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=1e-12, atol=1e-12)
    assert_same(sharded.model, plain.model, 1e-12)
    for run in (sharded, plain):
        run.train()
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


def test_forward_under_summon_is_refused() -> None:
    """A forward under summon_full_params freed the parameters that the context showed."""
    run_ranks(_forward_under_summon, 2)


def _forward_under_summon(rank: int, world_size: int) -> None:
    sharded, plain = pair(rank, world_size, "full")
    with (
        ShardedWrapper.summon_full_params(sharded.model),
        pytest.raises(RuntimeError, match="summon_full_params"),
    ):
        sharded.evaluate()
    for run in (sharded, plain):
        run.train()
    assert_same(sharded.model, plain.model, 1e-12)


@each_way
def test_moving_to_meta_is_refused(way: str) -> None:
    """to("meta") threw the weights away and left a model that crashed later."""
    run_ranks(_to_meta, 2, way)


def _to_meta(rank: int, world_size: int, way: str) -> None:
    run, _ = pair(rank, world_size, way)
    with pytest.raises(RuntimeError, match="meta"):
        run.model.to("meta")


# ---------------------------------------------------------------- models


class _Quantized(nn.Module):
    """An integer weight that is not trained, with a scale that is."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(21, dtype=torch.int8).view(7, 3)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) * self.scale


@each_way
def test_integer_parameter(way: str) -> None:
    """An int8 parameter was to be viewed as one that can require grad, which torch refuses."""
    run_ranks(_integers, 2, way)


def _integers(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way, Case("quantized", _Quantized, vectors))
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Box:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class _Record:
    hidden: Tensor
    extra: object = None


class _Boxing(nn.Module):
    """Computes again in backward, and returns its output in an object."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(checkpoint(self._inner, x, use_reentrant=False))

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Boxes(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = _Boxing(kind)
        self.second = _Boxing(kind)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).hidden
        return self.head(x + self.second(x).hidden)


@pytest.mark.parametrize("kind", [_Box, _Record])
@each_way
def test_checkpoint_in_a_unit_that_returns_an_object(way: str, kind: type) -> None:
    """Outputs were not found in the object, so nothing was gathered for the recomputation."""
    run_ranks(_boxed, 2, way, kind)


def _boxed(rank: int, world_size: int, way: str, kind: type) -> None:
    case = Case("boxes", functools.partial(_Boxes, kind), vectors, (_Boxing,))
    sharded, plain = pair(rank, world_size, way, case)
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Giver(nn.Module):
    """Returns a view of its weight."""

    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 3))
        self.kind = kind

    def forward(self) -> Any:
        return self.kind(self.weight.t())


class _Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.giver = _Giver(lambda view: view)
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.giver().t()


@pytest.mark.parametrize("way", ["full", "grad_op"])
def test_unit_returns_a_view_of_its_weight(way: str) -> None:
    """The view's memory was freed after forward, and whoever read it got a crash."""
    run_ranks(_returned_view, 2, way)


def _returned_view(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way, Case("taker", _Taker, vectors, (_Giver,)))
    for run in (sharded, plain):
        run.train(0, 3)
    assert_same(sharded.model, plain.model, 1e-12)


class _Keeper(nn.Sequential):
    """Keeps its weight, for a penalty, as if it stayed the same object."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, numel))
        self.kept: list[Tensor] = []
        self[0].register_forward_hook(self._keep)

    def _keep(self, linear: nn.Linear, *_: Any) -> None:
        assert type(linear.weight) is nn.Parameter
        self.kept[:] = [linear.weight]


@pytest.mark.parametrize("collectives", ["auto", "sockets"])
@pytest.mark.parametrize("numel", [7, 100_000])
def test_a_weight_kept_from_forward(collectives: str, numel: int) -> None:
    """Its memory was freed with its unit: whoever read it got a crash, or others' next step."""
    run_ranks(_kept_weight, 2, collectives, numel)


def _kept_weight(rank: int, world_size: int, collectives: str, numel: int) -> None:
    plain, x = _Keeper(numel), torch.ones(3, 7)

    (plain(x).pow(2).mean() + plain.kept[0].pow(2).sum()).backward()
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        keeper = _Keeper(numel)
        model = ShardedWrapper(
            keeper,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            collectives=collectives,
            backward_prefetch="BACKWARD_PRE",
        )
        for _ in range(2):
            out = model(x).pow(2).mean()
            (kept,) = keeper.kept
            assert kept.shape == (numel, 7)
            is_mapped = any(
                h.memory.shows_shards
                for unit in model._sharding.context.units
                for h in unit.handles
            )
            assert is_mapped is (numel > 7 and collectives == "auto")
            if strategy == "SHARD_GRAD_OP" and not is_mapped:
                (out + kept.pow(2).sum()).backward()
            else:
                assert "FreedParameter('0.weight')" in repr(kept)
                assert kept.requires_grad
                for use in (torch.sum, Tensor.t, lambda weight: x @ weight, lambda w: w.data):
                    with pytest.raises(RuntimeError, match=r"'0.weight': .* in forward, which"):
                        use(kept)
                # What the error recommends.
                (out + model[0].weight.pow(2).sum()).backward()
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
            model.zero_grad()


READS_A_VIEW = """
import torch, torch.distributed as dist
from flatshard import ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from torch import nn

dist.init_process_group("gloo")
kept = []
linear = nn.Linear(7, 7)
linear.register_forward_pre_hook(lambda module, _: kept.append(module.weight[0]))
model = nn.Sequential(linear, nn.Linear(7, 7))
model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
model(torch.ones(3, 7))
if dist.get_rank() == 0:  # or both would write at once
    kept[0].sum()  # the last line
"""


def test_a_view_kept_from_forward(tmp_path: Path) -> None:
    """Nobody can tell, but the process ended without a word."""
    script = tmp_path / "reads_a_view.py"
    script.write_text(READS_A_VIEW)
    done = torchrun(2, script, environment=dict(os.environ), cwd=tmp_path)
    assert done.status == -signal.SIGSEGV
    last = READS_A_VIEW[: READS_A_VIEW.index("# the last line")].count("\n") + 1
    assert "Fatal Python error: Segmentation fault" in done.err
    assert f'File "{script}", line {last} in <module>' in done.err


@pytest.mark.parametrize("grad", [True, False])
def test_view_of_a_weight_in_an_object_is_refused(grad: bool) -> None:
    """An object can't be copied in its owner's place, so its view was of freed memory."""
    run_ranks(_hidden_view, 2, grad)


def _hidden_view(rank: int, world_size: int, grad: bool) -> None:
    model = ShardedWrapper(nn.Sequential(_Giver(_Box)), auto_wrap_policy=ModuleWrapPolicy({_Giver}))
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"clone\(\)"):
        model[0]()


@pytest.mark.parametrize("whole", [True, False], ids=["model", "block"])
def test_compiled(whole: bool) -> None:
    """Tracing ran into the gathering of parameters, and kept tensors that were freed later."""
    run_ranks(_compiled, 2, whole)


def _compiled(rank: int, world_size: int, whole: bool) -> None:
    sharded, plain = pair(rank, world_size, "full")
    with allow_warnings():
        if whole:
            forward = torch.compile(sharded.model, backend="eager")
        else:
            sharded.submodule("fc2").compile(backend="eager")
            forward = sharded.model
        for step in range(3):
            outputs = [forward(sharded.inputs(step)), plain.model(sharded.inputs(step))]
            torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
            outputs[0].pow(2).mean().backward()
            plain.model(plain.inputs(step)).pow(2).mean().backward()
            plain.step()
            sharded.step()
            assert_same(sharded.model, plain.model, 1e-12)


@pytest.mark.parametrize("collectives", ["auto", "sockets", "native"])
def test_lazy_conjugates(collectives: str) -> None:
    """Views that autograd saved lost their conjugation, gradients sent or read in place, too."""
    run_ranks(_lazy_conjugates, 2, collectives)


def _lazy_conjugates(rank: int, world_size: int, collectives: str) -> None:
    for numel in (6, (1 << 17) + 2):  # the larger one's gradients stay where autograd made them
        plain, wrapped = _Complex(numel), _Complex(numel)
        sharded = ShardedWrapper(wrapped, auto_wrap_policy=None, collectives=collectives)
        batches = [
            torch.randn(numel, generator=torch.Generator().manual_seed(one))
            for one in range(world_size)
        ]
        torch.stack([plain(x) for x in batches]).mean().backward()
        sharded(batches[rank]).backward()
        with ShardedWrapper.summon_full_params(sharded, with_grads=True):
            for param, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
                assert expected.grad is not None
                torch.testing.assert_close(param.grad, expected.grad.resolve_conj().resolve_neg())


class _Complex(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.phase = nn.Parameter(torch.randn(numel, dtype=torch.complex64, generator=generator))
        self.turn = nn.Parameter(torch.randn(numel, dtype=torch.complex64, generator=generator))
        self.real = nn.Parameter(torch.randn(numel, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        # The conjugate itself is saved, and one gradient is a conjugate, another a negative.
        product = x * (self.phase * self.phase.conj() * self.turn.conj()).imag
        alone = (x * self.turn.conj()).imag + torch.complex(x, self.real).conj().imag
        return (product + alone).mean()
