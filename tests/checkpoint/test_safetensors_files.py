"""The safetensors format without ranks: several files, and broken ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatshard.checkpoint.safetensors import Elements, find_tensors, move
from tests.harness import assert_raises


def _file(folder: Path) -> Path:
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, folder / "some.safetensors")
    return folder / "some.safetensors"


def _refused(message: str, path: Path) -> None:
    assert_raises(ValueError, message, find_tensors, path)


def _with_header(path: Path, **entries: object) -> None:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def test_truncated_and_corrupt(tmp_path: Path) -> None:
    path = _file(tmp_path)
    whole = path.read_bytes()
    for number, why in (
        (4, "a header of"),
        (20, "a header of"),
        (len(whole) - 1, f"expected {len(whole)} bytes, got {len(whole) - 1}"),
    ):
        path.write_bytes(whole[:number])
        _refused(rf"some\.safetensors is not a complete .*{why}", path)
    path.write_bytes(whole + b"x")
    _refused(f"expected {len(whole)} bytes, got {len(whole) + 1}", path)
    path.write_bytes(b"\xff" * 64)
    _refused("a header of", path)
    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for change in (
        {"shape": [5]},
        {"shape": [-2, -2]},
        {"data_offsets": [4, 20]},
        {"data_offsets": [0]},
        {"dtype": "F31"},
        {"shape": None},
    ):
        _with_header(path, a={**good, **change})
        _refused(r"some\.safetensors is not a complete safetensors", path)
    _with_header(path, a=good, b=good)
    _refused("'b' begins at byte", path)
    _with_header(path, a=good)
    assert list(find_tensors(path).places) == ["a"]


def test_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = _file(tmp_path)
    place = find_tensors(path).places["a"]
    path.write_bytes(path.read_bytes()[: place.offset + 5])
    with pytest.raises(ValueError, match="became shorter while it was read: 7 bytes are missing"):
        move(place, Elements(torch.empty(3), [0], 0), to_file=False)


def test_folders(tmp_path: Path) -> None:
    _refused(r"expected safetensors files .*, got nothing", tmp_path)
    _file(tmp_path)
    assert set(find_tensors(tmp_path).places) == {"a", "b"}
    save_file({"c": torch.ones(1)}, tmp_path / "more.safetensors")
    _refused(r"several files \(more.safetensors, some.safetensors\)", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "some.safetensors", "c": "more.safetensors"}}))
    assert set(find_tensors(tmp_path).places) == set(find_tensors(index).places) == {"a", "c"}
    index.write_text(json.dumps({"weight_map": {"d": "some.safetensors"}}))
    _refused("lists 'd' in some.safetensors, which has no such", tmp_path)
    index.write_text(json.dumps({"weight_map": {"d": "none.safetensors"}}))
    _refused(r"none.safetensors: there is no such file", tmp_path)
    index.write_text("[]")
    _refused("is not an index of safetensors files", tmp_path)
