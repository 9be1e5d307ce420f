"""Models and parameters as objects: copies, averages, hooks, and what has to be refused."""

import copy
import gc
import io
import os
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatshard import FlatShardTensor, MixedPrecision, ShardedWrapper
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, run_ranks
from tests.models import CASES, Case
from tests.oracle import ROWS, assert_same, assert_same_state, local_loss, snapshot
from tests.side import Run, pair
from tests.ways import BASIC

pytestmark = pytest.mark.by_turns

each_way = pytest.mark.parametrize("way", BASIC)


@each_way
def test_deepcopy(way: str) -> None:
    run_ranks(_deepcopy, 2, way)


def _deepcopy(rank: int, world_size: int, way: str) -> None:
    """The copy trains on by itself, and so does the original."""
    pairs = pair(rank, world_size, way)
    copies = []
    for run in pairs:
        run.train(0, 2)
        twin = copy.deepcopy(run.model)
        copies.append(Run(twin, run.case, rank, world_size))
    assert_same(copies[0].model, copies[1].model)
    for one, other in zip(pairs, copies, strict=True):
        one.train(2, 4)
        other.train(5, 8)
    assert_same(pairs[0].model, pairs[1].model)
    assert_same(copies[0].model, copies[1].model)
    names = [[name for name, _ in run.model.named_parameters()] for run in (pairs[0], copies[0])]
    assert names[0] == names[1]
    kept = copy.deepcopy(copies[0].model) if rank == 0 else None  # alone, and never run
    later = pair(rank, world_size, way)
    for run in later:
        run.train(0, 1)
    assert_same(later[0].model, later[1].model)
    del kept


@each_way
@pytest.mark.uncoalesced  # a coalesced unit cannot be copied alone
def test_copy_of_one_unit(way: str) -> None:
    run_ranks(_copy_of_one_unit, 2, way)


def _copy_of_one_unit(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    part = copy.deepcopy(sharded.model.fc1)
    inputs = sharded.inputs(0)
    assert torch.equal(part(inputs), plain.model.fc1(inputs))


@pytest.mark.parametrize("kind", ["mean", "each", "all"])
def test_averaged_model(kind: str) -> None:
    run_ranks(_averaged, 2, kind)


def _averaged(rank: int, world_size: int, kind: str) -> None:
    keywords = {
        "mean": {},
        "each": {"avg_fn": lambda average, new, _: 0.9 * average + 0.1 * new},
        "all": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    }[kind]
    averages = []
    for run in pair(rank, world_size, "full"):
        average = AveragedModel(run.model, **keywords)
        for step in range(3):
            run.train(step, step + 1)
            average.update_parameters(run.model)
        averages.append(average.module)
    assert_same(*averages)


def test_pickling_is_refused() -> None:
    run_ranks(_pickling, 2)


def _pickling(rank: int, world_size: int) -> None:
    model = pair(rank, world_size, "full")[0].model
    attempts: list[Callable[[], object]] = [
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save(model.module, io.BytesIO()),
        lambda: torch.save(model.fc1.weight, io.BytesIO()),
        lambda: copy.deepcopy(model.module),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match=r"flatshard\.checkpoint"):
            attempt()


def test_scaler_agrees_on_overflow() -> None:
    run_ranks(_scaler, 2)


def _scaler(rank: int, world_size: int) -> None:
    """An overflow on one rank skips the step on all, with torch's own scaler."""
    run, _ = pair(rank, world_size, "full")
    run.model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = snapshot(run.model)
    loss = run.model(run.inputs(0).float()).sum()
    scaler.scale(loss * float("inf") if rank == 1 else loss).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same_state(snapshot(run.model), before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_scalers_under_an_fp16_policy(kind: str) -> None:
    """Torch's own scaler, and the one that FSDP1 needs, which talks to the other ranks itself."""
    results = run_ranks(_fp16_scaler, 2, kind)
    assert results[0] == results[1]
    scales, skipped = results[0]
    # Halved by two overflows, the first of fp16 itself on all ranks; doubled by two good steps.
    assert scales == [2.0**19, 2.0**19, 2.0**20, 2.0**19, 2.0**19, 2.0**20]
    assert skipped == [0, 3]


def _fp16_scaler(rank: int, world_size: int, kind: str) -> tuple[list[float], list[int]]:
    case, precision = CASES["mlp"], MixedPrecision(torch.float16)
    model = case.wrap(case.model(torch.float32), mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = {"init_scale": 2.0**20, "growth_interval": 2}
    if kind == "plain":
        scaler: Any = torch.amp.GradScaler("cpu", **start)
    else:
        scaler = ShardedGradScaler("cpu", **start)
    scales, skipped = [], []
    for step in range(6):
        before = snapshot(model)
        inputs, target = case.batch(step, ROWS * world_size, torch.float32)
        rows = slice(ROWS * rank, ROWS * (rank + 1))
        loss = 1e-4 * F.mse_loss(model(inputs[rows]).float(), target[rows])
        if step == 0 or (step == 3 and rank == 1):  # what gradients overflow on
            loss = loss * 1e6
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1e-5)
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert bool(norm.isfinite()) is (step not in (0, 3))
        assert total <= 1.001e-5 or not norm.isfinite()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if all(torch.equal(value, before[name]) for name, value in snapshot(model).items()):
            skipped.append(step)
    return scales, skipped


def test_hooks_see_what_they_see_under_ddp() -> None:
    run_ranks(_hooks, 2)


def _hooks(rank: int, world_size: int) -> None:
    """Tensor hooks get the local gradient (a clamp is not linear), the other kind the average."""
    case = CASES["mlp"]
    local, plain = case.model(), case.model()
    local.fc2.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model = case.wrap(local)
    model.fc3.weight.register_hook(lambda grad: 2 * grad)
    seen: list[Tensor] = []
    model.fc3.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.full_tensor())
    )
    Run(model, case, rank, world_size).loss(0).backward()
    expected = []
    for other in range(world_size):
        plain.zero_grad()
        inputs, target = case.batch(0, ROWS * world_size)
        rows = slice(ROWS * other, ROWS * (other + 1))
        F.mse_loss(plain(inputs[rows]), target[rows]).backward()
        expected.append((plain.fc2.weight.grad.clamp(-0.01, 0.01), 2 * plain.fc3.weight.grad))
    torch.testing.assert_close(model.fc2.weight.grad.full_tensor(), sum(e[0] for e in expected) / 2)
    torch.testing.assert_close(seen, [sum(e[1] for e in expected) / 2])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_OP"])
def test_flat_gradients_as_a_whole(strategy: str) -> None:
    run_ranks(_flat_gradients, 4, strategy)


def _flat_gradients(rank: int, world_size: int, strategy: str) -> None:
    """All shards one after the other: every original lies where the layout says."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    case = CASES["mlp-one-unit"]
    model = case.wrap(case.model(), sharding_strategy=strategy, use_orig_params=False)
    plain = case.model()
    inputs, target = case.batch(0, ROWS * world_size)
    F.mse_loss(plain(inputs), target).backward()
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    F.mse_loss(model(inputs[rows]), target[rows]).backward()
    (flat,) = model.parameters()
    whole = flat.grad.full_tensor()
    layout = flat.flat_layout
    assert whole.shape == (layout.padded_numel,)
    for span, param in zip(layout.spans, plain.parameters(), strict=True):
        torch.testing.assert_close(whole[span.start : span.end], param.grad.flatten())


def test_flat_parameters_refuse_tensor_hooks() -> None:
    run_ranks(_flat_hooks, 2)


def _flat_hooks(rank: int, world_size: int) -> None:
    run, plain = pair(rank, world_size, "full-flat")
    flat = next(run.model.parameters())
    with pytest.raises(RuntimeError, match="use_orig_params=True"):
        flat.register_hook(lambda grad: grad)
    # An optimizer in backward needs only the other kind.
    for param in run.model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(
            lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
        )
    other = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    for step in range(3):
        run.loss(step).backward()
        other.zero_grad()
        plain.loss(step).backward()
        other.step()
    assert_same(run.model, plain.model)


def test_penalties_weighted_differently_on_each_rank() -> None:
    run_ranks(_penalties, 2)


def _penalties(rank: int, world_size: int) -> None:
    sharded, plain = pair(rank, world_size, "full")
    for run, weight in ((sharded, 0.1 * (rank + 1)), (plain, 0.15)):
        for step in range(3):
            params = list(run.model.parameters())
            penalty = sum(p.pow(2).sum() + torch.norm(p) + p.abs().mean() for p in params)
            (run.loss(step) + weight * penalty).backward()
            run.step()
    assert_same(sharded.model, plain.model)


def test_gradients_for_chosen_parameters_are_refused() -> None:
    run_ranks(_chosen, 2)


def _chosen(rank: int, world_size: int) -> None:
    run, _ = pair(rank, world_size, "full")
    params = list(run.model.parameters())
    loss = run.loss(0)
    for ask in (
        lambda: torch.autograd.grad(loss, params, allow_unused=True),
        lambda: loss.backward(inputs=params),
    ):
        with pytest.raises(RuntimeError, match=r"parameter 'fc1\.weight' is sharded"):
            ask()


def test_users_attributes() -> None:
    run_ranks(_users_attributes, 2)


def _users_attributes(rank: int, world_size: int) -> None:
    """They stay on the parameter, and never replace what a sharded parameter needs itself."""
    model = nn.Linear(3, 4)
    model.weight.decays = True  # type: ignore[attr-defined]
    assert ShardedWrapper(model).module.weight.decays  # type: ignore[union-attr]
    model = nn.Linear(3, 4)
    model.weight.spec = "a user's"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"'weight' has an attribute 'spec'.*another name"):
        ShardedWrapper(model)


def test_editing_between_forward_and_backward_is_noticed() -> None:
    run_ranks(_edited, 2)


def _edited(rank: int, world_size: int) -> None:
    run, _ = pair(rank, world_size, "full")
    loss = run.loss(0)
    with torch.no_grad():
        run.model.fc2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified between forward and backward"):
        loss.backward()
    run.train()


def test_parameters_look_like_parameters() -> None:
    run_ranks(_looks, 3)


def _looks(rank: int, world_size: int) -> None:
    run, plain = pair(rank, world_size, "full")
    for (name, mine), (other_name, theirs) in zip(
        run.model.named_parameters(), plain.model.named_parameters(), strict=True
    ):
        assert name == other_name
        assert isinstance(mine, nn.Parameter)
        assert isinstance(mine, FlatShardTensor)
        assert (mine.shape, mine.ndim, mine.numel()) == (theirs.shape, theirs.ndim, theirs.numel())
        assert name in repr(mine)
        assert torch.equal(mine.full_tensor(), theirs)
        for reduce in (torch.sum, torch.mean, torch.max, torch.norm):
            torch.testing.assert_close(reduce(mine.detach()), reduce(theirs.detach()))
        assert bool(torch.isfinite(mine).all())
        for compute in (
            lambda p: p.t() if p.dim() == 2 else p.flip(0),
            lambda p: p[0],
            lambda p: torch.cat([p]),
            lambda p: torch.bernoulli(p.abs().clamp(0, 1)),  # drew by uninitialised memory
        ):
            drawn = []
            for param in (mine, theirs):
                torch.manual_seed(0)
                with allow_warnings():  # of all-gathers that could be spared
                    drawn.append(compute(param.detach()))
            assert torch.equal(*drawn)


@pytest.mark.parametrize(
    "init",
    ["normal_", "uniform_", "xavier_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_"],
)
def test_initialised_after_wrapping(init: str) -> None:
    run_ranks(_initialised, 2, init)


def _initialised(rank: int, world_size: int, init: str) -> None:
    """The same numbers as the unwrapped model draws, bit for bit."""
    values = []
    for run in pair(rank, world_size, "full"):
        torch.manual_seed(5)
        for param in run.model.parameters():
            if param.dim() > 1:
                getattr(nn.init, init)(param)
        values.append(snapshot(run.model))
    assert_same_state(*values, rtol=0.0, atol=0.0)


@each_way
def test_summoned_edits_are_kept(way: str) -> None:
    run_ranks(_summoned, 2, way)


def _summoned(rank: int, world_size: int, way: str) -> None:
    run, plain = pair(rank, world_size, way)
    with ShardedWrapper.summon_full_params(run.model), torch.no_grad():
        weight = run.submodule("fc2").weight
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, plain.model.fc2.weight)
        weight.t().mul_(2)
        plain.model.fc2.weight.mul_(2)
    assert_same(run.model, plain.model)
    if way != "no_shard":
        with ShardedWrapper.summon_full_params(run.model, writeback=False), torch.no_grad():
            run.submodule("fc2").weight.zero_()
    for each in (run, plain):
        each.train()
    assert_same(run.model, plain.model)


# ---------------------------------------------------------------- a module like the wrapped one


def test_apply() -> None:
    run_ranks(_applied, 2)


def _applied(rank: int, world_size: int) -> None:
    """The same modules in the same order, the same numbers, and whole parameters."""
    for name, keywords in product(
        ("nested", "tied-across-units", "mlp"), ({}, {"use_orig_params": False})
    ):
        case = CASES[name]
        plain, model = case.model(), case.wrap(case.model(), **keywords)
        seen: dict[nn.Module, list[str]] = {plain: [], model: []}
        with naming((name, keywords)):
            for one, names in seen.items():
                torch.manual_seed(3)
                one.apply(partial(_initialise, names))
                names.append(str(torch.get_rng_state().sum()))
            assert seen[plain] == seen[model]
            assert_same_state(model.state_dict(), snapshot(plain), 0.0, 0.0)

            def fail(module: nn.Module) -> None:
                if isinstance(module, nn.Linear):
                    raise KeyError

            with pytest.raises(KeyError):
                model.apply(fail)
            assert_same_state(model.state_dict(), snapshot(plain), 0.0, 0.0)
            local_loss(model, case, 0, rank, world_size).backward()


def _initialise(names: list[str], module: nn.Module) -> None:
    """Draws, views that only whole parameters have, and a container that reaches into its parts."""
    names.append(type(module).__name__)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_()
        module.weight.data[0].fill_(0.5)
    for name, param in module.named_parameters():
        if name.endswith("weight"):
            param.data.mul_(1.1).add_(torch.randn_like(param))


def test_isinstance_reaches_through() -> None:
    run_ranks(_instances, 1)


def _instances(rank: int, world_size: int) -> None:
    with allow_warnings():
        model = ShardedWrapper(
            nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    assert all(isinstance(model, kind) for kind in (nn.Sequential, ShardedWrapper, nn.Module))
    assert not isinstance(model, nn.Linear)
    assert [isinstance(child, nn.Linear) for child in model] == [True, False, True]
    assert type(model) is type(model[0]) is ShardedWrapper
    assert isinstance(copy.deepcopy(model)[0], nn.Linear)
    assert repr(model).startswith("ShardedWrapper(")
    assert {"unit_report", "append", "module"} <= set(dir(model))
    # A hook that is installed by class runs once.
    calls: list[int] = []

    def install(module: nn.Module, key: int) -> None:
        def add(*_: object) -> None:
            calls.append(key)

        for child in module.children():
            install(child, key)
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: add())

    for key in (1, 2):
        install(model, key)
    model(torch.ones(2, 7))
    assert calls == [1, 2, 1, 2]
    # One checkpoint per layer: not one around the unit and one in it.
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    assert sum(type(module) is CheckpointWrapper for module in model.modules()) == 2
    assert all(type(model[index]) is ShardedWrapper for index in (0, 2))
    model(torch.ones(2, 7)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# ---------------------------------------------------------------- freed


def _freed(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    for keywords in ({}, {"use_orig_params": False}, {"sharding_strategy": "NO_SHARD"}):
        for last in ("constructor", "forward", "backward", "step", "no_sync", "deepcopy"):
            with naming(f"{keywords}, after {last}"):
                model = case.wrap(case.model(), **keywords)
                _use(model, last, case, rank, world_size)
                kept = [weakref.ref(model), weakref.ref(model.fc1._sharding.unit.handles[0])]
                del model
                gc.collect()
                assert [one() for one in kept] == [None, None]


def _use(model: ShardedWrapper, last: str, case: Case, rank: int, world_size: int) -> None:
    if last == "constructor":
        return
    loss = local_loss(model, case, 0, rank, world_size)
    if last == "forward":
        return
    loss.backward()
    if last == "no_sync":
        with model.no_sync():
            local_loss(model, case, 0, rank, world_size).backward()
    elif last == "step":
        torch.optim.AdamW(model.parameters()).step()
    elif last == "deepcopy":
        copy.deepcopy(model)


def test_models_are_freed() -> None:
    """Autograd hides what its hooks and saved outputs hold from Python's collector."""
    run_ranks(_freed, 2)
