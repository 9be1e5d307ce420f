"""`flatshard convert` and `inspect`, on files as several libraries write them."""

import functools
import pickle
import tomllib
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from flatshard import ShardedWrapper, checkpoint
from flatshard.checkpoint import convert, sources as convert_module
from flatshard.checkpoint.command_line import explain, main
from flatshard.checkpoint.sources import Source, open_source
from tests.harness import ROOT, allow_warnings, assert_raises, full_disk, run_ranks
from tests.models import CASES, Odd
from tests.oracle import snapshot


def _model(seed: int = 3) -> nn.Module:
    """With tied weights, buffers, a parameter of no dimension and one without elements."""
    torch.default_generator.manual_seed(seed)
    model = CASES["tied-across-units"].build()
    model.odd, model.norm = Odd(), nn.BatchNorm1d(3)
    return model


# The same bits, in any order of the names.
_assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def _check(source: Path, folder: Path, expected: dict[str, Tensor], **options: Any) -> None:
    """Every format that is made of `source`, and safetensors of those, hold what is expected."""
    for name in ("a", "a.pt", "a.safetensors"):
        convert(source, folder / name, **options)
        convert(folder / name, folder / f"{name}-again.safetensors")
        model = _model(0)
        unexpected = load_model(model, folder / f"{name}-again.safetensors", strict=False)[1]
        # A DCP folder, which has options here, holds tied weights twice, and nothing says so.
        assert set(unexpected) <= ({"head.weight"} if options else set())
        _assert_same(snapshot(model), expected)
    loaded = torch.load(folder / "a.pt", weights_only=True)
    _assert_same(loaded, expected)
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr() or options
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


def test_ties_in_safetensors_of_ddp(tmp_path: Path) -> None:
    values = {"module.one": torch.ones(2), "module.other": torch.zeros(3)}
    save_file(values, tmp_path / "a.safetensors", {"module.tied": "module.one"})
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded.keys() == {"one", "other", "tied"}
    assert loaded["tied"].data_ptr() == loaded["one"].data_ptr()


def test_views_of_one_memory_are_not_ties(tmp_path: Path) -> None:
    """A square matrix and its transpose have the same address and shape."""
    matrix = torch.arange(9.0).view(3, 3)
    state = {"one": matrix, "transposed": matrix.t(), "tied": matrix}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    _assert_same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert torch.equal(load_file(tmp_path / "b.safetensors")["transposed"], matrix.t())


@pytest.mark.parametrize("kind", ["flatshard", "fsdp2"])
def test_dcp_folders(tmp_path: Path, kind: str) -> None:
    run_ranks(_save_dcp, 2, tmp_path / kind, kind)
    assert open_source(tmp_path / kind).facts == {"step": 7}
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
    assert source.facts == {"world size": 2, "step": 7, "optimizers": "'0' (SGD)"}
    assert source.kind.startswith("flatshard.checkpoint")
    _check(tmp_path / "own", tmp_path, snapshot(_model()), key="model")
    (tmp_path / "own").rename(tmp_path / "own.incomplete")
    assert_raises(ValueError, "incomplete", open_source, tmp_path / "own.incomplete")


def _save_own(rank: int, world_size: int, folder: Path) -> None:
    model = ShardedWrapper(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.save(folder, model, optimizer, extra={"step": 7})


class _Bytes(bytearray):
    """Memory of a tensor; a weak reference tells whether it is still there."""


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_one_tensor_at_a_time(tmp_path: Path, name: str) -> None:
    alive: list[weakref.ref[_Bytes]] = []

    def read(names: tuple[str, ...]) -> Tensor:
        # The last one may still be held, its copy in a writer is not counted.
        assert sum(one() is not None for one in alive) <= 1, names
        memory = _Bytes(400)
        alive.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float32)

    like = {(f"{number}",): torch.empty(100, device="meta") for number in range(9)}
    source = Source(tmp_path, "any", like, read)
    with mock.patch.object(convert_module, "open_source", return_value=source):
        convert("anything", tmp_path / name)
    assert len(alive) == 9


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
    (tmp_path / "zero" / "global_step11").mkdir(parents=True)
    (tmp_path / "zero" / "global_step11" / "mp_rank_00_model_states.pt").write_bytes(b"")
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
        "empty": "expected safetensors files (or, to convert, files of torch.distributed",
        "zero": "Run DeepSpeed's script zero_to_fp32.py",
        "zero/global_step11": "Run DeepSpeed's script zero_to_fp32.py",
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


@pytest.mark.parametrize("name", ["o.pt", "o.safetensors"])
def test_ctrl_c(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C leaves no half-written file behind."""
    read = mock.Mock(side_effect=KeyboardInterrupt)
    source = Source(tmp_path, "any", {("a",): torch.empty(1, device="meta")}, read)
    with mock.patch.object(convert_module, "open_source", return_value=source):
        assert main(["convert", "good.pt", str(tmp_path / name)]) == 130
    assert read.called
    assert capsys.readouterr().err == "flatshard convert: interrupted\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [100, 5_000, 9_000])
def test_full_disk(limit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk is an error that names the file, and leaves no half-written file behind."""
    torch.save({name: torch.ones(1_000) for name in "abc"}, tmp_path / "good.pt")
    with full_disk(limit):
        status = main(["convert", str(tmp_path / "good.pt"), str(tmp_path / "o.pt")])
    assert status == 2
    assert "File too large" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["good.pt"]


def test_incomplete_dcp_folder(tmp_path: Path) -> None:
    with allow_warnings(UserWarning):
        dcp.save({"a": torch.ones(50)}, checkpoint_id=tmp_path / "a", no_dist=True)
    file = next((tmp_path / "a").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"distcp is incomplete: expected \d+ bytes"):
        open_source(tmp_path / "a")
    file.unlink()
    assert_raises(FileNotFoundError, "distcp is missing", open_source, tmp_path / "a")


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_dcp_folder_that_lacks_values(part: str, tmp_path: Path) -> None:
    """A model without some of its values is not converted. The optimizer's values do not matter."""
    path = tmp_path / "a"
    with allow_warnings(UserWarning):
        state = {"model": {"a": torch.ones(4)}, "optimizer": {"a": torch.ones(4)}}
        dcp.save(state, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata[f"{part}.a"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    if part == "model":
        with pytest.raises(ValueError, match=r"a is incomplete: its files lack values of model\.a"):
            convert(path, tmp_path / "o.pt")
        assert [one.name for one in tmp_path.iterdir()] == ["a"]
    else:
        convert(path, tmp_path / "o.pt")
        _assert_same(torch.load(tmp_path / "o.pt"), {"a": torch.ones(4)})


# ---------------------------------------------------------------- ``flatshard explain``


def test_wheel_contains_the_page() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"] == {
        "docs/troubleshooting.md": "flatshard/troubleshooting.md"
    }
    assert "/docs/troubleshooting.md" in wheel["targets"]["sdist"]["include"]


def test_row_and_linked_sections(capsys: pytest.CaptureFixture[str]) -> None:
    page = (
        "# Page\n\n| code | message | what happened | what to do |\n|---|---|---|---|\n"
        '| <a id="FS-A"></a>`FS-A` | `so` | *this* | [that](a-b.md#c) |\n'
        '| <a id="FS-A-B"></a>`FS-A-B` | no | [see](#a-title) | FS-A |\n\n'
        "## Other\n\n## A title\n\n```python\n# comment\n```\n\n### More\n"
    )
    with mock.patch.object(Path, "read_text", return_value=page):
        row = "code: `FS-A`\n\nmessage: `so`\n\nwhat happened: *this*"
        assert explain("[fs-a]") == f"{row}\n\nwhat to do: that (page a-b)"
        row = "code: `FS-A-B`\n\nmessage: no\n\nwhat happened: see\n\nwhat to do: FS-A"
        section = "## A title\n\n```python\n# comment\n```"
        assert explain("FS-A-B") == f"{row}\n\n{section}"
        assert main(["explain", "FS-X"]) == 2
    said = capsys.readouterr().err
    assert said == "flatshard explain: no code 'FS-X'. The codes are FS-A, FS-A-B.\n"
