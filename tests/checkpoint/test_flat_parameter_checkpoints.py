"""Checkpoints from version 0.2.0 that were saved under ``use_orig_params=False`` still load.

``flat_parameters.tar.xz`` holds what two ranks left on disk after two steps of ``_net`` under
``AdamW(lr=0.01)``: ``checkpoint/`` of ``flatshard.checkpoint.save``, ``full.pt`` of
``full_state_dict`` and ``full_optim_state_dict``, and ``optimizer.state_dict()`` of rank 0, and of
the same training on one rank. Optimizers held one flat parameter for each of the two units.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.wrap import ModuleWrapPolicy
from tests.harness import naming, run_ranks
from tests.oracle import snapshot

SAVED = Path(__file__).with_name("flat_parameters.tar.xz")


def test_checkpoints_of_flat_parameters(tmp_path: Path) -> None:
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, filter="data")
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
            with pytest.raises(
                ValueError, match="of a sharded model contains only the parts of one rank"
            ):
                ShardedWrapper.optim_state_dict_to_load(model, optimizer, state)
            with pytest.raises(RuntimeError, match=r"only that rank's parts.*full_optim"):
                optimizer.load_state_dict(state)
            with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
                fresh.load_state_dict(state)
