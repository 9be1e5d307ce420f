"""Checksums tell tensors apart that have equal sums, so no edit and no difference is missed."""

import itertools

import pytest
import torch
from torch import nn

from flatshard import ShardedWrapper
from flatshard.memory import checksum
from tests.harness import on_ranks, rank_0_warns


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_masks_of_equal_sums(dtype: torch.dtype, repeats: int) -> None:
    """All masks of six elements, each element several times, as in a mask of channels."""
    masks = [torch.tensor(mask, dtype=dtype) for mask in itertools.product((0, 1), repeat=6)]
    sums = {checksum(mask.repeat_interleave(repeats)) for mask in masks}
    assert len(sums) == len(masks)


def test_patterns_of_large_tensors() -> None:
    board = (torch.arange(1 << 10) % 2).repeat(1 << 10, 1)
    board[1::2] = 1 - board[1::2]
    moved = board.roll(1, 0)  # each row and each column has the sum of before
    halves = torch.cat([board, 2 * board])
    assert checksum(board) != checksum(moved)
    assert checksum(halves) != checksum(halves.roll(1 << 10, 0))
    assert checksum(halves) == checksum(halves.clone())
    assert checksum(torch.arange(40_000)) != checksum(torch.arange(40_000).flip(0))


@on_ranks(2)
def test_nothing_is_missed(rank: int, world_size: int) -> None:
    """Initial values that differ between ranks, and an edit under ``summon_full_params``."""
    model = nn.Linear(2, 2)
    model.gate = nn.Parameter(torch.tensor([1.0, 2, 2, 1], dtype=torch.float64))
    mask = torch.tensor([0, 1, 1, 0])
    model.register_buffer("mask", mask if rank == 0 else 1 - mask)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with rank_0_warns(rank, "different weights .'mask'."):
        model = ShardedWrapper(model)
    assert model.mask.tolist() == [0, 1, 1, 0]
    with ShardedWrapper.summon_full_params(model), torch.no_grad():
        model.gate.copy_(3 - model.gate)
    assert model.gate.full_tensor().tolist() == [2, 1, 1, 2]
