"""Safetensors files that all ranks write in place, and from which each reads its own ranges."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from flatshard import CPUOffload, MixedPrecision, ShardedWrapper
from flatshard.checkpoint import load_safetensors, safetensors as files, save_safetensors
from flatshard.collectives import record
from tests.harness import allow_warnings, assert_raises, full_disk, naming, on_ranks, run_ranks
from tests.models import CASES
from tests.oracle import assert_identical, snapshot, train_steps, trainable
from tests.ways import WAYS, ranks_of

pytestmark = pytest.mark.by_turns

FEW = ("tied-across-units", "odd-shapes", "cnn-channels-last")
NAMES = ("mlp", "tied-blocks", "nested", "batch-norm", "frozen", "lstm", "multihead", *FEW)
CHOSEN = ["full", "full-3", "no_shard", "op", "hybrid", "hybrid-op"]


def _trained(name: str, way: str, rank: int, world_size: int, **keywords: Any) -> ShardedWrapper:
    """A model whose weights are none that a constructor gives."""
    WAYS[way].set_nodes()
    case = CASES[name]
    model = case.wrap(case.model(torch.float32), **WAYS[way].keywords, **keywords)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    train_steps(model, optimizer, case, rank, world_size, steps=1, dtype=torch.float32)
    return model


# ---------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("way", CHOSEN)
@on_ranks(ranks_of)
def test_round_trip(rank: int, world_size: int, tmp_path: Path, way: str) -> None:
    for name in NAMES if way == "full" else FEW:
        with naming(name):
            model = _trained(name, way, rank, world_size)
            expected, path = snapshot(model), tmp_path / f"{name}.safetensors"
            save_safetensors(model, path)
            if rank > 0:  # buffers are the first rank's
                expected |= {n: t for n, t in load_file(path).items() if "running" in n}
            case = CASES[name]
            plain = case.model(torch.float32)
            assert load_model(plain, path) == (set(), [])
            assert_identical(plain, expected)
            # With a forward before: what was gathered then is stale afterwards.
            other = case.wrap(case.model(torch.float32), **WAYS[way].keywords)
            inputs, _ = case.batch(0, 3, torch.float32)
            other.eval()(inputs)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.add_(1)
            assert load_safetensors(other, path) == ([], [])
            assert_identical(other, expected)
            torch.testing.assert_close(other(inputs), plain.eval()(inputs))


class _Everything(nn.Module):
    """Buffers of several kinds, an ignored parameter, an empty one, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(33, 65)
        self.narrow = nn.Linear(65, 7, dtype=torch.bfloat16)
        self.own = nn.Parameter(torch.randn(3, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.rand(4, 6)[:, ::2] > 0.5)
        self.register_buffer("unsaved", torch.ones(2), persistent=False)


def _everything(seed: int = 0) -> _Everything:
    torch.default_generator.manual_seed(seed)
    return _Everything()


@on_ranks(2)
def test_several_files(rank: int, world_size: int, tmp_path: Path) -> None:
    folder = tmp_path
    plain = _everything()
    expected = snapshot(plain)
    model = ShardedWrapper(plain, ignored_states=[plain.own])
    # Fewer files than before: those that are left over go.
    for size, count in ((100, 5), ("9 KB", 2)):
        save_safetensors(model, folder, max_shard_size=size, metadata={"step": "3"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = set(index["weight_map"].values())
        assert len(names) == count
        assert {path.name for path in folder.glob("*")} == {*names, "model.safetensors.index.json"}
        merged = {}
        for name in names:
            merged |= load_file(folder / name)
        assert_identical({name: merged[name] for name in expected}, expected)
        other = _everything(1)
        other = ShardedWrapper(other, ignored_states=[other.own])
        load_safetensors(other, folder)
        assert_identical(other, expected)
    save_safetensors(model, folder, dtype=torch.float16)
    saved = load_file(folder / "model.safetensors")
    for name, value in expected.items():
        wanted = value.half() if value.is_floating_point() else value
        assert torch.equal(saved[name], wanted), name
    load_safetensors(other, folder)
    assert torch.equal(snapshot(other)["fc.weight"], expected["fc.weight"].half().float())
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_ddp_prefix_and_one_name_of_a_tie(tmp_path: Path) -> None:
    tied = CASES["tied-across-units"].model(torch.float32).state_dict()
    for kept in ("embed.weight", "head.weight"):
        some = {n: t for n, t in tied.items() if n == kept or n.split(".")[0] not in "embed head"}
        save_file({f"module.{n}": t for n, t in some.items()}, tmp_path / f"{kept}.safetensors")
    run_ranks(_ties, 2, tmp_path, tied)


def _ties(rank: int, world_size: int, folder: Path, expected: dict[str, Tensor]) -> None:
    for kept in ("embed.weight", "head.weight"):
        model = _trained("tied-across-units", "full", rank, world_size)
        assert load_safetensors(model, folder / f"{kept}.safetensors") == ([], [])
        assert_identical(model, expected)


def test_transformers_reads_it(tmp_path: Path) -> None:
    """On this rank alone, as to import it takes seconds; files do not depend on that."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    plain = transformers.GPT2LMHeadModel(config)
    expected = snapshot(plain)
    with allow_warnings():
        model = ShardedWrapper(plain)
    for size in (None, "10KB"):
        path = tmp_path / str(size)
        save_safetensors(model, path, max_shard_size=size)
        config.save_pretrained(path)
        loaded, info = plain.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert_identical(loaded, expected)
    # And the other way round, what it wrote itself.
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1)
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    load_safetensors(model, tmp_path / "theirs")
    assert_identical(model, loaded)


# ---------------------------------------------------------------- refusals


@on_ranks(2)
def test_what_does_not_fit(rank: int, world_size: int, tmp_path: Path) -> None:
    model = _trained("mlp", "full", rank, world_size)
    before = snapshot(model)
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    state["fc2.weight"] = state["fc2.weight"].t().contiguous()
    del state["fc3.bias"], state["fc1.bias"]
    path = tmp_path / "other.safetensors"
    if rank == 0:
        save_file({**state, "more": torch.zeros(2)}, path)
        save_file({}, tmp_path / "empty.safetensors")
    torch.distributed.barrier()
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_safetensors(model, path)
    for text in (
        "'fc2.weight': expected (4, 5) torch.float32, got (5, 4) torch.float32",
        "'fc1.bias': expected (5,) torch.float32, got nothing; 'fc3.bias'",
        "'more': expected nothing, got (2,) torch.float32",
    ):
        assert text in str(caught.value)
    with pytest.raises(ValueError, match=r"does not fit the model: 'fc2.weight': [^;]*$"):
        load_safetensors(model, path, strict=False)
    assert_identical(model, before)
    # One rank alone has something to say.
    with pytest.raises(ValueError, match=r"rank 1: .*absent.*no such file"):
        load_safetensors(
            model, tmp_path / ("absent" if rank == 1 else "empty.safetensors"), strict=False
        )
    with pytest.raises(ValueError, match="ranks differ: the path"):
        save_safetensors(model, tmp_path / f"{rank}")
    with pytest.raises(ValueError, match="makes several files"):
        save_safetensors(model, tmp_path / "a.safetensors", max_shard_size=3)
    with pytest.raises(ValueError, match="max_shard_size: expected"):
        save_safetensors(model, tmp_path, max_shard_size="many")
    with pytest.raises(ValueError, match="expected a ShardedWrapper"):
        save_safetensors(nn.Linear(2, 2), tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "empty.safetensors"}
    torch.distributed.barrier()  # rank 0 makes another file next, with another name at first
    # Without strictness the rest is loaded.
    if rank == 0:
        save_file({"fc1.bias": torch.full((5,), 7.0), "more": torch.zeros(2)}, path)
    torch.distributed.barrier()
    keys = load_safetensors(model, path, strict=False)
    assert keys.unexpected_keys == ["more"]
    assert set(keys.missing_keys) == set(before) - {"fc1.bias"}
    assert_identical(model, before | {"fc1.bias": torch.full((5,), 7.0)})


class _WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}


def _double(_: nn.Module, state_dict: dict[str, Tensor], *rest: Any) -> None:
    state_dict["weight"] = state_dict["weight"].detach() * 2


@on_ranks(2)
def test_what_cannot_be_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'_extra_state' \(dict\)"):
        save_safetensors(ShardedWrapper(_WithExtraState(2, 2)), tmp_path)
    with pytest.raises(ValueError, match=r"has no dtype for 'phase' \(torch.complex128\)"):
        save_safetensors(ShardedWrapper(CASES["mixed-types"].model()), tmp_path)
    # A user's hook changes an entry: what the shard holds would be another value.
    doubled = nn.Linear(3, 3)
    doubled.register_state_dict_post_hook(_double)
    with pytest.raises(ValueError, match=r"'weight' \(replaced by a hook\)"):
        save_safetensors(ShardedWrapper(doubled), tmp_path)
    group = [torch.distributed.new_group([one]) for one in range(world_size)][rank]
    experts = nn.Sequential(ShardedWrapper(nn.Linear(3, 3), process_group=group), nn.Linear(3, 3))
    with pytest.raises(NotImplementedError, match="unit '0' trains only on ranks"):
        save_safetensors(ShardedWrapper(experts), tmp_path)


@on_ranks(2)
def test_saving_is_no_write(rank: int, world_size: int, tmp_path: Path) -> None:
    """After a save, no rank all-gathers again what it has gathered: others might not."""
    linear = nn.Linear(9, 7)
    linear.bias.requires_grad_(False)
    model = ShardedWrapper(linear, sharding_strategy="SHARD_OP")
    model(torch.ones(1, 9)).sum().backward()
    gathered = [handle for handle in model._sharded_unit.handles if handle.is_current]
    assert gathered
    save_safetensors(model, tmp_path)
    assert all(handle.is_current for handle in gathered)
    model(torch.ones(1, 9)).sum().backward()


class _Scaled(nn.Linear):
    """A layer with a buffer that `MixedPrecision(buffer_dtype=...)` casts."""

    def __init__(self, scale: float) -> None:
        super().__init__(5, 3)
        self.register_buffer("scale", torch.full((4,), scale))


@on_ranks(2)
def test_cast_buffers(rank: int, world_size: int, tmp_path: Path) -> None:
    """State dicts have copies of these buffers, in the original dtype."""
    precision = MixedPrecision(buffer_dtype=torch.bfloat16)
    save_safetensors(ShardedWrapper(_Scaled(3.0), mixed_precision=precision), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["scale"].dtype is torch.float32
    model = ShardedWrapper(_Scaled(1.0), mixed_precision=precision)
    load_safetensors(model, tmp_path)
    assert model.scale.tolist() == [3.0] * 4
    hooked = _Scaled(1.0)
    hooked.register_state_dict_post_hook(_copy_scale)
    model = ShardedWrapper(hooked)
    for function in (save_safetensors, load_safetensors):
        assert_raises(ValueError, r"'scale' \(replaced by a hook\)", function, model, tmp_path)


def _copy_scale(_: nn.Module, state_dict: dict[str, Tensor], *rest: Any) -> None:
    state_dict["scale"] = state_dict["scale"].clone()


@on_ranks(3)
def test_a_rank_that_cannot_write(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = _trained("mlp", "full", rank, world_size)
    save_safetensors(model, path)
    torch.distributed.barrier()
    before = path.read_bytes()
    for failing in range(world_size):  # rank 0 when it makes the file, the others when they write
        with (
            full_disk(300) if rank == failing else nullcontext(),
            pytest.raises(OSError, match=r"rank \d: .*File too large") as caught,
        ):
            save_safetensors(model, path)
        torch.distributed.barrier()
        assert "model.safetensors.incomplete" in str(caught.value)
        assert path.read_bytes() == before
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        torch.distributed.barrier()
    assert_raises(OSError, "File exists", save_safetensors, model, path / "model.safetensors")
    save_safetensors(model, path)  # as before, and all ranks still together
    assert path.read_bytes() == before


@on_ranks(2)
def test_a_rank_that_cannot_read(rank: int, world_size: int, tmp_path: Path) -> None:
    model = _trained("mlp", "full", rank, world_size)
    save_safetensors(model, tmp_path)
    inputs, _ = CASES["mlp"].batch(0, 3, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert not model(inputs).any()
    failing = mock.patch.object(files, "_read", side_effect=OSError("the disk is gone"))
    with failing if rank == 1 else nullcontext():
        assert_raises(OSError, r"rank 1: the disk is gone", load_safetensors, model, tmp_path)
    # What the other rank has read is seen, and not what was gathered before.
    plain = CASES["mlp"].model(torch.float32)
    plain.load_state_dict(snapshot(model))
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))
    assert plain.fc1.weight.any()


@on_ranks(2)
def test_shards_on_disk(rank: int, world_size: int, tmp_path: Path) -> None:
    offload = CPUOffload(offload_params=True, path=tmp_path)
    model = _trained("nested", "full", rank, world_size, cpu_offload=offload)
    expected = snapshot(model)
    with record() as events:
        save_safetensors(model, tmp_path / "export")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_safetensors(model, tmp_path / "export")
    assert not events  # no tensor is sent
    assert_identical(model, expected)
