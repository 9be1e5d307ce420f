"""Optimizers as other people write them: a checkpoint restores all of their state, or is refused.

Each is trained, saved, loaded into a fresh model and optimizer and trained on, beside a run without
a break.
"""

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatshard import ShardedWrapper, checkpoint
from flatshard.checkpoint import saving
from flatshard.optimizer import state_dicts
from tests.harness import run_ranks

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """A square matrix, a head with as many rows as there are ranks, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.square = nn.Linear(5, 4), nn.Linear(4, 4)
        self.head, self.scale = nn.Linear(4, 2, bias=False), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(torch.tanh(self.square(torch.tanh(self.body(x)))))


def built(make: Make, seed: int) -> tuple[ShardedWrapper, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ShardedWrapper(Net().double())
    return model, make(list(model.parameters()))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int
) -> dict[str, Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- numbers of numpy


def _numpy(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=np.float64(0.05), betas=(np.float64(0.5), 0.9))


def test_numbers_of_numpy(tmp_path: Path) -> None:
    """They load as numbers of Python, also from files that contain numbers of numpy."""
    run_ranks(_numbers_of_numpy, 2, tmp_path)


def _numbers_of_numpy(rank: int, world_size: int, folder: Path) -> None:
    extra = {"step": np.int64(3), "on": [np.bool_(True)], "half": np.float16(0.5)}
    expected = train(*built(_numpy, 0), range(6), rank)
    model, optimizer = built(_numpy, 0)
    train(model, optimizer, range(3), rank)
    checkpoint.save(folder / "new", model, optimizer, extra=extra)
    with (  # as earlier releases saved them
        mock.patch.object(state_dicts, "python_number", lambda value: value),
        mock.patch.object(saving, "python_number", lambda value: value),
        mock.patch.object(saving, "_check_loads"),
    ):
        checkpoint.save(folder / "old", model, optimizer, extra=extra)
    full = ShardedWrapper.optim_state_dict(model, optimizer)
    assert type(full["param_groups"][0]["lr"]) is float
    for name in ("new", "old"):
        model, optimizer = built(lambda params: torch.optim.AdamW(params, lr=1.0), 5)
        found = checkpoint.load(folder / name, model, optimizer)
        assert repr(found) == repr({"step": 3, "on": [True], "half": 0.5})
        group = optimizer.param_groups[0]
        assert repr([group["lr"], group["betas"]]) == "[0.05, (0.5, 0.9)]"
        torch.testing.assert_close(
            train(model, optimizer, range(3, 6), rank), expected, rtol=0.0, atol=0.0
        )


class Kind(enum.IntEnum):
    ONE = 1


def test_options_that_cannot_be_loaded(tmp_path: Path) -> None:
    """An object in a group is named while the checkpoint is saved, on all ranks."""
    run_ranks(_options_that_cannot_be_loaded, 2, tmp_path)


def _options_that_cannot_be_loaded(rank: int, world_size: int, folder: Path) -> None:
    model, optimizer = built(lambda params: torch.optim.AdamW(params), 0)
    train(model, optimizer, range(1), rank)
    for value in (Kind.ONE, torch.tanh, [object()], np.zeros(2)):
        optimizer.param_groups[0]["kind"] = value
        with pytest.raises(TypeError, match=r"the optimizer's param_groups\.0\.kind.* holds"):
            checkpoint.save(folder / "a", model, optimizer)
    assert not list(folder.iterdir())
