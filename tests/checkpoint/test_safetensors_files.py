"""The safetensors format without ranks: ranges, headers, several files, and broken ones."""

import itertools
import json
import math
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatshard.checkpoint import safetensors
from flatshard.checkpoint.safetensors import (
    DTYPES,
    Place,
    find_tensors,
    move_range,
    plan_files,
)
from flatshard.units.layout import strides_of
from tests.harness import naming


def test_any_ranges_make_the_tensor(tmp_path: Path) -> None:
    """Of any memory order, cut anywhere, cast, in pieces of any size, behind other bytes."""
    for seed in range(200):
        with naming(seed):
            _ranges_make_the_tensor(tmp_path, seed)


def _ranges_make_the_tensor(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    order = draw.sample(range(len(shape)), len(shape))
    numel = math.prod(shape)
    full = torch.randn(numel).as_strided(shape, strides_of(shape, order))
    flat = full.permute(order).reshape(-1)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
    place = Place(str(tmp_path / "file"), 7, dtype, shape)
    Path(place.path).write_bytes(b"-" * 7)
    cuts = [0, *sorted(draw.randint(0, numel) for _ in range(3)), numel]
    with mock.patch.object(safetensors, "PIECE_BYTES", draw.choice([8, 16, 64, 1 << 20])):
        for low, high in itertools.pairwise(cuts):
            move_range(place, flat[low:high].clone(), order, low, to_file=True)
        written = bytearray(Path(place.path).read_bytes()[7:])
        assert torch.equal(torch.frombuffer(written, dtype=dtype).view(shape), full.to(dtype))
        for low, high in itertools.pairwise(cuts):
            part = torch.zeros(high - low)
            move_range(place, part, order, low, to_file=False)
            assert torch.equal(part, flat[low:high].to(dtype).float())


def test_headers_are_those_of_safetensors(tmp_path: Path) -> None:
    values = [torch.zeros(3, 2, dtype=dtype) for dtype in DTYPES.values()]
    tensors = {f"{i} é": one for i, one in enumerate((*values, torch.tensor(2), torch.empty(0, 3)))}
    save_file(tensors, tmp_path / "theirs.safetensors", {"a": "b"})
    theirs = find_tensors(tmp_path / "theirs.safetensors")
    assert theirs.metadata == {"a": "b"}
    assert {n: (p.shape, p.dtype) for n, p in theirs.places.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    plan = plan_files(tensors, tmp_path / "ours.safetensors")
    plan.create()
    assert not (tmp_path / "ours.safetensors").exists()
    for name, place in plan.places.items():
        assert place.offset % place.dtype.itemsize == 0
        order = range(tensors[name].dim())
        move_range(place, tensors[name].reshape(-1), order, 0, to_file=True)
    plan.commit()
    ours = load_file(tmp_path / "ours.safetensors")
    assert all(
        torch.equal(*(one[name].to(torch.cfloat) for one in (ours, tensors))) for name in tensors
    )


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


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors file in this folder"):
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
