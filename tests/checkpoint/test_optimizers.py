"""Optimizers as other people write them: a checkpoint restores all of their state, or is refused.

Each is trained, saved, loaded into a fresh model and optimizer and trained on, beside a run without
a break.
"""

import enum
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.checkpoint import save_load
from flatshard.optimizer import state_dicts
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import allow_warnings, naming, on_ranks, run_ranks
from tests.optimizers.own import Model, Nested, OwnEntries, Rows, train
from tests.oracle import assert_same, snapshot, step_and_zero

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def built(make: Make, seed: int) -> tuple[ShardedWrapper, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ShardedWrapper(Model().double())
    return model, make(list(model.parameters()))


@on_ranks(2)
def test_state_of_several_optimizers(rank: int, world_size: int, tmp_path: Path) -> None:
    """Each optimizer gets its containers and numbers back; state of no parameter is refused."""

    def several(seed: int, kind: Make = Rows) -> tuple[ShardedWrapper, list[Any]]:
        model, _ = built(Nested, seed)
        params = list(model.parameters())
        return model, [Nested(params[:3]), kind(params[3:])]

    def train_both(model: nn.Module, optimizers: list[Any], steps: range) -> dict[str, Tensor]:
        for step in steps:
            model(torch.full((2, 6), step + 1.0, dtype=torch.float64)).square().mean().backward()
            step_and_zero(*optimizers)
        return snapshot(model)

    model, optimizers = several(0)
    train_both(model, optimizers, range(3))
    checkpoint.save(tmp_path / "both", model, optimizers)
    expected = train_both(model, optimizers, range(3, 6))
    model, optimizers = several(5)
    checkpoint.load(tmp_path / "both", model, optimizers)
    found = train_both(model, optimizers, range(3, 6))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    model, optimizers = several(0, OwnEntries)
    train_both(model, optimizers, range(1))
    with pytest.raises(ValueError, match=r"optimizer '1' has state .* belongs to no parameter"):
        checkpoint.save(tmp_path / "refused", model, optimizers)


# ---------------------------------------------------------------- numbers of numpy


def _numpy(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=np.float64(0.05), betas=(np.float64(0.5), 0.9))


@on_ranks(2)
def test_numbers_of_numpy(rank: int, world_size: int, tmp_path: Path) -> None:
    """They are saved as numbers of Python. Files that contain numbers of numpy are refused."""
    extra = {"step": np.int64(3), "on": [np.bool_(True)], "half": np.float16(0.5)}
    twin = built(_numpy, 0)
    train(*twin, 0)
    expected = train(*twin, 3)
    model, optimizer = built(_numpy, 0)
    train(model, optimizer, 0)
    checkpoint.save(tmp_path / "new", model, optimizer, extra=extra)
    with (  # as early releases saved them
        mock.patch.object(state_dicts, "python_number", lambda value: value),
        mock.patch.object(save_load, "python_number", lambda value: value),
        mock.patch.object(save_load, "_check_loads"),
    ):
        checkpoint.save(tmp_path / "old", model, optimizer, extra=extra)
    full = ShardedWrapper.optim_state_dict(model, optimizer)
    assert type(full["param_groups"][0]["lr"]) is float
    model, optimizer = built(lambda params: torch.optim.AdamW(params, lr=1.0), 5)
    with pytest.raises(ValueError, match=r"objects such as numpy.*, whose loading may run code"):
        checkpoint.load(tmp_path / "old", model, optimizer)
    found = checkpoint.load(tmp_path / "new", model, optimizer)
    assert repr(found) == repr({"step": 3, "on": [True], "half": 0.5})
    group = optimizer.param_groups[0]
    assert repr([group["lr"], group["betas"]]) == "[0.05, (0.5, 0.9)]"
    torch.testing.assert_close(train(model, optimizer, 3), expected, rtol=0.0, atol=0.0)


class Kind(enum.IntEnum):
    ONE = 1


@on_ranks(2)
def test_options_that_cannot_be_loaded(rank: int, world_size: int, tmp_path: Path) -> None:
    """An object in a group is named while the checkpoint is saved, on all ranks."""
    model, optimizer = built(lambda params: torch.optim.AdamW(params), 0)
    train(model, optimizer, 0)
    for value in (Kind.ONE, torch.tanh, [object()], np.zeros(2)):
        optimizer.param_groups[0]["kind"] = value
        with pytest.raises(TypeError, match=r"the optimizer's param_groups\.0\.kind.* holds"):
            checkpoint.save(tmp_path / "a", model, optimizer)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- several optimizers


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    params = list(model.parameters())
    muon = torch.optim.Muon([one for one in params if one.dim() == 2], lr=0.02)
    # Two groups: an optimizer's groups stay together.
    biases = [{"params": [one], "lr": 0.01 / n} for n, one in enumerate(params[1::2], 1)]
    return {"matrices": muon, "rest": torch.optim.AdamW(biases)}


def _train(model: nn.Module, optimizers: Any, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).double()
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
        step_and_zero(*optimizers.values())


@on_ranks(2)
def test_full_state_and_errors(rank: int, world_size: int, tmp_path: Path) -> None:
    model = ShardedWrapper(_model())
    optimizers = _optimizers(model)
    with allow_warnings():
        _train(model, optimizers, range(2), rank, world_size)
    checkpoint.save(tmp_path / "both", model, optimizers)
    weights = model.state_dict()
    sent = [checkpoint.full_optim_state_dict(model, optimizers)]
    checkpoint.load(tmp_path / "both", model, optimizers)
    again = checkpoint.full_optim_state_dict(model, optimizers)  # without a step before
    for name in optimizers if rank == 0 else ():
        torch.testing.assert_close(again[name]["state"], sent[0][name]["state"], rtol=0, atol=0)
    dist.broadcast_object_list(sent)
    other = ShardedWrapper(_model(seed=1))
    other.load_state_dict(weights)
    others = _optimizers(other)
    for name, one in others.items():
        one.load_state_dict(ShardedWrapper.optim_state_dict_to_load(other, one, sent[0][name]))
    for one, its in ((model, optimizers), (other, others)):
        with allow_warnings():
            _train(one, its, range(2, 4), rank, world_size)
    assert_same(other, model)

    muon, adamw = optimizers.values()
    twice = torch.optim.SGD([next(model.parameters())], lr=0.1)
    with pytest.raises(ValueError, match=r"'0.weight' belongs to optimizers '0' and '1'"):
        checkpoint.save(tmp_path / "twice", model, [muon, twice])
    other_class = {"matrices": muon, "rest": torch.optim.Adam(adamw.param_groups)}
    for wrong in ([muon, adamw], muon, other_class, {"matrices": adamw, "rest": muon}):
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"saved with other optimizers: expected 'matrices'"):
            checkpoint.load(tmp_path / "both", model, wrong)
        assert_same(before, model)
    assert checkpoint.load(tmp_path / "both", model) == {}  # without an optimizer
    checkpoint.save(tmp_path / "one", model, muon)
    with pytest.raises(ValueError, match=r"expected '0': Muon of 2 parameters; got '0': Muon of"):
        checkpoint.load(tmp_path / "one", model, [muon, adamw])
    swapped = [muon, adamw] if rank else [adamw, muon]
    with pytest.raises(ValueError, match=r"the list of optimizers is .*Muon.* on rank 1"):
        checkpoint.save(tmp_path / "swapped", model, swapped)


# ---------------------------------------------------------------- checkpoints of version 0.2.0


SAVED = Path(__file__).with_name("flat_parameters.tar.xz")


def test_checkpoints_of_flat_parameters(tmp_path: Path) -> None:
    with tarfile.open(SAVED) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # new in Python 3.11.4
        archive.extractall(tmp_path)
    for world_size in (1, 3):
        run_ranks(_load, world_size, tmp_path)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _load(rank: int, world_size: int, folder: Path) -> None:
    full = torch.load(folder / "full.pt", weights_only=True)
    ends = []
    for form in ("unwrapped", "full", "folder"):
        model = _net()
        if form != "unwrapped":
            model = ShardedWrapper(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
        if form == "folder":
            assert checkpoint.load(folder / "checkpoint", model, optimizer) == {"step": 2}
        else:
            model.load_state_dict(full["model"])
            state = ShardedWrapper.optim_state_dict_to_load(model, optimizer, full["optim"])
            optimizer.load_state_dict(state)
        with naming(form):
            torch.testing.assert_close(snapshot(model), full["model"], rtol=0.0, atol=0.0)
            saved = ShardedWrapper.optim_state_dict(model, optimizer)
            torch.testing.assert_close(saved["state"], full["optim"]["state"], rtol=0.0, atol=0.0)
            assert saved["param_groups"] == full["optim"]["param_groups"]
        model(torch.linspace(-1.0, 1.0, 12).view(4, 3)).square().mean().backward()
        optimizer.step()
        ends.append(snapshot(model))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0.0, atol=1e-6)

    # The parts of one rank have no names: an error, also before flatshard knows the optimizer.
    for name in ("one_rank_optimizer.pt", "optimizer_of_rank_0.pt"):
        state = torch.load(folder / name, weights_only=True)
        fresh = torch.optim.AdamW(model.parameters())
        with naming(name):
            partial = "of a sharded model contains only the parts of one rank"
            with pytest.raises(ValueError, match=partial):
                ShardedWrapper.optim_state_dict_to_load(model, optimizer, state)
            with pytest.raises(RuntimeError, match=r"only that rank's parts.*full_optim"):
                optimizer.load_state_dict(state)
            with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
                fresh.load_state_dict(state)
