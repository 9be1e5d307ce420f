"""`flatshard.checkpoint`: a training that is saved goes on on any ranks, as if it had not ended."""

import io
import os
import pickle
import random
import re
import time
from enum import Enum
from pathlib import Path, PurePath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flatshard import CPUOffload, ShardedWrapper, checkpoint
from flatshard.checkpoint import dcp_files
from flatshard.checkpoint.save_load import Save
from flatshard.checkpoint.training import Training
from flatshard.collectives import record
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.oracle import OPTIMIZERS, snapshot, step_and_zero, trainable
from tests.state.everything import CASE, StateDict, train
from tests.ways import Keywords

DDP = "ddp"
ON_DISK = "shards and optimizer state in files"
# Keywords, ranks, ranks per node; None: an unwrapped model in one process.
STAGES: list[tuple[Keywords | str, int, int] | None] = [
    ({}, 2, 2),
    ({"sharding_strategy": "SHARD_GRAD_OP"}, 3, 3),
    None,
    ({"sharding_strategy": "HYBRID_SHARD"}, 4, 2),
    (DDP, 2, 2),
    (ON_DISK, 2, 2),
    ({"sharding_strategy": "SHARD_OP", "auto_wrap_policy": None}, 3, 3),
    ({"sharding_strategy": "NO_SHARD"}, 3, 3),
    ({"sharding_strategy": "HYBRID_SHARD_OP"}, 4, 2),
    ({}, 1, 1),
]


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.versions)])
def test_goes_on_anywhere(kind: str, tmp_path: Path) -> None:
    """Each stage loads what the one before it saved; together they are one training run."""
    plain = CASE.model()
    optimizer = OPTIMIZERS[kind](trainable(plain))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number, stage in enumerate(STAGES if kind == "adamw" else STAGES[:3]):
        with naming(f"stage {number}: {stage}"):
            _, world_size, _ = stage or (None, 1, 1)
            state = run_ranks(_stage, world_size, kind, number, stage, tmp_path)[0]
            for step in range(2 * number, 2 * number + 2):
                train(plain, optimizer, range(step, step + 1))
                schedule.step()
            torch.testing.assert_close(state, snapshot(plain), rtol=0.0, atol=1e-10)
    assert [one.name for one in tmp_path.iterdir()] == [f"step-{number}"]  # keep=1


def _stage(
    rank: int, world_size: int, kind: str, number: int, stage: Any, folder: Path
) -> StateDict | None:
    keywords, _, per_node = stage or (None, 1, 1)
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    model: nn.Module = CASE.model()
    if keywords == DDP:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif keywords == ON_DISK:
        model = CASE.wrap(model, cpu_offload=CPUOffload(offload_params=True, path=folder.parent))
    elif keywords is not None:
        model = CASE.wrap(model, **keywords)
    optimizer = OPTIMIZERS[kind](trainable(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if number:
        path = checkpoint.latest(folder)
        assert path is not None
        with record() as events:
            extra = checkpoint.load(path, model, optimizer, scheduler=schedule)
        assert extra == {"step": 2 * number, "seen": [[1, 2.5], torch.tensor(3)]}
        assert not events
    for step in range(2 * number, 2 * number + 2):
        train(model, optimizer, range(step, step + 1), CASE, rank, world_size)
        schedule.step()
    extra = {"step": 2 * number + 2, "seen": [[1, 2.5], torch.tensor(3)]}
    path = folder / f"step-{number}"
    with record() as events:
        saving = checkpoint.save(
            path, model, optimizer, scheduler=schedule, extra=extra, keep=1, async_=number % 3 == 1
        )
    assert not events, "no tensor is sent"
    if saving is not None:
        train(model, optimizer, range(1), CASE, rank, world_size)  # which it does not see
        saving.wait()
        checkpoint.load(path, model, optimizer)
    result = snapshot(model.module if keywords == DDP else model)
    return result if rank == 0 else None


@pytest.mark.versions
def test_generators_go_on(tmp_path: Path) -> None:
    first = run_ranks(_draw_saved, 3, tmp_path)
    assert run_ranks(_draw_loaded, 3, tmp_path) == first
    assert len({tuple(drawn) for drawn in first}) == 3
    more = run_ranks(_draw_loaded, 4, tmp_path)
    assert more[:3] == first
    assert more[3] not in first
    assert run_ranks(_draw_loaded, 4, tmp_path)[3] == more[3]


def _draw_saved(rank: int, _: int, folder: Path) -> list[float]:
    model = ShardedWrapper(nn.Linear(2, 2))
    torch.manual_seed(rank)
    random.seed(rank)
    torch.rand(5)
    checkpoint.save(folder / "one", model)
    return [torch.rand(1).item(), random.random()]


def _draw_loaded(rank: int, _: int, folder: Path) -> list[float]:
    checkpoint.load(folder / "one", ShardedWrapper(nn.Linear(2, 2)))
    return [torch.rand(1).item(), random.random()]


def _wide(device: str = "cpu") -> nn.Module:
    """Parameters of more than the few kilobytes that torch writes and reads by itself."""
    torch.manual_seed(1)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(67, 65), nn.Linear(65, 131), nn.Conv2d(33, 31, 3))
    return model if device == "meta" else model.to(memory_format=torch.channels_last)


def _stepped(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """AdamW with a state that nobody else has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.zeros_like(param).uniform_()
    step_and_zero(optimizer)
    return optimizer


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 3), (4, 2)])
def test_any_ranks_bit_by_bit(saved: int, loaded: int, tmp_path: Path) -> None:
    expected = run_ranks(_save_wide, saved, tmp_path)[0]
    for model, optimizer in run_ranks(_load_wide, loaded, tmp_path):
        torch.testing.assert_close(model, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(optimizer, expected[1], rtol=0, atol=0)


def _save_wide(rank: int, world_size: int, folder: Path) -> tuple[StateDict, StateDict]:
    model = ShardedWrapper(_wide(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = _stepped(model, rank)
    checkpoint.save(folder / "one", model, optimizer)
    if world_size == 2:
        _read_by_others(rank, folder, snapshot(model))
    return snapshot(model), ShardedWrapper.optim_state_dict(model, optimizer)["state"]


def _read_by_others(rank: int, folder: Path, expected: StateDict) -> None:
    """DCP's own readers, into an unwrapped model and into FSDP2's; and torch's converter."""
    plain = _wide().state_dict()
    theirs = fully_shard(_wide().to(memory_format=torch.contiguous_format)).state_dict()
    with allow_warnings():
        dcp.load({"model": plain}, checkpoint_id=folder / "one")
        dcp.load({"model": theirs}, checkpoint_id=folder / "one")
    for name, value in expected.items():
        assert torch.equal(plain[name], value)
        assert torch.equal(theirs[name].full_tensor(), value)
    if rank == 0:
        with allow_warnings():
            dcp_to_torch_save(folder / "one", folder / "all.pt")
        found = torch.load(folder / "all.pt")["model"]
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def _load_wide(rank: int, world_size: int, folder: Path) -> tuple[StateDict, StateDict]:
    """Into a model made on meta and wrapped otherwise, without state of the optimizer."""
    model = ShardedWrapper(_wide("meta"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    checkpoint.load(folder / "one", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    return snapshot(model), ShardedWrapper.optim_state_dict(model, optimizer)["state"]


@pytest.mark.versions
def test_no_path_is_in_the_metadata(tmp_path: Path) -> None:
    """The class of a path has another name in Python 3.13, where others could not unpickle it."""
    checkpoint.save(tmp_path / "one", nn.Linear(3, 3))
    assert b"pathlib" not in (tmp_path / "one" / ".metadata").read_bytes()


class _OtherPython(pickle.Pickler):
    """Writes enums as Python 3.11.0 to 3.11.3 does, and can write the path of Windows on Linux."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.versions
@pytest.mark.parametrize(
    ("path", "written"),
    [
        *((Path("runs/1"), f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
        (Path(), "pathlib.PosixPath"),
        *((PureWindowsPath("C:/1"), f"{name}WindowsPath") for name in ("pathlib.", "pathlib.Pure")),
        (PureWindowsPath("C:/1"), "pathlib._local.WindowsPath"),
        (PurePath("1"), "pathlib._local.PurePosixPath"),
        (PurePath("1"), "pathlib.types.of.a.later.Python.PosixPath"),
        ("runs/1", None),
        (None, None),
    ],
)
def test_folders_of_any_python(path: Any, written: str | None, tmp_path: Path) -> None:
    """torch's own writer pickles the path of the folder: read whatever its class was called."""
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def dump(metadata: Any, file: Any) -> None:
        metadata.storage_meta = StorageMeta(path)
        data = io.BytesIO()
        _OtherPython(data, protocol=2, fix_imports=False).dump(metadata)
        content = data.getvalue()
        if written is not None:
            name = "\n".join(written.rsplit(".", 1)).encode()
            content, count = re.subn(rb"cpathlib[.\w]*\n\w+(?=\n)", b"c" + name, content)
            assert count == 1
        assert b"cbuiltins\ngetattr\n" in content
        file.write(content)

    with mock.patch.object(filesystem, "pickle", SimpleNamespace(dump=dump)):
        checkpoint.save(tmp_path / "one", model)
    checkpoint.load(tmp_path / "one", other)
    assert torch.equal(model.weight, other.weight)
    found = dcp_files.Saved(tmp_path / "one").metadata.storage_meta.checkpoint_id
    assert path is None or str(found) == str(PurePath(path)) or "\\" in str(path)


def test_without_state_of_the_optimizer(tmp_path: Path) -> None:
    """Saved before the first step; loading makes no state, and changes no parameter."""
    model = nn.Linear(3, 3)
    checkpoint.save(tmp_path / "one", model, torch.optim.AdamW(model.parameters(), lr=0.5))
    other = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(other.parameters())
    assert checkpoint.load(tmp_path / "one", other, optimizer) == {}
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.weight, model.weight)


class Counting(nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), cast(Any, 0)
        self.register_buffer("mean", torch.zeros(2))

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


@pytest.mark.parametrize("count", [3, {"a": {"b": 1}}, torch.tensor([1, 2])])
@on_ranks(2)
def test_extra_state_and_buffers(rank: int, world_size: int, count: Any, tmp_path: Path) -> None:
    """Where ranks have other values, rank 0's are saved."""
    model, other = (ShardedWrapper(Counting()).module for _ in range(2))
    model.count = None if rank else count
    model.mean += 1 + rank
    checkpoint.save(tmp_path / "one", model)
    checkpoint.load(tmp_path / "one", other)
    torch.testing.assert_close((other.count, other.mean), (count, torch.ones(2)))


@on_ranks(1)
def test_generators_of_the_computing_device(rank: int, world_size: int) -> None:
    """With CPUOffload, no parameter is on the device whose generator dropout uses."""
    model = ShardedWrapper(nn.Linear(2, 2))
    for handle in model._sharded_unit.handles:
        handle.device = torch.device("cuda", 3)
    assert Training(model, None, "save()").device == torch.device("cuda", 3)


@on_ranks(2)
def test_safetensors_wait_for_an_async_save(rank: int, world_size: int, tmp_path: Path) -> None:
    """Otherwise the thread and the program would run collectives on one group at the same time."""
    model, path, write = ShardedWrapper(nn.Linear(9, 7)), tmp_path / "model.safetensors", Save.write

    def late(save: Save) -> None:
        time.sleep(0.3 * rank)
        write(save)

    with mock.patch.object(Save, "write", late):
        save = checkpoint.save(tmp_path / "one", model, async_=True)
        checkpoint.save_safetensors(model, path)
        assert save.done()
        save = checkpoint.save(tmp_path / "two", model, async_=True)
        checkpoint.load_safetensors(model, path)
        assert save.done()


@on_ranks(2)
def test_async_saves_do_not_mix_with_training(rank: int, world_size: int, tmp_path: Path) -> None:
    model = CASE.wrap()
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    expected: dict[int, dict[str, Tensor]] = {}
    for step in range(6):
        train(model, optimizer, range(step, step + 1), CASE, rank, world_size)
        expected[step] = snapshot(model)
        checkpoint.save(tmp_path / f"step-{step}", model, optimizer, async_=True)
        dist.all_reduce(torch.ones(3))  # the program's own
    for step, state in expected.items():  # the first load waits for the last save
        checkpoint.load(tmp_path / f"step-{step}", model, optimizer)
        torch.testing.assert_close(snapshot(model), state, rtol=0, atol=0)
