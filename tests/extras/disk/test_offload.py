"""Offload to a disk changes where things live, and nothing else: to the bit."""

import copy
import gc
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from flatshard import CPUOffload, ShardedWrapper
from flatshard.extras import disk
from flatshard.module.wrappers import handles_in
from flatshard.options import OffloadError, as_cpu_offload
from flatshard.tensor.sharded_tensor import local_range
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import assert_raises, naming, on_ranks
from tests.models import CASES
from tests.oracle import OPTIMIZERS, snapshot, step_and_zero, trainable
from tests.side import Run

Figures = tuple[dict[str, Tensor], list[float], dict[str, Any]]


def _train(run: Run, optimizer: torch.optim.Optimizer) -> Figures:
    """Accumulates under and outside of ``no_sync``, and clips."""
    model, norms = run.model, []
    for step in range(3):
        if step == 1:
            with run.no_sync():
                run.loss(50).backward()
            run.loss(51).backward()
        run.loss(step).backward()
        norms.append(model.clip_grad_norm_(0.5).item())
        step_and_zero(optimizer)
    return snapshot(model), norms, ShardedWrapper.optim_state_dict(model, optimizer)["state"]


def _assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What an optimizer holds for each element that this rank has."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    states = [local_range(value) for value in states if isinstance(value, Tensor)]
    return [t for t in states if t.dim() and t.numel()]


COMBINATIONS = {
    "mlp": ({"sharding_strategy": "FULL_SHARD"}, {"sharding_strategy": "NO_SHARD"}),
    "transformer": ({}, {"collectives": "sockets"}),
    "tied-across-units": ({"sharding_strategy": "SHARD_GRAD_OP"}, {}),
    "frozen": ({}, {"sharding_strategy": "SHARD_OP"}),
    "mixed-types": ({}, {"coalesce_bytes": 0}),
    "checkpointed-reentrant": ({"reshard_after_forward": 1}, {"collectives": "native"}),
}


HYBRIDS = {
    "transformer": ("HYBRID_SHARD", "HYBRID_SHARD_OP"),
    "mlp": ("HYBRID_SHARD_ZERO2", "HYBRID_SHARD"),
    "tied-across-units": ("HYBRID_SHARD_OP", "HYBRID_SHARD_ZERO2"),
}


@pytest.mark.parametrize("size", [2, 4])
@on_ranks()
def test_training_is_the_same_to_the_bit(rank: int, size: int, tmp_path: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    modes = (CPUOffload(path=tmp_path), CPUOffload(offload_optimizer=True, path=tmp_path))
    hybrids = {name: [{"sharding_strategy": one} for one in both] for name, both in HYBRIDS.items()}
    for name, keywords in (COMBINATIONS if size == 2 else hybrids).items():
        for mode, extra, kind in zip(modes, keywords, ("adamw", "sgd"), strict=True):
            with naming(f"{name}, {kind}, {extra}, {mode}"):
                figures = []
                for offload in (None, mode):
                    model = CASES[name].wrap(cpu_offload=offload, **extra)
                    optimizer = OPTIMIZERS[kind](trainable(model))
                    figures.append(_train(Run(model, CASES[name], rank, size), optimizer))
                _assert_equal(figures[1], figures[0])
                handles = list(handles_in(model))
                assert all(map(disk.is_on_disk, _tensors(optimizer)))
                assert all(disk.is_on_disk(h.flat_param) is mode.takes_params for h in handles)
    del model, optimizer, handles, figures
    gc.collect()
    assert not disk._mapped, "files outlive what was in them"
    assert not list(tmp_path.iterdir()), "files have a name"


# ---------------------------------------------------------------- large enough to be mapped


def _wide() -> nn.Sequential:
    """Shards of more than 1 MiB on two ranks, which are mapped instead of copied."""
    return nn.Sequential(*(nn.Linear(768, 768) for _ in range(4)))


def _resident_bytes(kind: str = "RssFile") -> int:
    return int(re.findall(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


LINEARS = ModuleWrapPolicy({nn.Linear})


def _wrap_wide(**keywords: Any) -> ShardedWrapper:
    torch.manual_seed(0)
    return ShardedWrapper(_wide(), auto_wrap_policy=LINEARS, **keywords)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(2, 768, generator=generator)).pow(2).mean().backward()
    step_and_zero(optimizer)


@on_ranks(2, timeout=90)
def test_large_shards(rank: int, size: int, tmp_path: Path) -> None:
    offload = CPUOffload(offload_params=True, path=tmp_path)
    model, plain = _wrap_wide(cpu_offload=offload), _wrap_wide()
    assert all(handle.memory.shows_shards for handle in handles_in(model))
    kind = torch.optim.Adam
    optimizers = [kind(one.parameters(), lr=1e-3) for one in (model, plain)]
    for one, optimizer in zip((model, plain), optimizers, strict=True):
        _step(one, optimizer, rank)
    before = _resident_bytes()
    for step in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            _step(one, optimizer, rank)
        if step == 0:
            stepping = model.step_in_backward(optimizers[0])
    # 4.5 MiB of parameters, gradients and state of each unit; all of them would be 18.
    assert _resident_bytes() - before < 2 << 20, "pages were not given back"
    stepping.remove()
    _assert_equal(snapshot(model), snapshot(plain))

    # A copy has files of its own.
    twin = copy.deepcopy(model)
    twin_optimizer = kind(twin.parameters(), lr=1e-3)
    before_step = snapshot(model)
    _step(twin, twin_optimizer, rank)
    _assert_equal(snapshot(model), before_step)
    assert all(disk.is_on_disk(handle.flat_param) for handle in handles_in(twin))

    # What is loaded and converted lives on the disk as well.
    state = ShardedWrapper.optim_state_dict(plain, optimizers[1])
    fresh = kind(twin.parameters(), lr=1e-3)
    ShardedWrapper.optim_state_dict_to_load(twin, fresh, state, load_directly=True)
    twin.load_state_dict(before_step)
    _step(twin, fresh, rank)
    _step(plain, optimizers[1], rank)
    _assert_equal(snapshot(twin), snapshot(plain))
    assert all(map(disk.is_on_disk, _tensors(fresh)))
    with ShardedWrapper.summon_full_params(twin), torch.no_grad():
        twin.module[0].weight.mul_(2)
    twin.double()
    assert all(disk.is_on_disk(handle.flat_param) for handle in handles_in(twin))
    doubled = snapshot(plain)["0.weight"].double() * 2
    _assert_equal(snapshot(twin)["0.weight"], doubled)


# ---------------------------------------------------------------- what goes wrong


def _fill_disk(free_bytes: int) -> Any:
    """Play a disk on which so many bytes more can be reserved."""
    real, left = os.posix_fallocate, [free_bytes]

    def fallocate(number: int, offset: int, nbytes: int) -> None:
        if nbytes > left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= nbytes
        real(number, offset, nbytes)

    return mock.patch("os.posix_fallocate", fallocate)


@on_ranks(2)
def test_full_disk(rank: int, size: int, tmp_path: Path) -> None:
    model = _wide()
    before = [(param, param.detach().clone()) for param in model.parameters()]
    full = _fill_disk(6 << 20 if rank == 1 else 1 << 40)
    message = r"unit '2' .* needs [\d,]+ bytes on disk in .*, where [\d,]+ are free.*rank 1"
    with full, pytest.raises(OffloadError, match=message):
        ShardedWrapper(model, auto_wrap_policy=LINEARS, cpu_offload=CPUOffload(path=tmp_path))
    for (param, value), now in zip(before, model.parameters(), strict=True):
        assert param is now
        _assert_equal(param.detach(), value)
    gc.collect()
    assert not disk._mapped

    # At the optimizer's first step nothing is stepped; once there is room, it goes on.
    wrapped = ShardedWrapper(model, auto_wrap_policy=LINEARS, cpu_offload=CPUOffload(path=tmp_path))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    wrapped(torch.ones(1, 768)).mean().backward()
    values = snapshot(wrapped)
    with _fill_disk(5 << 20), pytest.raises(OffloadError, match="the state of Adam needs"):
        optimizer.step()
    _assert_equal(snapshot(wrapped), values)
    assert not optimizer.state
    optimizer.step()
    assert all(map(disk.is_on_disk, _tensors(optimizer)))


@on_ranks(2)
def test_bad_paths(rank: int, size: int, tmp_path: Path) -> None:
    file = Path(tmp_path, f"file{rank}")
    file.write_text("")
    paths = {f"{tmp_path}/missing": "No such file", str(file): "Not a directory"}
    for path, message in (*paths.items(), ("/proc", "no file can be made")):
        bad = path if rank == 1 else tmp_path  # where rank 0's is good, it hears of it all the same
        says = rf"path '{path}' ?{message}.*rank 1|{message}.*rank 1"
        keywords = {"cpu_offload": CPUOffload(path=bad)}
        assert_raises(ValueError, says, ShardedWrapper, nn.Linear(2, 2), **keywords)
    offload = CPUOffload(offload_params=rank == 0, offload_optimizer=rank == 1, path=tmp_path)
    with pytest.raises(ValueError, match="different models"):
        ShardedWrapper(nn.Linear(2, 2), cpu_offload=offload)
    with pytest.raises(ValueError, match="there is no 'cuda:3' on this host"):
        ShardedWrapper(nn.Linear(2, 2), device_id="cuda:3")


@on_ranks(2, fresh=True)
def test_freed_memory_returns_to_the_system(rank: int, size: int, tmp_path: Path) -> None:
    """glibc kept it: training needed three times the memory, and most of it was free."""
    torch.empty(31 << 20, dtype=torch.uint8)  # as in training: glibc keeps blocks up to this size
    ShardedWrapper(nn.Linear(2, 2), cpu_offload=CPUOffload(offload_params=True, path=tmp_path))
    blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(128)]
    full = _resident_bytes("VmRSS")
    del blocks[::2]
    assert full - _resident_bytes("VmRSS") > 0.8 * (64 << 20)


def test_policies_of_torch_and_bad_values() -> None:
    assert as_cpu_offload(fsdp.CPUOffload(offload_params=True)) == CPUOffload(offload_params=True)
    pinned = as_cpu_offload(fsdp.CPUOffloadPolicy(pin_memory=False))
    assert pinned == CPUOffload(offload_params=True, pin_memory=False)
    assert not as_cpu_offload(fsdp.OffloadPolicy()).is_on
    assert_raises(TypeError, "path must be", CPUOffload, path=3)
    assert_raises(TypeError, "offload_optimizer must be", CPUOffload, offload_optimizer="yes")
