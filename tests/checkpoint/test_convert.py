"""`flatshard convert` and `inspect`, on files as several libraries write them."""

import pickle
import sys
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from flatshard import ShardedWrapper, checkpoint
from flatshard.checkpoint import convert
from flatshard.checkpoint import converting as convert_module
from flatshard.checkpoint.command_line import main
from flatshard.checkpoint.ranges import Progress
from flatshard.checkpoint.sources import Source, open_source
from tests.harness import allow_warnings, run_ranks
from tests.models import CASES, Odd
from tests.oracle import snapshot


def _model(seed: int = 3) -> nn.Module:
    """With tied weights, buffers, a parameter of no dimension and one without elements."""
    torch.default_generator.manual_seed(seed)
    model = CASES["tied-across-units"].build()
    model.odd, model.norm = Odd(), nn.BatchNorm1d(3)
    return model


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def _check(source: Path, folder: Path, expected: dict[str, Tensor], **options: Any) -> None:
    """Every format that is made of `source`, and safetensors of those, hold what is expected."""
    for name, to in (("a", None), ("a.pt", None), ("b", "dcp"), ("a.safetensors", None)):
        convert(source, folder / name, to=to, **options)
        convert(folder / name, folder / f"{name}-again.safetensors")
        model = _model(0)
        unexpected = load_model(model, folder / f"{name}-again.safetensors", strict=False)[1]
        # A DCP folder holds tied weights twice, and nothing says so.
        assert set(unexpected) <= ({"head.weight"} if name == "b" or options else set())
        _assert_same(snapshot(model), expected)
    loaded = torch.load(folder / "a.pt", weights_only=True)
    _assert_same(loaded, expected)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr() or options
    with allow_warnings(UserWarning):
        dcp_to_torch_save(folder / "b", folder / "b.pt")
    _assert_same(torch.load(folder / "b.pt"), expected)
    assert not [one.name for one in folder.iterdir() if "incomplete" in one.name]


@pytest.mark.parametrize("kind", ["plain", "legacy", "ddp", "nested", "safetensors"])
def test_files(tmp_path: Path, kind: str) -> None:
    model = _model()
    state, path = model.state_dict(), tmp_path / "source.pt"
    ddp = {f"module.{name}": value for name, value in state.items()}
    if kind == "safetensors":
        path = tmp_path / "source.safetensors"
        some = {n: t.contiguous() for n, t in state.items() if n != "head.weight"}
        save_file(some, path, {"head.weight": "embed.weight"})
    elif kind == "nested":
        state = {"net": {"model": ddp}, "optimizer": {"state": {0: torch.ones(1)}}, "epoch": 3}
        torch.save(state, path)
    else:
        state = ddp if kind == "ddp" else state
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
    _check(path, tmp_path, snapshot(model))


@pytest.mark.parametrize("kind", ["flatshard", "fsdp2"])
def test_dcp_folders(tmp_path: Path, kind: str) -> None:
    run_ranks(_save_dcp, 2, tmp_path / kind, kind)
    source = open_source(tmp_path / kind)
    assert source.facts == {"step": 7}
    _check(tmp_path / kind, tmp_path, snapshot(_model()), key="app.model")


def _save_dcp(rank: int, world_size: int, folder: Path, kind: str) -> None:
    model = _model()
    if kind == "fsdp2":
        fully_shard(model, ignored_params=set(model.odd.parameters()))  # which it refuses
    else:
        model = ShardedWrapper(model)
    states = get_state_dict(model, ())[0]
    app = {"app": {"model": states, "epoch": 3}, "step": torch.tensor(7)}
    with allow_warnings():
        dcp.save(app, checkpoint_id=folder)


def test_own_checkpoints(tmp_path: Path) -> None:
    run_ranks(_save_own, 2, tmp_path / "own")
    source = open_source(tmp_path / "own")
    assert source.facts == {"world size": 2, "step": 7}
    assert source.kind.startswith("flatshard.checkpoint")
    _check(tmp_path / "own", tmp_path, snapshot(_model()), key="model")
    (tmp_path / "own").rename(tmp_path / "own.incomplete")
    with pytest.raises(ValueError, match="incomplete"):
        open_source(tmp_path / "own.incomplete")


def _save_own(rank: int, world_size: int, folder: Path) -> None:
    model = ShardedWrapper(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(folder, model, optimizer, extra={"step": 7})


class _Bytes(bytearray):
    """Memory of a tensor; a weak reference tells whether it is still there."""


@pytest.mark.parametrize(("name", "to"), [("a.safetensors", None), ("a.pt", None), ("b", "dcp")])
def test_one_tensor_at_a_time(tmp_path: Path, name: str, to: str | None) -> None:
    alive: list[weakref.ref[_Bytes]] = []

    def read(names: tuple[str, ...]) -> Tensor:
        # The last one may still be held, its copy in a writer is not counted.
        assert sum(one() is not None for one in alive) <= 1, names
        memory = _Bytes(400)
        alive.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float32)

    like = {(f"{number}",): torch.empty(100, device="meta") for number in range(9)}
    with mock.patch.object(convert_module, "open_source", return_value=Source("any", like, read)):
        convert("anything", tmp_path / name, to=to)
    assert len(alive) == 9


# ---------------------------------------------------------------- DeepSpeed


def _deepspeed_class(name: str) -> type:
    """A class that pickles as one of DeepSpeed's, which is not installed."""
    module, _, short = f"deepspeed.{name}".rpartition(".")
    made = type(short, (), {"__module__": module, "__init__": lambda self, *args: None})
    sys.modules["deepspeed"] = sys.modules[module] = types.ModuleType(module)
    setattr(sys.modules[module], short, made)
    return made


class _Stage:
    """Pickles as an enum's member does."""

    def __init__(self, cls: type, number: int) -> None:
        self.pickled = cls, (number,)

    def __reduce__(self) -> Any:
        return self.pickled


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_deepspeed(tmp_path: Path, stage: int, world_size: int) -> None:
    """The layout is that of files which DeepSpeed 0.19.8 wrote."""
    model = _model()
    model.odd.fc.requires_grad_(False)
    model.odd.nothing.requires_grad_(False)
    with mock.patch.dict(sys.modules):
        folder = _save_deepspeed(tmp_path / "source", model, stage, world_size)
    _check(tmp_path / "source", tmp_path, snapshot(model))
    facts = open_source(tmp_path / "source").facts
    assert facts["step"] == 11
    assert facts["world size"] == world_size
    if stage and world_size > 1:
        sorted(folder.glob("*optim_states.pt"))[1].unlink()
        with pytest.raises(ValueError, match="incomplete: expected files of 3 ranks, got 2"):
            convert(tmp_path / "source", tmp_path / "more")


def _save_deepspeed(path: Path, model: nn.Module, stage: int, size: int) -> Path:
    folder = path / "global_step11"
    folder.mkdir(parents=True)
    (path / "latest").write_text("global_step11")
    state = model.state_dict()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    groups = [{n: p for n, p in trained.items() if (p.dim() > 1) == wide} for wide in (True, False)]
    scaler = _deepspeed_class("runtime.fp16.loss_scaler.LossScaler")()
    enum = _deepspeed_class("runtime.zero.config.ZeroStageEnum")

    def cut(tensor: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor that is padded to parts of one size."""
        padding = torch.full((-tensor.numel() % size,), 9.0)
        return (
            torch.cat([tensor.reshape(-1), padding]).chunk(size)[rank]
            if tensor.numel()
            else tensor.reshape(-1)
        )

    for rank in range(size):
        header = {
            "module": state
            if stage < 3
            else {n: t for n, t in state.items() if "running" in n or "batches" in n},
            "buffer_names": [name for name, _ in model.named_buffers()],
            "param_shapes": [{name: p.shape for name, p in group.items()} for group in groups],
            "frozen_param_shapes": {n: p.shape for n, p in frozen.items()} if stage > 1 else None,
            "frozen_param_fragments": {
                n: cut(p, rank) if stage == 3 else p for n, p in frozen.items()
            },
            "shared_params": {"head.weight": "embed.weight"},
            "global_steps": 11,
            "dp_world_size": size,
            "ds_version": "0.19.8",
        }
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(header, folder / f"{prefix}mp_rank_00_model_states.pt")
        if stage == 0:
            break
        optim = {"loss_scaler": scaler, "zero_stage": _Stage(enum, stage), "partition_count": size}
        if stage == 3:
            vector = torch.cat([cut(p, rank) for group in groups for p in group.values()])
            optim["fp32_flat_groups"] = list(vector.split(50))
        else:
            optim["partition_count"] = [size, size]
            # Each parameter ends at a multiple of two elements.
            gaps = [[-p.numel() % 2 for p in group.values()] for group in groups]
            optim["param_alignment_paddings"] = gaps
            vectors = [
                torch.cat(
                    [
                        torch.cat([p.reshape(-1), torch.full((gap,), 9.0)])
                        for p, gap in zip(group.values(), some, strict=True)
                    ]
                )
                for group, some in zip(groups, gaps, strict=True)
            ]
            optim["single_partition_of_fp32_groups"] = [cut(vector, rank) for vector in vectors]
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optim}, folder / name)
    return folder


# ---------------------------------------------------------------- the command line


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": _model().state_dict(), "step": 5, "note": "x"}, tmp_path / "a.pt")
    words = [str(tmp_path / "a.pt"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(["convert", *words, "--max-shard-size", "1KB"]) == 0
    assert main(["inspect", str(tmp_path / "a.pt")]) == 0
    before = capsys.readouterr().out
    for text in ("format: torch.save\nstep: 5\n", "tensors, "):
        assert text in before
    assert main(["inspect", str(tmp_path / "out")]) == 0
    after = capsys.readouterr().out
    assert "head.weight is embed.weight" in after
    assert "embed.weight" in after
    assert "bfloat16" in after
    assert "float32" not in after


class _Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code of a pickle ran",)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, and no pickle runs code."""
    optimizer = torch.optim.SGD(_model().parameters(), momentum=0.9)
    optimizer.state[next(_model().parameters())]["momentum_buffer"] = torch.ones(1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(_Evil()))
    (tmp_path / "text.pt").write_text("no tensors")
    torch.save(_Evil(), tmp_path / "evil.pt")
    torch.save({"a": torch.ones(1), "b": {"c": torch.ones(1)}}, tmp_path / "two.pt")
    torch.save({"fc._flat_param": torch.ones(1)}, tmp_path / "flat.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "good.pt")
    cut = (tmp_path / "good.pt").read_bytes()[:-100]
    (tmp_path / "cut.pt").write_bytes(cut)
    for name, why in {
        "absent": "no such file or folder",
        "empty": "expected files of torch.distributed.checkpoint, DeepSpeed or safetensors",
        "dcp": "_pytest.outcomes._Fail, whose loading may run code",
        "text.pt": "torch.load cannot read this file safely",
        "cut.pt": "torch.load cannot read this file safely",
        "evil.pt": "whose loading may run code",
        "two.pt": "Pass the model's key, one of: b",
        "flat.pt": "flat parameter of FSDP1's LOCAL_STATE_DICT",
    }.items():
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 2, name
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert name in said
        assert why in said, said
    assert main(["convert", str(tmp_path / "good.pt"), str(tmp_path / "two.pt")]) == 2
    assert " exists. Choose" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "good.pt"), str(tmp_path / "o"), "--dtype", "nn"]) == 2
    assert "--dtype: expected a dtype" in capsys.readouterr().err
    for name, *more in (("no-folder/o.pt",), ("o.pt", "--max-shard-size", "5GB")):
        assert main(["convert", str(tmp_path / "good.pt"), str(tmp_path / name), *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["convert", "--unknown"])
    assert "arguments are required: source, destination" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["o.pt", "o-dcp", "o.safetensors"])
def test_ctrl_c(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What had been written so far was left."""
    torch.save({"a": torch.ones(1)}, tmp_path / "good.pt")
    words = [str(tmp_path / "good.pt"), str(tmp_path / name)]
    interrupted = mock.patch.object(Progress, "advance", side_effect=KeyboardInterrupt)
    with interrupted:
        assert main(["convert", *words, *(["--to", "dcp"] if "dcp" in name else [])]) == 130
    assert capsys.readouterr().err == "flatshard convert: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["good.pt"]
    assert not (tmp_path / "out").exists()


def test_incomplete_dcp_folder(tmp_path: Path) -> None:
    with allow_warnings(UserWarning):
        dcp.save({"a": torch.ones(50)}, checkpoint_id=tmp_path / "a", no_dist=True)
    file = next((tmp_path / "a").glob("*.distcp"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"distcp is incomplete: expected \d+ bytes"):
        open_source(tmp_path / "a")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="distcp is missing"):
        open_source(tmp_path / "a")
