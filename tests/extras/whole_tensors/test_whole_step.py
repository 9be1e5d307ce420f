"""Optimizers that need full tensors step a sharded model as they step an unwrapped one."""

import copy
import math
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from flatshard import CPUOffload, ShardedWrapper, checkpoint
from flatshard.collectives import record
from flatshard.extras import whole_tensors
from flatshard.extras.whole_tensors import choose_owners, step_cost
from flatshard.extras.whole_tensors.trial import StepMode
from flatshard.optimizer.adapter import adapter_of
from flatshard.units.layout import FlatLayout
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import assert_identical, assert_same, snapshot, step_with, trainable
from tests.side import TOLERANCE, Run, assert_same_model, pair

pytestmark = pytest.mark.by_turns

Optimizers = Sequence[torch.optim.Optimizer]


class RowNorms(torch.optim.Optimizer):
    """Divides a gradient by the running norms of its rows; one that nobody has heard of."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for param in self.params if param.grad is not None):
            state = self.state[param]
            rows = param.grad.reshape(len(param) if param.dim() else 1, -1)
            if not state:
                state["norms"] = torch.zeros(len(rows), 1, dtype=param.dtype)
                state["momentum"] = torch.zeros_like(param)
            state["norms"].mul_(0.9).add_(rows.norm(dim=1, keepdim=True))
            state["momentum"].mul_(0.9).add_((rows / (1 + state["norms"])).view_as(param))
            param.add_(state["momentum"], alpha=-self.param_groups[0]["lr"])
        self.finish()

    def finish(self) -> None:
        """What the optimizers below do besides."""

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]


class Drawing(RowNorms):
    """Draws torch's numbers for parameters that are larger than in a trial, others in trials."""

    def finish(self) -> None:
        for param in self.params:
            if param.numel() > 100:
                param.add_(torch.rand_like(param), alpha=1e-3)
            else:
                random.random(), numpy.random.rand()


class Counting(RowNorms):
    """Has a number in its group that changes with each step, and steps less and less."""

    def finish(self) -> None:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
            group["lr"] = 0.05 / group["number"]


class Failing(RowNorms):
    """Fails on the rank that steps the largest parameter, once it has changed some."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if any(param.numel() == self.defaults.get("largest") for param in self.params):
            raise FloatingPointError("not finite")


class Decaying(RowNorms):
    """Changes its learning rate, by counts of its parameters, from the fifth step on."""

    def finish(self) -> None:
        for param in self.params:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1
            if self.state[param]["step"] == 5:
                self.param_groups[0]["lr"] /= 2


class ClearingGrads(RowNorms):
    """Sets gradients to None in its step."""

    def finish(self) -> None:
        for param in self.params:
            param.grad = None


class Together(torch.optim.Optimizer):
    """Divides by the norm of the rows of all parameters together."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        flat = torch.cat([param.grad.reshape(-1) for param in params])
        for param in params:
            param.sub_(param.grad / (1 + flat.norm()), alpha=0.5)


def _muon(params: Sequence[nn.Parameter]) -> Optimizers:
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)]


def _lbfgs(params: Sequence[nn.Parameter]) -> Optimizers:
    return [torch.optim.LBFGS(params, lr=0.1, max_iter=3)]


KINDS: dict[str, tuple[Callable[[Sequence[nn.Parameter]], Optimizers], StepMode]] = {
    "muon": (_muon, StepMode.IN_PARTS),
    "adafactor": (lambda params: [torch.optim.Adafactor(params, lr=0.05)], StepMode.IN_PARTS),
    "lbfgs": (_lbfgs, StepMode.ON_EVERY_RANK),
    "rows": (lambda params: [RowNorms(params)], StepMode.IN_PARTS),
    "counting": (lambda params: [Counting(params)], StepMode.ON_OWNERS),
    "together": (lambda params: [Together(params)], StepMode.ON_EVERY_RANK),
}


def _optimizers(run: Run, kind: str) -> Optimizers:
    return KINDS[kind][0](trainable(run.model))


def _train(run: Run, optimizers: Optimizers, steps: range) -> None:
    for number in steps:
        step_with(optimizers, partial(run.loss, number))


# ------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_steps_as_an_unwrapped_model(rank: int, world_size: int) -> None:
    for kind, case in product(KINDS, ("mlp", "cnn")):
        with naming((kind, case)):
            runs = pair(rank, world_size, "full", case)
            for run in runs:
                optimizers = _optimizers(run, kind)
                _train(run, optimizers, range(3))
                if run.is_sharded and world_size > 1:
                    assert adapter_of(optimizers[0]).mode is KINDS[kind][1]
            # torch's Muon multiplies in bfloat16.
            bound = 1e-2 if kind == "muon" else TOLERANCE
            assert_same(*(run.model for run in runs), rtol=0.0, atol=bound)


@on_ranks(2)
def test_muon_on_gradients_of_equal_bits(rank: int, world_size: int) -> None:
    """Where the gradients are the same, the values are, bit for bit."""
    runs = pair(rank, world_size, "full", "transformer")
    for run in runs:
        optimizers = _optimizers(run, "muon")
        for number in range(3):
            for index, param in enumerate(run.model.parameters()):
                generator = torch.Generator().manual_seed(100 * number + index)
                param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            for optimizer in optimizers:
                optimizer.step()
    assert_identical(*(run.model for run in runs))


# ------------------------------------------------------------ who does what


@on_ranks(2)
def test_work_is_done_once(rank: int, world_size: int) -> None:
    """Each matrix has one owner, whose state it is alone; what moves is a part of the model."""
    run, _ = pair(rank, world_size, "full", "transformer")
    optimizer, _ = optimizers = _optimizers(run, "muon")
    with record() as events:
        _train(run, optimizers, range(1))
    params = optimizer.param_groups[0]["params"]
    mine = [index for index, param in enumerate(params) if optimizer.state[param]]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    assert sorted(chain.from_iterable(everyone)) == list(range(len(params)))
    assert all(everyone)
    assert all(type(optimizer.state[params[index]]["momentum_buffer"]) is Tensor for index in mine)
    sent = torch.tensor(sum(event.nbytes for event in events if event.kind == "all_to_all"))
    dist.all_reduce(sent)
    assert 0 < sent <= 2 * sum(param.nbytes for param in params)


# ------------------------------------------------------------ what fails


@on_ranks(2)
def test_a_step_that_fails_on_one_rank_fails_on_all(rank: int, world_size: int) -> None:
    run, _ = pair(rank, world_size, "full", "mlp")
    RowNorms([torch.nn.Parameter(torch.zeros(1))])  # `super().step()` has torch's hooks from now on
    optimizer = Failing(list(run.model.parameters()))
    run.loss(0).backward()
    before = snapshot(run.model)
    optimizer.step()
    after = snapshot(run.model)
    optimizer.defaults["largest"] = max(param.numel() for param in run.model.parameters())
    assert_raises(FloatingPointError, r"not finite \(rank [01]\)", optimizer.step)
    assert_identical(run.model, after)
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    optimizer.defaults["largest"] = 0
    optimizer.step()  # and it goes on


@on_ranks(2)
def test_changed_groups_and_different_gradients_raise(rank: int, world_size: int) -> None:
    """A step that changes groups or gradients, and then gradients that rank 1 lacks."""
    run, _ = pair(rank, world_size, "full", "mlp")
    optimizer = Decaying(run.model.parameters())
    _train(run, [optimizer], range(4))
    before = snapshot(run.model)
    with pytest.raises(NotImplementedError, match=r"Decaying.step\(\) changes its"):
        _train(run, [optimizer], range(4, 5))
    assert_identical(run.model, before)
    with pytest.raises(NotImplementedError, match=r"step\(\) sets the gradient to None"):
        ClearingGrads(run.model.parameters()).step()
    run.loss(0).backward()
    if rank:
        next(iter(run.model.parameters())).grad = None
    message = r"ranks differ: parameter '.*' is .* Every rank must step"
    assert_raises(ValueError, message, torch.optim.Adafactor(run.model.parameters()).step)


# ------------------------------------------------------------ everything around it


@on_ranks(3)
def test_owners_stay_while_groups_change(rank: int, world_size: int) -> None:
    """Parameters keep their owners, and so their state, while the groups change."""
    run, plain = pair(rank, world_size, "full", "mlp")
    for one in (run, plain):
        params = list(one.model.parameters())
        optimizer = RowNorms(params)
        for steps, kept in ((2, params), (2, params[2:]), (2, params[::-1])):
            optimizer.param_groups[0]["params"] = kept
            _train(one, [optimizer], range(steps))
        one.model.double()
    assert_same_model(run, plain)


@on_ranks(2)
def test_parameters_in_files_and_in_small_parts(rank: int, world_size: int, tmp_path: Path) -> None:
    offload = CPUOffload(offload_params=True, path=tmp_path)
    for keywords in ({}, {"cpu_offload": offload}):
        runs = pair(rank, world_size, "full", "cnn", **keywords)
        for run in runs:
            with mock.patch.object(whole_tensors, "PART_BYTES", 2000):
                _train(run, _optimizers(run, "adafactor"), range(3))
        assert_same_model(*runs)


# ---------------------------------------------------------------- other state on each rank


class Divided(torch.optim.Optimizer):
    """Keeps the momentum of each parameter on one rank; the others keep zeros (nanochat)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def momentum(self, param: Tensor, number: int) -> Tensor:
        self.state[param]["number"] = number  # the same on all ranks
        return self.state[param].setdefault("momentum", torch.zeros_like(param))  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, param in enumerate(self.param_groups[0]["params"]):
            momentum = self.momentum(param, number)
            owner = number % dist.get_world_size()
            if dist.get_rank() == owner:
                momentum.mul_(0.9).add_(param.grad)
            update = momentum.clone()
            dist.broadcast(update, owner)
            param.sub_(update, alpha=0.05)


class DividedGroup(Divided):
    """Keeps these momenta in its group, without state of any parameter (NorMuon)."""

    def momentum(self, param: Tensor, number: int) -> Tensor:
        group = self.param_groups[0]
        return group.setdefault(f"momentum {number}", torch.zeros_like(param))  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", [Divided, DividedGroup])
@on_ranks(2)
def test_other_state_on_each_rank(
    rank: int, world_size: int, tmp_path: Path, kind: type[Divided], strategy: str
) -> None:
    """Refused by name while it is saved; each rank's own state dict restores it."""

    def built() -> tuple[ShardedWrapper, Divided]:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model = ShardedWrapper(layers, sharding_strategy=strategy)
        return model, kind(model.parameters())

    def train(steps: range) -> dict[str, Tensor]:
        for step in steps:
            model(torch.full((2, 3), step + rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    model, optimizer = built()
    with allow_warnings():
        expected = train(range(4))
        model, optimizer = built()
        weights = train(range(2))
        # Before `get_optimizer_state_dict`, which steps an optimizer without state.
        state = copy.deepcopy(optimizer.state_dict())
        name = (
            r"(state 'momentum' of parameter '0.weight'|option 'momentum 0' of group 0) differs "
            r"between ranks 0 and 1: Divided"
        )
        saves = (
            lambda: checkpoint.save(tmp_path / "a", model, optimizer),
            lambda: checkpoint.full_optim_state_dict(model, optimizer),
            lambda: get_optimizer_state_dict(model, optimizer),
        )
        # Under NO_SHARD, torch's get_optimizer_state_dict communicates nothing.
        for save in saves[: 2 if strategy == "NO_SHARD" else 3]:
            assert_raises(ValueError, name, save)
        model, optimizer = built()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert_identical(train(range(2, 4)), expected)


class _OfModules(torch.optim.SGD):
    """Changes gradients that it finds by modules, as K-FAC does; ``change`` says how."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model.parameters(), lr=0.1)
        inner = model.module if isinstance(model, ShardedWrapper) else model
        self.parts = [m for m in inner.modules() if type(m) is nn.Linear]
        self.change = change

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.weight.grad.copy_(self.change(part.weight.grad))
        super().step()


@on_ranks(2)
def test_gradients_that_an_optimizer_finds_by_modules(rank: int, world_size: int) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda grad: grad * 0.5,  # the trial before the first step uses the same gradients
        lambda grad: grad.flip(0),  # gathers the gradients
    ]
    for change in changes:
        pairs = pair(rank, world_size, "full")
        for run in pairs:
            run.optimizer = _OfModules(run.model, change)
            with allow_warnings():
                run.train(0, 2)
        assert_same_model(*pairs)
    sharded, _ = pair(rank, world_size, "full")
    sharded.optimizer = _OfModules(sharded.model, lambda grad: grad.full_tensor().svd()[0] @ "")
    assert_raises(NotImplementedError, "in attribute 'parts'", sharded.train, 0, 1)


@on_ranks(2)
def test_random_draws_for_large_parameters_only_are_told(rank: int, world_size: int) -> None:
    model = ShardedWrapper(nn.Linear(32, 16, bias=False))
    optimizer = Drawing(model.parameters())
    model(torch.ones(4, 32)).sum().backward()
    before = random.getstate(), numpy.random.get_state()[2]
    with warnings.catch_warnings(record=True, action="always") as caught:
        optimizer.step()
    assert before == (random.getstate(), numpy.random.get_state()[2])
    owners = [str(one.message) for one in caught if "Drawing.step() draws" in str(one.message)]
    numbers: list[Any] = [None] * world_size
    dist.all_gather_object(numbers, len(owners))
    assert sorted(numbers) == [0, 1]  # only the owner has drawn


# ---------------------------------------------------------------- owners


def _held(shapes: list[tuple[int, ...]], world_size: int) -> list[dict[int, int]]:
    params = {str(number): torch.empty(shape) for number, shape in enumerate(shapes)}
    layout = FlatLayout.build(params, world_size=world_size, itemsize=4)
    ranks = range(world_size)
    return [
        {
            rank: layout.local_span(n, rank).numel
            for rank in ranks
            if layout.local_span(n, rank).numel
        }
        for n in range(len(shapes))
    ]


def test_work_and_elements_are_shared_out() -> None:
    """The blocks of a transformer: no rank has more than 15 % above its part."""
    block = [(1152, 384), (384, 384), (1536, 384), (384, 1536)]
    for world_size in (2, 3, 4, 8):
        shapes, held = block * 12, _held(block, world_size) * 12
        owners = choose_owners(shapes, held, world_size)
        for measure in (math.prod, step_cost):
            total = sum(map(measure, shapes))
            for rank in range(world_size):
                own = sum(measure(s) for s, o in zip(shapes, owners, strict=True) if o == rank)
                assert own <= 1.15 * total / world_size, (world_size, measure, rank)
        # At most the parts that are not there already, twice to the owner and once back.
        moved = sum(sum(h.values()) - h.get(o, 0) for h, o in zip(held, owners, strict=True))
        assert 3 * moved <= 2 * sum(map(math.prod, shapes)), (world_size, moved)
