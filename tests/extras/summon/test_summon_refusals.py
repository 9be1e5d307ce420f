"""`summon_full_params`: what it refuses, and forwards inside of it."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatshard import collectives
from tests.extras.summon.test_summon import assert_trains_alike, backward, summon
from tests.harness import allow_warnings, assert_raises, naming, on_ranks
from tests.oracle import assert_same
from tests.side import Run, pair
from tests.ways import on_ranks_each_way

pytestmark = pytest.mark.by_turns


@on_ranks_each_way(2)
def test_refused_inside_and_in_a_step(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    with summon(sharded.model), sharded.no_sync():
        for attempt in (copy.deepcopy, nn.Module.float):
            assert_raises(RuntimeError, r"unit .*summon_full_params", attempt, sharded.model)

    def ask(*_: Any) -> None:
        summon(sharded.model).__enter__()

    removable = sharded.submodule("fc2").register_forward_hook(ask)
    assert_raises(RuntimeError, "between steps", sharded.loss, 0)
    removable.remove()
    output = sharded.model(sharded.inputs(0))
    output.register_hook(ask)
    assert_raises(RuntimeError, "between steps", output.sum().backward)
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_what_cannot_be_kept(rank: int, world_size: int, way: str) -> None:
    """A named error at the end, and the model is what it was; nothing of that unit is kept."""
    sharded, plain = pair(rank, world_size, way)
    sharded.loss(0).backward()
    sharded.optimizer.zero_grad()

    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros_like(module.weight))

    def reshape(module: nn.Module) -> None:
        module.weight.data = module.weight.data.t().contiguous()

    def retype(module: nn.Module) -> None:
        module.weight.data = module.weight.data.float()

    def assign_grad(module: nn.Module) -> None:
        module.weight.grad = torch.ones_like(module.weight)

    other_data = "expected data of shape"
    cases = {replace: "replaced", reshape: other_data, retype: other_data}
    cases[assign_grad] = "with_grads=True"
    for change, match in cases.items():
        if way == "no_shard" and change in (reshape, retype, assign_grad):
            continue  # shown as they are: what is done to them is done
        with pytest.raises(RuntimeError, match=rf"'fc2.weight'.*{match}"), summon(sharded.model):
            change(sharded.submodule("fc2"))
        with summon(sharded.model, writeback=False):
            change(sharded.submodule("fc2"))
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_step_inside(rank: int, world_size: int, way: str) -> None:
    """A step under writeback raises; without writeback it stays."""
    sharded, plain = pair(rank, world_size, way)
    backward(sharded, plain)
    with summon(sharded.model, writeback=False):
        sharded.step()
    plain.step()
    assert_same(sharded.model, plain.model)
    backward(sharded, plain, step=1)
    refused = pytest.raises(RuntimeError, match="an optimizer step")
    with contextlib.nullcontext() if way == "no_shard" else refused, summon(sharded.model):
        sharded.step()
    plain.step()
    assert_trains_alike(sharded, plain)


def _replace_weight(run: Run) -> None:
    run.submodule("fc1").weight = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))


def _drop_on_rank_1(run: Run) -> None:
    run.loss(0).backward()
    if run.rank == 1:
        run.model.fc1.weight.grad = None


# The way, what comes before, options, and words of the error.
_DROPPED = (_drop_on_rank_1, {"with_grads": True}, r"'fc1.weight'.*None on rank 1")
REFUSED: list[tuple[str, Callable[[Run], object], dict[str, bool], str]] = [
    ("full", lambda run: None, {"rank0_only": True}, "needs writeback=False"),
    ("full", _replace_weight, {}, r"'fc1.weight'.*replaced or removed after wrapping"),
    ("full", *_DROPPED),
    ("no_shard", *_DROPPED),
]


@on_ranks(2)
def test_refused_before_one_rank_waits_for_another(rank: int, world_size: int) -> None:
    for way, prepare, options, match in REFUSED:
        sharded, _ = pair(rank, world_size, way)
        prepare(sharded)
        asked = summon(sharded.model, **options)
        with collectives.record() as issued:
            assert_raises((RuntimeError, ValueError), match, asked.__enter__)
        assert not [event for event in issued if event.kind == "gather"]
    sharded, _ = pair(rank, world_size, "full", "mlp-one-unit")
    with pytest.raises(RuntimeError, match=r"'fc1.weight' belongs to the root unit"):
        summon(sharded.model.fc1).__enter__()


@on_ranks_each_way(2)
def test_in_inference_mode(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    with torch.inference_mode(), summon(sharded.model):
        sharded.submodule("fc2").weight.mul_(2)
    plain.model.fc2.weight.data.mul_(2)
    with torch.inference_mode(), summon(sharded.model, writeback=False):
        sharded.submodule("fc2").weight.mul_(2)
    with torch.inference_mode():
        state = sharded.model.state_dict()
    assert not any(value.is_inference() for value in state.values())
    assert_trains_alike(sharded, plain)


# ---------------------------------------------------------------- forwards inside


@on_ranks_each_way(2)
def test_forward(rank: int, world_size: int, way: str) -> None:
    """It communicates nothing, and computes with what was written inside."""
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.model.eval()
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with summon(sharded.model), mode(), collectives.record() as events:
            for _ in range(2):
                torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=0, atol=0)
                with torch.no_grad():
                    for run in (sharded, plain):
                        next(run.model.parameters()).mul_(1.5)
        assert not events
    for run in (sharded, plain):
        run.model.train()
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_forward_on_rank_0_alone(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    with summon(sharded.model, rank0_only=True, writeback=False), collectives.record() as events:
        if rank == 0 or way == "no_shard":
            torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=0, atol=0)
        else:
            assert_raises(RuntimeError, r"unit .*, rank 1: .*summon_full_params", sharded.evaluate)
    assert not events
    # Nor need ranks evaluate equally often, as their shares of the data differ.
    with summon(sharded.model, writeback=False), collectives.record() as events:
        for _ in range(1 + 3 * rank):
            torch.testing.assert_close(sharded.evaluate(), plain.evaluate(), rtol=0, atol=0)
    assert not events
    assert_trains_alike(sharded, plain)


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
}


@on_ranks_each_way(2)
def test_transforms_of_torch_func(rank: int, world_size: int, way: str) -> None:
    """They work inside of the context; outside they raise an error that names it."""
    sharded, plain = pair(rank, world_size, way)
    x = sharded.inputs(0)
    for name, transform in TRANSFORMS.items():
        with naming(name), allow_warnings(message=".torch.jit.script. is deprecated"):
            with pytest.raises(RuntimeError, match=r"torch\.func.*summon_full_params"):
                transform(sharded.model, x)
            with summon(sharded.model, writeback=False):
                found = transform(sharded.model.module, x)
            torch.testing.assert_close(found, transform(plain.model, x))
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_backward_inside_is_refused(rank: int, world_size: int, way: str) -> None:
    """Nothing would average the gradients, also when it runs after the context."""
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.train(0, 1)
    with summon(sharded.model, writeback=False, with_grads=True):
        loss, kept = sharded.loss(0), sharded.loss(1)
        (slope, *_) = torch.autograd.grad(loss, list(sharded.model.parameters()), retain_graph=True)
        assert slope.any()
        assert_raises(RuntimeError, r"unit .*gradients of full parameters", loss.backward)
    if way != "no_shard":  # where they are the parameters themselves
        assert_raises(RuntimeError, r"unit .*gradients of full parameters", kept.backward)
    sharded.optimizer.zero_grad()
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_between_forward_and_backward(rank: int, world_size: int, way: str) -> None:
    """A summon that only reads wrote back all the same, and backward found other parameters."""
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        with run.no_sync():
            run.loss(0).backward()
        loss = run.loss(1)
        if run is sharded:
            with summon(run.model):
                assert [p.isfinite().all() for p in run.model.parameters()]
        loss.backward()
        run.step()
    # What is written counts, also in one rank's part alone and by ways that autograd does not see.
    loss = sharded.loss(2)
    with summon(sharded.model):
        for run in (sharded, plain):
            run.submodule("fc2").weight.data[0, 0] = 3.0
    if way != "no_shard":
        assert_raises(RuntimeError, "modified between forward and backward", loss.backward)
    assert_trains_alike(sharded, plain)
