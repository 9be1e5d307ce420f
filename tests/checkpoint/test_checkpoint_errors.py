"""What `flatshard.checkpoint` refuses: named on every rank, the checkpoints before it untouched."""

import json
import os
import pickle
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from flatshard import CollectiveError, ShardedWrapper, checkpoint
from flatshard.checkpoint import dcp_files, folder, save_load, training
from flatshard.checkpoint.command_line import main
from flatshard.extras import whole_tensors
from flatshard.extras.model_shards import ModelShards
from tests.harness import assert_raises, full_disk, on_ranks, run_ranks
from tests.oracle import snapshot
from tests.scripts import run_script


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60))


def _saved(path: Path) -> nn.Module:
    model = _model()
    checkpoint.save(path, model)
    return model


# ---------------------------------------------------------------- loading


@on_ranks(2)
def test_what_does_not_fit_is_listed(rank: int, world_size: int, tmp_path: Path) -> None:
    saved = ShardedWrapper(_model())
    checkpoint.save(tmp_path / "one", saved, torch.optim.SGD(saved.parameters()))
    other = nn.Sequential(nn.Linear(41, 50), nn.Linear(50, 60), nn.LayerNorm(60))
    model = ShardedWrapper(other)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"rank 0: .*one is of another model: ") as error:
        checkpoint.load(tmp_path / "one", model)
    assert "'model.0.weight': expected shape (50, 41), got shape (50, 40)" in str(error.value)
    assert "'2.bias': missing in the checkpoint; '2.weight': missing" in str(error.value)
    assert str(error.value).count(";") == 2
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)
    smaller = ShardedWrapper(nn.Sequential(nn.Linear(40, 50)))
    with pytest.raises(ValueError, match=r"'model.1.weight': expected nothing, got shape \(60, 50"):
        checkpoint.load(tmp_path / "one", smaller)
    checkpoint.save(tmp_path / "two", saved)
    optimizer = torch.optim.SGD(saved.parameters())
    with pytest.raises(ValueError, match="'the optimizer': missing in the checkpoint"):
        checkpoint.load(tmp_path / "two", saved, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="two was saved without a scheduler"):
        checkpoint.load(tmp_path / "two", saved, scheduler=schedule)


@on_ranks(2)
def test_units_of_some_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """Ranks hold other experts under one name, of which DCP would keep one."""
    groups = [dist.new_group([one]) for one in range(2)]
    model = _model()
    model[1] = ShardedWrapper(model[1], process_group=groups[rank])
    with pytest.raises(NotImplementedError, match="unit '1' trains only on ranks"):
        checkpoint.save(tmp_path / "one", ShardedWrapper(model))


@on_ranks(2)
def test_one_rank_inside_a_step(rank: int, world_size: int, tmp_path: Path) -> None:
    """All ranks save or load, and only rank 1 does so in a forward: all raise the same error."""
    # A forward that communicates nothing, so that rank 1 may run it alone.
    model = ShardedWrapper(_model(), sharding_strategy="NO_SHARD")
    match = r"was called while a forward or backward of the root unit is running\..* \(rank 1\)"

    def calls(*_: Any) -> None:
        assert_raises(RuntimeError, rf"save\(\) {match}", checkpoint.save, tmp_path / "one", model)
        assert_raises(RuntimeError, rf"load\(\) {match}", checkpoint.load, tmp_path / "one", model)
        with pytest.raises(RuntimeError, match=rf"full_state_dict\(\) {match}"):
            checkpoint.full_state_dict(model)

    if rank == 0:
        calls()
    else:
        model.module[0].register_forward_pre_hook(calls)
        with torch.no_grad():
            model(torch.ones(1, model.module[0].in_features))
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_no_checkpoint_yet(rank: int, world_size: int, tmp_path: Path) -> None:
    """``latest`` finds nothing: on all ranks, or on rank 1, which has another file system."""
    model = ShardedWrapper(_model())
    expected = r"rank {}: there is no checkpoint to load: .*latest\(\) returned a path"
    with pytest.raises(FileNotFoundError, match=r"load\(None\), " + expected.format(0)):
        checkpoint.load(checkpoint.latest(tmp_path), model)  # type: ignore[arg-type]
    checkpoint.save(tmp_path / "step-1", model)
    last = checkpoint.latest(tmp_path / "elsewhere" if rank == 1 else tmp_path)
    assert_raises(FileNotFoundError, expected.format(1), checkpoint.load, last, model)


@on_ranks(2)
def test_an_error_on_one_rank_with_an_optimizer_that_shares_its_state(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """The other rank does not wait for this rank in the exchange of optimizer state."""
    model = ShardedWrapper(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "one", model, optimizer)
    with pytest.raises(FileNotFoundError, match=r"rank 1: there is no checkpoint to load"):
        checkpoint.load(None if rank else tmp_path / "one", model, optimizer)  # type: ignore[arg-type]
    failing = mock.patch.object(ModelShards, "state_dict", side_effect=OSError("no memory"))
    with failing if rank else nullcontext(), pytest.raises(OSError, match="rank 1: no memory"):
        checkpoint.save(tmp_path / "two", model, optimizer)
    checkpoint.load(tmp_path / "one", model, optimizer)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "rank-00000.pt", "flatshard.json"])
@pytest.mark.parametrize("how", ["truncated", "corrupted", "missing"])
def test_broken_files_are_named(name: str, how: str, tmp_path: Path) -> None:
    _saved(tmp_path / "one")
    path = tmp_path / "one" / name
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-9])
    else:
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)
    model = _model()
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises((ValueError, FileNotFoundError), match=name.replace(".", r"\.")):
        checkpoint.load(tmp_path / "one", model)
    assert not model[0].weight.any(), "something was overwritten"


def test_other_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(tmp_path / "step-1")
    model = _model()
    last = rf"Last complete checkpoint: {tmp_path / 'step-1'}\."
    for folder_name in ("step-2.incomplete", "empty"):
        (tmp_path / folder_name).mkdir()
    torch.save(model.state_dict(), tmp_path / "net.pt")
    checkpoint.convert(tmp_path / "net.pt", tmp_path / "other")
    for name, error, said in (
        ("step-2", FileNotFoundError, f"step-2 is incomplete: .* {last}"),
        ("step-2.incomplete", FileNotFoundError, f"step-2.incomplete is incomplete: .* {last}"),
        ("step-3", FileNotFoundError, f"step-3 does not exist. {last}"),
        ("", ValueError, f"but a directory of checkpoints. {last}"),
        ("net.pt", ValueError, f"json, got files of torch.save. {last}"),
        ("other", ValueError, "expected the file flatshard.json, got files of safetensors"),
        ("empty", ValueError, "got files of an unknown format"),
    ):
        assert_raises(error, said, checkpoint.load, tmp_path / name, model)
    marker = tmp_path / "step-1" / "flatshard.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": "other/9"}))
    with pytest.raises(ValueError, match=r"expected format 'flatshard.checkpoint/1', got 'o"):
        checkpoint.load(tmp_path / "step-1", model)
    assert checkpoint.latest(tmp_path) is None
    for damaged in ("", "[]", "{}", '{"format": "flatshard.checkpoint/1", "files": []}'):
        marker.write_text(damaged)
        with pytest.raises(ValueError, match=r"flatshard.json cannot be read: \w+Error"):
            checkpoint.load(tmp_path / "step-1", model)
        assert main(["inspect", str(tmp_path / "step-1")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"flatshard inspect: {marker} cannot be read: ")


class Evil:
    """Runs a function when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = _saved(tmp_path / "one")
    for name, content in ((".metadata", pickle.dumps(Evil())), ("rank-00000.pt", None)):
        path = tmp_path / "one" / name
        before = path.read_bytes()
        if content is None:
            torch.save({"rng": Evil()}, path)
        else:
            path.write_bytes(content)
        _record(path)
        with pytest.raises((ValueError, RuntimeError), match=r"mkdir|Weights only"):
            checkpoint.load(tmp_path / "one", model)
        path.write_bytes(before)
        _record(path)
    imported = b"\x80\x04\x8c\x25" + b"torch.distributed.checkpoint.metadata"
    imported += b"\x8c\x08os.mkdir\x93\x8c\x04evil\x85R."
    attribute = b"cbuiltins\ngetattr\n(ctorch\nSize\nVcount\ntR."  # getattr is for enums only
    for content, named in ((imported, r"os\.mkdir"), (attribute, r"builtins\.getattr")):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{named}, whose loading may run code"):
            dcp_files.Saved(tmp_path)
    assert not (tmp_path / "evil").exists()
    for unsafe, shown in ((Evil(), "<.*Evil object"), ({"f": [1, _record]}, "<function _record")):
        with pytest.raises(TypeError, match=rf"rank 0: extra\['x'\] holds {shown}.*would run code"):
            checkpoint.save(tmp_path / "two", model, extra={"x": unsafe})
    assert not (tmp_path / "two.incomplete").exists()


def _record(path: Path) -> None:
    """Write into the marker what the file is now."""
    content = path.read_bytes()
    marker = path.parent / "flatshard.json"
    said = json.loads(marker.read_text())
    said["files"][path.name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    marker.write_text(json.dumps(said))


# ---------------------------------------------------------------- saving


def test_names_and_old_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (8, 9, 10, 11):
        _saved(tmp_path / f"other-{step}")
        checkpoint.save(tmp_path / f"step-{step}", _model(), keep=2, extra={"step": step})
    (tmp_path / "step-7.incomplete").mkdir()  # of a save that was killed
    (tmp_path / "other-7.incomplete").mkdir()  # of another training
    checkpoint.save(tmp_path / "step-12", _model(), keep=2)
    others = [f"other-{step}" for step in (10, 11, "7.incomplete", 8, 9)]
    names = [*others, "step-11", "step-12"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoint.latest(tmp_path) == tmp_path / "step-12"
    assert main(["inspect", str(tmp_path / "step-11")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("format: flatshard.checkpoint\nstep: 11\nworld size: 1\nmodel.0.weight")
    marker = folder.read_marker(tmp_path / "step-11")
    assert (marker.step, marker.world_size) == (11, 1)
    with pytest.raises(FileExistsError, match=r"step-12 already exists\. Save under another name"):
        _saved(tmp_path / "step-12")
    for path, keep in (("step-13", 0), ("last", 1)):
        with pytest.raises(ValueError, match=f"keep={keep} with checkpoint '{path}'"):
            checkpoint.save(tmp_path / path, _model(), keep=keep)


def test_clocks_that_differ(tmp_path: Path) -> None:
    """A host whose clock is late resumes the training: its checkpoint is the last all the same."""
    with mock.patch.object(time, "time", return_value=2000.0):
        _saved(tmp_path / "step-1")
    with mock.patch.object(time, "time", return_value=1000.0):
        checkpoint.save(tmp_path / "step-2", _model(), keep=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@on_ranks(2)
def test_ranks_pass_the_same(rank: int, world_size: int, tmp_path: Path) -> None:
    model = ShardedWrapper(_model())

    def fails(error: type[Exception], message: str, *given: Any, **extra: Any) -> None:
        assert_raises(error, message, checkpoint.save, tmp_path / "one", *given, extra=extra)

    fails(ValueError, r"extra\['loss'\] is 0 on rank 0, 1 on rank 1. Pass equal", model, loss=rank)
    large = torch.zeros(2000).index_fill_(0, torch.tensor(1000), rank)
    fails(ValueError, r"extra\['large'\] is 'a tensor \(2000,\)", model, large=large)
    # Equal values in tensors that differ otherwise (on GPUs, each rank has its own device).
    loss = torch.ones(2, requires_grad=rank == 0)
    checkpoint.save(tmp_path / "other" / "zero", model, extra={"loss": loss})
    fails(TypeError, r"got a list\. .* once for each model, with its own folder", [model, model])
    fails(TypeError, "expected a torch.optim.Optimizer, got <generator", model, model.parameters())
    fails(TypeError, r"got \[\]\. For several optimizers over one", model, [[]])
    with pytest.raises(ValueError, match=r"the path is .*one0.* on rank 0, .*one1"):
        checkpoint.save(tmp_path / f"one{rank}", model)
    fails(TypeError, r"rank 1: extra\['x'\] holds <", model, x=Evil() if rank else None)
    assert checkpoint.latest(tmp_path) is None


class ShareOnEachRank(torch.optim.Optimizer):
    """Steps some parameters on each rank and broadcasts them, as KellerJordan's Muon does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, param in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(0.1 * momentum / (1 + (momentum @ momentum.mT).trace()))
            dist.broadcast(param, owner)


def test_state_that_ranks_hold_for_different_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_different_state, 2, tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["full", "old"]
    assert main(["inspect", str(tmp_path / "old")]) == 2
    assert capsys.readouterr().err.endswith(
        "old is incomplete: its files lack values of optimizer.state.1.weight.momentum, "
        "optimizer.state.2.weight.momentum. Use another checkpoint.\n"
    )
    checkpoint.convert(tmp_path / "old", tmp_path / "model.safetensors")


def _different_state(rank: int, _: int, path: Path) -> None:
    def trained(**keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        model = ShardedWrapper(layers, **keywords)
        optimizer = ShareOnEachRank(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained()
    expected = r"state 'momentum' of parameter '0\.weight' differs between ranks 0 and 1: ShareOn"
    for async_ in (False, True):
        with pytest.raises(ValueError, match=expected):
            checkpoint.save(path / "one", model, optimizer, async_=async_)
    unchecked = mock.patch.object(whole_tensors, "check_same_state")
    with mock.patch.object(save_load, "check_same_state"), unchecked:
        with pytest.raises(ValueError, match=r"did not save all values of .*1\.weight\.momentum"):
            checkpoint.save(path / "two", model, optimizer)
        assert checkpoint.latest(path) is None
        with mock.patch.object(dcp_files, "incomplete_tensors", return_value=[]):  # as before 0.3
            checkpoint.save(path / "old", model, optimizer)
    old = r"old is incomplete: its files .*2\.weight\.momentum\. "
    with unchecked, pytest.raises(ValueError, match=old):
        checkpoint.load(path / "old", model, optimizer)
    checkpoint.load(path / "old", model)  # which is complete
    # Full tensors are complete on the rank that has them: every rank loads all.
    model, optimizer = trained(sharding_strategy="NO_SHARD")
    checkpoint.save(path / "full", model, optimizer)
    checkpoint.load(path / "full", model, optimizer)
    assert len(optimizer.state) == 4


@pytest.mark.versions
@pytest.mark.parametrize(("async_", "limit"), [(False, 10_000), (True, 10_000), (False, 2_000)])
@on_ranks(2, fresh=True)
def test_a_full_disk_is_an_error_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path, async_: bool, limit: int
) -> None:
    """A limit on the size of files, met in the middle of one: EFBIG, as ENOSPC would be.

    At 2,000 bytes torch's zip writer raises an error of its own, "unexpected pos 704 vs 598".
    """
    model = ShardedWrapper(_model())
    checkpoint.save(tmp_path / "step-1", model)
    before = {one.name: one.read_bytes() for one in (tmp_path / "step-1").iterdir()}
    expected = r"save\(.*step-2'\), rank 1: .*too large"
    with full_disk(limit) if rank == 1 else nullcontext():
        if async_:
            checkpoint.save(tmp_path / "step-2", model, async_=True)
        # After an asynchronous save, the next save raises what happened in the thread.
        with pytest.raises(OSError, match=expected) as error:
            checkpoint.save(tmp_path / ("step-3" if async_ else "step-2"), model)
    (note,) = error.value.__notes__
    last = f"Last complete checkpoint: {tmp_path / 'step-1'}."
    assert note.endswith(f"step-2 was not saved. {last}")
    checkpoint.save(tmp_path / "step-3", model)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert before == {one.name: one.read_bytes() for one in (tmp_path / "step-1").iterdir()}


def test_a_rank_that_dies_while_saving(tmp_path: Path) -> None:
    run_ranks(_dies, 3, tmp_path, expendable=[1], group_timeout=8)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    _saved(tmp_path / "step-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


def _dies(rank: int, _: int, path: Path) -> None:
    model = ShardedWrapper(_model())
    checkpoint.save(path / "step-1", model)
    if rank == 1:
        DefaultSavePlanner.resolve_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
    with pytest.raises(CollectiveError, match=rf"save\(.*step-2'\), rank {rank}.* failed") as error:
        checkpoint.save(path / "step-2", model)
    assert f"Last complete checkpoint: {path / 'step-1'}." in error.value.__notes__[0]


@on_ranks(1, fresh=True)
def test_an_error_nobody_awaits_is_raised_at_exit(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is on fire")

    folder.finish = fail  # type: ignore[assignment]
    save = checkpoint.save(tmp_path / "one", _model(), async_=True)
    while not save.done():
        time.sleep(0.01)
    # As Python calls it.
    assert_raises(OSError, "the disk is on fire", training.wait_for_pending)
    training.wait_for_pending()


@on_ranks(2, fresh=True)
def test_a_group_that_is_destroyed_early(rank: int, world_size: int, tmp_path: Path) -> None:
    write = save_load.Save._write_files

    def late(*given: Any) -> Any:
        while dist.is_initialized():
            time.sleep(0.01)
        return write(*given)

    save_load.Save._write_files = late  # type: ignore[method-assign]
    save = checkpoint.save(tmp_path / "one", ShardedWrapper(_model()), async_=True)
    dist.destroy_process_group()
    assert_raises(RuntimeError, r"group was destroyed before .* Call wait\(\) on the", save.wait)
    assert checkpoint.latest(tmp_path) is None


def test_a_save_that_failed_is_the_programs_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from flatshard import checkpoint\n"
        "from flatshard.checkpoint import folder, training\n"
        "folder.finish = None\n"
        "checkpoint.save('one', torch.nn.Linear(1, 1), async_=True)\n"
        "training._at_exit()\n"  # as Python calls it
    )
    ended = run_script(script, cwd=tmp_path)
    assert ended.status == 1
    assert "one was not saved. Last complete checkpoint: none." in ended.err


def test_other_hosts_files_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system that the hosts do not share, rank 0 sees its own files alone."""
    monkeypatch.setattr(time, "monotonic", iter(range(0, 1000, 6)).__next__)
    with pytest.raises(FileNotFoundError, match=r"__1_0.distcp is missing, expected 1 bytes. Save"):
        folder.check_lengths(tmp_path, {"__1_0.distcp": 1}, "Save again.", wait=10)
