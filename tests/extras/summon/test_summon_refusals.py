"""What `summon_full_params` refuses, and what is refused inside of it."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.extras.summon.summoning import assert_trains_alike, summon
from tests.harness import on_ranks
from tests.oracle import assert_same
from tests.side import pair
from tests.ways import on_ranks_each_way

pytestmark = pytest.mark.by_turns


@on_ranks_each_way(2)
def test_refused_inside(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)
    attempts: list[Callable[[], object]] = [
        lambda: copy.deepcopy(sharded.model),
        lambda: sharded.model.float(),
    ]
    with summon(sharded.model), sharded.no_sync():
        for attempt in attempts:
            with pytest.raises(RuntimeError, match=r"unit .*summon_full_params"):
                attempt()
    assert_trains_alike(sharded, plain)


@on_ranks_each_way(2)
def test_refused_in_forward_and_backward(rank: int, world_size: int, way: str) -> None:
    sharded, plain = pair(rank, world_size, way)

    def ask(*_: Any) -> None:
        summon(sharded.model).__enter__()

    removable = sharded.submodule("fc2").register_forward_hook(ask)
    with pytest.raises(RuntimeError, match="between steps"):
        sharded.loss(0)
    removable.remove()
    output = sharded.model(sharded.inputs(0))
    output.register_hook(ask)
    with pytest.raises(RuntimeError, match="between steps"):
        output.sum().backward()
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

    cases = {
        replace: "replaced",
        reshape: "expected data of shape",
        retype: "expected data of shape",
        assign_grad: "with_grads=True",
    }
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
    """A step under writeback was lost at the end; without writeback it stays."""
    sharded, plain = pair(rank, world_size, way)
    for run in (sharded, plain):
        run.loss(0).backward()
    with summon(sharded.model, writeback=False):
        sharded.step()
    plain.step()
    assert_same(sharded.model, plain.model)
    for run in (sharded, plain):
        run.loss(1).backward()
    refused = pytest.raises(RuntimeError, match="an optimizer step")
    with contextlib.nullcontext() if way == "no_shard" else refused, summon(sharded.model):
        sharded.step()
    plain.step()
    assert_trains_alike(sharded, plain)


@on_ranks(2)
def test_part_of_a_unit(rank: int, world_size: int) -> None:
    """It did nothing, and left the parameters sharded."""
    sharded, _ = pair(rank, world_size, "full", "mlp-one-unit")
    with pytest.raises(RuntimeError, match=r"'fc1.weight' belongs to the root unit"):
        summon(sharded.model.fc1).__enter__()


@on_ranks(2)
def test_replaced_before(rank: int, world_size: int) -> None:
    """The new parameter was overwritten without a word."""
    sharded, _ = pair(rank, world_size, "full")
    sharded.submodule("fc1").weight = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"'fc1.weight'.*replaced after wrapping"):
        summon(sharded.model).__enter__()


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
