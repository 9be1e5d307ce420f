"""What optimizers get: neighbours as one parameter; by which kernel; what closures do."""

import io
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flatshard import FlatShardTensor
from tests.harness import naming, on_ranks
from tests.models import CASES
from tests.oracle import local_loss, own_parts, snapshot, step_and_zero, train_steps, trainable

pytestmark = pytest.mark.by_turns

KINDS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}


# ---------------------------------------------------------------- by which kernel


@on_ranks(2)
def test_fused_where_it_is_left_open(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    kernel = mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_)
    ends = {}
    for name, is_fused, dtype, keywords in (
        ("open", True, torch.float32, {}),
        ("fused", True, torch.float32, {"fused": True}),
        ("not fused", False, torch.float32, {"fused": False}),
        ("foreach", False, torch.float32, {"foreach": True}),
        ("no foreach", False, torch.float32, {"foreach": False}),
        ("tensor", False, torch.float32, {"lr": torch.tensor(0.01)}),
        ("narrow", False, torch.bfloat16, {}),
        ("wide", True, torch.float64, {}),
    ):
        with naming(name), kernel as fused_adamw:
            model = case.wrap(case.model().to(dtype))
            optimizer = torch.optim.AdamW(trainable(model), **{"lr": 0.01, **keywords})
            before = dict(optimizer.param_groups[0])
            for step in range(3):
                x = case.batch(rank + 2 * step, 8)[0].to(dtype)
                model(x).pow(2).mean().backward()
                step_and_zero(optimizer)
            assert fused_adamw.called is is_fused
            assert optimizer.param_groups[0] == before, "the user's options are as they were"
            ends[name] = snapshot(model)
    torch.testing.assert_close(ends["open"], ends["fused"], rtol=0, atol=0)
    for name in ("not fused", "foreach", "no foreach", "tensor"):
        torch.testing.assert_close(ends["open"], ends[name], rtol=1e-6, atol=1e-8)


@on_ranks(3)
def test_norms_and_means_of_state(rank: int, world_size: int) -> None:
    """Norms, sums and means of optimizer state are those of whole state."""
    case = CASES["mlp"]
    for kind, make in KINDS.items():
        with naming(kind):
            plain, model = case.model(), case.wrap()
            expected, optimizer = make(trainable(plain)), make(trainable(model))
            train_steps(model, optimizer, case, rank, world_size, steps=2)
            for step in range(2):
                for one in range(world_size):
                    (local_loss(plain, case, step, one, world_size) / world_size).backward()
                step_and_zero(expected)
            _compare_state(model, optimizer, plain, expected)
            loaded = make(trainable(model))
            train_steps(model, loaded, case, rank, world_size, steps=1)
            loaded.load_state_dict(own_parts(optimizer))
            for other in (optimizer, loaded):
                _compare_state(model, other, plain, expected)
            torch.save(own_parts(loaded), io.BytesIO())  # plain tensors again


def _compare_state(model: Any, optimizer: Any, plain: Any, expected: Any) -> None:
    for param, other in zip(trainable(model), trainable(plain), strict=True):
        state, wanted = optimizer.state[param], expected.state[other]
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            found = state[key]
            assert found.shape == value.shape, key
            for read in (Tensor.norm, Tensor.sum, Tensor.mean, Tensor.max, torch.linalg.norm):
                torch.testing.assert_close(read(found), read(value), check_dtype=False)
            if isinstance(found, FlatShardTensor):
                torch.testing.assert_close(found.full_tensor(), value)
