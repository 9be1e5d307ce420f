"""Sharded state dicts: saved and loaded by ``torch.distributed.checkpoint``, on any ranks."""

import copy
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from flatshard import FlatShardTensor, ShardedWrapper
from flatshard.collectives import record
from tests.harness import allow_warnings, assert_raises, naming, on_ranks, run_ranks
from tests.models import Case, images
from tests.oracle import OPTIMIZERS, change_all, snapshot, trainable
from tests.state.everything import Everything, StateDict, train
from tests.ways import Keywords

FULL = StateDictOptions(full_state_dict=True)


class Used(Everything):
    """All of its parameters are used: torch makes state for those that are not, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.idle(x.new_ones(2)).sum()


CASE = Case("used", Used, images, (nn.Conv2d, nn.Linear))


class Job(Stateful):
    """As in torch's tutorial on distributed checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> StateDict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: StateDict) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class OwnJob(Job):
    """The same by our own functions. State is there to load into."""

    def state_dict(self) -> StateDict:
        model, optimizer = self.model, self.optimizer
        with ShardedWrapper.state_dict_type(model, "SHARDED_STATE_DICT"):
            of_optimizer = ShardedWrapper.optim_state_dict(model, optimizer)
            return {"model": model.state_dict(), "optimizer": of_optimizer}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.model.load_state_dict(state_dict["model"])
        loaded = ShardedWrapper.optim_state_dict_to_load(
            self.model, self.optimizer, state_dict["optimizer"]
        )
        self.optimizer.load_state_dict(loaded)


OWN: Keywords = {"coalesce_bytes": 0}  # of the stage that uses `OwnJob`
# Keywords, ranks, ranks per node; None is an unwrapped model in one process, by torch alone.
STAGES: list[tuple[Keywords, int, int] | None] = [
    ({}, 2, 2),
    ({"sharding_strategy": "SHARD_GRAD_OP"}, 3, 3),
    None,
    ({"sharding_strategy": "HYBRID_SHARD"}, 4, 2),
    (OWN, 2, 2),
    ({"sharding_strategy": "NO_SHARD"}, 2, 2),
    ({"sharding_strategy": "SHARD_OP", "auto_wrap_policy": None}, 3, 3),
    ({}, 1, 1),
]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_goes_on_anywhere(kind: str, tmp_path: Path) -> None:
    """Each stage loads what the one before it saved; together they are one training run."""
    plain = CASE.model()
    optimizer = OPTIMIZERS[kind](trainable(plain))
    for number, stage in enumerate(STAGES if kind == "adamw" else STAGES[:3]):
        with naming(f"stage {number}: {stage}"):
            keywords, world_size, per_node = stage or (None, 1, 1)
            call = kind, number, keywords, per_node, tmp_path
            state = run_ranks(_stage, world_size, *call)[0]
            train(plain, optimizer, range(2 * number, 2 * number + 2))
            torch.testing.assert_close(state, snapshot(plain), rtol=0.0, atol=1e-10)


def _stage(
    rank: int, world_size: int, kind: str, number: int, keywords: Keywords | None, per_node: int,
    folder: Path,
) -> StateDict | None:  # fmt: skip
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    model = CASE.model() if keywords is None else CASE.wrap(**keywords)
    optimizer = OPTIMIZERS[kind](trainable(model))
    job = (OwnJob if keywords == OWN else Job)(model, optimizer)
    if keywords == OWN:
        train(model, optimizer, range(1), CASE, rank, world_size)
    with allow_warnings():
        if number:
            state: StateDict = {"job": job}
            dcp.load(state, checkpoint_id=folder / str(number - 1))
        steps = range(2 * number, 2 * number + 2)
        train(model, optimizer, steps, CASE, rank, world_size)
        with record() as events:
            state = {"job": job.state_dict()}
            if keywords is not None:
                _check(model, state["job"])
        assert not events, "a sharded state dict takes no communication"
        dcp.save(state, checkpoint_id=folder / str(number))
    result = snapshot(model)
    if keywords is not None:
        _check_full(model, optimizer, result)
    return result if rank == 0 else None


def _check(model: nn.Module, state: StateDict) -> None:
    """Names, shapes and dtypes are the unwrapped model's; as many values as this rank has."""
    for name, value in Used().double().state_dict().items():
        with naming(name):
            mine = state["model"][name]
            assert mine.shape == value.shape
            assert mine.dtype == (value.dtype if value.is_complex() else torch.float64)
            if not isinstance(mine, FlatShardTensor):
                continue
            chunks = mine.__create_chunk_list__()
            assert sum(chunk.sizes.numel() for chunk in chunks) == mine.local.numel()
    weight = state["optimizer"]["state"]["conv.weight"]
    moment = next(value for key, value in weight.items() if key != "step")
    assert type(moment) is type(state["model"]["conv.weight"])


def _check_full(model: Any, optimizer: torch.optim.Optimizer, expected: StateDict) -> None:
    """With ``full_state_dict=True`` torch's functions give, and load, what is full."""
    full_model, full_optim = get_state_dict(model, optimizer, options=FULL)
    torch.testing.assert_close(full_model, expected, rtol=0.0, atol=0.0)
    by_name = ShardedWrapper.optim_state_dict(model, optimizer)["state"]
    torch.testing.assert_close(full_optim["state"], by_name, rtol=0.0, atol=0.0)
    # Of an unsharded model torch's functions give no copies.
    full_model, full_optim = copy.deepcopy((full_model, full_optim))
    change_all(model, Tensor.zero_)
    for value in chain.from_iterable(state.values() for state in optimizer.state.values()):
        if isinstance(value, Tensor):
            value.zero_()
    set_state_dict(
        model, optimizer, model_state_dict=full_model, optim_state_dict=full_optim, options=FULL
    )
    torch.testing.assert_close(snapshot(model), expected, rtol=0.0, atol=0.0)
    again = ShardedWrapper.optim_state_dict(model, optimizer)["state"]
    torch.testing.assert_close(again, by_name, rtol=0.0, atol=0.0)


@on_ranks(2)
def test_fsdp2_reads_and_writes_it(rank: int, world_size: int, tmp_path: Path) -> None:
    def wrapped(seed: int) -> tuple[ShardedWrapper, nn.Module]:
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        theirs = fully_shard(copy.deepcopy(plain))
        return ShardedWrapper(plain), theirs

    ours, theirs = wrapped(0)
    other, their_other = wrapped(1)
    with allow_warnings():
        dcp.save(ours.sharded_state_dict(), checkpoint_id=tmp_path / "ours")
        dcp.save(get_model_state_dict(theirs), checkpoint_id=tmp_path / "theirs")
        for name in ("ours", "theirs"):
            mine, their_state = other.sharded_state_dict(), get_model_state_dict(their_other)
            dcp.load(mine, checkpoint_id=tmp_path / name)
            dcp.load(their_state, checkpoint_id=tmp_path / name)
            for key, value in ours.state_dict().items():
                assert torch.equal(other.state_dict()[key], value)
                assert torch.equal(their_state[key].full_tensor(), value)
            for one in (other, their_other):
                change_all(one, Tensor.zero_)


@on_ranks(2)
def test_saves_while_training_goes_on(rank: int, world_size: int, tmp_path: Path) -> None:
    model = CASE.wrap()
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    job = Job(model, optimizer)
    train(model, optimizer, range(2), CASE, rank, world_size)
    group = dist.new_group(backend="gloo")
    with allow_warnings():
        saved = dcp.async_save(
            {"job": job.state_dict()}, checkpoint_id=tmp_path, process_group=group
        )
        expected = snapshot(model)
        train(model, optimizer, range(2, 4), CASE, rank, world_size)
        saved.result()
        dcp.load({"job": job}, checkpoint_id=tmp_path)
    torch.testing.assert_close(snapshot(model), expected, rtol=0.0, atol=0.0)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_refusals(rank: int, world_size: int, tmp_path: Path) -> None:
    model = CASE.wrap()
    hook = model.module.first.register_forward_hook(lambda *_: model.sharded_state_dict())
    assert_raises(RuntimeError, r"sharded state dict .* between steps", model, CASE.batch(0, 2)[0])
    hook.remove()
    # An optimizer may keep sharded tensors, as timm's LAMB does.
    momentum = [torch.zeros_like(param) for param in model.parameters()]
    for kept, remedy in (
        (list(model.parameters()), r"full_state_dict\(model\) for a model"),
        (momentum, r"full_optim_state_dict\(model, optimizer\) for an optimizer's state"),
        (model.sharded_state_dict(), r"full_state_dict\(model\) for a model"),
    ):
        with pytest.raises(RuntimeError, match=rf"is sharded and cannot be pickled.*{remedy}"):
            torch.save(kept, tmp_path / f"{rank}.pt")
    other = CASE.wrap(sharding_strategy="SHARD_OP", auto_wrap_policy=None)
    with pytest.raises(RuntimeError, match=r"different shapes, strides or ranges"):
        other.load_state_dict(model.sharded_state_dict())
