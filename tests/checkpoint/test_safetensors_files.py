"""The safetensors format without ranks: several files, and broken ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatshard.checkpoint.safetensors import Elements, find_tensors, move


def _file(folder: Path) -> Path:
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, folder / "some.safetensors")
    return folder / "some.safetensors"


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
        with pytest.raises(ValueError, match=rf"some\.safetensors is not a complete .*{why}"):
            find_tensors(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=f"expected {len(whole)} bytes, got {len(whole) + 1}"):
        find_tensors(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="a header of"):
        find_tensors(path)
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
        with pytest.raises(ValueError, match=r"some\.safetensors is not a complete safetensors"):
            find_tensors(path)
    _with_header(path, a=good, b=good)
    with pytest.raises(ValueError, match="'b' begins at byte"):
        find_tensors(path)
    _with_header(path, a=good)
    assert list(find_tensors(path).places) == ["a"]


def test_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = _file(tmp_path)
    place = find_tensors(path).places["a"]
    path.write_bytes(path.read_bytes()[: place.offset + 5])
    with pytest.raises(ValueError, match="became shorter while it was read: 7 bytes are missing"):
        move(place, Elements(torch.empty(3), [0], 0), to_file=False)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected safetensors files .*, got nothing"):
        find_tensors(tmp_path)
    _file(tmp_path)
    assert set(find_tensors(tmp_path).places) == {"a", "b"}
    save_file({"c": torch.ones(1)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"several files \(more.safetensors, some.safetensors\)"):
        find_tensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "some.safetensors", "c": "more.safetensors"}}))
    assert set(find_tensors(tmp_path).places) == set(find_tensors(index).places) == {"a", "c"}
    index.write_text(json.dumps({"weight_map": {"d": "some.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists 'd' in some.safetensors, which has no such"):
        find_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"d": "none.safetensors"}}))
    with pytest.raises(ValueError, match=r"none.safetensors: there is no such file"):
        find_tensors(tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        find_tensors(tmp_path)
