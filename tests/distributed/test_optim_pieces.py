"""Optimizers that get a run in pieces: to the bit what they do with all of it."""

import io
from functools import partial
from typing import Any
from unittest import mock

import torch

from flatshard import ShardedWrapper, declare_elementwise, optim, optim_runs
from tests.harness import naming, run_ranks
from tests.models import CASES
from tests.oracle import snapshot, train_steps, trainable

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


def test_pieces_change_nothing() -> None:
    run_ranks(_compare, 2)


def _compare(rank: int, world_size: int) -> None:
    for kind in KINDS:
        for use_orig_params in (True, False):
            with naming(f"{kind}, use_orig_params={use_orig_params}"):
                whole = _train(rank, world_size, kind, use_orig_params, piece=1 << 17)
                pieces = _train(rank, world_size, kind, use_orig_params, piece=16)
                torch.testing.assert_close(pieces, whole, rtol=0, atol=0)


def _train(rank: int, world_size: int, kind: str, use_orig_params: bool, *, piece: int) -> Any:
    """Train, and save and load the optimizer in the middle."""
    case = CASES["mlp"]
    with mock.patch.object(optim_runs, "_PIECE_NUMEL", piece):
        model = case.wrap(case.model(), use_orig_params=use_orig_params)
        optimizer = KINDS[kind](trainable(model))
        cut: list[int] = []
        optimizer.register_step_post_hook(lambda one, *_: cut.append(_num_params(one)))
        losses = train_steps(model, optimizer, case, rank, world_size, steps=2)
        saved = io.BytesIO()
        torch.save(optim.parts(optimizer), saved)
        optimizer = KINDS[kind](trainable(model))
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved, weights_only=False))
        losses += train_steps(model, optimizer, case, rank, world_size, steps=2)
        assert len(set(cut)) == 1, "parameters are put back"
        state = ShardedWrapper.optim_state_dict(model, optimizer)
        return losses, snapshot(model), state["state"]


def _num_params(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def test_the_optimizer_sees_pieces() -> None:
    """What it gets is as long as a piece, and in its own order."""
    seen = run_ranks(_seen, 2)
    assert all(max(lengths) == 16 and min(lengths) < 16 for lengths in seen)


class _Watching(torch.optim.Optimizer):
    """Plain gradient descent that remembers what it saw."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.lengths: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.lengths = [param.numel() for param in params]
        for param in params:
            param.sub_(param.grad, alpha=0.1)


def _seen(rank: int, world_size: int) -> list[int]:
    declare_elementwise(_Watching)
    case = CASES["mlp"]
    with mock.patch.object(optim_runs, "_PIECE_NUMEL", 16):
        model = case.wrap(case.model())
        optimizer = _Watching(trainable(model))
        train_steps(model, optimizer, case, rank, world_size, steps=1)
    return optimizer.lengths


def test_state_stays_where_it_is() -> None:
    """Also where the first of neighbours lies on another rank."""
    run_ranks(_stays, 3)


def _stays(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    model = case.wrap(case.model())
    assert rank == 0 or any(p._local.numel() == 0 for p in model.parameters()), "no such case"
    optimizer = KINDS["adamw"](trainable(model))
    places = []
    for _ in range(3):
        train_steps(model, optimizer, case, rank, world_size, steps=1)
        states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        places.append([one.untyped_storage().data_ptr() for one in states])
    assert places[1] == places[0]
    assert places[2] == places[0]
